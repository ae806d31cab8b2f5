"""Grammars whose masks take long hold up nobody for longer than a step's share."""

from types import SimpleNamespace
from typing import Any

from localllm.schedule.grammar_turns import GrammarTurns


def request(cost_s: float | None) -> Any:
    matcher = None if cost_s is None else SimpleNamespace(cost_s=cost_s)
    return type("Request", (), {"matcher": matcher})()


def test_ordinary_grammars_and_free_answers_never_rest() -> None:
    running = [*(request(0.0005) for _ in range(64)), *(request(None) for _ in range(64))]
    assert not GrammarTurns(0.01).resting(running)


def test_those_that_take_long_take_turns_within_the_share_of_a_step() -> None:
    slow, free = [request(0.02) for _ in range(10)], request(None)
    turns, served = GrammarTurns(0.05), dict.fromkeys(range(10), 0)
    for _ in range(50):
        resting = turns.resting([free, *slow])
        assert free not in resting
        going = [i for i, each in enumerate(slow) if each not in resting]
        assert len(going) == 2  # of 0.02 s in 0.05 s
        for i in going:
            served[i] += 1
    assert set(served.values()) == {10}


def test_one_that_takes_more_than_the_share_goes_on_alone() -> None:
    running = [request(0.2), request(0.3), request(0.002)]
    turns, orders = GrammarTurns(0.05), []
    for _ in range(6):
        resting = turns.resting(running)
        orders.append([i for i, each in enumerate(running) if each not in resting])
    assert all(orders)
    assert {0, 1, 2} <= {i for order in orders for i in order}
    assert all(not {0, 1} <= set(order) for order in orders)


def test_who_has_ended_is_forgotten() -> None:
    turns = GrammarTurns(0.05)
    turns.resting([request(0.2) for _ in range(5)])
    assert not turns.resting([])
    assert not turns._served
