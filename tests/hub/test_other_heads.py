"""Heads and assistants from a hub, over loopback: they draft for a model and answer nobody."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from assistants import TARGET, write_assistant
from checkpoints import tiny_config, write_checkpoint
from eagles import Layout, write_eagle, write_eagle3
from fake_hub import Hub, running_hub
from safetensors.torch import load_file, save_file

from localllm.errors import ExitCode
from localllm.model.families.table import read_architecture


@pytest.mark.parametrize("layout", ["authors", "speculators"])
def test_a_head_of_the_hub_drafts_for_a_model(
    layout: Layout,
    make_checkpoint: Callable[..., Path],
    command: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
) -> None:
    folder, head = make_checkpoint(num_hidden_layers=7), tmp_path / "head"
    write_eagle3(head, read_architecture(folder), layout)
    arguments = (str(folder), "Hello", "--greedy", "-n", "200", "--json", "--raw")
    with running_hub(Hub({"me/head": head})) as hub:
        code, out, errors = command(hub, "chat", *arguments, "--spec", "eagle:me/head")
        assert code == 0, errors
        plain = json.loads(command(hub, "chat", *arguments, "--spec", "off")[1])
        drafted = json.loads(out)
        assert drafted["text"] == plain["text"]
        assert drafted["usage"]["drafts"]["EAGLE"]["drafted"] > 0
        code, _, errors = command(hub, "chat", "me/head", "Hello")
        assert code == ExitCode.CHECKPOINT
        assert "a head that drafts for one" in errors


@pytest.fixture
def gemma4(make_checkpoint: Callable[..., Path], tmp_path: Path) -> tuple[Path, Path]:
    """The folders of a model and of its assistant."""
    folder = make_checkpoint("Gemma4ForCausalLM", **TARGET)
    assistant = tmp_path / "assistant"
    write_assistant(assistant, 48)
    return folder, assistant


def test_an_assistant_of_the_hub_drafts_for_its_model(
    gemma4: tuple[Path, Path], command: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    folder, assistant = gemma4
    eagle = tmp_path / "eagle"
    write_eagle(eagle, read_architecture(folder))
    arguments = (str(folder), "Hello", "--greedy", "-n", "200", "--json", "--raw")
    with running_hub(Hub({"me/assistant": assistant, "me/eagle": eagle})) as hub:
        code, out, errors = command(hub, "chat", *arguments, "--spec", "draft:me/assistant")
        assert code == 0, errors
        plain = json.loads(command(hub, "chat", *arguments, "--spec", "off")[1])
        drafted = json.loads(out)
        assert drafted["text"] == plain["text"]
        assert drafted["usage"]["drafts"]["assistant"]["drafted"] > 0
        code, _, errors = command(hub, "chat", "me/assistant", "Hello")
        assert code == ExitCode.CHECKPOINT
        assert "an assistant that drafts for one" in errors
        both = "draft:me/assistant+eagle:me/eagle"
        code, _, errors = command(hub, "chat", *arguments, "--spec", both)
        assert code == ExitCode.USAGE
        assert "an EAGLE head or an assistant, not both" in errors


def test_a_model_is_not_fetched_where_what_is_to_draft_cannot_be(
    gemma4: tuple[Path, Path], command: Callable[..., tuple[int, str, str]]
) -> None:
    with running_hub(Hub({"me/gem": gemma4[0]})) as hub:
        for spec in ("draft:me/nothing", "eagle:me/nothing", "draft:nowhere"):
            code, _, errors = command(hub, "chat", "me/gem", "Hello", "--spec", spec)
            assert code == ExitCode.MODEL
            assert spec.partition(":")[2] in errors
        assert not hub.sent["config.json"]


def test_a_plan_counts_heads_that_are_here(
    gemma4: tuple[Path, Path], command: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    folder, assistant = gemma4
    other, eagle = tmp_path / "other", tmp_path / "eagle"
    write_checkpoint(other, tiny_config("Qwen3ForCausalLM", num_hidden_layers=7))
    write_eagle3(eagle, read_architecture(other))
    folders = {"me/gem": folder, "me/other": other, "me/eagle": eagle}
    with running_hub(Hub(folders | {"me/gem-assistant": assistant})) as hub:

        def planned(*arguments: str) -> dict[str, Any]:
            asked = ("plan", *arguments, "--vram", "4GiB", "--json")
            code, out, errors = command(hub, *asked)
            assert code == 0, errors
            found: dict[str, Any] = json.loads(out)
            return found

        for model, spec, name in (
            ("me/gem", "draft:me/gem-assistant", "me/gem-assistant"),
            ("me/other", "eagle:me/eagle", "me/eagle"),
        ):
            plain = planned(model)
            assert not plain["has_head"]
            code, _, errors = command(hub, "plan", model, "--vram", "4GiB", "--spec", spec)
            assert code == ExitCode.USAGE
            assert f"localllm pull {name}" in errors
            assert hub.sent["model.safetensors"] == 0
            assert command(hub, "pull", name)[0] == 0
            drafting = planned(model, "--spec", spec)
            assert drafting["has_head"]
            assert drafting["weights_bytes"] > plain["weights_bytes"]
            hub.sent.clear()
        # Without a word it is the assistant that is here.
        assert planned("me/gem")["has_head"]
        assert not planned("me/gem", "--spec", "ngram")["has_head"]


def test_the_assistant_of_a_model_drafts_once_it_is_here(
    gemma4: tuple[Path, Path], command: Callable[..., tuple[int, str, str]]
) -> None:
    folder, assistant = gemma4
    arguments = ("Hello", "--greedy", "-n", "200", "--json", "--raw")
    with running_hub(Hub({"me/gem": folder, "me/gem-assistant": assistant})) as hub:
        plain = json.loads(command(hub, "chat", "me/gem", *arguments)[1])
        code, _, errors = command(hub, "chat", "me/gem", *arguments, "--spec", "head")
        assert code == ExitCode.USAGE
        assert "this model has no head that drafts" in errors
        code, _, errors = command(hub, "pull", "me/gem-assistant")
        assert code == 0, errors
        code, out, errors = command(hub, "chat", "me/gem", *arguments, "--spec", "head")
        assert code == 0, errors
        drafted = json.loads(out)
        assert drafted["text"] == plain["text"]
        assert drafted["usage"]["drafts"]["assistant"]["drafted"] > 0
    # Beside a folder, too; one of another model is not used, unless a head must be.
    beside = folder.with_name(f"{folder.name}-assistant")
    write_assistant(beside, 64)
    with running_hub(Hub({})) as hub:
        code, plain_here, errors = command(hub, "chat", str(folder), *arguments)
        assert code == 0, errors
        assert "the model's assistant is not used" in errors
        code, _, errors = command(hub, "chat", str(folder), *arguments, "--spec", "head")
        assert code == ExitCode.USAGE
        assert "64 wide, not 48" in errors
        write_assistant(beside, 48)
        code, out, errors = command(hub, "chat", str(folder), *arguments, "--spec", "head")
        assert code == 0, errors
        assert json.loads(out)["usage"]["drafts"]["assistant"]["drafted"] > 0
        # Nor is one whose weights cannot be used.
        tensors = load_file(beside / "model.safetensors")
        tensors["model.norm.weight"].fill_(float("nan"))
        save_file(tensors, beside / "model.safetensors")
        code, out, errors = command(hub, "chat", str(folder), *arguments)
        assert code == 0, errors
        assert json.loads(out)["text"] == json.loads(plain_here)["text"]
        assert "the model's assistant is not used: " in errors
        few = ("--spec", "-n", "4", "-r", "1", "-p", "9", "--batch", "1")
        code, _, errors = command(hub, "bench", str(folder), *few)
        assert code == 0, errors
        assert "the model's assistant is not used: " in errors
        code, _, errors = command(hub, "chat", str(folder), *arguments, "--spec", "head")
        assert code == ExitCode.CHECKPOINT
