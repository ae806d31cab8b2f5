"""Templates render as transformers renders them, and strangers' programs stay in their box."""

import re
import resource
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from localllm.errors import ExitCode, TemplateError
from localllm.text.template_sandbox import SandboxEnvironment
from localllm.text.tokenizer import render_chat_template

CORPUS = sorted((Path(__file__).parents[3] / "shared/data/chat_templates").glob("*.jinja"))
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why is <b> & 'q' ünicode?"},
    {"role": "assistant", "content": "Because."},
    {"role": "user", "content": "  spaces  "},
]
TOOLS = [{"type": "function", "function": {"name": "clock", "description": "Tells the <time>"}}]

GOOD = {
    "loop and whitespace control": "{%- for m in messages %}\n  [{{ m['role'] }}] "
    "{{ m.content | trim }}\n"
    "{%- endfor %}\n{% if add_generation_prompt %}\n[assistant]\n{% endif %}\n",
    "tojson keeps html and unicode": "{{ messages | tojson }}{{ tools | tojson(indent=2) }}",
    "loop controls": "{% for m in messages %}{% if loop.index == 3 %}{% break %}{% endif %}"
    "{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "generation tag": "{% for m in messages %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% endfor %}",
    "namespace, slices, tests, macros": "{% set ns = namespace(n=0) %}"
    "{% macro wrap(x) %}<{{ x }}>{% endmacro %}"
    "{% for m in messages[1:] %}{% set ns.n = ns.n + 1 %}{{ wrap(m.content) ~ ns.n }}{% endfor %}"
    "{{ messages[::-1][0]['content'].strip().split(' ') | join('-') }}{{ x is defined }}",
    "filters": "{{ messages | selectattr('role', 'equalto', 'user') "
    "| map(attribute='content') | list }}"
    "{{ 'a%s' % 1 }}{{ '{:>4}'.format(7) }}{{ 'ab' * 2 }}{{ 'x' | upper | indent(2) }}",
}


@pytest.mark.parametrize("name", GOOD)
def test_rendering_equals_transformers(name: str) -> None:
    for tools in (None, TOOLS):
        for prompt in (False, True):
            [expected], _ = render_jinja_template(
                [MESSAGES], tools=tools, chat_template=GOOD[name], add_generation_prompt=prompt
            )
            assert render_chat_template(GOOD[name], MESSAGES, tools, prompt) == expected


CALL = {"type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}
CONVERSATIONS = {
    "plain": MESSAGES[1:2],
    "system": MESSAGES[:2],
    "several turns": MESSAGES,
    "tool call and result": [
        MESSAGES[1],
        {"role": "assistant", "content": "", "tool_calls": [{"id": "abcdefghi", **CALL}]},
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "clock", "content": "12:00"},
        MESSAGES[3],
    ],
}
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<u>", "pad_token": "<p>"}


def rendered(render: Callable[[], str]) -> str:
    """What a renderer gives, or that it refuses."""
    try:
        return render()
    except Exception:
        return "refused"


@pytest.mark.skipif(not CORPUS, reason="the templates of published models lie outside the tree")
@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_templates_of_published_models_render_as_in_transformers(path: Path) -> None:
    template = path.read_text(encoding="utf-8")
    for messages in CONVERSATIONS.values():
        for tools, prompt in product((None, TOOLS), (False, True)):
            expected = rendered(
                lambda m=messages, t=tools, p=prompt: render_jinja_template(  # type: ignore[misc]
                    [m], tools=t, chat_template=template, add_generation_prompt=p, **SPECIAL_TOKENS
                )[0][0]
            )
            ours = rendered(
                lambda m=messages, t=tools, p=prompt: render_chat_template(  # type: ignore[misc]
                    template, m, t, p, **SPECIAL_TOKENS
                )
            )
            assert ours == expected


def test_a_template_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, compile_one = list[str](), SandboxEnvironment.compile

    def counted(self: SandboxEnvironment, source: str, *more: object) -> object:
        compiled.append(source)
        return compile_one(self, source, *more)  # type: ignore[call-overload]

    monkeypatch.setattr(SandboxEnvironment, "compile", counted)
    template = "{% for m in messages %}{{ m.content }},{% endfor %} once"
    for text in ("one", "two"):
        asked = [{"role": "user", "content": text}]
        assert render_chat_template(template, asked) == f"{text}, once"
    assert compiled == [template]


def test_strftime_now_gives_the_date() -> None:
    assert render_chat_template("{{ strftime_now('%Y') }}", []) == time.strftime("%Y")


GROW = "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}"
HOSTILE = {
    "attribute escape": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "escape by filter": "{{ ''|attr('__class__') }}",
    "escape by format": "{{ '{0.__class__}'.format(messages) }}",
    "escape by format_map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "changing what it was given": "{{ messages.append(1) }}",
    "nested loops": "{% for a in range(9999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "product": "{{ 'a' * 1000000000 }}",
    "list product": "{{ ([0] * 1000000000) | length }}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "growing number": GROW.replace("START", "3").replace("STEP", "ns.x * ns.x") + "{{ ns.x }}",
    "concatenation": GROW.replace("START", "'ab'").replace("STEP", "ns.x ~ ns.x") + "{{ ns.x }}",
    "addition": GROW.replace("START", "'ab'").replace("STEP", "ns.x + ns.x") + "{{ ns.x }}",
    "nested lists": GROW.replace("START", "['ab']").replace("STEP", "[ns.x, ns.x]") + "{{ ns.x }}",
    "nested lists as json": GROW.replace("START", "[1]").replace("STEP", "[ns.x, ns.x]")
    + "{{ ns.x | tojson | length }}",
    "printf width": "{{ '%1000000000d' % 1 }}",
    "printf star": "{{ '%*d' % (1000000000, 1) }}",
    "format width": "{{ '{:1000000000}'.format(1) }}",
    "format nested width": "{{ '{:{w}}'.format(1, w=1000000000) }}",
    "ljust": "{{ 'a'.ljust(1000000000) }}",
    "zfill": "{{ 'a'.zfill(1000000000) }}",
    "center": "{{ 'a' | center(1000000000) }}",
    "indent": "{{ 'a' | indent(1000000000) }}",
    "json indent": "{{ messages | tojson(indent=1000000000) }}",
    "replace": "{% set x = 'a' * 100000 %}{{ x.replace('a', x) }}",
    "replace filter": "{% set x = 'a' * 100000 %}{{ x | replace('a', x) }}",
    "join": "{{ ('a' * 100000).join(range(100000) | map('string')) }}",
    "join filter": "{{ range(100000) | join('a' * 100000) }}",
    "expandtabs": "{{ ('\t' * 100000).expandtabs(100000) }}",
    "folded constant": "{{ '" + "a b " * 150_000 + "' | wordwrap(1) }}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "comparison of nests": GROW.replace("START", "[1]").replace("STEP", "[ns.x, ns.x]")
    + GROW.replace("ns", "nt").replace("START", "[1]").replace("STEP", "[nt.x, nt.x]")
    + "{{ ns.x == nt.x }}",
    "hash of a nest": GROW.replace("START", "(1,)").replace("STEP", "(ns.x, ns.x)")
    + "{{ {ns.x: 1} }}",
    "join of long texts": "{% set x = 'a' * 1000000 %}{{ [x, x, x, x] * 20000 | join('') }}",
    "many fields": "{{ ('{0:99999}' * 50000).format(1) }}",
    "many fields of a long text": "{% set x = 'a' * 100000 %}{{ ('{0}' * 50000).format(x) }}",
    "format_map": "{{ ('{a:99999}' * 50000).format_map({'a': 1}) }}",
    "format filter": "{{ ('%99999d' * 50000) | format(1) }}",
    "a width that is a text": "{{ '{0:{1}}'.format(1, '999999999') }}",
    "bytes": "{{ 'a'.encode().ljust(1000000000) }}",
    "integers": "{{ (1).to_bytes(1000000000) }}",
    "json indent of a text": "{{ messages | tojson(indent='x' * 1000000) }}",
    "deep json": GROW.replace("60", "900").replace("START", "[1]").replace("STEP", "[ns.x]")
    + "{% set l = [ns.x] * 2000 %}{{ l | tojson(indent=16) }}",
    "indent with a text": "{{ ('a\n' * 100000) | indent('x' * 100000) }}",
    "a captured block": "{% set x %}{% for a in range(99999) %}"
    + "y" * 10_000
    + "{% endfor %}{% endset %}",
    "hoarding": GROW.replace("60", "9999")
    .replace("START", "[]")
    .replace("STEP", "[ns.x, 'a' * 100000 ~ i]"),
    "hoarding by map": GROW.replace("60", "9999")
    .replace("START", "[]")
    .replace("STEP", "ns.x + [range(90000) | map('string') | list]"),
    "strftime": "{{ strftime_now('%999999999Y') }}",
    "output": "{% for a in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "syntax": "{% if %}",
    "unknown name": "{{ nothing.at.all }}",
    "refusal": "{{ raise_exception('only one system message') }}",
    "division": "{{ 1 / 0 }}",
}


# Each takes a second until it is stopped, as others of its kind do.
STOPPED_LATE = ("folded constant", "comparison of nests", "hash of a nest", "deep json")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in STOPPED_LATE else [])
        for name in HOSTILE
    ],
)
def test_a_hostile_template_ends_in_exit_code_7_within_2_s_with_memory_flat(name: str) -> None:
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.thread_time()
    with pytest.raises(TemplateError) as caught:
        render_chat_template(HOSTILE[name], MESSAGES)
    assert time.thread_time() - started < 2
    assert caught.value.exit_code == ExitCode.CHECKPOINT
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 100_000


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ 2200000 | tojson }}{{ 2200000 | string }}{{ x | default(2200000) }}", "2200000" * 3),
        ("{{ 'Date 20240115 %s' % 7 }}", "Date 20240115 7"),
        ("{{ 'Date 20240115 {}'.format(7) }}", "Date 20240115 7"),
        ("{{ {'t': 1732153333} | tojson }}", '{"t": 1732153333}'),
        ("{{ '%05.1f|%s' % (2.25, 'x') }}", "002.2|x"),
        ("{% set x %}a{{ 1 }}b{% endset %}{{ x }}", "a1b"),
        ("{% for a, b in [(1, 2)] %}{{ a + b }}{% endfor %}", "3"),
    ],
)
def test_ordinary_things_pass_the_limits(template: str, text: str) -> None:
    assert render_chat_template(template, []) == text


def test_a_refusal_and_a_syntax_error_say_so() -> None:
    with pytest.raises(TemplateError, match="only one system message"):
        render_chat_template(HOSTILE["refusal"], MESSAGES)
    with pytest.raises(TemplateError) as caught:
        render_chat_template("fine\n{% if %}", MESSAGES)
    assert "line 2" in caught.value.where


def test_a_long_conversation_renders_well_within_the_limits() -> None:
    messages = [{"role": "user", "content": "word " * 2000}] * 200  # two million characters
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}"
    assert len(render_chat_template(template, messages)) > 1_900_000


def test_the_trace_function_of_a_debugger_is_put_back() -> None:
    import sys

    def trace(*arguments: object) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        render_chat_template("x", [])
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)


def test_no_other_file_renders_a_template() -> None:
    root = Path(__file__).parents[2]
    sources = [*root.glob("localllm/**/*.py"), *root.glob("kernels/**/*.py")]
    users = {path.name for path in sources if "jinja2" in path.read_text(encoding="utf-8")}
    assert users == {"template.py", "template_sandbox.py"}
    for path in sources:
        code = path.read_text(encoding="utf-8")
        assert "jinja2.Environment" not in code, path
        assert not re.search(r"(?<!Sandboxed)\bEnvironment\(", code), path
        assert "import Environment" not in code, path
