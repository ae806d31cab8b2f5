"""A GGUF file of every family computes what the checkpoint does that it was made from."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import random_tensors, write_checkpoint
from gguf_files import converted, write_gguf
from gguf_models import GGUF_MODELS
from golden import logits_of
from heads import behind, head_architecture
from heads import random_tensors as head_tensors
from torch import Tensor

from localllm.engine.config import EngineConfig
from localllm.engine.loaded_decoder import build_decoder
from localllm.engine.scoring import WindowScorer
from localllm.errors import CheckpointError, UnsupportedModelError
from localllm.files.gguf import read_gguf
from localllm.model.architecture import Architecture
from localllm.model.families.table import architecture_of
from localllm.model.gguf.config import config_of
from localllm.model.gguf.families import GGUF_FAMILIES
from localllm.model.gguf.keys import shortest
from localllm.model.mtp import find_mtp
from localllm.model.weight_check import check_weights
from localllm.model.weights import open_source

IDS = [(7 * i + 3) % 200 for i in range(40)]
# The logarithm of a decay's exponential, factors of frequencies in 32 bits, and queries and keys
# whose values stand in another order, which their products are summed in.
MOST = 1e-4
# With a head that drafts behind the model's own layers.
WITH_HEAD = ("qwen3next", "qwen35", "qwen35moe", "glm4moe", "deepseek2, glm")


def architecture_in(path: Path) -> Architecture:
    return architecture_of(config_of(read_gguf(path)))


def logits_in(path: Path) -> Tensor:
    """The logits after each of `IDS`."""
    architecture = architecture_in(path)
    weights = check_weights([path], architecture)
    config = EngineConfig(dtype="float32", max_num_seqs=1)
    with open_source(weights) as source:
        loaded = build_decoder(source, weights.resident_bytes, architecture, config)
    return torch.cat(list(WindowScorer(loaded.model, 64).logits(IDS)))


def tensors_of(name: str) -> dict[str, Tensor]:
    """As its file holds them."""
    model = GGUF_MODELS[name]
    return converted(model, random_tensors(model.config))


def written(path: Path, name: str, **options: Any) -> Path:
    return write_gguf(path, GGUF_MODELS[name], tensors_of(name), **options)


def test_none_is_missing() -> None:
    assert {model.arch for model in GGUF_MODELS.values()} == GGUF_FAMILIES.keys()


@pytest.mark.parametrize("name", GGUF_MODELS)
def test_files_compute_what_their_checkpoints_do(name: str, tmp_path: Path) -> None:
    model = GGUF_MODELS[name]
    expected, _ = logits_of(write_checkpoint(tmp_path / "checkpoint", model.config), "float32", IDS)
    path = written(tmp_path / "model.gguf", name)
    found = logits_in(path)
    # Every key has reached the family's reader.
    assert architecture_in(path).unknown_fields == ()
    if model.is_exact:
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, atol=MOST, rtol=MOST)


@pytest.mark.parametrize(
    ("name", "matrices"),
    [
        *((name, matrices) for name in GGUF_MODELS for matrices in ("Q8_0", "Q4_0")),
        ("gpt-oss", "MXFP4"),
    ],
)
def test_blocks_compute_what_their_values_do(name: str, matrices: str, tmp_path: Path) -> None:
    values = written(tmp_path / "values.gguf", name, matrices=matrices, is_rounded=True)
    blocks = written(tmp_path / "blocks.gguf", name, matrices=matrices)
    architecture = architecture_in(blocks)
    assert check_weights([blocks], architecture).kinds == {matrices}
    # Products with blocks round their inputs.
    torch.testing.assert_close(logits_in(blocks), logits_in(values), atol=MOST, rtol=MOST)


@pytest.mark.parametrize("name", ["llama", "gpt-oss", "qwen3moe", "phi3"])
def test_nvfp4_has_scales_beside_its_blocks(name: str, tmp_path: Path) -> None:
    values = written(tmp_path / "values.gguf", name, matrices="NVFP4", is_rounded=True)
    blocks = written(tmp_path / "blocks.gguf", name, matrices="NVFP4")
    assert check_weights([blocks], architecture_in(blocks)).kinds == {"nvfp4"}
    torch.testing.assert_close(logits_in(blocks), logits_in(values), atol=1e-5, rtol=1e-5)


def whole_expansion(tensors: dict[str, Tensor]) -> dict[str, Any]:
    for layer in range(2):
        keys = tensors.pop(f"blk.{layer}.attn_k_b.weight").transpose(1, 2)
        values = tensors.pop(f"blk.{layer}.attn_v_b.weight")
        tensors[f"blk.{layer}.attn_kv_b.weight"] = torch.cat((keys, values), dim=1).flatten(0, 1)
    changes = dict.fromkeys(("attention.key_length_mla", "attention.value_length_mla"))
    own = {"attention.key_length": 32, "attention.value_length": 16, "attention.head_count_kv": 4}
    return {**changes, **own}


def whole_inputs(tensors: dict[str, Tensor]) -> dict[str, Any]:
    config = GGUF_MODELS["qwen3next"].config
    stored = random_tensors(config)
    for layer in (0, 2):
        for name in ("attn_qkv", "attn_gate"):
            del tensors[f"blk.{layer}.{name}.weight"]
        own = stored[f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight"]
        tensors[f"blk.{layer}.ssm_in.weight"] = own
    return {}


def gates_with_ups(tensors: dict[str, Tensor]) -> dict[str, Any]:
    for layer in range(2):
        parts = [tensors.pop(f"blk.{layer}.ffn_{each}_exps.weight") for each in ("gate", "up")]
        tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = torch.cat(parts, dim=1)
    return {}


def flat_row_gates(tensors: dict[str, Tensor]) -> dict[str, Any]:
    for layer in range(2):
        name = f"blk.{layer}.ffn_gate_inp_shexp.weight"
        tensors[name] = tensors[name].flatten()
    return {}


def older_attention_factor(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {"rope.scaling.yarn_attn_factor": None, "rope.scaling.attn_factor": 1.25}


def no_shared_experts(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {"expert_shared_feed_forward_length": 0, "expert_shared_count": 0}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("deepseek2, v3", whole_expansion),
        ("qwen3next", whole_inputs),
        ("qwen3moe", gates_with_ups),
        ("qwen2moe", flat_row_gates),
        ("qwen3moe", no_shared_experts),
        ("olmo2, windows", older_attention_factor),
    ],
)
def test_other_converters_forms_compute_the_same(
    name: str, change: Callable[[dict[str, Tensor]], dict[str, Any]], tmp_path: Path
) -> None:
    tensors = tensors_of(name)
    changes = change(tensors)
    path = write_gguf(tmp_path / "other.gguf", GGUF_MODELS[name], tensors, changes=changes)
    assert torch.equal(logits_in(path), logits_in(written(tmp_path / "model.gguf", name)))


def test_a_layer_that_drafts_by_two_blocks_is_left_out(tmp_path: Path) -> None:
    """Nemotron-H's, which is attention and experts in one."""
    model, tensors = GGUF_MODELS["nemotron_h_moe"], tensors_of("nemotron_h_moe")
    own = [
        (name.split(".", 2)[2], values)
        for name, values in tensors.items()
        if name.startswith(("blk.1.", "blk.2."))
    ]
    further = {f"blk.4.{kind}": values for kind, values in own}
    further["blk.4.nextn.eh_proj.weight"] = torch.zeros(64, 128)
    path = write_gguf(tmp_path / "head.gguf", model, {**tensors, **further}, head_layers=1)
    alone = logits_in(written(tmp_path / "model.gguf", "nemotron_h_moe"))
    assert torch.equal(logits_in(path), alone)


@pytest.mark.parametrize("name", WITH_HEAD)
def test_layers_that_draft_are_read_as_a_head(name: str, tmp_path: Path) -> None:
    model = GGUF_MODELS[name]
    count = model.config["num_hidden_layers"]
    alone = logits_in(written(tmp_path / "model.gguf", name))
    own = head_tensors(head_architecture(model.config), 1)
    head = dict[str, Tensor]()
    for ours, values in own.items():
        for before, after in behind(count).items():
            if ours.startswith(before):
                head[after + ours.removeprefix(before)] = values
                break
    tensors = converted(model, {**random_tensors(model.config), **head}, head_layers=1)
    path = write_gguf(tmp_path / "head.gguf", model, tensors, head_layers=1)
    assert torch.equal(logits_in(path), alone)
    found = find_mtp([path], architecture_in(path))
    assert found is not None
    with open_source(found.weights) as source:
        read = {name: source.plain(name) for name in found.weights.plain}
    for ours, values in own.items():
        if "kv_b_proj" not in ours:  # two tensors, in another form
            assert torch.allclose(read[ours], values, atol=1e-6), ours


@pytest.mark.parametrize("name", GGUF_MODELS)
def test_what_a_key_says_is_never_ignored(name: str, tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", name, changes={"attention.new_kind": 3})
    with pytest.raises(UnsupportedModelError, match="new_kind' is not known"):
        config_of(read_gguf(path))


def test_a_window_that_a_family_has_not_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", "llama", changes={"attention.sliding_window": 24})
    with pytest.raises(UnsupportedModelError, match="sliding_window' is not known"):
        config_of(read_gguf(path))
    none = written(tmp_path / "model.gguf", "llama", changes={"attention.sliding_window": 0})
    config_of(read_gguf(none))


def test_a_tensor_without_a_place_is_refused(tmp_path: Path) -> None:
    tensors = {**tensors_of("llama"), "blk.0.attn_new.weight": torch.zeros(4)}
    path = write_gguf(tmp_path / "model.gguf", GGUF_MODELS["llama"], tensors)
    with pytest.raises(CheckpointError, match=r"'blk.0.attn_new.weight' is left over"):
        check_weights([path], architecture_in(path))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = tensors_of("qwen3")
    del tensors["blk.1.ffn_up.weight"]
    path = write_gguf(tmp_path / "model.gguf", GGUF_MODELS["qwen3"], tensors)
    with pytest.raises(CheckpointError, match=r"'model.layers.1.mlp.up_proj.weight' is missing"):
        check_weights([path], architecture_in(path))


def header_only(path: Path, arch: str, kind: str = "model") -> Path:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_type(kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    path = header_only(tmp_path / "model.gguf", "rwkv7")
    with pytest.raises(UnsupportedModelError, match="'rwkv7' are not supported; known: llama"):
        config_of(read_gguf(path))


@pytest.mark.parametrize(
    ("arch", "kind", "what"),
    [
        ("llama", "adapter", "an adapter"),
        ("clip", "mmproj", "the tower"),
        ("clip", "model", "the tower"),
        ("llama", "imatrix", "a table for quantizing"),
    ],
)
def test_files_that_are_no_models_are_called_what_they_are(
    arch: str, kind: str, what: str, tmp_path: Path
) -> None:
    path = header_only(tmp_path / "model.gguf", arch, kind)
    with pytest.raises(UnsupportedModelError, match=f"this file is {what}"):
        config_of(read_gguf(path))


def test_frequencies_in_old_files_are_those_of_the_base(tmp_path: Path) -> None:
    model = GGUF_MODELS["llama"]
    usual = torch.from_numpy(10000.0 ** (-np.arange(0, 16, 2) / 16))
    name = "blk.0.attn_rot_embd.weight"
    tensors = tensors_of("llama")
    path = write_gguf(tmp_path / "usual.gguf", model, {**tensors, name: usual})
    assert torch.equal(logits_in(path), logits_in(written(tmp_path / "model.gguf", "llama")))
    other = write_gguf(tmp_path / "other.gguf", model, {**tensors, name: 2 * usual})
    with pytest.raises(CheckpointError, match="other frequencies than"):
        config_of(read_gguf(other))
    header = read_gguf(path)
    for base in (0.0, -1.0, 1e-300):
        changed = replace(header, keys={**header.keys, "llama.rope.freq_base": base})
        with pytest.raises(CheckpointError):
            config_of(changed)


def test_numbers_are_written_as_short_as_they_were() -> None:
    generator = np.random.default_rng(0)
    numbers = generator.integers(1, 0x7F7FFFFF, 2000, dtype=np.uint32).view(np.float32)
    for value in (*numbers, np.float32(3.4028235e38), np.float32(1e-6), np.float32(0)):
        assert shortest(float(value)) == float(str(value))
    assert shortest(0.1) == 0.1  # what float32 does not hold stays as it is
    assert shortest(1e300) == 1e300


def test_factors_of_frequencies_are_checked(tmp_path: Path) -> None:
    for name, values in (("llama", [1.0] * 4 + [1e30] * 4), ("gemma4", [2.0] * 16)):
        tensors = {**tensors_of(name), "rope_freqs.weight": torch.tensor(values)}
        path = write_gguf(tmp_path / f"{name}.gguf", GGUF_MODELS[name], tensors)
        with pytest.raises(CheckpointError, match=r"'rope_freqs.weight' must hold"):
            config_of(read_gguf(path))


@pytest.mark.parametrize("count", [0, 3000])
def test_absurd_numbers_of_layers_are_refused(count: int, tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", "llama", changes={"block_count": count})
    with pytest.raises(CheckpointError, match="claims to have"):
        config_of(read_gguf(path))


LIST = memoryview(np.zeros(2, "u4"))


@pytest.mark.parametrize("name", GGUF_MODELS)
def test_no_number_of_a_header_is_a_fault_of_ours(name: str, tmp_path: Path) -> None:
    header = read_gguf(written(tmp_path / "model.gguf", name))
    own = f"{GGUF_MODELS[name].arch}."
    numbers = [key for key, value in header.keys.items() if key.startswith(own)]
    for key in numbers:
        for value in (0, 1, 0xFFFFFFFF, -1, 1e38, float("nan"), "none", True, LIST):
            changed = replace(header, keys={**header.keys, key: value})
            # Whatever is not refused as such has become another model.
            with suppress(CheckpointError, UnsupportedModelError):
                architecture_of(config_of(changed))
