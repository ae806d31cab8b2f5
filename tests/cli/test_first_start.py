"""The first minute: what is told, what Enter takes, and that nothing is silent for long."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localllm.cli.draw import status_line
from localllm.cli.draw.status_line import StatusLine
from localllm.cli.models import opening, variants
from localllm.cost.planning import Machine, machine_with, plan_model, shape_of
from localllm.engine.config import EngineConfig
from localllm.hub.catalog import load_catalog, recommended

Run = Callable[..., Any]
GIB = 1 << 30


def machine(device: str, gib: float) -> Machine:
    return replace(machine_with(int(gib * GIB)), device=device)


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Machine], list[variants._Choice]]:
    """A function that lists the ways to a model on a machine."""

    def choices(alias: str, on: Machine) -> list[variants._Choice]:
        monkeypatch.setattr("localllm.cost.planning.this_machine", lambda *a, **k: on)
        return variants._choices(load_catalog()[alias], EngineConfig(max_num_seqs=1))

    return choices


@pytest.mark.parametrize(
    ("kind", "gib", "alias"),
    [
        ("cpu", 2, "qwen3-0.6b"),
        ("cpu", 256, "qwen3-0.6b"),
        ("gpu", 4, "qwen3-0.6b"),
        ("gpu", 5.8, "qwen3-4b"),
        ("gpu", 8, "qwen3-4b"),
        ("gpu", 11.6, "qwen3-8b"),
        ("gpu", 15.6, "qwen3-14b"),
        ("gpu", 24, "qwen3-14b"),
    ],
)
def test_each_size_of_machine_has_one_model_to_begin_with(
    kind: str, gib: float, alias: str
) -> None:
    entry = recommended(kind, int(gib * GIB))
    assert entry is not None
    assert entry.alias == alias
    assert not entry.gated


@pytest.mark.parametrize(("gib", "alias"), [(6, "qwen3-4b"), (12, "qwen3-8b"), (16, "qwen3-14b")])
def test_what_is_recommended_fits(gib: float, alias: str) -> None:
    from localllm.hub.catalog import ModelSource

    entry = load_catalog()[alias]
    shape = shape_of(ModelSource(alias, repo=entry.repo), None)
    found = plan_model(shape, machine_with(int(0.92 * gib * GIB)), EngineConfig(max_num_seqs=1))
    assert found.fits, found.problem
    assert found.memory.max_model_len >= 4096


def test_the_same_model_is_told_everywhere(localllm: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = load_catalog()["qwen3-4b"]
    monkeypatch.setattr("localllm.cli.models.first_start.recommended_here", lambda device: entry)
    monkeypatch.setattr("localllm.cost.planning.recommended", lambda kind, memory: entry)
    assert "localllm chat qwen3-4b" in localllm("chat", "hi", "-n", "2").err
    # A single question is greeted once.
    assert "no model given" not in localllm("chat", "hi", "-n", "2").err
    assert "a smaller model: qwen3-4b" in localllm("plan", "qwen3-32b", "--vram", "6GiB").out


def test_how_memory_is_divided_greets_nobody() -> None:
    told: list[str] = []
    tell = opening.without_memory(told.append)
    for line in ("memory: weights 1.00 GiB", "memory taken: weights", "checked 3 operators"):
        tell(line)
    assert told == ["checked 3 operators"]


def test_enter_takes_the_shortest_way_to_an_answer(
    choose: Callable[[str, Machine], list[variants._Choice]],
) -> None:
    large = machine("cuda", 48)
    whole, *_ = choose("qwen3-0.6b", large)
    assert (whole.name, whole.is_quantized_here) == ("qwen3-0.6b", False)
    makers, whole, quantized = choose("qwen3-8b", large)
    assert makers.name == load_catalog()["qwen3-8b"].int4
    assert (whole.name, whole.is_quantized_here) == ("qwen3-8b", False)
    assert quantized.is_quantized_here
    assert makers.seconds < whole.seconds < quantized.seconds


def test_quantizing_here_is_the_first_way_only_where_nothing_else_fits(
    choose: Callable[[str, Machine], list[variants._Choice]],
) -> None:
    small = machine("cuda", 3)
    quantized, whole = choose("qwen3-1.7b", small)  # of which its makers have no 4 bits
    assert quantized.is_quantized_here
    assert quantized.fits
    assert not whole.fits
    assert not any(choice.fits for choice in choose("qwen3-32b", small))


def test_a_pipe_is_told_once_what_takes_long(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(status_line, "SILENT_S", 0.05)
    done: list[int] = []
    with StatusLine(lambda: f"loading it, step {len(done)}", 0.01):
        time.sleep(0.3)
        done += [1, 2, 3]
    assert capfd.readouterr().err == "loading it, step 3\n"  # what it took, not when it was told
    monkeypatch.setattr(status_line, "LONG_S", 0.05)
    with StatusLine(lambda: "loading it", 0.01):
        time.sleep(0.5)
    assert capfd.readouterr().err == "loading it\n" * 2
    monkeypatch.setattr(status_line, "LONG_S", 30)
    with StatusLine(lambda: None, 0.01):
        time.sleep(0.4)
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(status_line, "SILENT_S", 30)
    with StatusLine(lambda: "loading it", 0.01):
        pass
    assert capfd.readouterr().err == ""


def test_offline_nothing_is_offered_that_would_have_to_be_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def ask(count: int) -> int:
        raise AssertionError("it asks")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(variants, "is_terminal", lambda stream: True)
    monkeypatch.setattr(variants, "_ask", ask)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert variants.choose_variant("qwen3-1.7b", EngineConfig()) == "qwen3-1.7b"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(AssertionError, match="it asks"):
        variants.choose_variant("qwen3-1.7b", EngineConfig())
