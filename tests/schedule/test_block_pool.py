"""Blocks are shared, cached and given away in the stated order; no GPU, no torch."""

import random
import time

import pytest

from localllm.schedule.block_pool import BlockPool, hash_block

KEYS = [bytes([i]) * 32 for i in range(8)]


def test_the_null_block_is_never_given_out() -> None:
    assert BlockPool(4).allocate(3) == [1, 2, 3]


def test_a_cached_block_is_found_until_it_is_given_away() -> None:
    pool = BlockPool(3)
    [block, other] = pool.allocate(2)
    pool.register(block, KEYS[0])
    pool.free([block])
    assert pool.find(KEYS[0]) == block
    assert pool.num_free_blocks == 1
    pool.allocate(1)
    assert pool.find(KEYS[0]) is None
    pool.free([other])


def test_empty_blocks_are_given_away_before_cached_ones_and_ends_before_beginnings() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(4)
    for block, key in zip(blocks[:3], KEYS, strict=False):
        pool.register(block, key)
    pool.free(reversed(blocks))  # the last one holds nothing that could be found
    assert pool.allocate(4) == [blocks[3], blocks[2], blocks[1], blocks[0]]


def test_a_shared_block_is_free_when_its_last_user_lets_go() -> None:
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    pool.share([block])
    assert pool.is_shared(block)
    pool.free([block])
    assert pool.num_free_blocks == 0
    pool.free([block])
    assert pool.num_free_blocks == 1


def test_a_second_block_with_the_same_content_stays_without_a_key() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    pool.register(first, KEYS[0])
    pool.register(second, KEYS[0])
    assert pool.find(KEYS[0]) == first
    pool.free([first, second])
    pool.check_invariants([])


def test_keys_chain_so_that_equal_blocks_behind_other_prefixes_differ() -> None:
    assert hash_block(b"a", [1, 2]) == hash_block(b"a", [1, 2])
    assert hash_block(b"a", [1, 2]) != hash_block(b"b", [1, 2])
    assert hash_block(b"a", [1, 2]) != hash_block(b"a", [2, 1])


def test_the_invariants_catch_a_lost_block() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(AssertionError):
        pool.check_invariants([])


def test_books_balance_under_random_use() -> None:
    rng = random.Random(5)
    pool = BlockPool(20)
    tables: list[list[int]] = []
    for _ in range(2000):
        if tables and rng.random() < 0.5:
            pool.free(reversed(tables.pop(rng.randrange(len(tables)))))
        else:
            found = [pool.find(key) for key in KEYS[: rng.randrange(4)]]
            matched = [block_id for block_id in found if block_id is not None]
            pool.share(matched)
            count = min(rng.randrange(4), pool.num_free_blocks)
            table = matched + pool.allocate(count)
            for i, block in enumerate(table):
                if pool.blocks[block].key is None and rng.random() < 0.5:
                    pool.register(block, KEYS[i % 8])
            tables.append(table)
        pool.check_invariants(tables)


def test_taking_a_block_out_of_the_middle_does_not_cost_more_in_a_large_pool() -> None:
    def time_hits(num_blocks: int) -> float:
        pool = BlockPool(num_blocks)
        blocks = pool.allocate(num_blocks - 1)
        pool.register(blocks[len(blocks) // 2], KEYS[0])
        pool.free(blocks)
        best = float("inf")
        for _ in range(5):
            started = time.perf_counter()
            for _ in range(2000):
                block_id = pool.find(KEYS[0])
                assert block_id is not None
                pool.share([block_id])
                pool.free([block_id])
            best = min(best, time.perf_counter() - started)
        return best

    # A list or deque would take 100 times as long; 5 leaves room for a busy machine.
    assert time_hits(40_000) < 5 * time_hits(400)


def test_pinned_blocks_are_given_away_last_and_take_half_of_the_pool() -> None:
    pool = BlockPool(9)
    blocks = pool.allocate(8)
    for block, key in zip(blocks, KEYS, strict=True):
        pool.register(block, key)
    for key in KEYS[:3]:
        pool.pin(key)
    pool.pin(b"unknown")
    pool.free(blocks)
    assert pool.num_free_blocks == 8
    assert pool.allocate(5) == blocks[3:]
    assert [pool.find(key) for key in KEYS[:3]] == blocks[:3]
    # A request that needs all blocks gets them.
    assert pool.allocate(3) == blocks[:3]
    pool.free(blocks)
    pool.check_invariants([])
    # What is pinned while nobody uses it waits as long; beyond half, the oldest are pinned no more.
    pool.share(blocks)
    for block, key in zip(blocks, KEYS, strict=True):
        pool.register(block, key)
    pool.free(blocks)
    for key in KEYS[:6]:
        pool.pin(key)
    pool.check_invariants([])
    assert pool.allocate(4) == [blocks[6], blocks[7], blocks[0], blocks[1]]
    assert pool.allocate(4) == blocks[2:6]


def test_a_pinned_block_stays_pinned_after_it_was_shared() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(4)
    for block, key in zip(blocks, KEYS, strict=False):
        pool.register(block, key)
    pool.pin(KEYS[0])
    pool.free(blocks)
    pool.share([blocks[0]])
    pool.free([blocks[0]])
    pool.allocate(3)
    assert pool.find(KEYS[0]) == blocks[0]
