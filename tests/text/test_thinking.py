"""Thoughts and answer are told apart by the markers of the model's family."""

import random
import re
from pathlib import Path

import pytest
from checkpoints import CHATML
from hypothesis import given
from hypothesis import strategies as st
from scripted import scripted_model

from localllm.chat.conversation import ChatSession
from localllm.schedule.sampling_params import SamplingParams
from localllm.text.prompt import Conversation
from localllm.text.thinking import FAMILIES, Markers, Split, ThinkingSplitter, find_markers
from localllm.text.tokenizer import Tokenizer

TEMPLATES = Path(__file__).parents[3] / "shared/data/chat_templates"
THINK = Markers("<think>", "</think>", skip="<think>\n\n</think>\n\n")
HARMONY = FAMILIES[0]
COMMAND = next(family for family in FAMILIES if family.around)
QWEN_LIKE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)


def split(markers: Markers | None, pieces: list[str], is_open: bool = False) -> Split:
    splitter = ThinkingSplitter(markers, is_open)
    parts = [*(splitter.push(piece) for piece in pieces), splitter.flush()]
    return Split("".join(p.thinking for p in parts), "".join(p.answer for p in parts))


CASES = {
    "thoughts, then an answer": (
        THINK,
        False,
        "<think>\nFirst this.\n\nThen that.\n</think>\n\nThe *answer*.\n",
        Split("First this.\n\nThen that.", "The *answer*.\n"),
    ),
    "the prompt began the thoughts": (THINK, True, "a\nb\n</think>\n\nc", Split("a\nb", "c")),
    "thoughts that never end": (THINK, False, "<think>\non and on\n", Split("on and on", "")),
    "no thoughts": (THINK, False, "Just an answer.", Split("", "Just an answer.")),
    "a marker in the answer is a word": (
        THINK,
        False,
        "Write <think> and </think> around it.",
        Split("", "Write <think> and </think> around it."),
    ),
    "empty thoughts": (THINK, False, "<think>\n\n</think>\n\nHi", Split("", "Hi")),
    "what only looks like a marker": (
        THINK,
        True,
        "a <b </c </think",
        Split("a <b </c </think", ""),
    ),
    "an answer between texts": (
        COMMAND,
        False,
        "<|START_RESPONSE|>It is <|START_\nso.<|END_RESPONSE|>",
        Split("", "It is <|START_\nso."),
    ),
    "thoughts, then an answer between texts": (
        COMMAND,
        False,
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>So.<|END_RESPONSE|>",
        Split("Hm.", "So."),
    ),
    "an answer that only seems to be between texts": (
        COMMAND,
        False,
        "<|START_ACTION|>x<|END_",
        Split("", "<|START_ACTION|>x<|END_"),
    ),
    "a model without thoughts": (None, False, "<think>x</think>", Split("", "<think>x</think>")),
    "channels": (
        HARMONY,
        False,
        "<|channel|>analysis<|message|>Need facts.<|end|><|start|>assistant"
        "<|channel|>final<|message|>Four.",
        Split("Need facts.", "Four."),
    ),
    "two thoughts in channels": (
        HARMONY,
        False,
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>"
        "Two.<|end|><|start|>assistant<|channel|>final<|message|>Three.",
        Split("One.\n\nTwo.", "Three."),
    ),
    "an answer at once, in a channel": (
        HARMONY,
        False,
        "<|channel|>final<|message|>Yes.",
        Split("", "Yes."),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_thoughts_are_split_off_wherever_the_pieces_are_cut(name: str) -> None:
    markers, is_open, text, expected = CASES[name]
    assert split(markers, [text], is_open) == expected
    assert split(markers, list(text), is_open) == expected
    rng = random.Random(name)
    for _ in range(50):
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(6)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert split(markers, pieces, is_open) == expected


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "\n", "a", "<", "think>", " "]), max_size=9)
)
def test_nothing_but_markers_and_newlines_is_lost(pieces: list[str]) -> None:
    whole, apart = split(THINK, ["".join(pieces)]), split(THINK, pieces)
    assert whole == apart

    def without(text: str) -> str:
        """At once: what is left may look like a marker where one was cut out."""
        return re.sub(r"</?think>|\n| ", "", text)

    assert without(whole.thinking) + without(whole.answer) == without("".join(pieces))


def test_what_looks_like_a_marker_across_a_marker_is_text() -> None:
    assert split(THINK, ["<think><</think>think>"]) == Split("<", "think>")


@pytest.mark.skipif(not TEMPLATES.exists(), reason="the templates lie outside the repository")
@pytest.mark.parametrize(
    ("name", "opens"),
    [
        ("Qwen-Qwen3-0.6B", "<think>"),
        ("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "<think>"),
        ("HuggingFaceTB-SmolLM3-3B", "<think>"),
        ("openai-gpt-oss-120b", "<|channel|>analysis<|message|>"),
        ("ByteDance-Seed-OSS", "<seed:think>"),
        ("google-gemma-4-31B-it", "<|channel>thought\n"),
        ("meta-llama-Llama-3.1-8B-Instruct", None),
        ("Qwen-Qwen2.5-7B-Instruct", None),
    ],
)
def test_the_family_is_read_from_the_published_template(name: str, opens: str | None) -> None:
    markers = find_markers((TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"))
    assert (markers.opens if markers else None) == opens


@pytest.mark.skipif(not TEMPLATES.exists(), reason="the templates lie outside the repository")
@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("Qwen-Qwen3-0.6B", "<think>\n\n</think>\n\n"),
        ("HuggingFaceTB-SmolLM3-3B", "<think>\n\n</think>\n"),
        ("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "<think>\n\n</think>\n\n"),
        ("Qwen-QwQ-32B", "<think>\n\n</think>\n\n"),
        ("openai-gpt-oss-120b", "<|start|>assistant<|channel|>final<|message|>"),
    ],
)
def test_thinking_switched_off_ends_the_prompt_where_the_answer_begins(
    name: str, ending: str, make_checkpoint
) -> None:  # type: ignore[no-untyped-def]
    folder = make_checkpoint()
    source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    tokenizer = Tokenizer.from_folder(folder)
    messages = [{"role": "user", "content": "Why?"}]
    assert (
        tokenizer.render_chat(Conversation(messages, think="off"))
        .rstrip()
        .endswith(ending.rstrip())
    )
    assert not tokenizer.encode_chat(Conversation(messages, think="off")).is_thinking


@pytest.mark.skipif(not TEMPLATES.exists(), reason="the templates lie outside the repository")
def test_an_effort_reaches_the_template_that_asks_for_one(make_checkpoint) -> None:  # type: ignore[no-untyped-def]
    folder = make_checkpoint()
    source = (TEMPLATES / "openai-gpt-oss-120b.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    tokenizer = Tokenizer.from_folder(folder)
    messages = [{"role": "user", "content": "Why?"}]
    assert "Reasoning: high" in tokenizer.render_chat(Conversation(messages, think="high"))
    assert "Reasoning: low" in tokenizer.render_chat(Conversation(messages, think="low"))


def _thinking_folder(make_checkpoint) -> Path:  # type: ignore[no-untyped-def]
    folder: Path = make_checkpoint()
    (folder / "chat_template.jinja").write_text(QWEN_LIKE)
    return folder


def test_thoughts_are_kept_beside_the_answer_and_dropped_by_the_template(make_checkpoint) -> None:  # type: ignore[no-untyped-def]
    model = scripted_model(_thinking_folder(make_checkpoint), ["<think>Hm.</think>Yes.", "No."])
    session = ChatSession(model)
    for question in ("One?", "Two?"):
        _, events = session.reply(question, SamplingParams())
        list(events)
    assert session.messages[1] == {
        "role": "assistant",
        "content": "Yes.",
        "reasoning_content": "Hm.",
        "thinking": "Hm.",
    }
    engine = model.text_engine.engine
    second = model.tokenizer.decode(engine.prompts[1])  # type: ignore[attr-defined]
    assert "Yes." in second
    assert "Hm." not in second


def test_markers_that_are_special_tokens_are_still_found(make_checkpoint, edit_json) -> None:  # type: ignore[no-untyped-def]
    folder = _thinking_folder(make_checkpoint)
    state = folder / "tokenizer.json"
    import json

    raw = json.loads(state.read_text())
    for content in ("<think>", "</think>"):
        token = {**raw["added_tokens"][0], "id": 288 + len(content), "content": content}
        raw["added_tokens"].append(token)
        raw["model"]["vocab"][content] = token["id"]
    state.write_text(json.dumps(raw))
    model = scripted_model(folder, ["<think>Hm.</think>Yes.<|im_end|>"])
    assert len(model.text_engine.engine.answers[0]) == 10  # type: ignore[attr-defined]
    completion, events = ChatSession(model).reply("?", SamplingParams())
    list(events)
    assert (completion.thinking, completion.text) == ("Hm.", "Yes.")


def test_a_stop_string_ends_the_answer_and_not_the_thoughts(make_checkpoint) -> None:  # type: ignore[no-untyped-def]
    model = scripted_model(_thinking_folder(make_checkpoint), ["<think>a END b</think>c END d"])
    completion, events = ChatSession(model).reply("?", SamplingParams(stop=("END",)))
    list(events)
    assert (completion.thinking, completion.text) == ("a END b", "c ")


def test_a_plain_template_does_not_think() -> None:
    assert find_markers(CHATML) is None
