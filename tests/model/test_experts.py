"""Mixtures of experts: products that do not depend on other rows, files, and quantization."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import byte_tokenizer, random_tensors, stacked, write_checkpoint
from engines import library_folder
from every_family import small_config
from golden import logits_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from localllm.errors import CheckpointError
from localllm.model.families.table import architecture_of
from localllm.model.linear import ExpertByExpert, Projection, packed_linear
from localllm.model.packed.mxfp4_schemes import BlocksMxfp4
from localllm.model.packed.table import PACKED_TYPES
from localllm.quantize.calibrate import CalibrationRequest
from localllm.quantize.layer import LEAST_ROWS
from localllm.quantize.recipe import Recipe
from localllm.quantize.run import QuantizeRequest, quantize_model
from localllm_kernels import TORCH_OPS, Ops, cpu_ops
from localllm_kernels.experts.route import Routing, route_reference
from localllm_kernels.pointwise.gate import GATE_KINDS, GateKind, parts_of

CPU = torch.device("cpu")
HIDDEN, INNER, NUM_EXPERTS, TOP_K = 64, 96, 5, 2
C_COMPILER = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


def experts(
    kind: str, ops: Ops, gate: GateKind = "silu"
) -> tuple[list[Projection], list[Projection]]:
    """Both products of each expert, of weights drawn the same way each time."""
    assert ops.linears is not None
    generator = torch.Generator().manual_seed(1)

    def product(width_out: int, width_in: int) -> Projection:
        assert ops.linears is not None
        if kind in PACKED_TYPES:
            weight = PACKED_TYPES[kind].draw((width_out, width_in), generator)
            return packed_linear(weight, None, torch.bfloat16, ops.linears)
        weight = torch.randn(width_out, width_in, generator=generator) / width_in**0.5
        return ops.linears.plain(weight.to(getattr(torch, kind)), None)

    gate_up = [product(parts_of(gate) * INNER, HIDDEN) for _ in range(NUM_EXPERTS)]
    return gate_up, [product(HIDDEN, INNER) for _ in range(NUM_EXPERTS)]


def routed(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(rows, HIDDEN, generator=generator)
    logits = torch.randn(rows, NUM_EXPERTS, generator=generator)
    return x, *route_reference(logits, Routing(TOP_K))


@C_COMPILER
@pytest.mark.parametrize("gate_kind", GATE_KINDS)
@pytest.mark.parametrize(
    "kind", ["float32", "bfloat16", "int4", "int8", "mxfp4", "nvfp4", "trellis3"]
)
def test_one_call_gives_each_row_what_it_gets_alone(kind: str, gate_kind: GateKind) -> None:
    ops = cpu_ops(library_folder())
    assert ops.linears is not None
    gate = partial(ops.gate, kind=gate_kind)
    gate_up, down = experts(kind, ops, gate_kind)
    together = ops.linears.experts(gate_up, down, gate_kind)
    assert together is not None
    x, chosen, factors = routed(40)
    found = together(x, chosen, factors, gate)
    for rows in (slice(0, 1), slice(7, 10), slice(39, 40), slice(3, 36)):
        part = together(x[rows], chosen[rows], factors[rows], gate)
        assert torch.equal(part, found[rows])
    assert torch.equal(found, ExpertByExpert(tuple(gate_up), tuple(down))(x, chosen, factors, gate))


def test_padded_rows_of_an_expert_are_left_out() -> None:
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(NUM_EXPERTS, 2 * INNER, HIDDEN, generator=generator) / HIDDEN**0.5
    gate_up = tuple((lambda x, w=w: x @ w.T) for w in weights)
    down = tuple((lambda x, w=w: x @ w[:INNER]) for w in weights)
    x, chosen, factors = routed(11)
    expected = torch.zeros(11, HIDDEN)
    for row in range(11):
        for number, factor in zip(chosen[row].tolist(), factors[row], strict=True):
            inner = TORCH_OPS.gate(gate_up[number](x[row : row + 1]), "silu")
            expected[row] += factor * down[number](inner)[0]
    found = ExpertByExpert(gate_up, down, 8)(
        x, chosen, factors, partial(TORCH_OPS.gate, kind="silu")
    )
    torch.testing.assert_close(found, expected)


def test_gpt_oss_reads_blocks_of_all_experts(tmp_path: Path) -> None:
    """As the published files: stacked, gate and up in turns, in mxfp4 with biases."""
    config = small_config("GptOssForCausalLM")
    architecture = architecture_of(config)
    generator = torch.Generator().manual_seed(4)
    plain, packed = random_tensors(config), {}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            [
                PACKED_TYPES["mxfp4"].draw(shape, generator)
                for _ in range(config["num_local_experts"])
            ]
            for shape in ((96, 64), (96, 64), (64, 96))
        )
        for i, weights in enumerate(zip(gate, up, down, strict=True)):
            for name, weight in zip(("gate", "up", "down"), weights, strict=True):
                plain[f"{prefix}.{i}.{name}_proj.weight"] = weight.dequantize(torch.float32)
        parts = [[BlocksMxfp4().write(each) for each in part] for part in (gate, up, down)]
        for kind in ("blocks", "scales"):
            first, second, last = (torch.stack([p[kind] for p in part]) for part in parts)
            both = torch.stack((first, second), dim=2).flatten(1, 2)
            packed |= {f"{prefix}.gate_up_proj_{kind}": both, f"{prefix}.down_proj_{kind}": last}
    whole = stacked(plain, architecture)
    kept = {name: each for name, each in whole.items() if not name.endswith("up_proj")}
    kept = {name: each for name, each in kept.items() if not name.endswith("experts.down_proj")}
    folders = [write_checkpoint(tmp_path / name, config) for name in ("plain", "packed")]
    save_file(whole, folders[0] / "model.safetensors")
    save_file({**kept, **packed}, folders[1] / "model.safetensors")
    said = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folders[1] / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    (expected, _), (found, _) = (logits_of(folder, "float32") for folder in folders)
    torch.testing.assert_close(found, expected)
    # In 16 bits the library multiplies with the codes themselves.
    near, _ = logits_of(folders[1], "bfloat16")
    assert (near - expected).norm() < 0.05 * expected.norm()


def test_stacked_experts_of_another_number_are_refused(tmp_path: Path) -> None:
    config = small_config("GptOssForCausalLM")
    folder = write_checkpoint(tmp_path / "model", config)
    other = {**config, "num_local_experts": 5}
    (folder / "config.json").write_text(json.dumps(other))
    with pytest.raises(CheckpointError, match="experts"):
        logits_of(folder, "float32")


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("Qwen3MoeForCausalLM", "rtn"),
        pytest.param("GptOssForCausalLM", "mxfp4", marks=pytest.mark.slow),
        pytest.param("Qwen3MoeForCausalLM", "int8", marks=pytest.mark.slow),
        pytest.param("Qwen3MoeForCausalLM", "mxfp4", marks=pytest.mark.slow),
        pytest.param("GptOssForCausalLM", "rtn", marks=pytest.mark.slow),
        pytest.param("GptOssForCausalLM", "int8", marks=pytest.mark.slow),
    ],
)
def test_rounding_makes_a_model_like_its_source(family: str, method: Any, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", small_config(family))
    text = CalibrationRequest(text="The square of 12 is 144. " * 200, length=64)
    made = QuantizeRequest(str(source), tmp_path / "out", Recipe(method, 32), text, CPU)
    outcome = quantize_model(made, lambda *args: None)
    ids = byte_tokenizer().encode("The square of 12 is 144. The").ids
    expected, found = (
        logits_of(folder, "float32", ids)[0] for folder in (source, tmp_path / "out")
    )
    assert (found - expected).norm() < 0.4 * expected.norm()
    assert not any("router" in name or "mlp.gate." in name for name in outcome.layer_errors)
    assert outcome.quality is not None
    assert bool(outcome.expert_rows) == outcome.recipe.uses_inputs


def test_an_expert_that_saw_too_little_is_rounded_and_named(tmp_path: Path) -> None:
    """The router of the second layer seldom chooses the last expert."""
    source = write_checkpoint(tmp_path / "source", small_config("Qwen3MoeForCausalLM"))
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.gate.weight"][5] = 0
    norm = tensors["model.layers.1.post_attention_layernorm.weight"]
    tensors["model.layers.1.post_attention_layernorm.weight"] = norm.abs()
    save_file(tensors, source / "model.safetensors")
    text = CalibrationRequest(text="The square of 12 is 144. " * 200, num_windows=16, length=64)
    reports = []
    for method in ("gptq", "rtn"):
        out = tmp_path / method
        made = QuantizeRequest(str(source), out, Recipe(method, 32), text, CPU, verify=False)
        quantize_model(made, lambda *args: None)
        reports.append(load_file(out / "model.safetensors"))
    report = json.loads((tmp_path / "gptq" / "localllm_quant.json").read_text())
    rows = report["expert_rows"]
    assert len(rows) == 2 * 6
    # Each of 1,024 tokens takes two experts.
    assert sum(rows.values()) == 2 * 2 * 1024
    unseen = [name for name, count in rows.items() if count < LEAST_ROWS]
    assert unseen
    said = (tmp_path / "gptq" / "README.md").read_text()
    assert f"{len(unseen)} saw under 128 and are rounded to nearest: {unseen[0]}" in said
    own, nearest = reports
    for name in rows:
        is_same = torch.equal(own[f"{name}.weight_packed"], nearest[f"{name}.weight_packed"])
        assert is_same == (name in unseen)
