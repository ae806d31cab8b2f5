"""A request's beginning from a store behind the pool, without a model."""

from collections.abc import Sequence

from scheduling import make_request, make_scheduler

from localllm.schedule.block_group import BlockGroup
from localllm.schedule.block_pool import BlockPool, hash_block
from localllm.schedule.prefix_cache import PrefixCache
from localllm.schedule.scheduler import SampledToken, Scheduler


class Store:
    """Holds the keys that it was offered; and what it filled."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.loaded: list[bytes] = []

    def has(self, key: bytes, group: int) -> bool:
        return key in self.keys

    def load(self, key: bytes, group: int, block_id: int) -> bool:
        if key not in self.keys:
            return False
        self.loaded.append(key)
        return True

    def offer(self, keys: Sequence[bytes]) -> None:
        self.keys.update(keys)


def finish(scheduler: Scheduler) -> None:
    """Step until nothing is left."""
    while scheduler.has_unfinished():
        batch = scheduler.schedule()
        caught_up = sum(entry.catches_up for entry in batch.requests)
        scheduler.update(batch, [[SampledToken(500)] for _ in range(caught_up)])
        scheduler.check_invariants()


def stored(num_prompt: int) -> Store:
    """A store with the beginning of `make_request(…, num_prompt)`."""
    store = Store()
    scheduler = make_scheduler(150, store=store)
    scheduler.add(make_request(0, num_prompt))
    finish(scheduler)
    return store


def test_a_later_process_computes_only_what_is_new() -> None:
    store = stored(41)
    scheduler = make_scheduler(150, store=store)
    scheduler.add(make_request(0, 41))
    batch = scheduler.schedule()
    scheduler.check_invariants()
    assert batch.requests[0].start == 40
    assert len(store.loaded) == 10
    scheduler.update(batch, [[SampledToken(500)]])
    # It is in memory now.
    other = make_request(1, 45)
    scheduler.add(other)
    assert other.num_cached_tokens == 0
    scheduler.schedule()
    assert other.num_cached_tokens == 40
    assert len(store.loaded) == 10


def test_a_gap_ends_the_prefix_and_what_is_in_memory_is_not_loaded() -> None:
    store = stored(41)
    scheduler = make_scheduler(150, store=store)
    scheduler.add(make_request(0, 41))
    finish(scheduler)
    num_loaded = len(store.loaded)
    again = make_request(1, 41)
    scheduler.add(again)
    finish(scheduler)
    assert again.num_cached_tokens == 40
    assert len(store.loaded) == num_loaded
    gap = store.loaded[3]
    store.keys.discard(gap)
    fresh = make_scheduler(100, store=store)
    cut = make_request(0, 41)
    fresh.add(cut)
    fresh.schedule()
    assert cut.num_cached_tokens == 12


def test_a_prefix_in_memory_stops_at_the_first_missing_block() -> None:
    pool = BlockPool(5)
    cache = PrefixCache([BlockGroup(pool, 4)], 4, b"r", by_content=True)
    request = make_request(0, 13)
    parent = b"r" + request.salt
    for i in range(3):
        [block] = pool.allocate(1)
        parent = hash_block(parent, request.token_ids[4 * i : 4 * i + 4])
        if i != 1:
            pool.register(block, parent)
    prefix = cache.find(request, others_wait=False)
    assert (prefix.tables, prefix.num_tokens) == ([[1]], 4)


def test_a_store_is_read_no_further_than_there_are_blocks() -> None:
    store = stored(41)
    scheduler = make_scheduler(12, store=store)
    first = make_request(0, 17, base=1000)
    scheduler.add(first)
    scheduler.update(scheduler.schedule(), [[SampledToken(500)]])
    second = make_request(1, 41)
    scheduler.add(second)
    scheduler.update(scheduler.schedule(), [[SampledToken(500)]])
    scheduler.check_invariants()
    assert [each.request_id for each in scheduler.running] == [0]
    finish(scheduler)
    assert second.num_cached_tokens > 0


def test_others_do_not_wait_for_all_of_a_long_prefix() -> None:
    store = stored(401)
    scheduler = make_scheduler(300, budget=512, store=store)
    scheduler.add(make_request(0, 9, max_tokens=50, base=5000))
    scheduler.update(scheduler.schedule(), [[SampledToken(500)]])
    long = make_request(1, 401)
    scheduler.add(long)
    loads = []
    while not long.num_computed_tokens:
        batch = scheduler.schedule()
        scheduler.check_invariants()
        assert batch.requests[0].request.request_id == 0
        caught_up = sum(entry.catches_up for entry in batch.requests)
        scheduler.update(batch, [[SampledToken(500)] for _ in range(caught_up)])
        loads.append(len(store.loaded))
    assert long.num_cached_tokens == 400
    assert loads == [32, 64, 96, 100]


def test_an_unfit_output_is_not_kept() -> None:
    store = Store()
    scheduler = make_scheduler(150, store=store)
    scheduler.add(make_request(0, 41))
    [event] = scheduler.update(scheduler.schedule(), [[SampledToken(None)]])
    assert event.error is not None
    assert not store.keys


def test_requests_of_another_salt_share_nothing() -> None:
    scheduler = make_scheduler(150)
    cached = {}
    for salt in (b"", b"a", b"b", b"a", b""):
        request = make_request(0, 41)
        request.salt = salt
        scheduler.add(request)
        finish(scheduler)
        cached.setdefault(salt, []).append(request.num_cached_tokens)
    assert cached == {b"": [0, 40], b"a": [0, 40], b"b": [0]}
