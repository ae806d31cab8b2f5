"""What large bodies cost before they are refused: while a thread computes without a pause, no
stream of another client goes on.
"""

import gc
import json
import time
from collections.abc import Callable, Iterator

import pytest

from localllm.server.app import _parse
from localllm.server.body_reader import check_arguments, count_names, count_values
from localllm.server.messages_schema import MessagesRequest
from localllm.server.refusals import RefusedError
from localllm.server.responses_schema import ResponseRequest
from localllm.server.schema import ChatRequest, WholeBody

# Of this thread's own time, without a pause; 0.2 s is the bar for a stream's gap, and this machine
# may be half as fast as a user's.
MOST_S = 0.2
MESSAGES = '"messages": [{"role": "user", "content": "hi"}]'
MANY = 250_000


def chat(more: str) -> str:
    return f"{{{MESSAGES}, {more}}}"


def names(count: int, value: str) -> str:
    return "{" + ",".join(f'"k{i:020d}": {value}' for i in range(count)) + "}"


CASES: list[tuple[str, type[WholeBody], Callable[[], str], int]] = [
    ("a bias for each", ChatRequest, lambda: chat(f'"logit_bias": {names(MANY, "1000")}'), 413),
    ("some biases", ChatRequest, lambda: chat(f'"logit_bias": {names(30_000, "1000")}'), 400),
    ("unknown names", ChatRequest, lambda: chat(names(MANY, "1")[1:-1]), 413),
    ("some unknown names", ChatRequest, lambda: chat(names(30_000, "1")[1:-1]), 200),
    ("stops", ChatRequest, lambda: chat(f'"stop": {json.dumps([5] * MANY)}'), 400),
    (
        "parts",
        ChatRequest,
        lambda: json.dumps(
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}] * 256}] * 40}
        ),
        400,
    ),
    (
        "metadata",
        ResponseRequest,
        lambda: f'{{"input": "a", "metadata": {names(30_000, "1")}}}',
        400,
    ),
    ("includes", ResponseRequest, lambda: json.dumps({"input": "a", "include": [5] * MANY}), 400),
    (
        "stop sequences",
        MessagesRequest,
        lambda: f'{{"model": "a", "max_tokens": 1, {MESSAGES}, "stop_sequences": {[5] * MANY}}}',
        400,
    ),
]


@pytest.fixture(autouse=True, scope="module")
def _what_other_tests_left() -> Iterator[None]:
    """Is not searched for garbage: that takes longer than all that is measured here."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize(
    ("schema", "body", "status"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_a_large_body_is_read_or_refused_soon(
    schema: type[WholeBody], body: Callable[[], str], status: int
) -> None:
    content, found = body().encode(), 200
    began_s = time.thread_time()
    try:
        _parse(schema, content)
    except RefusedError as error:
        found = error.refusal.status
    assert time.thread_time() - began_s < MOST_S
    assert found == status


# More marks than any limit, which do not count, since they are in a text.
PADDING = b'"' + b",:" * 300_000 + b'"'


@pytest.mark.parametrize(
    ("text", "values", "num_names"),
    [
        (b'[{"a": [1, 2, {"b": 3}]}, ', 7, 2),
        (b'["' + b"\\\\" * 40_000 + b'", 1, 2, ', 4, 0),  # escapes that pieces cut
        (b'["x' + b"\\\\" * 40_000 + b'\\", 5", 1, 2, ', 4, 0),
        (b'["x' + b'\\",' * 400_000 + b'", {"a:": 1}, ', 4, 1),
    ],
)
def test_marks_are_counted_outside_of_texts(text: bytes, values: int, num_names: int) -> None:
    assert count_values(text + PADDING) == values
    assert count_names(text + PADDING) == num_names


@pytest.mark.parametrize(
    "text",
    [b'["' + b'\\",' * 2_000_000, b'",' * 3_000_000, b"[" * 6_000_000, b"\\" * 6_000_000 + PADDING],
    ids=["a text that never ends", "short texts", "lists", "escapes"],
)
def test_marks_of_what_is_no_json_are_counted_soon(text: bytes) -> None:
    began_s = time.thread_time()
    count_values(text)
    count_names(text)
    assert time.thread_time() - began_s < 1


def test_arguments_of_calls_have_so_many_values_and_levels() -> None:
    check_arguments(["", "no JSON {", "[" * 200, "[" * 128 + "]" * 128, '{"a": "[[[["}' * 100])
    for deep in (
        "[" * 129 + "]" * 129,
        '{"a":' * 900 + "1" + "}" * 900,
        "[" * 50_000 + "]" * 50_000,
    ):
        with pytest.raises(ValueError, match="over 128 levels"):
            check_arguments([deep])
    with pytest.raises(ValueError, match="over 262,144 values"):
        check_arguments(["[" + "1," * 200_000 + "1]"] * 2)


def test_a_prompt_far_too_long_is_encoded_without_keeping_others_from_running() -> None:
    import threading

    from localllm.hub.checkpoint import open_checkpoint

    tokenizer, has_ended = open_checkpoint().tokenizer, threading.Event()
    gaps: list[float] = []

    def look() -> None:
        while not has_ended.is_set():
            began_s = time.monotonic()
            time.sleep(0.001)
            gaps.append(time.monotonic() - began_s)

    thread = threading.Thread(target=look)
    thread.start()
    began_s = time.monotonic()
    tokenizer.encode("a b " * (1 << 18), add_special_tokens=False)
    took_s = time.monotonic() - began_s
    has_ended.set()
    thread.join()
    assert max(gaps) < took_s / 2  # all of it if the thread cannot run meanwhile
