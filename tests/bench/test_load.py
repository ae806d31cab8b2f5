"""A real engine under load: every request is answered, and the clock is kept."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from engines import Limits, load_tiny_model, make_engine

from localllm.bench import load
from localllm.bench.load import LoadRun, Timeline, run_requests, run_static
from localllm.bench.speed import run_decode, run_prefill
from localllm.bench.workload import LoadRequest, Mix
from localllm.engine.engine import Engine

MIX = Mix(num_requests=12, mean_prompt=12, mean_new=6, longest=3, vocab_size=200)


@pytest.fixture
def engine() -> Engine:
    return make_engine(load_tiny_model("Qwen3ForCausalLM"), Limits(enable_prefix_caching=True))


def test_every_request_gets_its_tokens_in_order_of_time(engine: Engine) -> None:
    requests = MIX.draw(rate=200.0)
    run = run_requests(engine, requests)
    for request, timeline in zip(requests, run.timelines, strict=True):
        assert len(timeline.token_s) == request.num_new
        assert timeline.token_s == sorted(timeline.token_s)
        assert timeline.token_s[0] >= timeline.arrival_s == request.arrival_s
    assert run.num_tokens == sum(request.num_new for request in requests)
    assert run.seconds >= requests[-1].arrival_s


def test_no_more_run_at_once_than_asked(engine: Engine) -> None:
    most = 0
    add = engine.add_request

    def counting(*args: object) -> int:
        nonlocal most
        request_id = add(*args)  # type: ignore[arg-type]
        unfinished = sum(1 for _ in engine.scheduler.unfinished())
        most = max(most, unfinished)
        return request_id

    engine.add_request = counting  # type: ignore[method-assign]
    run = run_requests(engine, MIX.draw(), max_at_once=3)
    assert most == 3
    assert len(run.timelines) == MIX.num_requests


def test_no_test_finds_the_prompts_of_another_in_the_cache(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[list[tuple[int, ...]]] = []
    run = load.run_requests

    def recording(engine: Engine, requests: list[LoadRequest], *rest: int) -> LoadRun:
        runs.append([each.prompt for each in requests if len(each.prompt) >= 8])
        return run(engine, [replace(each, arrival_s=0.0) for each in requests], *rest)

    monkeypatch.setattr(load, "run_requests", recording)
    suite = load.LoadSuite(SimpleNamespace(engine=engine), replace(MIX, seed=3), static_batch=64)  # type: ignore[arg-type]
    monkeypatch.setattr(load, "CONCURRENCIES", (1,))
    suite.run(lambda what: None)
    # Warm-up, full queue, two loads, static, the same continuously; decoding reads cached prompts.
    assert len(runs) == 8
    prompts = [prompt[:8] for prompts in runs[1:6] for prompt in prompts]
    assert len(prompts) == len(set(prompts))


def test_latencies_by_hand() -> None:
    first = Timeline(1.0, [2.0, 3.0, 6.0])
    second = Timeline(2.0, [2.5])
    run = LoadRun([first, second], 8.0)
    assert run.tokens_per_s == 4 / 8.0
    assert run.latencies() == {
        "ttft_s": {"p50": 0.5, "p99": 1.0},
        "time_per_token_s": {"p50": 2.0, "p99": 2.0},
        "total_s": {"p50": 0.5, "p99": 5.0},
    }


def test_static_batches_compute_every_row_to_the_longest(engine: Engine) -> None:
    computed = []
    forward = engine._runner.forward

    def counting(batch, hidden):  # type: ignore[no-untyped-def]
        computed.append(sum(each.num_scheduled_tokens for each in batch.requests))
        return forward(batch)

    engine._runner.forward = counting  # type: ignore[method-assign]
    requests = [LoadRequest((1, 2), 3), LoadRequest((3, 4, 5, 6), 1), LoadRequest((7,), 2)]
    run_static(engine, requests, batch=2)
    # Two rows of 4 tokens, then two steps of two; then one token, and one step of one.
    assert computed == [8, 2, 2, 1, 1]


def test_a_prefill_tells_what_was_cached(engine: Engine) -> None:
    prompt = [i % 200 for i in range(50)]
    first, again = run_prefill(engine, prompt), run_prefill(engine, [*prompt[:40], *range(20)])
    assert (first.num_tokens, first.depth) == (50, 0)
    assert (again.num_tokens, again.depth) == (60 - 32, 32)  # blocks of 16


def test_decoding_is_timed_by_the_step_of_the_whole_batch(engine: Engine) -> None:
    steps = run_decode(engine, [[1], [2, 3], [4]], 7)
    assert len(steps) == 7
    assert all(step > 0 for step in steps)
    assert not engine.has_unfinished()
