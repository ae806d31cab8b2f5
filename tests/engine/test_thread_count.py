"""The number of threads, on simulated machines whose steps take what is said."""

import random
from collections.abc import Callable

import pytest

from localllm.engine.thread_count import ThreadCount
from localllm.schedule.step_clock import StepClock

# Seconds of a step by the number of threads.
Machine = Callable[[int], float]


def alone(threads: int) -> float:
    """Two cores to itself."""
    return {1: 1.7, 2: 1.0}[threads]


def beside_one(threads: int) -> float:
    """A core is another's: two threads wait for each other."""
    return {1: 1.7, 2: 5.0}[threads]


def drive(count: ThreadCount, machine: Machine, steps: int, rng: random.Random) -> list[int]:
    """Numbers that the steps had."""
    had = []
    for _ in range(steps):
        had.append(count.count(1))
        noise = rng.choice([1.0, 1.0, 1.0, 1.1, 1.3])
        count.book(1, noise * machine(count.count(1)))
    return had


@pytest.fixture
def rng() -> random.Random:
    return random.Random(0)


def seconds(had: list[int], machine: Machine) -> float:
    return sum(map(machine, had))


def test_alone_it_costs_hardly_anything_to_look(rng: random.Random) -> None:
    had = drive(ThreadCount(2), alone, 2000, rng)
    assert seconds(had, alone) < 1.01 * 2000


def test_beside_other_work_it_gives_a_core_away_and_takes_it_back(rng: random.Random) -> None:
    count = ThreadCount(2)
    drive(count, alone, 300, rng)
    had = drive(count, beside_one, 300, rng)
    assert had.index(1) < 25
    assert seconds(had, beside_one) < 1.25 * 300 * beside_one(1)
    had = drive(count, alone, 300, rng)
    assert seconds(had, alone) < 1.2 * 300


def test_what_is_slow_from_the_first_step_on_is_found_too(rng: random.Random) -> None:
    had = drive(ThreadCount(2), beside_one, 100, rng)
    assert had.index(1) < 10
    assert had[20:].count(2) < 12


def test_after_a_pause_it_looks_again_at_once(rng: random.Random) -> None:
    count = ThreadCount(2)
    drive(count, beside_one, 500, rng)
    count.look_again()
    had = drive(count, alone, 30, rng)
    assert had[15:].count(1) <= 2


def test_steps_that_others_make_slow_too_change_nothing(rng: random.Random) -> None:
    """As when another process takes the memory's bandwidth: fewer threads are no faster."""
    count = ThreadCount(2)
    drive(count, alone, 100, rng)
    had = drive(count, lambda threads: 2 * alone(threads), 500, rng)
    assert had.count(1) < 12


def test_many_cores_are_given_away_one_after_the_other(rng: random.Random) -> None:
    """Of eight cores three are busy: five threads would be best, four are nearest."""

    def machine(threads: int) -> float:
        return 8 / threads if threads <= 5 else 3.0

    count = ThreadCount(8)
    drive(count, lambda threads: 8 / threads, 200, rng)
    had = drive(count, machine, 1500, rng)
    assert seconds(had[300:], machine) < 1.15 * 1200 * machine(4)


def test_sizes_of_steps_are_compared_with_their_like() -> None:
    """Prompts come and go between the tokens of answers; on this machine two threads are better."""
    count, rng = ThreadCount(2), random.Random(1)
    fewer = 0
    for _ in range(1000):
        rows = rng.choice([1, 1, 1, 1, 256])
        given = count.count(rows, has_prompt=rows > 1)
        fewer += given == 1
        assert rows == 1 or given == 2
        count.book(rows, rows * alone(given), has_prompt=rows > 1)
    assert fewer < 30


def test_a_prompt_that_comes_first_gets_all_threads_until_its_steps_become_slower() -> None:
    count = ThreadCount(2)
    for _ in range(40):
        assert count.count(512, has_prompt=True) == 2
        count.book(512, alone(2), has_prompt=True)
    had = []
    for _ in range(40):
        had.append(count.count(512, has_prompt=True))
        count.book(512, beside_one(had[-1]), has_prompt=True)
    assert had.index(1) < 15
    assert had[20:].count(2) < 8


def test_a_prompt_ends_a_trial() -> None:
    clock, other = StepClock(), object()
    count = ThreadCount(2, clock)
    while count.count(1) == 2:
        count.book(1, alone(2))
    assert not clock.begin_experiment(other)
    assert count.count(400, has_prompt=True) == 2
    assert clock.begin_experiment(other)


def test_answers_to_many_on_a_machine_that_is_busy_from_the_start(rng: random.Random) -> None:
    count, had = ThreadCount(2), []
    for _ in range(200):
        had.append(count.count(32))
        count.book(32, rng.choice([1.0, 1.1]) * beside_one(had[-1]))
    assert had[20:].count(2) < 20


@pytest.mark.parametrize("most", [1, 2, 3, 7, 64])
def test_a_fixed_number_stays(most: int) -> None:
    count = ThreadCount(most, is_fixed=True)
    for step in range(100):
        assert count.count(1) == most
        count.book(1, 1.0 + step)


@pytest.mark.parametrize("most", [1, 2, 3, 5, 12, 96])
def test_numbers_are_between_one_and_the_most(most: int) -> None:
    count, rng = ThreadCount(most), random.Random(most)
    assert count.count(1) == most
    for _ in range(3000):
        rows = rng.choice([1, 40])
        assert 1 <= count.count(rows) <= most
        count.book(rows, rng.random())
