"""Messages between processes: what is written is read, and nothing else is."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from enum import StrEnum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm import errors
from localllm.answer.completion import TextEvent
from localllm.attach.messages import (
    COMMANDS,
    REPLIES,
    Command,
    Events,
    Failed,
    Open,
    Ping,
    Refused,
    Reply,
    Staying,
    Submit,
)
from localllm.drafting.speculation_config import SpeculationConfig
from localllm.engine.config import EngineConfig
from localllm.errors import ExitCode, LocalLLMError, RequestError
from localllm.process.failure import Failure
from localllm.process.frames import Codec, Unpacker
from localllm.process.limits import AtMost, Within
from localllm.process.shapes import MessageError
from localllm.schedule.request import FinishReason
from localllm.schedule.sampling_params import SamplingParams
from localllm.text.grammar import GRAMMAR_KINDS, Grammar
from localllm.text.prompt import Prompt
from localllm.untrusted.messages import FROM_WORKER, TO_WORKER, FromWorker, ToWorker

CODECS: list[tuple[Codec[Any], Any]] = [
    (COMMANDS, Command),
    (REPLIES, Reply),
    (TO_WORKER, ToWorker),
    (FROM_WORKER, FromWorker),
]
CLASSES = [(codec, kind) for codec, union in CODECS for kind in get_args(union)]
IDS = [kind.__name__ for _, kind in CLASSES]
KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, LocalLLMError)
]
# What no field of any message is.
NOTHING = msgpack.ExtType(5, b"x")
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NUMBERS = st.floats(-1e6, 1e6)
UNIT = st.floats(0.01, 1)


def failures(kind: type[LocalLLMError]) -> st.SearchStrategy[LocalLLMError]:
    kinds = [each for each in KINDS if issubclass(each, kind)]

    def make(kind: type[LocalLLMError], texts: list[str], code: ExitCode) -> LocalLLMError:
        error = kind(texts[0], where=texts[1], hint=texts[2])
        error.exit_code = code
        if isinstance(error, RequestError):
            error.param = texts[3]
        return error

    texts = st.lists(TEXTS, min_size=4, max_size=4)
    return st.builds(make, st.sampled_from(kinds), texts, st.sampled_from(list(ExitCode)))


GRAMMARS = st.builds(Grammar, st.sampled_from(GRAMMAR_KINDS), st.just("[a-z]+"))
# Classes that check their fields themselves.
CHECKED: dict[type, st.SearchStrategy[Any]] = {
    SamplingParams: st.builds(
        SamplingParams,
        temperature=UNIT,
        top_p=UNIT,
        logit_bias=st.dictionaries(st.integers(0, 9), st.floats(-100, 100)),
        stop=st.lists(TEXTS.filter(bool), max_size=3).map(tuple),
        stop_token_ids=st.lists(st.integers(0, 99)).map(tuple),
        max_tokens=st.none() | st.integers(1, 9),
        logprobs=st.none() | st.integers(0, 9),
        n=st.integers(1, 8),
        seed=st.none() | st.integers(0, (1 << 64) - 1),
        grammar=st.none() | GRAMMARS,
    ),
    EngineConfig: st.builds(
        EngineConfig,
        gpu_memory_utilization=UNIT,
        cache_dir=st.none() | TEXTS,
        deterministic=st.booleans(),
        dtype=st.sampled_from(["auto", "float32", "bfloat16"]),
        speculation=st.builds(SpeculationConfig, max_draft=st.integers(1, 9)),
        threads=st.none() | st.integers(1, 9),
    ),
}


def values_of(annotation: Any, limits: Sequence[Any] = ()) -> st.SearchStrategy[Any]:
    """Values of a type, within its limits."""
    origin, inner = get_origin(annotation), get_args(annotation)
    longest = min([each.length for each in limits if isinstance(each, AtMost)] or [8])
    within = next((each for each in limits if isinstance(each, Within)), Within(-9, 9))
    if origin is Annotated:
        return values_of(inner[0], inner[1:])
    if origin in (Union, UnionType):
        return st.one_of([values_of(each) for each in inner])
    if origin is Literal:
        return st.sampled_from(inner)
    if origin is tuple and inner[-1] is not Ellipsis:
        return st.tuples(*map(values_of, inner))
    if origin in (tuple, Sequence):
        items = st.lists(values_of(inner[0]), max_size=min(longest, 5))
        return items.map(tuple) if origin is tuple else items
    if annotation in CHECKED:
        return CHECKED[annotation]
    if issubclass(annotation, LocalLLMError):
        return failures(annotation)
    if is_dataclass(annotation):
        hints = get_type_hints(annotation, include_extras=True)
        parts = {each.name: values_of(hints[each.name]) for each in fields(annotation)}
        return st.builds(annotation, **parts)
    if issubclass(annotation, StrEnum):
        return st.sampled_from(list(annotation))
    return {
        NoneType: st.none(),
        bool: st.booleans(),
        int: st.integers(int(within.low), int(within.high)),
        float: st.floats(max(within.low, -1e9), min(within.high, 1e9)),
        str: TEXTS,
        bytes: st.binary(max_size=min(longest, 8)),
    }[annotation]


def comparable(value: Any) -> Any:
    """A value with its errors as what is told of them, which can be compared."""
    if isinstance(value, LocalLLMError):
        return Failure.of(value)
    if isinstance(value, list | tuple):
        return type(value)(map(comparable, value))
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), [comparable(getattr(value, each.name)) for each in fields(value)]
    return value


def body_of(codec: Codec[Any], message: Any) -> bytes:
    return codec.pack(message)[4:]


def tree_of(codec: Codec[Any], message: Any) -> Any:
    return msgpack.unpackb(body_of(codec, message))


def corrupted(tree: Any) -> Iterator[Any]:
    """The tree with one of its nodes left out, there twice, or exchanged."""
    yield NOTHING
    if isinstance(tree, list):
        yield [*tree, tree[-1] if tree else None]
        for place, node in enumerate(tree):
            yield [*tree[:place], *tree[place + 1 :]]
            for other in corrupted(node):
                yield [*tree[:place], other, *tree[place + 1 :]]


@pytest.mark.parametrize(("codec", "kind"), CLASSES, ids=IDS)
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_what_is_written_is_read(codec: Codec[Any], kind: type, data: st.DataObject) -> None:
    message = data.draw(values_of(kind))
    found = codec.unpack(body_of(codec, message))
    assert comparable(found) == comparable(message)
    assert type(found) is kind


@pytest.mark.parametrize(("codec", "kind"), CLASSES, ids=IDS)
@settings(deadline=None, max_examples=4)
@given(data=st.data())
def test_a_message_with_one_part_too_few_too_many_or_of_no_known_type_is_refused(
    codec: Codec[Any], kind: type, data: st.DataObject
) -> None:
    for tree in corrupted(tree_of(codec, data.draw(values_of(kind)))):
        with pytest.raises(MessageError):
            codec.unpack(msgpack.packb(tree))


def wrong_values(annotation: Any) -> list[Any]:
    """Values of other types, and those beyond each limit, for a field of a plain type."""
    origin, inner = get_origin(annotation), get_args(annotation)
    limits: Sequence[Any] = ()
    if origin in (Union, UnionType):
        kinds = [each for each in inner if each is not NoneType]
        wrong = wrong_values(kinds[0]) if len(kinds) == 1 else []
        return [value for value in wrong if value is not None]
    if origin is Annotated:
        annotation, limits = inner[0], inner[1:]
    accepted = {float: (float, int)}.get(annotation, (annotation,))
    if annotation not in (bool, int, float, str, bytes):
        return []
    wrong = [v for v in (None, True, 1, 1.5, "text", b"bytes", [], {}) if type(v) not in accepted]
    for limit in limits:
        match limit:
            case AtMost(length):
                wrong.append(annotation(length + 1) if annotation is bytes else "x" * (length + 1))
            case Within(low, high):
                wrong += [annotation(low) - 1, annotation(high) + 1]
    if annotation is float and limits:
        wrong.append(float("nan"))
    return wrong


@pytest.mark.parametrize(("codec", "kind"), CLASSES, ids=IDS)
@settings(deadline=None, max_examples=3)
@given(data=st.data())
def test_a_field_of_another_type_or_beyond_its_limit_is_refused(
    codec: Codec[Any], kind: type, data: st.DataObject
) -> None:
    message = data.draw(values_of(kind))
    for name, annotation in get_type_hints(kind, include_extras=True).items():
        for value in wrong_values(annotation):
            with pytest.raises(MessageError):
                codec.unpack(body_of(codec, replace(message, **{name: value})))


def framed(codec: Codec[Any], row: Any, number: int) -> bytes:
    packed: bytes = msgpack.packb([codec._version, [[number, row]]])
    return packed


def junk() -> st.SearchStrategy[Any]:
    integers = st.integers(-(1 << 63), (1 << 64) - 1)
    texts = st.text(st.characters(exclude_categories=["Cs"]))
    plain = st.none() | st.booleans() | integers | st.floats() | texts | st.binary()

    def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.lists(inner, max_size=6) | st.dictionaries(plain, inner)

    return st.recursive(plain | st.just(NOTHING), nested, max_leaves=30)


@settings(deadline=None, max_examples=300)
@given(st.binary() | junk().map(msgpack.packb) | st.tuples(junk(), st.integers(-1, 12)))
def test_whatever_comes_nothing_else_is_raised(given: bytes | tuple[Any, int]) -> None:
    for codec, _ in CODECS:
        with suppress(MessageError):
            codec.unpack(given if isinstance(given, bytes) else framed(codec, *given))


def test_another_version_and_the_other_direction_are_refused() -> None:
    version, *rest = tree_of(COMMANDS, Ping(1))
    for other in (version + 1, None, str(version)):
        with pytest.raises(MessageError, match="another version"):
            COMMANDS.unpack(msgpack.packb([other, *rest]))
    with pytest.raises(MessageError, match="another version"):
        COMMANDS.unpack(body_of(REPLIES, Staying()))


def test_a_class_that_checks_its_fields_refuses_them_here_too() -> None:
    params = SamplingParams()
    object.__setattr__(params, "temperature", 1e9)
    with pytest.raises(MessageError, match="temperature"):
        COMMANDS.unpack(body_of(COMMANDS, Submit(1, Prompt([1]), params, b"")))
    config = EngineConfig()
    object.__setattr__(config, "block_size", 0)
    with pytest.raises(MessageError, match="block_size"):
        COMMANDS.unpack(body_of(COMMANDS, Open("m", "m", config, 0, None, None)))


def test_lengths_that_are_claimed_take_no_memory() -> None:
    version, [[number, _]] = tree_of(REPLIES, Events(()))
    for length in (1 << 40, (1 << 64) - 1):
        for inner in (None, [], [[], None], [[0], [[0]] * 11]):
            body = msgpack.packb([version, [[number, [[[length], inner]]]]])
            with pytest.raises(MessageError):
                REPLIES.unpack(body)


def test_an_error_keeps_its_class_and_long_or_broken_texts_are_cut() -> None:
    class OwnError(RequestError):
        """Known here alone."""

    told = OwnError("x" * 100_000, param="n", where="\ud800", hint="h")
    found = REPLIES.unpack(body_of(REPLIES, Refused(1, told)))
    assert isinstance(found, Refused)
    assert type(found.error) is RequestError
    assert found.error.message == "x" * (1 << 16)
    assert (found.error.param, found.error.where, found.error.hint) == ("n", "?", "h")
    memory = LocalLLMError("m", exit_code=ExitCode.DISK)
    failed = REPLIES.unpack(body_of(REPLIES, Failed(memory)))
    assert isinstance(failed, Failed)
    assert failed.error.exit_code is ExitCode.DISK
    with pytest.raises(MessageError, match="not RequestError"):
        REPLIES.unpack(body_of(REPLIES, Refused(1, memory)))  # type: ignore[arg-type]


def test_messages_come_whole_in_whatever_pieces() -> None:
    event = TextEvent(0, "a", "", None, FinishReason.STOP, None, 0, 0, 1.0)
    sent = [Events(((1, event), (2, event))), Staying(), Events(())]
    stream = b"".join(map(REPLIES.pack, sent))
    for size in (1, 3, 7, len(stream)):
        unpacker = Unpacker(REPLIES)
        pieces = (stream[at : at + size] for at in range(0, len(stream), size))
        assert [message for piece in pieces for message in unpacker.feed(piece)] == sent


def test_a_frame_that_is_too_long_is_refused_before_it_has_come() -> None:
    unpacker = Unpacker(REPLIES, max_bytes=100)
    with pytest.raises(MessageError, match="101 bytes"):
        list(unpacker.feed((101).to_bytes(4, "big")))


def test_the_events_of_a_step_are_as_small_as_may_be() -> None:
    event = TextEvent(0, " word", "", None, None, None, 16, 3, 1234.5)
    taken = len(REPLIES.pack(Events(tuple((i, event) for i in range(64)))))
    assert taken < 64 * 29


def test_mappings_are_mappings() -> None:
    bias: Mapping[int, float] = {3: -1.5, 4: 2.0}
    sent = Submit(1, Prompt([1, 2]), SamplingParams(logit_bias=bias), b"salt")
    found = COMMANDS.unpack(body_of(COMMANDS, sent))
    assert found == sent
