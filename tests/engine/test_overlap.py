"""Steps that are scheduled before the tokens of the last one are there, by the numbers."""

from engines import EOS_TOKEN_ID, Limits, checked_step, load_tiny_model, make_engine, run_alone
from scheduling import counts, make_request, make_scheduler

from localllm.schedule.block_group import most_blocks
from localllm.schedule.request import FinishReason, TokenEvent
from localllm.schedule.sampling_params import SamplingParams
from localllm.schedule.scheduler import SampledToken


def test_a_step_is_scheduled_while_the_ids_of_the_last_are_on_their_way() -> None:
    scheduler = make_scheduler(num_blocks=100, budget=10)
    scheduler.add(make_request(0, 4, max_tokens=2))
    scheduler.add(make_request(1, 9, max_tokens=3, base=100))
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert [counts(first), counts(second)] == [{0: 4, 1: 6}, {0: 1, 1: 3}]
    [event] = scheduler.update(first, [[SampledToken(7)]])
    assert (event.request_id, event.token_id) == (0, 7)
    third = scheduler.schedule()
    assert counts(third) == {1: 1}  # the other has all of its tokens, if not yet their ids
    events = scheduler.update(second, [[SampledToken(8)], [SampledToken(9)]])
    assert [event.finish_reason for event in events] == [FinishReason.LENGTH, None]
    scheduler.check_invariants()


def test_what_was_scheduled_for_a_request_that_has_ended_is_dropped() -> None:
    scheduler = make_scheduler(num_blocks=100)
    request = make_request(0, 4, max_tokens=9)
    request.stop_token_ids = frozenset({5})
    scheduler.add(request)
    first, second = scheduler.schedule(), scheduler.schedule()
    [event] = scheduler.update(first, [[SampledToken(5)]])
    assert event.finish_reason is FinishReason.STOP
    assert scheduler.num_free_blocks == scheduler.num_usable_blocks
    scheduler.add(make_request(1, 4, base=50))
    third = scheduler.schedule()  # it may have the blocks and the place of the first
    assert scheduler.update(second, [[SampledToken(6)]]) == []
    [event] = scheduler.update(third, [[SampledToken(6)]])
    assert (event.request_id, request.token_ids[-1]) == (1, 5)
    scheduler.check_invariants()


def test_a_request_that_is_prepared_from_its_ids_waits_for_them() -> None:
    scheduler = make_scheduler(num_blocks=100)
    for request_id in range(2):
        scheduler.add(make_request(request_id, 4, base=50 * request_id))
    scheduler._waiting[0].needs_ids = True
    first, second = scheduler.schedule(), scheduler.schedule()
    assert counts(second) == {1: 1}
    scheduler.update(first, [[SampledToken(7)], [SampledToken(7)]])
    assert counts(scheduler.schedule()) == {0: 1, 1: 1}


def test_a_request_that_is_preempted_meanwhile_keeps_the_token_that_comes() -> None:
    scheduler = make_scheduler(num_blocks=4)
    for request_id in range(3):
        scheduler.add(make_request(request_id, 4, max_tokens=8, base=50 * request_id))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert counts(second) == {0: 1, 1: 1}
    events = scheduler.update(first, [[SampledToken(7)]] * 3)
    assert [event.request_id for event in events] == [0, 1, 2]
    [preempted] = scheduler._waiting
    assert preempted.token_ids[-1] == 7
    scheduler.check_invariants()


def test_batches_are_undone_the_last_one_first() -> None:
    scheduler = make_scheduler(num_blocks=100, budget=6)
    for request_id in range(2):
        scheduler.add(make_request(request_id, 4, base=50 * request_id))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert [counts(first), counts(second)] == [{0: 4, 1: 2}, {0: 1, 1: 2}]
    scheduler.roll_back(second)
    scheduler.roll_back(first)
    scheduler.check_invariants()
    assert counts(scheduler.schedule()) == {0: 4, 1: 2}


def test_the_engine_has_a_batch_under_way_while_it_books_the_one_before() -> None:
    engine = make_engine(load_tiny_model("Qwen3ForCausalLM"), Limits(overlaps=True))
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    engine.add_request([3, 4, 5], params)
    steps: list[list[TokenEvent]] = []
    while engine.has_unfinished():
        steps.append(checked_step(engine))
    assert [len(events) for events in steps] == [0, 1, 1, 1]


def test_a_long_prompt_gets_through_a_window_pool_for_one_request() -> None:
    window, chunk, block_size = 16, 32, 8
    model = load_tiny_model("MistralForCausalLM", window)
    limits = Limits(
        block_size=block_size,
        num_blocks=most_blocks(window, block_size, 200, chunk),
        max_num_batched_tokens=chunk,
        overlaps=True,
    )
    prompt, params = [*range(3, 203)], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    [alone] = run_alone(model, prompt, params)
    engine = make_engine(model, limits)
    engine.add_request(prompt, params)
    tokens, num_steps = [], 0
    while engine.has_unfinished():
        tokens += [event.token_id for event in checked_step(engine)]
        num_steps += 1
        assert num_steps < 60
    assert tokens == alone.token_ids
    assert engine.scheduler.num_preemptions == 0


def test_an_end_token_is_noticed_a_step_late_and_nothing_comes_of_it() -> None:
    model = load_tiny_model("Qwen3ForCausalLM")
    for seed in range(200):
        params = SamplingParams(temperature=1.5, seed=seed, max_tokens=30)
        [alone] = run_alone(model, [3, 4, 5], params)
        if EOS_TOKEN_ID in alone.token_ids[1:]:
            break
    else:
        raise AssertionError("no seed ends with the end token")
    engine = make_engine(model, Limits(overlaps=True))
    engine.add_request([3, 4, 5], params)
    events: list[TokenEvent] = []
    while engine.has_unfinished():
        events += checked_step(engine)
    assert [event.token_id for event in events] == alone.token_ids
    assert events[-1].finish_reason is FinishReason.STOP
    # The batch that was under way is booked by the next step, and brings nothing.
    engine.add_request([3], SamplingParams(temperature=0, max_tokens=1))
    assert engine.step() == []
    assert len(engine.step()) == 1
