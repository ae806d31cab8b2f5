"""The search for configurations, on a device whose times are made up; and the file they go to."""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import load_tiny_model
from guards import needs_interpreter
from recording_device import Recording, RecordingDevice
from torch import Tensor
from triton.runtime.interpreter import GridExecutor

from localllm.model.blocks.gated_mlp import GatedMLPSpec
from localllm.model.decoder import DecoderModel
from localllm.operators import tuning
from localllm.operators.device import CaptureError
from localllm.operators.tuning import ROWS, _calls, tune
from localllm.operators.tuning_file import TuningFile
from localllm.quantize.recipe import Recipe
from localllm_kernels.compiling.tiles import TileConfig
from localllm_kernels.compiling.tunings import Tunings
from localllm_kernels.products.gpu_linears import GpuLinears

INT4 = Recipe("rtn", group_size=32)
CONFIG = TileConfig(1, 16, 1024, 3, 4)


def made_up_seconds(recording: Recording) -> float:
    """Best with 32 outputs and 2 warps; the fewer splits the better."""
    seconds = 0.0
    for settings in recording.settings:
        outputs = settings.get("BLOCK_N", 32)  # of one row they are always as many
        seconds += 1 + abs(outputs - 32) / 32 + abs(settings["num_warps"] - 2)
    return seconds


def triton_model(recipe: Recipe) -> DecoderModel:
    return load_tiny_model("Qwen3ForCausalLM", None, torch.float32, recipe, backend="triton")


@contextmanager
def tuned_by(model: DecoderModel, tunings: Tunings) -> Iterator[None]:
    """Within it the products of `model` take what `tunings` say."""
    linears = model.ops.linears
    assert isinstance(linears, GpuLinears)
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(linears.workspace, "tunings", tunings)
        yield


@contextmanager
def nothing_computed() -> Iterator[None]:
    """Within it launches do nothing: the times are made up, and the results said to be right."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "distance", lambda *arguments: 0.0)
        patch.setattr(GridExecutor, "__call__", lambda *args, **kwargs: None)
        yield


@needs_interpreter
@pytest.mark.parametrize(
    "family",
    [
        "Qwen3MoeForCausalLM",
        pytest.param("NemotronHForCausalLM", marks=pytest.mark.slow),
        pytest.param("DeepseekV3ForCausalLM", marks=pytest.mark.slow),
    ],
)
def test_products_beside_experts_are_tuned(family: str) -> None:
    """Experts have tiles of their own, and weights that were dequantized no kernel. DeepSeek's
    queries are products that neither read the residual stream nor are added to it.
    """
    model = load_tiny_model(family, None, torch.float32, INT4, backend="triton")
    tunings, device = Tunings(), RecordingDevice(made_up_seconds)
    found: dict[str, TileConfig] = {}
    with tuned_by(model, tunings):
        for call in _calls(model):
            call()
        with nothing_computed():
            for _ in tune(model, tunings, device, found.__setitem__):
                pass
    assert found


@needs_interpreter
def test_it_walks_to_what_is_fastest_and_leaves_what_runs_as_it_is() -> None:
    model, tunings, device = triton_model(INT4), Tunings(), RecordingDevice(made_up_seconds)
    found: dict[str, TileConfig] = {}
    with tuned_by(model, tunings), nothing_computed():
        steps = sum(1 for _ in tune(model, tunings, device, found.__setitem__))
    # The four products of a layer; the head is plain.
    assert len(found) == 4 * len(ROWS)
    assert {each.num_warps for each in found.values()} == {2}
    assert {each.block_n for each in found.values() if each.block_m > 1} == {32}
    assert sorted({each.block_m for each in found.values()}) == [1, 16, 64]
    assert steps > len(found)
    assert not tunings.found
    # What is found is not looked for again.
    tunings = Tunings(found)
    with tuned_by(model, tunings), nothing_computed():
        assert list(tune(model, tunings, device, found.__setitem__)) == []


@needs_interpreter
def test_a_configuration_that_does_not_fit_is_passed_over() -> None:
    model, tunings, device = triton_model(Recipe("int8")), Tunings(), RecordingDevice()
    capture = device.capture

    def failing(call: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        captured = capture(call)
        if any(settings["BLOCK_N"] == 128 for settings in device.captured[-1].settings):
            raise CaptureError("out of resource: shared memory")
        return captured

    device.capture = failing  # type: ignore[method-assign]
    device.seconds = lambda recording: 1 / sum(each["BLOCK_N"] for each in recording.settings)
    found: dict[str, TileConfig] = {}
    with tuned_by(model, tunings), nothing_computed():
        for _ in tune(model, tunings, device, found.__setitem__):
            pass
    assert {each.block_n for each in found.values()} == {64}


@needs_interpreter
def test_a_configuration_that_gives_another_result_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, tunings, device = triton_model(Recipe("int8")), Tunings(), RecordingDevice()
    device.seconds = lambda recording: 1 / sum(each["BLOCK_N"] for each in recording.settings)
    found: dict[str, TileConfig] = {}
    with tuned_by(model, tunings), nothing_computed():
        is_default = iter([True, *[False] * 1000])
        monkeypatch.setattr(tuning, "distance", lambda *_: 0.0 if next(is_default) else 2.0)
        search = tune(model, tunings, device, found.__setitem__)
        while not found:
            next(search)
    [config] = found.values()
    assert config.block_n == 64  # more would be faster
    assert "times the tolerance" in caplog.text


def test_what_is_found_is_there_at_the_next_start(tmp_path: Path) -> None:
    file = TuningFile(tmp_path / "tunings" / "gpu.json")
    assert file.read().found == {}
    file.add("int4 1 4096 32 128 0", CONFIG)
    file.add("int8 16 4096 4096", TileConfig(16, 64, 128, 1, 4))
    assert file.read().found["int4 1 4096 32 128 0"] == CONFIG
    assert len(file.read().found) == 2
    assert [each.name for each in file.path.parent.iterdir()] == ["gpu.json"]


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", '{"a": 3}', '{"a": {"block_m": 1}}', "\x00", '{"a": null}'],
)
def test_a_file_that_is_not_sound_is_written_anew(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = TuningFile(tmp_path / "gpu.json")
    file.path.write_text(content)
    with caplog.at_level(logging.WARNING):
        assert file.read().found == {}
    assert "will be rewritten" in caplog.text
    file.add("int4 1", CONFIG)
    assert file.read().found == {"int4 1": CONFIG}


@pytest.mark.parametrize(
    "change",
    [{"block_n": 3}, {"block_n": 1 << 20}, {"num_warps": 64}, {"num_splits": 0}, {"block_k": "x"}],
)
def test_numbers_that_nobody_found_are_not_used(tmp_path: Path, change: dict[str, Any]) -> None:
    file = TuningFile(tmp_path / "gpu.json")
    file.add("int4 1", CONFIG)
    entries = json.loads(file.path.read_text())
    entries["int4 1"] |= change
    file.path.write_text(json.dumps(entries))
    assert file.read().found == {}


def test_another_gpu_and_other_kernels_have_another_file() -> None:
    one, other = TuningFile.of("NVIDIA H200"), TuningFile.of("NVIDIA L4")
    assert one.path != other.path
    assert one.path.name.startswith("NVIDIA-H200-")
    assert one == TuningFile.of("NVIDIA H200")


def test_a_configuration_for_other_rows_is_not_taken() -> None:
    default = TileConfig(16, 64, 128, 1, 4)
    tunings = Tunings({"int4 16": CONFIG, "int4 32": TileConfig(16, 32, 128, 2, 4)})
    assert tunings.config("int4", (16,), lambda: default, lambda config: []) == default
    assert tunings.config("int4", (32,), lambda: default, lambda config: []).block_n == 32


@needs_interpreter
@pytest.mark.parametrize("num_rows", [1, 5])
def test_a_tuned_product_gives_the_same(num_rows: int) -> None:
    model, tunings = triton_model(INT4), Tunings()
    product = model.layers[0].sublayers[1].block.products[1]
    [mlp] = model.architecture.blocks_of(GatedMLPSpec)
    x = torch.randn(num_rows, mlp.inner_size)
    with tuned_by(model, tunings), tunings.listening() as asked:
        expected = product(x)
    [(key, (default, vary))] = asked.items()
    others = vary(default)
    assert len(others) >= 2
    for other in others:
        with tuned_by(model, Tunings({key: other})):
            torch.testing.assert_close(product(x), expected)
