"""What fails in a step: memory costs one request its place, a lost device ends the engine."""

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from drafting import oracle_speculator
from engines import Limits, load_tiny_model, make_engine, run_alone

from localllm.engine.engine import Engine
from localllm.errors import DeviceError, ExitCode
from localllm.operators.device import is_fatal, is_out_of_memory
from localllm.schedule.request import FinishReason, TokenEvent
from localllm.schedule.runner import Launched
from localllm.schedule.sampling_params import SamplingParams
from localllm.schedule.scheduler import ScheduledBatch

GREEDY = SamplingParams(temperature=0, ignore_eos=True, max_tokens=6)
SMALL, LARGE = list(range(3, 20)), [3 + i % 200 for i in range(150)]
MODES = pytest.mark.parametrize("overlaps", [False, True], ids=["plain", "overlapping"])


class UnexpectedError(Exception):
    """What nobody expects."""


def make(overlaps: bool) -> Engine:
    limits = Limits(overlaps=overlaps, enable_prefix_caching=True)
    return make_engine(load_tiny_model("Qwen3ForCausalLM"), limits)


def fail(engine: Engine, fails: Callable[[ScheduledBatch], Exception | None]) -> None:
    """Make the runner raise what `fails` says."""
    runner = engine._runner
    launch = runner.launch

    def failing(batch: ScheduledBatch) -> Launched:
        error = fails(batch)
        if error is not None:
            raise error
        return launch(batch)

    runner.launch = failing  # type: ignore[method-assign]


def finish(engine: Engine) -> dict[int, list[TokenEvent]]:
    events: dict[int, list[TokenEvent]] = {}
    for _ in range(200):
        if not engine.has_unfinished():
            break
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
        engine.scheduler.check_invariants()
    assert not engine.has_unfinished()
    assert engine.scheduler.num_free_blocks == engine.scheduler.num_usable_blocks
    return events


def tokens(events: list[TokenEvent]) -> list[int | None]:
    return [event.token_id for event in events]


def alone(prompt: list[int]) -> list[int]:
    return run_alone(load_tiny_model("Qwen3ForCausalLM"), prompt, GREEDY)[0].token_ids


@MODES
def test_a_request_too_large_for_a_step_goes_on_in_smaller_ones(overlaps: bool) -> None:
    engine = make(overlaps)
    sizes: list[int] = []

    def fails(batch: ScheduledBatch) -> Exception | None:
        sizes.append(sum(each.num_scheduled_tokens for each in batch.requests))
        return torch.OutOfMemoryError("CUDA out of memory") if sizes[-1] > 100 else None

    fail(engine, fails)
    small, large = engine.add_request(SMALL, GREEDY), engine.add_request(LARGE, GREEDY)
    events = finish(engine)
    assert max(sizes) > 100, "the test must press"
    assert tokens(events[small]) == alone(SMALL)
    assert tokens(events[large]) == alone(LARGE)


@MODES
def test_a_request_that_never_fits_ends_alone(overlaps: bool) -> None:
    engine = make(overlaps)
    small, large = engine.add_request(SMALL, GREEDY), engine.add_request(LARGE, GREEDY)

    def fails(batch: ScheduledBatch) -> Exception | None:
        has_large = any(each.request.request_id == large for each in batch.requests)
        return torch.OutOfMemoryError("CUDA out of memory") if has_large else None

    fail(engine, fails)
    events = finish(engine)
    assert tokens(events[small]) == alone(SMALL)
    [event] = events[large]
    assert event.finish_reason is FinishReason.ERROR
    assert event.error is not None
    assert event.error.exit_code is ExitCode.MEMORY
    again = engine.add_request(SMALL, GREEDY)
    assert tokens(finish(engine)[again]) == alone(SMALL)


@MODES
@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore"),
        RuntimeError("Triton Error [CUDA]: unspecified launch failure"),
    ],
)
def test_a_lost_device_ends_the_engine_with_a_word(overlaps: bool, error: Exception) -> None:
    engine = make(overlaps)
    engine.add_request(SMALL, GREEDY)
    engine.step()
    fail(engine, lambda batch: error)
    for call in (engine.step, engine.step, lambda: engine.add_request(SMALL, GREEDY)):
        with pytest.raises(DeviceError, match="nothing more can be computed") as caught:
            call()
        assert caught.value.where == str(error).partition("\n")[0]


@MODES
def test_an_interruption_costs_time_and_no_token(overlaps: bool) -> None:
    engine = make(overlaps)
    steps = 0

    def fails(batch: ScheduledBatch) -> Exception | None:
        nonlocal steps
        steps += 1
        return UnexpectedError() if steps % 2 == 0 else None

    fail(engine, fails)
    wanted = [SMALL, LARGE, SMALL[:5]]
    ids = [engine.add_request(prompt, GREEDY) for prompt in wanted]
    found: dict[int, list[int | None]] = {request_id: [] for request_id in ids}
    while engine.has_unfinished():
        with suppress(UnexpectedError):
            for event in engine.step():
                found[event.request_id].append(event.token_id)
        engine.scheduler.check_invariants()
    assert list(found.values()) == [alone(prompt) for prompt in wanted]


@MODES
@pytest.mark.parametrize("at", range(1, 7))
def test_no_token_is_lost_where_a_step_with_drafts_fails(overlaps: bool, at: int) -> None:
    model = load_tiny_model("Qwen3ForCausalLM")
    prompts = (SMALL, LARGE[:40])
    alone = {len(prompt): run_alone(model, prompt, GREEDY)[0].token_ids for prompt in prompts}
    limits = Limits(
        overlaps=overlaps,
        speculator=lambda: oracle_speculator(
            lambda request: alone[request.num_prompt_tokens], error_rate=0.2, max_draft=2
        ),
    )
    engine = make_engine(model, limits)
    num_launches = 0

    def once(batch: ScheduledBatch) -> Exception | None:
        nonlocal num_launches
        num_launches += 1
        return UnexpectedError() if num_launches == at else None

    fail(engine, once)
    ids = {engine.add_request(prompt, GREEDY): prompt for prompt in prompts}
    found: dict[int, list[int | None]] = {request_id: [] for request_id in ids}
    for _ in range(40):
        if engine.has_unfinished():
            with suppress(UnexpectedError):
                for event in engine.step():
                    found[event.request_id].append(event.token_id)
            engine.scheduler.check_invariants()
    for request_id, prompt in ids.items():
        assert found[request_id] == alone[len(prompt)]


@pytest.mark.parametrize(
    ("message", "is_memory"),
    [
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_a_library_without_memory_for_itself_does_not_end_the_device(
    message: str, is_memory: bool
) -> None:
    error = RuntimeError(message)
    assert is_out_of_memory(error) == is_memory
    assert is_fatal(error) != is_memory
