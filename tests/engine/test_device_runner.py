"""The GPU's runner on a device that records: what is captured and replayed, and what it gives."""

from dataclasses import replace

import pytest
import torch
from drafting import model_speculator, oracle_speculator
from engines import Limits, add, checked_step, load_tiny_model, make_engine, run_alone
from guards import CAPTURING, needs_interpreter
from recording_device import RecordingDevice

from localllm.drafting.speculator import Speculator
from localllm.engine.engine import Engine
from localllm.model.decoder import DecoderModel
from localllm.operators.device import CaptureError
from localllm.quantize.recipe import Recipe
from localllm.schedule.request import TokenEvent
from localllm.schedule.sampling_params import SamplingParams
from localllm.text.grammar import Grammar
from localllm_kernels.compiling.choice import Choice, Piece
from localllm_kernels.sampling.sample import SamplingRows
from localllm_kernels.triton_ops import triton_ops

# Rows of padding are computed from whatever lies there.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

INT4 = Recipe("rtn", group_size=32)
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
PENALIZED = SamplingParams(
    temperature=0.9,
    top_k=20,
    repetition_penalty=1.3,
    frequency_penalty=0.6,
    presence_penalty=-0.4,
    logit_bias={7: 2.0, 30: -5.0},
    seed=3,
    max_tokens=6,
    ignore_eos=True,
)
LISTED = SamplingParams(temperature=0.8, seed=9, max_tokens=4, logprobs=3, repetition_penalty=1.2)


def prompt(length: int) -> list[int]:
    return [(7 * i) % 250 + 1 for i in range(length)]


# Prompt lengths of requests of each kind: chunks beside decoding ones, cached prefixes, preemption.
WAVES = ((1, 29, 13), (29, 30, 6))


def generate(
    engine: Engine, waves: tuple[tuple[int, ...], ...] = WAVES
) -> dict[int, list[TokenEvent]]:
    events: dict[int, list[TokenEvent]] = {}
    for lengths in waves:
        for length, params in zip(lengths, (GREEDY, PENALIZED, LISTED), strict=True):
            engine.add_request(prompt(length), params, borders=range(8, length, 8))
        while engine.has_unfinished():
            for event in checked_step(engine):
                events.setdefault(event.request_id, []).append(event)
    return events


def device_engine(model: DecoderModel, **limits: object) -> tuple[Engine, RecordingDevice]:
    device = RecordingDevice()
    return make_engine(model, Limits(device=device, **limits)), device  # type: ignore[arg-type]


PRESSED = [
    ("Qwen3ForCausalLM", WAVES),
    # Chunks whose last layers compute a few rows, or none.
    ("Gemma4ForCausalLM", ((1, 29, 6),)),
    ("Qwen3MoeForCausalLM", WAVES),
    # The second wave goes on from snapshots of the first.
    ("Qwen3_5ForCausalLM", ((1, 22, 13), (22, 23, 6))),
    ("Lfm2ForCausalLM", WAVES),
]


@pytest.mark.parametrize("backend", CAPTURING)
@pytest.mark.parametrize(
    ("architecture", "waves"),
    PRESSED,
    ids=["plain", "keys of other layers", "experts", "recurrences", "convolutions"],
)
def test_it_gives_the_tokens_of_the_torch_operators(
    architecture: str, waves: tuple[tuple[int, ...], ...], backend: str
) -> None:
    engine = check_tokens(architecture, None, waves, backend)
    assert engine.scheduler.num_preemptions > 0, "the test must press"


@needs_interpreter
@pytest.mark.parametrize(
    "recipe", [None, pytest.param(INT4, marks=pytest.mark.slow)], ids=["plain", "int4"]
)
def test_so_do_the_kernels(recipe: Recipe | None) -> None:
    """Few steps of one model; the others are in the slow suite."""
    check_tokens("Qwen3ForCausalLM", recipe, ((1, 12, 6),), "triton")


def check_tokens(
    architecture: str, recipe: Recipe | None, waves: tuple[tuple[int, ...], ...], backend: str
) -> Engine:
    """Hold what a device gives against what a CPU gives; the device's engine."""
    sizes = {"block_size": 8, "num_blocks": 7, "max_num_batched_tokens": 24}
    expected = generate(
        make_engine(
            load_tiny_model(architecture, None, torch.float32, recipe),
            Limits(enable_prefix_caching=True, **sizes),
        ),
        waves,
    )
    model = load_tiny_model(architecture, None, torch.float32, recipe, backend)
    engine, device = device_engine(model, enable_prefix_caching=True, **sizes)
    found = generate(engine, waves)
    assert len(device.replayed) > len(device.captured) > 0
    assert any(e.num_cached_tokens for own in found.values() for e in own) == (len(waves) > 1)
    for request_id, events in expected.items():
        own = found[request_id]
        assert [each.token_id for each in own] == [each.token_id for each in events]
        for mine, theirs in zip(own, events, strict=True):
            assert (mine.logprobs is None) == (theirs.logprobs is None)
            if mine.logprobs is not None and theirs.logprobs is not None:
                assert mine.logprobs.logprob == pytest.approx(theirs.logprobs.logprob, abs=1e-4)
                assert [i for i, _ in mine.logprobs.top] == [i for i, _ in theirs.logprobs.top]
    return engine


@pytest.mark.parametrize("backend", CAPTURING)
@pytest.mark.parametrize(
    ("architecture", "budget"),
    [("Qwen3ForCausalLM", 300), ("Qwen3ForCausalLM", 24), ("Qwen3_5ForCausalLM", 24)],
)
def test_drafts_are_verified_in_captured_windows(
    architecture: str, budget: int, backend: str
) -> None:
    plain = load_tiny_model(architecture)
    lengths = (27, 3, 9)
    wanted = [(prompt(n), p) for n, p in zip(lengths, (GREEDY, PENALIZED, LISTED), strict=True)]
    alone = {len(ids): run_alone(plain, ids, params)[0] for ids, params in wanted}
    engine, device = device_engine(
        load_tiny_model(architecture, backend=backend),
        max_num_batched_tokens=budget,
        speculator=lambda: oracle_speculator(
            lambda request: alone[request.num_prompt_tokens].token_ids, 0.15, 3
        ),
    )
    for _ in range(3):
        ids = {engine.add_request(*request): len(request[0]) for request in wanted}
        found: dict[int, list[TokenEvent]] = {}
        while engine.has_unfinished():
            for event in checked_step(engine):
                found.setdefault(ids[event.request_id], []).append(event)
        for length, events in found.items():
            assert [event.token_id for event in events] == alone[length].token_ids
        assert all(event.logprobs is not None for event in found[lengths[-1]])
        assert any(event.is_draft for events in found.values() for event in events)
    assert len(device.replayed) > len(device.captured) > 0


@pytest.mark.parametrize("backend", CAPTURING)
def test_a_smaller_model_drafts_on_the_device_too(backend: str) -> None:
    plain = load_tiny_model("Qwen3ForCausalLM")
    params = [
        replace(each, max_tokens=num)
        for each, num in zip((GREEDY, PENALIZED), (24, 20), strict=True)
    ]
    wanted = list(zip((prompt(29), prompt(13)), params, strict=True))
    alone = [run_alone(plain, *request)[0].token_ids for request in wanted]
    draft = load_tiny_model("Qwen3ForCausalLM", backend=backend)
    drafting_device = RecordingDevice()

    def speculator() -> Speculator:
        return model_speculator(draft, 200, 16, 3, 4096, drafting_device)

    engine, _ = device_engine(
        load_tiny_model("Qwen3ForCausalLM", backend=backend), speculator=speculator
    )
    assert not engine.is_warm
    ids = [engine.add_request(*request) for request in wanted]
    found: dict[int, list[int | None]] = {i: [] for i in ids}
    num_accepted = 0
    while engine.has_unfinished():
        for event in checked_step(engine):
            found[event.request_id].append(event.token_id)
            num_accepted += event.is_draft
    assert list(found.values()) == alone
    assert num_accepted > 10
    assert drafting_device.replayed


def test_a_shape_is_captured_when_it_comes_again_and_then_replayed() -> None:
    model = load_tiny_model("Qwen3ForCausalLM", backend="launched")
    engine, device = device_engine(model)
    engine.add_request(prompt(20), GREEDY)
    counts = []
    while engine.has_unfinished():
        checked_step(engine)
        counts.append((len(device.captured), len(device.replayed)))
    # The prompt, the first token behind it, and then all the others from the graph; the last step
    # books what is under way.
    assert counts == [(0, 0), (0, 0), (1, 1), (1, 2), (1, 3), (1, 3)]


def test_nobody_waits_for_the_device_but_for_ids() -> None:
    model = load_tiny_model("Qwen3ForCausalLM", backend="launched")
    engine, device = device_engine(model)
    for params in (GREEDY, PENALIZED):
        engine.add_request(prompt(9), params)
    waits, num_events = [], 0
    while engine.has_unfinished():
        num_events += len(checked_step(engine))
        waits.append(device.num_waits)
    assert waits == list(range(len(waits)))  # none in the first step, one in each other
    assert num_events == 5 + 6


@pytest.mark.parametrize("backend", CAPTURING)
def test_what_is_captured_ahead_serves_the_first_token(backend: str) -> None:
    model = load_tiny_model("Qwen3ForCausalLM", backend=backend)
    engine, device = device_engine(model, max_num_seqs=2, max_num_batched_tokens=24)
    pieces = 0
    while engine.work_ahead():
        assert not engine.is_warm
        pieces += 1
    assert engine.is_warm
    sizes = [1, 2]
    # A prompt, decode steps, windows of one and two requests, and what sampling can need.
    assert len(device.captured) == len(sizes)
    assert pieces == 1 + 2 * len(sizes) + 4 + 1 + 7
    before = [tuple(each) for each in _cache_bytes(engine)]
    assert not any(map(any, before)), "padding was stored"
    engine.add_request(prompt(5), GREEDY)
    checked_step(engine)
    assert not engine.work_ahead()  # there is a request
    while engine.has_unfinished():
        checked_step(engine)
    assert len(device.captured) == len(sizes)
    assert len(device.replayed) == 4  # the prompt is a window, whose shape had not come yet


def _cache_bytes(engine: Engine) -> list[list[int]]:
    stacked = engine._runner._kv_cache.stacks[0]  # type: ignore[attr-defined]
    return [part.view(torch.uint8).flatten().tolist() for part in (stacked.key, stacked.value)]


def test_what_cannot_be_prepared_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = load_tiny_model("Qwen3ForCausalLM", backend="launched")
    engine, device = device_engine(model, max_num_seqs=1, max_num_batched_tokens=16)
    sample, attempts = engine._runner._sample, []  # type: ignore[attr-defined]

    def failing(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        if rows.penalties is not None:
            raise RuntimeError("out of resource: registers")
        return sample(logits, rows)  # type: ignore[no-any-return]

    def no_room(call: object) -> None:
        attempts.append(call)
        raise CaptureError("a capture failed") from torch.OutOfMemoryError("CUDA out of memory")

    engine._runner._sample = failing  # type: ignore[attr-defined]
    device.capture = no_room  # type: ignore[method-assign, assignment]
    while engine.work_ahead():
        assert len(attempts) <= 1
    assert engine.is_warm
    assert "could not prepare" in caplog.text
    request_id = engine.add_request(prompt(4), GREEDY)
    found = [event.token_id for event in generate_one(engine, request_id)]
    assert found == run_alone(load_tiny_model("Qwen3ForCausalLM"), prompt(4), GREEDY)[0].token_ids


@needs_interpreter
def test_operators_that_wait_for_values_are_not_captured() -> None:
    plain = load_tiny_model("Qwen3ForCausalLM", backend="triton")
    ops = triton_ops("cpu", choice=Choice(frozenset([Piece.FEW_QUERIES, Piece.SAMPLING])))
    engine, device = device_engine(replace(plain, ops=ops, fused=None))
    request_id = engine.add_request(prompt(20), GREEDY)
    found = [event.token_id for event in generate_one(engine, request_id)]
    assert found == run_alone(load_tiny_model("Qwen3ForCausalLM"), prompt(20), GREEDY)[0].token_ids
    assert not device.captured


def test_a_capture_that_fails_leaves_steps_that_are_launched(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = load_tiny_model("Qwen3ForCausalLM", backend="launched")
    engine, device = device_engine(model)

    def failing(call: object) -> None:
        raise CaptureError("operation not permitted when stream is capturing")

    device.capture = failing  # type: ignore[method-assign, assignment]
    request_id = engine.add_request(prompt(4), GREEDY)
    found = [event.token_id for event in generate_one(engine, request_id)]
    assert "not permitted" in caplog.text
    assert found == run_alone(load_tiny_model("Qwen3ForCausalLM"), prompt(4), GREEDY)[0].token_ids


def test_a_token_that_is_not_finite_ends_its_request_a_step_later() -> None:
    model = load_tiny_model("Qwen3ForCausalLM", backend="launched")
    engine, _ = device_engine(model)
    good = engine.add_request(prompt(4), GREEDY)
    expected = [event.token_id for event in generate_one(engine, good)]
    bad = engine.add_request(prompt(12), GREEDY)
    good = engine.add_request(prompt(4), GREEDY)
    checked_step(engine)
    [request] = [r for r in engine.scheduler._running if r.request_id == bad]
    kv_cache = engine._runner._kv_cache.stacks[0]  # type: ignore[attr-defined]
    kv_cache.value[:, request.tables[0][0]] = torch.nan
    events: dict[int, list[TokenEvent]] = {good: [], bad: []}
    while engine.has_unfinished():
        for event in checked_step(engine):
            events[event.request_id].append(event)
    assert [event.token_id for event in events[good]] == expected
    assert events[bad][-1].error is not None
    assert len(events[bad]) == 2


def generate_one(engine: Engine, request_id: int) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    while engine.has_unfinished():
        events += [each for each in checked_step(engine) if each.request_id == request_id]
    return events


@pytest.mark.parametrize("backend", CAPTURING)
@pytest.mark.parametrize("has_drafts", [False, True], ids=["plain", "drafts"])
def test_grammars_are_followed_beside_free_answers(has_drafts: bool, backend: str) -> None:
    grammars = (r"[0-9]{3}-(ab|cd)*;", r"(yes|no), (certainly|perhaps)\.", None)
    wanted = []
    for i, params in enumerate((GREEDY, PENALIZED, LISTED)):
        source = grammars[i]
        grammar = None if source is None else Grammar("regex", source)
        wanted.append((prompt(7 + 5 * i), replace(params, max_tokens=12, grammar=grammar)))

    def answers(engine: Engine) -> dict[int, list[int | None]]:
        ids = {add(engine, *request): [] for request in wanted}
        while engine.has_unfinished():
            for event in checked_step(engine):
                ids[event.request_id].append(event.token_id)
        return ids

    expected = answers(make_engine(load_tiny_model("Qwen3ForCausalLM"), Limits()))

    def speculator() -> Speculator:
        said = {key: [t for t in ids if t is not None] for key, ids in expected.items()}
        return oracle_speculator(lambda request: said[request.request_id], 0.2, 5)

    model = load_tiny_model("Qwen3ForCausalLM", backend=backend)
    engine, _ = device_engine(model, speculator=speculator if has_drafts else None)
    assert answers(engine) == expected
    assert all(expected.values())
