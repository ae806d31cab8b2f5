"""Ten thousand bad requests: `pip install schemathesis; pytest -m slow tests/server/test_fuzz.py`.

Half are made from our own OpenAPI document, by breaking its rules; half are sound requests in which
something is exchanged, taken out or put in.
"""

import copy
import json
import shutil
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from server.conftest import Server
from server.test_server_faults import assert_refused, golden

from localllm.hub.checkpoint import open_checkpoint

pytestmark = pytest.mark.slow
EACH = 5000
JSON = {"content-type": "application/json"}
calm = settings(
    deadline=None, suppress_health_check=list(HealthCheck), database=None, print_blob=True
)
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "And now?"},
]
SOUND: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2, "model": "pocket"}),
    (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "max_completion_tokens": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": True,
            "top_logprobs": 3,
            "logit_bias": {"5": 1.5},
            "stop": ["a", "b"],
            "n": 2,
            "seed": 7,
            "temperature": 0.5,
            "top_p": 0.9,
            "presence_penalty": 0.1,
            "frequency_penalty": -0.1,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "max_tokens": 4,
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "x",
                    "strict": True,
                    "schema": {
                        "type": "object",
                        "properties": {"a": {"enum": [1, 2]}, "b": {"type": "string"}},
                        "required": ["a"],
                        "additionalProperties": False,
                    },
                },
            },
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [
                *MESSAGES,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "abc123def",
                            "type": "function",
                            "function": {"name": "f", "arguments": '{"a": 1}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "abc123def", "content": "2"},
            ],
            "tools": [TOOL],
            "tool_choice": "none",
            "max_tokens": 2,
        },
    ),
    (
        "/v1/completions",
        {
            "prompt": ["Once", [5, 6, 7]],
            "max_tokens": 2,
            "echo": True,
            "logprobs": 2,
            "structured_outputs": {"regex": "[a-z]{1,3}"},
        },
    ),
    ("/v1/completions", {"prompt": "x", "max_tokens": 2, "structured_outputs": {"choice": ["a"]}}),
    ("/tokenize", {"prompt": "some text", "add_special_tokens": True}),
    ("/tokenize", {"messages": MESSAGES}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
]
OWN_TOOL = {"name": "f", "input_schema": TOOL["function"]["parameters"]}
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "So.", "signature": "x"},
            {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "1"}]}
        ],
    },
]
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "So."}]},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
    {"type": "function_call_output", "call_id": "c1", "output": "1"},
]
SCHEMA = {"type": "object", "properties": {}, "additionalProperties": False}
OF_AGENTS: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/messages",
        {
            "model": "pocket",
            "max_tokens": 2,
            "messages": BLOCKS,
            "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
            "stop_sequences": ["a"],
            "temperature": 0.5,
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "diagnostics": {"previous_message_id": "msg_1"},
        },
    ),
    (
        "/v1/messages",
        {
            "model": "pocket",
            "max_tokens": 4,
            "stream": True,
            "messages": MESSAGES[1:],
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
        },
    ),
    (
        "/v1/messages",
        {
            "model": "pocket",
            "max_tokens": 2,
            "messages": BLOCKS[:1],
            "tools": [OWN_TOOL],
            "tool_choice": {"type": "none"},
        },
    ),
    ("/v1/messages/count_tokens", {"model": "pocket", "messages": BLOCKS, "system": "a"}),
    (
        "/v1/responses",
        {
            "input": ITEMS,
            "instructions": "Be brief.",
            "max_output_tokens": 2,
            "metadata": {"a": "b"},
            "reasoning": {"effort": "low"},
            "tools": [{"type": "function", **TOOL["function"]}, {"type": "web_search"}],
            "tool_choice": "none",
        },
    ),
    (
        "/v1/responses",
        {
            "input": "Hello",
            "max_output_tokens": 4,
            "stream": True,
            "store": False,
            "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
            "prompt_cache_options": {"comparison_response_id": "resp_1"},
        },
    ),
    ("/v1/responses/input_tokens", {"input": ITEMS}),
    ("/v1/embeddings", {"input": ["a", [5, 6]], "dimensions": 4, "encoding_format": "float"}),
    ("/v1/rerank", {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}),
    (
        "/v1/rerank",
        {
            "model": "pocket",
            "query": "a",
            "documents": ["b c d"],
            "return_documents": True,
            "max_tokens_per_doc": 2,
            "instruction": "d",
        },
    ),
    ("/page/conversations", {"model": "pocket", "turns": [{"question": "a", "answer": "b"}]}),
]
PATHS_OF_AGENTS = sorted({path for path, _ in OF_AGENTS})
junk = st.recursive(
    st.sampled_from([None, True, 0, -1, 2, 1e308, -0.0, 10**30, "", "a", "\x00", "\ud800", "é" * 9])
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Pocket, as a model that also scores pairs of texts."""
    folder = tmp_path_factory.mktemp("model") / "pocket"
    shutil.copytree(open_checkpoint().folder, folder)
    modules = [{"path": "1_LogitScore", "type": "sentence_transformers.cross_encoder.LogitScore"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_LogitScore").mkdir()
    answers = {"true_token_id": 1738, "false_token_id": 1454}
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(answers))
    return str(folder)


FLAGS = ("-c", "192", "--max-num-seqs", "8", "--served-model-name", "pocket", "--dtype", "float32")


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something can be exchanged."""
    found = [path] if path else []
    inner = value.items() if isinstance(value, dict) else ()
    inner = enumerate(value) if isinstance(value, list) else inner
    for key, each in inner:
        found += places(each, (*path, key))
    return found


@st.composite
def mutated(draw: st.DrawFn, sounds: list[tuple[str, dict[str, Any]]]) -> tuple[str, Any]:
    path, sound = draw(st.sampled_from(sounds))
    body: Any = copy.deepcopy(sound)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.sampled_from(places(body) or [()]))
        if not at:
            return path, draw(junk)
        holder = body
        for key in at[:-1]:
            holder = holder[key]
        match draw(st.sampled_from(["exchange", "exchange", "drop", "wrap", "repeat", "add"])):
            case "exchange":
                holder[at[-1]] = draw(junk)
            case "drop":
                del holder[at[-1]]
            case "wrap":
                holder[at[-1]] = [holder[at[-1]]]
            case "repeat":
                holder[at[-1]] = [holder[at[-1]]] * draw(st.integers(2, 100))
            case "add" if isinstance(holder, dict):
                holder[draw(st.text(max_size=6))] = draw(junk)
    return path, body


@pytest.mark.parametrize(
    "sounds",
    [SOUND, *([each for each in OF_AGENTS if each[0] == path] for path in PATHS_OF_AGENTS)],
    ids=["older", *PATHS_OF_AGENTS],
)
def test_sound_requests_in_which_something_is_wrong(
    serve: Callable[..., Server], reranker: str, sounds: list[tuple[str, dict[str, Any]]]
) -> None:
    server = serve(*FLAGS, model=reranker)
    text = golden(server.client())
    counts: Counter[int] = Counter()
    with httpx.Client(base_url=server.url, timeout=60) as http:

        @settings(calm, max_examples=EACH)
        @given(mutated(sounds))
        def ask(asked: tuple[str, Any]) -> None:
            path, body = asked
            content = json.dumps(body).encode("utf-8", "surrogatepass")
            response = http.post(
                path, content=content, headers={"content-type": "application/json"}
            )
            counts[response.status_code] += 1
            assert response.status_code < 500, (path, body, response.text)
            if response.status_code != 200:
                assert_refused(response, response.status_code)

        ask()
    print(dict(counts))  # noqa: T201
    assert counts[400] > EACH / 3
    assert golden(server.client()) == text


def test_requests_that_break_the_rules_of_our_own_description(
    serve: Callable[..., Server], reranker: str
) -> None:
    schemathesis = pytest.importorskip("schemathesis", reason="pip install schemathesis")
    from schemathesis import GenerationMode

    server = serve(*FLAGS, model=reranker)
    text = golden(server.client())
    described = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [each.ok() for each in described.get_all_operations()]
    assert {each.path for each in operations} >= {path for path, _ in SOUND + OF_AGENTS}
    counts: Counter[int] = Counter()
    impossible: list[str] = []
    for operation in operations:
        has_body = operation.method == "post"
        modes = [GenerationMode.NEGATIVE, GenerationMode.POSITIVE]
        for mode in modes if has_body else modes[1:]:

            @settings(calm, max_examples=EACH // 4 if mode is modes[0] else 60)
            @given(operation.as_strategy(generation_mode=mode))
            def ask(case: Any) -> None:
                if isinstance(case.body, dict):  # answers of a few tokens
                    case.body.update({"max_tokens": 2} if "max_tokens" in case.body else {})
                response = case.call(base_url=server.url, timeout=60)
                counts[response.status_code] += 1
                assert response.status_code < 500, (case.path, case.body, response.text)
                if response.status_code != 200:
                    found = response.json()["error"]
                    is_anthropic = case.path.startswith("/v1/messages")
                    names = {"message", "type"} | (set() if is_anthropic else {"param", "code"})
                    assert set(found) == names

            try:
                ask()
            except Unsatisfiable:
                impossible.append(f"{operation.label} {mode.name}")
    print(dict(counts), impossible)  # noqa: T201
    assert sum(counts.values()) >= EACH
    assert golden(server.client()) == text
