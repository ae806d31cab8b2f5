"""Scheduling by the numbers, and the engine under pressure."""

import random

import pytest
import torch
from engines import Limits, checked_step, load_tiny_model, make_engine, run, run_alone
from scheduling import counts, make_request, make_scheduler

from localllm.engine.engine import Engine
from localllm.errors import ContextLengthError, RequestError
from localllm.schedule.request import FinishReason, TokenEvent
from localllm.schedule.sampling_params import SamplingParams
from localllm.schedule.scheduler import SampledToken, ScheduledBatch, Scheduler

GREEDY = SamplingParams(temperature=0, ignore_eos=True, max_tokens=20)


def finish_step(scheduler: Scheduler, batch: ScheduledBatch, token_id: int = 7) -> list[TokenEvent]:
    sampled = [[SampledToken(token_id)] for entry in batch.requests if entry.catches_up]
    events = scheduler.update(batch, sampled)
    scheduler.check_invariants()
    return events


def test_a_long_prompt_is_computed_in_chunks_of_the_budget_beside_decoding_requests() -> None:
    scheduler = make_scheduler(num_blocks=100, budget=10)
    scheduler.add(make_request(0, 3))
    scheduler.add(make_request(1, 25, base=100))
    seen = []
    for _ in range(4):
        batch = scheduler.schedule()
        seen.append(counts(batch))
        finish_step(scheduler, batch)
    assert seen == [{0: 3, 1: 7}, {0: 1, 1: 9}, {0: 1, 1: 9}, {0: 1, 1: 1}]


def accept(scheduler: Scheduler, batch: ScheduledBatch, count: int) -> list[TokenEvent]:
    """Book the batch of one request, of whose draft `count` tokens are accepted."""
    [entry] = batch.requests
    tokens = [SampledToken(token) for token in (*entry.draft[:count], 99)]
    events = scheduler.update(batch, [tokens])
    scheduler.check_invariants()
    return events


def test_a_draft_is_computed_behind_the_newest_token_and_kept_as_far_as_accepted() -> None:
    scheduler = make_scheduler(num_blocks=100, size=4)
    request = make_request(0, 6, max_tokens=20)
    scheduler.add(request)
    finish_step(scheduler, scheduler.schedule())
    free = scheduler.num_free_blocks
    batch = scheduler.schedule({request: [1, 2, 3, 4, 5, 6, 7, 8, 9]})
    [entry] = batch.requests
    assert (entry.start, entry.known_end, entry.end) == (6, 7, 16)
    assert entry.token_ids == [7, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert entry.num_samples == 10
    scheduler.check_invariants()
    events = accept(scheduler, batch, 2)
    assert [(event.token_id, event.is_draft) for event in events] == [
        (1, True), (2, True), (99, False)
    ]  # fmt: skip
    assert events[-1].num_drafted_tokens == 9
    assert (request.num_tokens, request.num_computed_tokens) == (10, 9)
    assert scheduler.num_free_blocks == free - 1  # what was rejected holds none


def test_a_draft_takes_what_nobody_else_needs() -> None:
    scheduler = make_scheduler(num_blocks=6, budget=10, size=4)
    first, second = make_request(0, 3, max_tokens=9), make_request(1, 2, max_tokens=20)
    for request in (first, second):
        scheduler.add(request)
    finish_step(scheduler, scheduler.schedule())
    batch = scheduler.schedule({first: [1] * 20, second: [2] * 20})
    # One row each; of the budget's other eight the first takes what its answer has room for.
    assert [len(entry.draft) for entry in batch.requests] == [7, 1]
    scheduler.roll_back(batch)
    scheduler.check_invariants()
    third = make_request(2, 5, base=50)
    scheduler.add(third)
    batch = scheduler.schedule({first: [1] * 20})
    assert counts(batch) == {0: 4, 1: 1, 2: 5}  # a waiting prompt goes before drafts
    assert [len(entry.draft) for entry in batch.requests] == [3, 0, 0]
    scheduler.check_invariants()


def test_a_draft_preempts_nobody_and_stays_within_free_blocks() -> None:
    scheduler = make_scheduler(num_blocks=4, size=4)
    request = make_request(0, 8, max_tokens=8)
    other = make_request(1, 2, max_tokens=2, base=30)
    for each in (request, other):
        scheduler.add(each)
    finish_step(scheduler, scheduler.schedule())
    batch = scheduler.schedule({request: [5] * 6, other: [5] * 6})
    # The newest token of the first takes the last free block, whose rest is the draft's; of the
    # other's answer one token is left, which is sampled.
    assert counts(batch) == {0: 4, 1: 1}
    assert scheduler.num_preemptions == 0
    scheduler.check_invariants()


def test_an_answer_ends_within_a_draft_and_its_blocks_are_findable() -> None:
    scheduler = make_scheduler(num_blocks=100, size=4)
    request = make_request(0, 6, max_tokens=20)
    request.stop_token_ids = frozenset({2})
    scheduler.add(request)
    finish_step(scheduler, scheduler.schedule())
    events = accept(scheduler, scheduler.schedule({request: [1, 2, 3]}), 3)
    assert [event.finish_reason for event in events] == [None, FinishReason.STOP]
    assert request.token_ids[6:] == [7, 1, 2]
    again = make_request(1, 0)
    again.token_ids = [*request.token_ids, 40, 41]
    again.num_prompt_tokens = len(again.token_ids)
    again.max_total_tokens = 20
    scheduler.add(again)
    scheduler.schedule()
    assert again.num_cached_tokens == 8  # two blocks, the second from the draft


def test_a_row_that_is_not_finite_ends_a_request_behind_what_was_accepted() -> None:
    scheduler = make_scheduler(num_blocks=100)
    request = make_request(0, 6)
    scheduler.add(request)
    finish_step(scheduler, scheduler.schedule())
    batch = scheduler.schedule({request: [1, 2]})
    events = scheduler.update(batch, [[SampledToken(1), SampledToken(None)]])
    scheduler.check_invariants()
    assert [event.token_id for event in events] == [1, None]
    assert events[-1].error is not None


def test_a_cached_prefix_is_a_head_start_and_the_newest_token_is_always_computed() -> None:
    scheduler = make_scheduler(num_blocks=100)
    scheduler.add(make_request(0, 8, max_tokens=1))
    finish_step(scheduler, scheduler.schedule())
    scheduler.add(make_request(1, 8))
    batch = scheduler.schedule()
    # Both blocks of four are cached; the second is computed again for its last token's logits.
    assert counts(batch) == {1: 4}
    assert batch.requests[0].request.num_cached_tokens == 4


def test_the_newest_request_is_preempted_first_and_comes_back_first() -> None:
    scheduler = make_scheduler(num_blocks=4)
    for request_id in range(3):
        scheduler.add(make_request(request_id, 4, max_tokens=8, base=50 * request_id))
    batch = scheduler.schedule()
    assert counts(batch) == {0: 4, 1: 4, 2: 4}
    finish_step(scheduler, batch)
    batch = scheduler.schedule()  # each wants a second block, one is left
    assert counts(batch) == {0: 1, 1: 1}
    assert scheduler.num_preemptions == 1
    finish_step(scheduler, batch)
    assert [r.request_id for r in scheduler._waiting] == [2]


def test_samples_share_the_blocks_of_their_prompt() -> None:
    engine = make_engine(load_tiny_model("Qwen3ForCausalLM"), Limits(block_size=4, num_blocks=60))
    params = SamplingParams(temperature=1, seed=1, max_tokens=8, n=4, ignore_eos=True)
    engine.add_request(list(range(3, 25)), params)  # 22 tokens: five full blocks and a half
    checked_step(engine)
    checked_step(engine)
    pool = engine.scheduler.groups[0].pool
    used = pool.num_usable_blocks - pool.num_free_blocks
    assert used == 5 + 4  # the full ones once, the half one once a sample
    tables = [request.tables[0] for request in engine.scheduler._running]
    assert all(table[:5] == tables[0][:5] for table in tables)
    assert len({table[5] for table in tables}) == 4


def test_samples_of_a_request_differ_and_each_is_what_it_is_alone() -> None:
    model = load_tiny_model("Qwen3ForCausalLM")
    params = SamplingParams(temperature=1, seed=1, max_tokens=12, n=4, ignore_eos=True)
    prompt = list(range(3, 25))
    answers = run(make_engine(model, Limits()), [(prompt, params)])
    texts = [answers[0, sample].token_ids for sample in range(4)]
    assert texts == [answer.token_ids for answer in run_alone(model, prompt, params)]
    assert len({tuple(text) for text in texts}) == 4


def test_24_requests_in_the_space_of_3_all_finish_with_the_tokens_they_get_alone() -> None:
    model = load_tiny_model("Qwen3ForCausalLM")
    rng = random.Random(3)
    wanted = []
    for i in range(24):
        prompt = [rng.randrange(3, 259) for _ in range(rng.randrange(8, 33))]
        params = SamplingParams(temperature=i % 2, seed=i, max_tokens=32, ignore_eos=True)
        wanted.append((prompt, params))
    blocks_for_3 = 3 * (64 // 16)
    engine = make_engine(model, Limits(num_blocks=blocks_for_3, max_num_batched_tokens=64))
    answers = run(engine, wanted)
    assert engine.scheduler.num_preemptions > 0, "the test must press"
    for i, request in enumerate(wanted):
        assert answers[i, 0].finish_reason is FinishReason.LENGTH
        assert answers[i, 0].token_ids == run_alone(model, *request)[0].token_ids


def test_a_request_that_can_never_fit_ends_alone_with_an_error() -> None:
    model = load_tiny_model("Qwen3ForCausalLM")
    engine = make_engine(model, Limits(num_blocks=4))  # 64 tokens
    good = engine.add_request(list(range(3, 13)), GREEDY)
    with pytest.raises(ContextLengthError, match="64"):
        engine.add_request(list(range(3, 103)), GREEDY)
    tokens = []
    while engine.has_unfinished():
        for event in checked_step(engine):
            assert event.request_id == good
            tokens.append(event.token_id)
    assert tokens == run_alone(model, list(range(3, 13)), GREEDY)[0].token_ids


def test_an_answer_is_clipped_to_the_room_left_in_the_context() -> None:
    model = load_tiny_model("Qwen3ForCausalLM")
    engine = make_engine(model, Limits(num_blocks=4))
    params = SamplingParams(temperature=0, ignore_eos=True)
    answer = run(engine, [(list(range(3, 53)), params)])[0, 0]
    assert len(answer.token_ids) == 64 - 50
    assert answer.finish_reason is FinishReason.LENGTH


def test_an_aborted_request_has_no_blocks_after_the_call() -> None:
    engine = make_engine(load_tiny_model("Qwen3ForCausalLM"), Limits())
    request_id = engine.add_request(list(range(3, 90)), GREEDY)
    checked_step(engine)
    pool = engine.scheduler.groups[0].pool
    assert pool.num_free_blocks < pool.num_usable_blocks
    [event] = engine.abort(request_id)
    assert event.finish_reason is FinishReason.ABORT
    assert pool.num_free_blocks == pool.num_usable_blocks
    assert not engine.has_unfinished()


def test_kv_waste_is_at_most_2_percent_at_a_mean_length_of_500() -> None:
    rng = random.Random(11)
    scheduler = make_scheduler(num_blocks=5000, budget=100_000, seqs=64, size=16)
    for i in range(64):
        length = rng.randrange(250, 750)
        scheduler.add(make_request(i, length, max_tokens=40, base=1000 * i))
    wastes = []
    for _ in range(39):
        finish_step(scheduler, scheduler.schedule())
        running = scheduler._running
        allocated = 16 * sum(len(request.tables[0]) for request in running)
        used = sum(request.num_computed_tokens for request in running)
        wastes.append((allocated - used) / allocated)
    assert len(scheduler._running) == 64
    assert sum(wastes) / len(wastes) <= 0.02
    assert max(wastes) <= 0.02


def test_logits_that_are_not_finite_end_their_request_and_no_other() -> None:
    model = load_tiny_model("Qwen3ForCausalLM")
    engine = make_engine(model, Limits())
    runner = engine._runner
    forward = type(runner).forward
    bad = engine.add_request(list(range(3, 20)), GREEDY)
    good = engine.add_request(list(range(5, 20)), GREEDY)

    def poisoned(batch: ScheduledBatch, hidden: None) -> torch.Tensor:
        logits = forward(runner, batch).clone()
        for row, entry in enumerate(e for e in batch.requests if e.catches_up):
            if entry.request.request_id == bad and entry.request.num_generated_tokens == 3:
                logits[row, 5] = torch.nan
        return logits

    runner.forward = poisoned  # type: ignore[method-assign]
    events: dict[int, list[TokenEvent]] = {bad: [], good: []}
    while engine.has_unfinished():
        for event in checked_step(engine):
            events[event.request_id].append(event)
    assert [event.finish_reason for event in events[bad]] == [None] * 3 + [FinishReason.ERROR]
    assert "not finite" in str(events[bad][-1].error)
    alone = run_alone(model, list(range(5, 20)), GREEDY)[0].token_ids
    assert [event.token_id for event in events[good]] == alone


def test_a_step_that_fails_costs_time_and_no_token() -> None:
    model = load_tiny_model("Qwen3ForCausalLM")
    engine = make_engine(model, Limits(enable_prefix_caching=True))
    runner = engine._runner
    forward = type(runner).forward
    params = SamplingParams(temperature=1, seed=2, max_tokens=10, n=3, ignore_eos=True)
    prompt = list(range(3, 25))  # the last block is half full: each sample copies it
    step = 0

    def failing(batch: ScheduledBatch, hidden: None) -> torch.Tensor:
        nonlocal step
        step += 1
        if step == 2:  # the copies are scheduled, and not done
            raise RuntimeError("out of memory")
        return forward(runner, batch)

    runner.forward = failing  # type: ignore[method-assign]
    engine.add_request(prompt, params)
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    while engine.has_unfinished():
        try:
            for event in engine.step():
                assert event.token_id is not None
                tokens[event.sample].append(event.token_id)
        except RuntimeError:
            engine.scheduler.check_invariants()
    assert list(tokens.values()) == [a.token_ids for a in run_alone(model, prompt, params)]


@pytest.mark.parametrize(
    ("prompt", "params", "name"),
    [
        ([], GREEDY, "prompt"),
        ([3, -1], GREEDY, "prompt"),
        ([3, 288], GREEDY, "prompt"),
        ([3, 10**18], GREEDY, "prompt"),
        ([3, 4.0], GREEDY, "prompt"),
        ([3, True], GREEDY, "prompt"),
        ([3], SamplingParams(logit_bias={288: 1.0}), "logit_bias"),
        ([3], SamplingParams(stop_token_ids=(999,)), "stop_token_ids"),
    ],
)
def test_token_ids_out_of_range_are_refused_before_the_engine(
    prompt: list[int], params: SamplingParams, name: str
) -> None:
    engine: Engine = make_engine(load_tiny_model("Qwen3ForCausalLM"), Limits())
    with pytest.raises(RequestError) as caught:
        engine.add_request(prompt, params)
    assert caught.value.param == name
    assert not engine.has_unfinished()
