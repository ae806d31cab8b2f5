"""Cache groups in the scheduler, without a model: windows give back what they leave behind, and a
prefix is gone on with where every group can.
"""

from array import array
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import make_request, make_scheduler

from localllm.schedule.block_group import BlockGroup, most_blocks
from localllm.schedule.block_pool import NULL_BLOCK_ID, BlockPool
from localllm.schedule.prefix_cache import PrefixCache
from localllm.schedule.request import FinishReason, Request
from localllm.schedule.scheduler import (
    SampledToken,
    ScheduledBatch,
    Scheduler,
    SchedulerConfig,
)

SIZE = 4


def finish_step(scheduler: Scheduler, batch: ScheduledBatch) -> None:
    """As if a model had computed it; all drafts are accepted."""
    sampled = [
        [SampledToken(token) for token in (*entry.draft, 500 + entry.end)]
        for entry in batch.requests
        if entry.catches_up
    ]
    scheduler.update(batch, sampled)
    scheduler.check_invariants()


def finish(scheduler: Scheduler) -> None:
    for _ in range(1000):
        if not scheduler.has_unfinished():
            return
        finish_step(scheduler, scheduler.schedule())
    raise AssertionError("it does not come to an end")


def held(request: Request, group: int) -> int:
    return sum(block_id != NULL_BLOCK_ID for block_id in request.tables[group])


@pytest.mark.parametrize("window", [2, 4, 9, 10, 16])
@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_a_window_s_blocks_do_not_grow_with_the_request(window: int, chunk: int) -> None:
    most = most_blocks(window, SIZE, 1000, chunk)
    scheduler = make_scheduler(most + 1, budget=chunk, windows=[window])
    request = make_request(0, 300, max_tokens=100)
    scheduler.add(request)
    seen = 0
    for _ in range(1000):
        if not scheduler.has_unfinished():
            break
        batch = scheduler.schedule()
        seen = max(seen, held(request, 0))
        finish_step(scheduler, batch)
        if request.tables:
            # Behind a step the window is there, and the open block.
            assert held(request, 0) <= (window - 1) // SIZE + 2
    assert len(request.token_ids) == 400
    assert most - 2 <= seen <= most


def test_a_full_group_beside_a_window_keeps_everything() -> None:
    scheduler = make_scheduler(30, windows=[None, 6])
    request = make_request(0, 60, max_tokens=20)
    scheduler.add(request)
    for _ in range(10):
        finish_step(scheduler, scheduler.schedule())
    assert held(request, 0) == len(request.tables[0]) == 18
    assert held(request, 1) <= 3
    assert len(request.tables[1]) == 18


def test_a_request_that_no_pool_can_hold_is_known_by_its_full_groups() -> None:
    assert make_scheduler(30, budget=8, windows=[None, 6]).max_request_tokens == 30 * SIZE
    assert make_scheduler(30, budget=8, windows=[6]).max_request_tokens > 10**9
    # Without room for a window and a step it is all that there is.
    assert make_scheduler(4, budget=8, windows=[6]).max_request_tokens == 4 * SIZE


def test_a_next_turn_goes_on_from_the_window_at_the_end() -> None:
    scheduler = make_scheduler(100, windows=[None, 6])
    first = make_request(0, 41, max_tokens=4)
    scheduler.add(first)
    finish(scheduler)
    again = make_request(1, 60)
    again.token_ids[:44] = first.token_ids[:44]
    scheduler.add(again)
    batch = scheduler.schedule()
    assert batch.requests[0].start == again.num_cached_tokens == 44
    # The query at 44 looks at 39 to 43.
    assert set(again.tables[1][:9]) == {NULL_BLOCK_ID}
    assert NULL_BLOCK_ID not in again.tables[1][9:]
    finish_step(scheduler, batch)
    finish(scheduler)
    # A beginning whose window was left behind is of no use, unless blocks of it are still there.
    early = make_request(2, 30)
    scheduler.add(early)
    scheduler.schedule()
    assert early.num_cached_tokens == 28


def test_a_prefix_whose_window_was_given_away_is_computed() -> None:
    scheduler = make_scheduler(100, windows=[None, 6])
    scheduler.add(make_request(0, 41))
    finish(scheduler)
    pool = scheduler.groups[1].pool
    pool.free(pool.allocate(pool.num_usable_blocks))  # what was kept is gone
    again = make_request(1, 41)
    scheduler.add(again)
    scheduler.schedule()
    assert again.num_cached_tokens == 0


@pytest.mark.parametrize("chunk", [1, 5, 11, 39])
def test_an_aligned_window_starts_at_its_last_multiple(chunk: int) -> None:
    most = most_blocks(16, SIZE, 1000, chunk, is_aligned=True)
    pool = BlockPool(most + 1)
    group = BlockGroup(pool, SIZE, 16, is_aligned=True)
    firsts = [group.first_needed(position) * SIZE for position in (0, 15, 16, 17, 31, 32)]
    assert firsts == [0, 0, 16, 16, 16, 32]
    assert group.longest_request(chunk) is None
    table, seen = array("i"), 0
    for start in range(0, 400, chunk):
        assert group.fits(table, start, chunk)
        group.reserve(table, start, chunk)
        seen = max(seen, group.num_held(table))
        group.give_back(table, start + chunk)
    assert most - 1 <= seen <= most


def test_where_an_aligned_window_starts_a_prefix_needs_none_of_it() -> None:
    groups = [
        BlockGroup(BlockPool(50), SIZE),
        BlockGroup(BlockPool(most_blocks(16, SIZE, 99, 8, is_aligned=True) + 1), SIZE, 16, True),
    ]
    scheduler = Scheduler(SchedulerConfig(SIZE, 4, 8, True, b"r"), groups)
    for number, base in enumerate((0, 1000, 0)):
        request = make_request(number, 60, max_tokens=2, base=base)
        scheduler.add(request)
        finish(scheduler)
    # The second one has taken the first one's window, but not what is behind it.
    assert request.num_cached_tokens == 48


def test_a_sample_computes_what_a_window_of_the_first_has_left() -> None:
    scheduler = make_scheduler(100, budget=64, seqs=1, windows=[6])
    first = make_request(0, 21, max_tokens=12)
    second = make_request(0, 21, max_tokens=2)
    second.sample, second.parent = 1, first
    scheduler.add(first)
    scheduler.add(second)
    finish(scheduler)
    assert len(second.token_ids) == 23

    together = make_scheduler(100, budget=64, seqs=2, windows=[6])
    first, second = make_request(0, 21, max_tokens=12), make_request(0, 21, max_tokens=2)
    second.sample, second.parent = 1, first
    together.add(first)
    together.add(second)
    finish_step(together, together.schedule())
    batch = together.schedule()
    assert [entry.num_scheduled_tokens for entry in batch.requests] == [
        1,
        1,
    ]  # the prompt is shared
    finish_step(together, batch)
    finish(together)


def brute_force(groups: Sequence[BlockGroup], stored: Sequence[set[int]], num_keys: int) -> int:
    """The longest prefix whose queries find all that they look at."""
    for count in range(num_keys, -1, -1):
        at = count * SIZE
        needed = [
            {key // SIZE for key in range(max(0, at - (group.window or at + 1) + 1), at)}
            for group in groups
        ]
        if all(need <= there for need, there in zip(needed, stored, strict=True)):
            return count
    raise AssertionError


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from([None, 1, 4, 5, 9, 30]), min_size=1, max_size=3),
    st.lists(st.sets(st.integers(0, 11)), min_size=3, max_size=3),
    st.integers(0, 12),
)
def test_the_longest_prefix_is_found(
    windows: list[int | None], stored: list[set[int]], num_keys: int
) -> None:
    groups = [BlockGroup(BlockPool(30), SIZE, window) for window in windows]
    keys = [bytes([i]) for i in range(num_keys)]
    for group, places in zip(groups, stored, strict=False):
        for place in places:
            [block_id] = group.pool.allocate(1)
            group.pool.register(block_id, bytes([place]))
    cache = PrefixCache(groups, SIZE, b"", by_content=True)
    found = cache._longest(keys, cache._is_held)
    assert found == brute_force(groups, stored[: len(groups)], num_keys)


class Store:
    """Holds blocks by key and group; and what it filled."""

    def __init__(self) -> None:
        self.blocks: set[tuple[bytes, int]] = set()
        self.loaded: list[tuple[bytes, int]] = []

    def has(self, key: bytes, group: int) -> bool:
        return (key, group) in self.blocks

    def load(self, key: bytes, group: int, block_id: int) -> bool:
        self.loaded.append((key, group))
        return self.has(key, group)

    def offer(self, keys: Sequence[bytes]) -> None:
        self.blocks |= {(key, group) for key in keys for group in range(2)}


def test_of_a_window_no_more_is_loaded_than_the_next_token_looks_at() -> None:
    store = Store()
    scheduler = make_scheduler(100, store=store, windows=[None, 6])
    scheduler.add(make_request(0, 41))
    finish(scheduler)
    later = make_scheduler(100, store=store, windows=[None, 6])
    request = make_request(0, 41)
    later.add(request)
    later.schedule()
    later.check_invariants()
    assert request.num_cached_tokens == 40
    assert sum(group == 0 for _, group in store.loaded) == 10
    assert sum(group == 1 for _, group in store.loaded) == 2
    # Where the window is not in the store, an earlier end is taken.
    keys = request.block_keys
    store.blocks.discard((keys[9], 1))
    third, again = make_scheduler(100, store=store, windows=[None, 6]), make_request(0, 41)
    third.add(again)
    third.schedule()
    assert again.num_cached_tokens == 36


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.sampled_from([[6], [None, 6], [None, 1, 9], [5, 17]]),
    st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 30), st.integers(0, 2)), min_size=1, max_size=6
    ),
    st.integers(1, 20),
    st.integers(0, 12),
    st.integers(0, 1 << 30),
)
def test_the_books_balance_through_drafts_failures_and_preemptions(
    windows: list[int | None],
    asked: list[tuple[int, int, int]],
    budget: int,
    spare: int,
    seed: int,
) -> None:
    random = Random(seed)
    longest = max(prompt + more for prompt, more, _ in asked)
    blocks = max(-(-longest // SIZE), max(most_blocks(w, SIZE, longest, budget) for w in windows))
    scheduler = make_scheduler(blocks + 1 + spare, budget, seqs=3, windows=windows)
    for i, (prompt, more, base) in enumerate(asked):
        scheduler.add(make_request(i, prompt, max_tokens=more, base=1000 * base))
    ended = 0
    for _ in range(2000):
        if not scheduler.has_unfinished():
            break
        drafts = {each: [1] * random.randrange(6) for each in scheduler.running}
        batch = scheduler.schedule(drafts)
        scheduler.check_invariants()
        if random.random() < 0.1:
            scheduler.roll_back(batch)
            scheduler.check_invariants()
            continue
        sampled = []
        for entry in batch.requests:
            if entry.catches_up:
                accepted = random.randint(0, len(entry.draft))
                sampled.append([SampledToken(1)] * accepted + [SampledToken(7)])
        events = scheduler.update(batch, sampled)
        scheduler.check_invariants()
        ended += sum(event.finish_reason is FinishReason.LENGTH for event in events)
    assert ended == len(asked)
    assert scheduler.num_free_blocks == scheduler.num_usable_blocks
