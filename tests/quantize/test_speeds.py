"""The speeds on a card: from alternating rounds, and only where they say something."""

import itertools
from collections.abc import Iterator

import pytest

from localllm.engine.config import EngineConfig
from localllm.errors import CheckpointError
from localllm.quantize import proof


class Loaded:
    """A model whose rounds take what is given."""

    def __init__(self, speeds: Iterator[float]) -> None:
        self.speeds = speeds

    def close(self) -> None:
        pass


def compare(
    monkeypatch: pytest.MonkeyPatch, source: list[float], result: list[float]
) -> tuple[float, float] | None:
    speeds = {"source": source, "result": result}
    order: list[str] = []

    def measured(model: Loaded, num_tokens: int) -> float:
        order.append(next(name for name, each in models.items() if each is model))
        return next(model.speeds)

    models = {name: Loaded(itertools.cycle(each)) for name, each in speeds.items()}
    monkeypatch.setattr(proof, "open_model", lambda name, config: models[name])
    monkeypatch.setattr(proof, "_decode_speed", measured)
    found = proof.compare_speeds(("source", "result"), EngineConfig())
    assert order[:4] == ["source", "result"] * 2
    return found


def test_a_difference_above_the_noise_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare(monkeypatch, [10, 12, 9, 11, 10], [20, 24, 18, 22, 20]) == (10, 20)


def test_noise_is_not_told_as_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a card had it: "8.5 → 215.7" one time, "3.6 → 3.5" another."""
    assert compare(monkeypatch, [8.5, 215.7, 3.6], [3.5, 216.0, 9.0]) is None


def test_a_model_that_cannot_be_loaded_has_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, config: EngineConfig) -> None:
        raise CheckpointError("for a test")

    monkeypatch.setattr(proof, "open_model", refuse)
    assert proof.compare_speeds(("a", "b"), EngineConfig()) is None
