"""The vectors by which routers choose experts, in the precision of their files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint
from every_family import small_config
from golden import logits_of
from heads import write_with_head
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from localllm.model.blocks.experts import MixtureOfExperts
from localllm.model.blocks.latent_experts import LatentExperts
from localllm.quantize.calibrate import CalibrationRequest
from localllm.quantize.recipe import Recipe
from localllm.quantize.run import QuantizeRequest, quantize_model

FAMILIES = [
    "DeepseekV3ForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "Lfm2MoeForCausalLM",
    "NemotronHForCausalLM",
]
CORRECTIONS = ("e_score_correction_bias", "expert_bias")


def write_biased(
    folder: Path, family: str, write: Callable[[Path, dict[str, Any]], object] = write_checkpoint
) -> Path:
    """A checkpoint in bfloat16 whose corrections, around 7 and in float32, alone decide."""
    config = small_config(family) | {"dtype": "bfloat16"}
    write(folder, config)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    found = [name for name in tensors if name.endswith(CORRECTIONS)]
    assert found
    for name in found:
        count = len(tensors[name])
        # The last ones are the best; in bfloat16 all are the same number, and the first ones win.
        tensors[name] = 7 + 0.01 * torch.arange(count) / count
        router = name.removesuffix(name.rpartition(".")[2]).removesuffix("gate.") + "gate.weight"
        tensors[router].zero_()
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def chosen_by_transformers(folder: Path, ids: list[int]) -> list[Tensor]:
    """The experts of each layer, [tokens, experts], sorted."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    found = []

    def keep(module: Any, inputs: tuple[Any, ...], output: Any) -> None:
        found.append(inputs[1].view(len(ids), -1).sort().values)

    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_hook(keep)
    with torch.inference_mode():
        model(torch.tensor([ids]))
    return found


def chosen_by_us(folder: Path, ids: list[int]) -> list[Tensor]:
    _, model = logits_of(folder, "bfloat16", ids)
    found = []
    for layer in model.layers:
        for sublayer in layer.sublayers:
            block = sublayer.block
            block = block.experts if isinstance(block, LatentExperts) else block
            if isinstance(block, MixtureOfExperts):
                # The router's weight is zero.
                width = block.spec.router.num_experts
                chosen, _ = model.ops.route(torch.zeros(len(ids), width), block.routing)
                found.append(chosen.long().sort().values)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_corrections_that_bfloat16_cannot_hold_decide(family: str, tmp_path: Path) -> None:
    source, ids = write_biased(tmp_path / "source", family), [5, 77, 130]
    expected = chosen_by_transformers(source, ids)
    assert expected
    found = chosen_by_us(source, ids)
    assert [each.tolist() for each in found] == [each.tolist() for each in expected]


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_quantized_models_choose_as_their_source_does(method: Any, tmp_path: Path) -> None:
    source = write_biased(tmp_path / "source", "Glm4MoeLiteForCausalLM")
    text = CalibrationRequest(text="The square of 12 is 144. " * 40, num_windows=4, length=32)
    made = QuantizeRequest(
        str(source), tmp_path / "out", Recipe(method, 32), text, torch.device("cpu"), verify=False
    )
    quantize_model(made, lambda *args: None)
    ids = [5, 77, 130]
    found = chosen_by_us(tmp_path / "out", ids)
    assert [each.tolist() for each in found] == [
        each.tolist() for each in chosen_by_transformers(source, ids)
    ]
    assert_kept(source, made.out)


def test_a_quantized_head_keeps_its_corrections(tmp_path: Path) -> None:
    source = write_biased(tmp_path / "source", "DeepseekV3ForCausalLM", write_with_head)
    made = QuantizeRequest(
        str(source),
        tmp_path / "out",
        Recipe("rtn", 32),
        CalibrationRequest(),
        torch.device("cpu"),
        verify=False,
    )
    quantize_model(made, lambda *args: None)
    assert assert_kept(source, made.out) == 2


def assert_kept(source: Path, quantized: Path) -> int:
    """The number of corrections, which are those of the source."""
    before, after = (read_all(folder) for folder in (source, quantized))
    names = [name for name in before if name.endswith(CORRECTIONS)]
    for name in names:
        assert after[name].dtype == torch.float32
        assert torch.equal(after[name], before[name])
    return len(names)


def read_all(folder: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
