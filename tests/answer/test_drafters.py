"""What drafts for a model is looked up once, and fails before the model is read, or not at all."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from assistants import TARGET, write_assistant
from checkpoints import tiny_config
from eagles import write_eagle3
from heads import APART, add_head, head_architecture
from safetensors.torch import load_file, save_file

from localllm.answer.opening import open_model
from localllm.chat.conversation import ChatSession
from localllm.cli.draw.render import Shown
from localllm.cli.repl.repl import Repl
from localllm.drafting.speculation_config import SpeculationConfig
from localllm.engine.config import EngineConfig
from localllm.engine.memory import MemoryPlan, plan_memory
from localllm.errors import (
    CatalogError,
    CheckpointError,
    GpuMemoryError,
    RequestError,
    UnsupportedModelError,
)
from localllm.hub.catalog import ModelSource, resolve_model
from localllm.model.families.table import read_architecture
from localllm.model.weights import load_model

MakeCheckpoint = Callable[..., Path]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The classes of the models whose tensors were read, draft models included."""
    names = list[str]()

    def load(source: Any, architecture: Any, **options: Any) -> Any:
        names.append(architecture.name)
        return load_model(source, architecture, **options)

    monkeypatch.setattr("localllm.engine.loaded_decoder.load_model", load)
    return names


def drafting(drafter: str) -> EngineConfig:
    return EngineConfig(device="cpu", speculation=SpeculationConfig(drafter=drafter))


def gemma4(make_checkpoint: MakeCheckpoint) -> Path:
    """A model for which `write_assistant(folder, 48)` writes an assistant."""
    return make_checkpoint("Gemma4ForCausalLM", **TARGET)


def with_own_head(make_checkpoint: MakeCheckpoint) -> Path:
    """A model whose files hold a head."""
    folder = make_checkpoint()
    add_head(folder, head_architecture(tiny_config("Qwen3ForCausalLM")), APART, seed=1)
    return folder


def spoil(folder: Path, tensor: str) -> None:
    """Make a tensor's values such as no model can have."""
    tensors = load_file(folder / "model.safetensors")
    tensors[tensor].fill_(float("nan"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("kind", ["draft model", "assistant", "EAGLE"])
def test_a_name_is_looked_up_once(
    kind: str, make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = gemma4(make_checkpoint) if kind == "assistant" else make_checkpoint()
    other = tmp_path / "other"
    if kind == "draft model":
        other = make_checkpoint(num_hidden_layers=1)
    elif kind == "assistant":
        write_assistant(other, 48)
    else:
        target = make_checkpoint(num_hidden_layers=7)
        write_eagle3(other, read_architecture(target))
    found = Counter[str]()

    def resolve(name: str) -> ModelSource:
        found[name] += 1
        return resolve_model(name)

    for place in ("hub.checkpoint", "answer.drafters"):
        monkeypatch.setattr(f"localllm.{place}.resolve_model", resolve)
    model = open_model(str(target), drafting(f"{'eagle' if kind == 'EAGLE' else 'draft'}:{other}"))
    speculator = model.text_engine.engine.speculator
    assert speculator is not None
    assert list(speculator.parts()) == [kind]
    assert found == {str(target): 1, str(other): 1}


def test_what_cannot_draft_is_refused_before_a_model_is_read(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, loaded: list[str]
) -> None:
    target, wide = (make_checkpoint(num_hidden_layers=7, hidden_size=width) for width in (48, 64))
    small, other = make_checkpoint(num_hidden_layers=1), make_checkpoint(vocab_size=300)
    eagle, assistant = tmp_path / "eagle", tmp_path / "assistant"
    write_eagle3(eagle, read_architecture(target))
    write_assistant(assistant, 48)
    for folder, drafter, error, message in (
        (target, "draft:nowhere", CatalogError, "unknown model"),
        (target, f"draft:{small}+eagle:nowhere", CatalogError, "unknown model"),
        (target, f"draft:{other}", RequestError, "vocabularies differ"),
        (target, f"draft:{eagle}", UnsupportedModelError, "a head that drafts for one"),
        (target, f"draft:{assistant}", RequestError, "no windowed layers"),
        (target, f"draft:{small}+eagle:{small}", CheckpointError, "is no EAGLE head"),
        (wide, f"eagle:{eagle}", RequestError, "it is 48 wide, the model 64"),
        (target, "head", RequestError, "no head that drafts"),
    ):
        with pytest.raises(error, match=message):
            open_model(str(folder), drafting(drafter))
    assert loaded == []


@pytest.mark.parametrize("kind", ["eagle", "draft", "head"])
def test_values_that_are_not_finite_are_found_before_a_model_is_read(
    kind: str, make_checkpoint: MakeCheckpoint, tmp_path: Path, loaded: list[str]
) -> None:
    other, drafter = tmp_path / "other", f"{kind}:{tmp_path / 'other'}"
    if kind == "eagle":
        target = make_checkpoint(num_hidden_layers=7)
        write_eagle3(other, read_architecture(target))
        spoil(other, "norm.weight")
    elif kind == "draft":
        target = gemma4(make_checkpoint)
        write_assistant(other, 48)
        spoil(other, "model.norm.weight")
    else:
        target, drafter = with_own_head(make_checkpoint), "head"
        spoil(target, "mtp.norm.weight")
    with pytest.raises(CheckpointError, match="not finite"):
        open_model(str(target), drafting(drafter))
    assert loaded == []


@pytest.mark.parametrize(
    ("kind", "spoilt"), [("assistant", "pre_projection.weight"), ("head", "mtp.norm.weight")]
)
def test_a_model_is_loaded_once_without_a_head_that_nobody_named(
    kind: str,
    spoilt: str,
    make_checkpoint: MakeCheckpoint,
    loaded: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    if kind == "assistant":
        target = gemma4(make_checkpoint)
        beside = target.with_name(f"{target.name}-assistant")
        write_assistant(beside, 48)
        spoil(beside, spoilt)
    else:
        target = with_own_head(make_checkpoint)
        spoil(target, spoilt)
    model = open_model(str(target), drafting("auto"))
    assert len(loaded) == 1
    assert f"the model's {kind} is not used: tensor '{spoilt}' holds" in caplog.text
    speculator = model.text_engine.engine.speculator
    assert speculator is not None
    assert list(speculator.parts()) == ["n-grams"]


def test_an_assistant_for_which_there_is_no_memory_is_left_out(
    make_checkpoint: MakeCheckpoint,
    loaded: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    most = [0]

    def plan_for_one(*args: Any, **options: Any) -> MemoryPlan:
        plan = plan_memory(*args, **options)
        most.append(max(most[-1], plan.weights_bytes))
        if plan.weights_bytes == most[-1]:  # with the assistant
            raise GpuMemoryError("it does not fit")
        return plan

    monkeypatch.setattr("localllm.engine.decoder_memory.plan_memory", plan_for_one)
    target = gemma4(make_checkpoint)
    write_assistant(target.with_name(f"{target.name}-assistant"), 48)
    open_model(str(target), drafting("auto"))
    assert len(loaded) == 1
    assert "the model's assistant is not used: it does not fit" in caplog.text


def test_a_broken_model_is_not_read_twice_because_it_has_an_assistant(
    make_checkpoint: MakeCheckpoint, loaded: list[str]
) -> None:
    target = gemma4(make_checkpoint)
    write_assistant(target.with_name(f"{target.name}-assistant"), 48)
    spoil(target, "model.norm.weight")
    with pytest.raises(CheckpointError, match="not finite"):
        open_model(str(target), drafting("auto"))
    assert len(loaded) == 1


def test_a_model_stays_if_nothing_can_draft_for_the_next_one(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, loaded: list[str]
) -> None:
    """One loaded again would have forgotten all prompts, after minutes."""
    first, second = gemma4(make_checkpoint), make_checkpoint()
    write_assistant(tmp_path / "assistant", 48)
    config = drafting(f"draft:{tmp_path / 'assistant'}")
    model = open_model(str(first), config)
    repl = Repl(ChatSession(model), config, {"max_tokens": 4}, Shown("plain", "fold"))
    with pytest.raises(RequestError, match="cannot draft for"):
        repl.load_model(str(second))
    assert repl.session.model is model
    assert len(loaded) == 1
    repl.session.close()
