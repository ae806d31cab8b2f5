"""Heads in a model's own checkpoint give what transformers' `MtpLayer` gives."""

import re
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint
from engines import load_folder
from every_family import small_config
from heads import APART, behind, head_architecture, load_own_head, write_with_head
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpLayer
from whole_text import whole_text

from localllm.cost.planning import Machine, plan_model, shape_of
from localllm.drafting.head_source import find_head
from localllm.drafting.speculation_config import SpeculationConfig
from localllm.engine.config import EngineConfig
from localllm.errors import CheckpointError
from localllm.hub.catalog import resolve_model
from localllm.model.architecture import Architecture
from localllm.model.decoder import DecoderModel
from localllm.model.families.table import architecture_of
from localllm.model.join import DRAFTED
from localllm.model.mtp import find_mtp, mtp_architecture
from localllm.model.weight_files import find_weight_files
from localllm.quantize.calibrate import CalibrationRequest
from localllm.quantize.recipe import Method, Recipe
from localllm.quantize.run import QuantizeRequest, quantize_model

TOKENS = [11, 250, 7, 7, 93, 120, 5, 201, 33, 64, 9, 140, 71]
# Float32 sums in another order.
MOST = 2e-4
FAMILIES = {
    "Qwen3ForCausalLM": APART,
    "Qwen3NextForCausalLM": APART,
    "Qwen3_5ForCausalLM": APART,
    "Qwen3_5MoeForCausalLM": APART,
    "Glm4MoeForCausalLM": behind(2),
    "Glm4MoeLiteForCausalLM": behind(2),
    "DeepseekV3ForCausalLM": behind(2),
}


def config_of(family: str) -> dict[str, Any]:
    config = small_config(family)
    if family == "Glm4MoeForCausalLM":
        config["model_type"] = "glm4_moe"
    return config


def oracle(folder: Path, tensors: dict[str, Tensor], architecture: Architecture) -> MtpLayer:
    """Transformers' layer with these weights."""
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    kinds = getattr(config, "layer_types", None)
    layers = model.get_decoder().layers
    index = len(layers) - 1
    if kinds is not None:
        index = max(i for i, kind in enumerate(kinds) if kind == "full_attention")
    norm = type(model.get_decoder().norm)
    layer = MtpLayer(model.config, type(layers[index]), norm, index)
    own = {
        "enorm.weight": tensors["model.join_embedding_norm.weight"],
        "hnorm.weight": tensors["model.join_hidden_norm.weight"],
        "eh_proj.weight": tensors["model.join.weight"],
        "post_norm.weight": tensors["model.norm.weight"],
    }
    begin = "model.layers.0."
    own |= {
        f"mtp_block.{name.removeprefix(begin)}": values
        for name, values in tensors.items()
        if name.startswith(begin)
    }
    for _, spec in architecture.experts():
        parts = [
            [own.pop(f"mtp_block.{name}.weight") for name in spec.expert_at(i).names]
            for i in range(spec.router.num_experts)
        ]
        gate_up = torch.stack([torch.cat((gate, up)) for gate, up, _ in parts])
        own["mtp_block.mlp.experts.gate_up_proj"] = gate_up
        own["mtp_block.mlp.experts.down_proj"] = torch.stack([down for *_, down in parts])
    layer.load_state_dict(own)
    layer.rotary = model.get_decoder().rotary_emb
    return layer.eval()


def rows_of(head: DecoderModel, hidden: Tensor) -> Tensor:
    """The head's rows for TOKENS after `hidden`."""
    batch, cache = whole_text(head, TOKENS, hidden)
    with torch.inference_mode():
        return head.forward(batch, cache)[: len(TOKENS)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_gives_what_transformers_gives(family: str, tmp_path: Path) -> None:
    config = config_of(family)
    tensors = write_with_head(tmp_path, config, FAMILIES[family])
    target = load_folder(tmp_path, torch.float32)
    head = load_own_head(tmp_path, target)
    layer = oracle(tmp_path, tensors, head_architecture(config))
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(len(TOKENS), config["hidden_size"], generator=generator)
    embedded = target.embedding(torch.tensor(TOKENS))
    positions = torch.arange(len(TOKENS))[None]
    mask = torch.full((len(TOKENS), len(TOKENS)), float("-inf")).triu(1)[None, None]
    with torch.inference_mode():
        expected = layer(
            embedded[None],
            hidden[None],
            layer.rotary(embedded[None], positions),
            mask,
            positions,
            None,
        )[0]
    found = rows_of(head, hidden)
    torch.testing.assert_close(found, expected, atol=MOST, rtol=MOST)
    assert (found - found[:1]).abs().max() > 0.1
    # The output head is the target's.
    assert head.compute_logits(found).shape[1] == config["vocab_size"]


def test_a_head_s_own_output_head_has_logits_for_some_tokens(tmp_path: Path) -> None:
    config = config_of("Qwen3ForCausalLM")
    write_with_head(tmp_path, config)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    ids = torch.tensor([3, 7, 100, 287], dtype=torch.int32)
    weight = torch.randn(4, config["hidden_size"], generator=torch.Generator().manual_seed(1))
    save_file({**tensors, "mtp.token_ids": ids, "mtp.lm_head.weight": weight}, file)
    target = load_folder(tmp_path, torch.float32)
    head = load_own_head(tmp_path, target)
    assert DRAFTED in head.architecture.tensors()
    hidden = torch.randn(2, config["hidden_size"])
    logits = head.compute_logits(hidden)
    torch.testing.assert_close(logits[:, ids.long()], hidden @ weight.T, atol=1e-5, rtol=1e-5)
    others = [i for i in range(config["vocab_size"]) if i not in ids.tolist()]
    assert bool((logits[:, others] == float("-inf")).all())
    save_file({**tensors, "mtp.token_ids": ids + 1, "mtp.lm_head.weight": weight}, file)
    with pytest.raises(CheckpointError, match=r"mtp\.token_ids.*not of the 288 tokens"):
        load_own_head(tmp_path, target)


def test_a_broken_head_is_refused(tmp_path: Path) -> None:
    write_with_head(tmp_path, config_of("Qwen3_5ForCausalLM"))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    target = load_folder(tmp_path, torch.float32)
    save_file({name: each for name, each in tensors.items() if name != "mtp.norm.weight"}, file)
    with pytest.raises(CheckpointError, match=r"'mtp\.norm\.weight' is missing"):
        load_own_head(tmp_path, target)
    tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"][:, :-1].contiguous()
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"'mtp\.fc\.weight' has shape"):
        load_own_head(tmp_path, target)


def test_what_a_further_layer_lacks_is_named_as_in_the_files(tmp_path: Path) -> None:
    write_with_head(tmp_path, config_of("DeepseekV3ForCausalLM"), behind(2))
    file = tmp_path / "model.safetensors"
    tensors, target = load_file(file), load_folder(tmp_path, torch.float32)
    for name in ("enorm", "shared_head.norm", "self_attn.o_proj", "mlp.experts.1.down_proj"):
        lacking = f"model.layers.2.{name}.weight"
        save_file({each: tensors[each] for each in tensors if each != lacking}, file)
        with pytest.raises(CheckpointError, match=re.escape(f"'{lacking}' is missing")):
            load_own_head(tmp_path, target)


def test_a_model_works_without_its_broken_head(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_with_head(tmp_path, config_of("Qwen3ForCausalLM"))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["mtp.norm.weight"]
    save_file(tensors, file)
    files, target = find_weight_files(tmp_path), load_folder(tmp_path, torch.float32).architecture
    assert find_head(files, target, SpeculationConfig()) is None
    assert "head for further tokens is not used: tensor 'mtp.norm.weight'" in caplog.text
    with pytest.raises(CheckpointError, match=r"'mtp\.norm\.weight' is missing"):
        find_head(files, target, SpeculationConfig(drafter="head"))


@pytest.mark.parametrize("method", ["rtn", "int8"])
def test_a_head_is_quantized_along(method: Method, tmp_path: Path) -> None:
    config = config_of("Qwen3_5ForCausalLM")
    write_with_head(tmp_path / "plain", config)
    recipe = Recipe(method, group_size=32)
    request = QuantizeRequest(
        str(tmp_path / "plain"),
        tmp_path / "small",
        recipe,
        CalibrationRequest(),
        torch.device("cpu"),
        verify=False,
    )
    outcome = quantize_model(request, lambda *args: None)
    assert "mtp.layers.0.mlp.down_proj" in outcome.layer_errors
    rows = []
    for folder in (tmp_path / "plain", tmp_path / "small"):
        target = load_folder(folder, torch.float32)
        found = find_mtp(find_weight_files(folder), target.architecture)
        assert found is not None
        assert bool(found.weights.quantized) == (folder.name == "small")
        hidden = torch.randn(len(TOKENS), 64, generator=torch.Generator().manual_seed(3))
        rows.append(rows_of(load_own_head(folder, target), hidden))
    error = (rows[0] - rows[1]).norm() / rows[0].norm()
    assert 0.001 < error < (0.3 if method == "rtn" else 0.03)


def test_a_plan_counts_the_head(tmp_path: Path) -> None:
    machine = Machine("test", "cpu", 1 << 34, 1 << 33, None, None)
    plans = []
    for name in ("without", "with"):
        config = config_of("Qwen3ForCausalLM")
        if name == "with":
            write_with_head(tmp_path / name, config)
        else:
            write_checkpoint(tmp_path / name, config)
        source = resolve_model(str(tmp_path / name))
        plans.append(plan_model(shape_of(source, None), machine, EngineConfig()))
    plain, drafting = plans
    head = head_architecture(config_of("Qwen3ForCausalLM"))
    num_values = sum(prod(shape) for shape in head.tensors().values())
    assert drafting.memory.weights_bytes - plain.memory.weights_bytes == 4 * num_values
    # The entry of a token: keys and values of one layer; and a sixteenth of a hidden state.
    assert drafting.kv_token_bytes - plain.kv_token_bytes == 2 * 2 * 16 * 4 + 64 * 4 // 16


def test_a_model_whose_layers_have_inputs_of_their_own_has_no_head() -> None:
    """A head computes one layer, and has none of these inputs."""
    target = architecture_of(small_config("Gemma4ForCausalLM"))
    assert target.per_layer is not None
    assert mtp_architecture(target, {}) is None
    assert mtp_architecture(architecture_of(small_config("Qwen3ForCausalLM")), {}) is not None
