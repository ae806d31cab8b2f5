"""Prompts go where they are cached, new ones are spread, and no replica stands idle."""

import random
from collections import Counter, defaultdict

import pytest

from localllm.replicas.affinity import Affinity
from localllm.replicas.ask import keys_of

TWO = ("a", "b")


def affinity_of(*names: str, most_keys: int = 1 << 18) -> Affinity:
    found = Affinity(most_keys)
    found.keep(names)
    return found


def prompt(group: int, length: int = 300, own: int = 0) -> list[int]:
    """One that begins as all of its group do."""
    drawn = random.Random(group)
    shared = [drawn.randrange(5000) for _ in range(length)]
    return shared + [random.Random(f"{group} {own}").randrange(5000) for _ in range(20)]


def send(
    affinity: Affinity, name: str, ids: list[int], reported: dict[str, int] | None = None
) -> str:
    keys = keys_of(ids, b"")
    best = affinity.rank(keys, len(ids), reported or {})[0]
    affinity.give(name, best, keys, len(ids))
    return best


def test_keys_are_those_of_the_beginning() -> None:
    first, second = keys_of(prompt(0, own=1), b""), keys_of(prompt(0, own=2), b"")
    assert len(first) == 320 // 16
    assert first[:18] == second[:18]
    assert first[-1] != second[-1]
    assert keys_of(prompt(0), b"salt")[0] != first[0]


@pytest.mark.parametrize("at_once", [1, 4, 16, 96])
def test_a_group_stays_together_and_groups_are_spread(at_once: int) -> None:
    affinity, under_way = affinity_of(*TWO), list[str]()
    of_group, of_replica = defaultdict(Counter), Counter[str]()
    order = [(group, i) for i in range(12) for group in range(8)]
    random.Random(at_once).shuffle(order)
    for group, i in order:
        name = f"{group} {i}"
        replica = send(affinity, name, prompt(group, own=i))
        of_group[group][replica] += 1
        of_replica[replica] += 1
        under_way.append(name)
        if len(under_way) >= at_once:
            affinity.ended(under_way.pop(0))
    for counts in of_group.values():
        assert counts.most_common(1)[0][1] >= 0.95 * 12
    assert max(of_replica.values()) <= 0.6 * len(order)


def test_one_hot_prompt_is_answered_by_all_when_one_has_enough_to_do() -> None:
    affinity = affinity_of(*TWO)
    found = Counter(send(affinity, str(i), prompt(0, own=i)) for i in range(60))
    assert 20 <= found["a"] <= 40


def test_what_other_fronts_send_counts_too() -> None:
    affinity = affinity_of(*TWO)
    first = send(affinity, "1", prompt(0))
    affinity.ended("1")
    assert send(affinity, "2", prompt(0, own=1)) == first
    affinity.ended("2")
    assert send(affinity, "3", prompt(0, own=2), {first: 50}) != first


def test_a_request_that_goes_elsewhere_counts_once() -> None:
    affinity = affinity_of(*TWO)
    keys = keys_of(prompt(0), b"")
    affinity.give("1", "a", keys, 320)
    affinity.give("1", "a", keys, 320)
    affinity.give("1", "b", keys, 320)
    affinity.ended("1")
    # Nothing is under way, and both hold it.
    assert affinity.rank(keys, 320, {}) == ["a", "b"]
    assert not affinity._running


def test_a_replica_that_comes_later_is_not_flooded_and_one_that_ended_is_forgotten() -> None:
    affinity = affinity_of(*TWO)
    for i in range(400):
        send(affinity, str(i), prompt(i))
        affinity.ended(str(i))
    affinity.keep(("b", "c"))
    found = Counter(send(affinity, str(i), prompt(i)) for i in range(1000, 1040))
    assert set(found) == {"b", "c"}
    assert found["c"] <= 26


def test_a_limited_memory_forgets_the_oldest_prompts() -> None:
    affinity = affinity_of("a", most_keys=40)
    for i in range(3):
        send(affinity, str(i), prompt(i))
    known = affinity._replicas["a"]
    assert len(known.held) == 40
    assert known.num_held(keys_of(prompt(2), b"")) == 20
    assert known.num_held(keys_of(prompt(0), b"")) == 0
