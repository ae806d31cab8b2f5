"""A checkpoint that is not what it says is refused with file and tensor, before memory is taken."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint
from every_family import small_config
from safetensors.torch import load_file, save_file

from localllm.engine.config import EngineConfig
from localllm.engine.loaded_decoder import load_decoder
from localllm.errors import CheckpointError, ExitCode
from localllm.model.families.table import read_architecture
from localllm.model.weight_check import check_weights
from localllm.model.weight_files import find_weight_files
from localllm.model.weights import is_finite, open_source

Make = Callable[..., Path]


def check(folder: Path) -> None:
    architecture = read_architecture(folder)
    check_weights(find_weight_files(folder), architecture)


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        check(folder)
    assert caught.value.exit_code == ExitCode.CHECKPOINT
    return str(caught.value)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def rewrite_header(folder: Path, change: Callable[[str], str]) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    [length] = struct.unpack("<Q", data[:8])
    header = change(data[8 : 8 + length].decode()).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])


def test_a_sound_checkpoint_passes(make_checkpoint: Make) -> None:
    check(make_checkpoint())


def test_a_missing_tensor_is_named(make_checkpoint: Make) -> None:
    folder = make_checkpoint()
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    assert "'model.layers.1.mlp.up_proj.weight' is missing" in refusal(folder)


def test_keys_that_nothing_reads_may_be_there(tmp_path: Path) -> None:
    """Published files of Gemma 4 have keys where another layer's are taken."""
    family = "Gemma4ForCausalLM"
    folder = write_checkpoint(tmp_path / "model", small_config(family))
    place, extra = "model.layers.3.self_attn", torch.zeros(2, 2)
    rewrite(folder, lambda tensors: tensors.update({f"{place}.v_proj.weight": extra}))
    check(folder)
    rewrite(folder, lambda tensors: tensors.update({f"{place}.r_proj.weight": extra}))
    assert "r_proj.weight' is left over" in refusal(folder)


def test_a_left_over_tensor_is_named(make_checkpoint: Make) -> None:
    folder = make_checkpoint()
    rewrite(folder, lambda tensors: tensors.update({"model.layers.7.extra": torch.zeros(2)}))
    assert "'model.layers.7.extra' is left over" in refusal(folder)


def test_a_wrong_shape_is_named_with_both(make_checkpoint: Make) -> None:
    folder = make_checkpoint()
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(47)}))
    message = refusal(folder)
    assert "'model.norm.weight' has shape [47]" in message
    assert "[48]" in message


def test_a_dtype_that_is_no_float_is_named(make_checkpoint: Make) -> None:
    folder = make_checkpoint()
    whole = torch.zeros(48, dtype=torch.int32)
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": whole}))
    assert "'model.norm.weight' has dtype I32" in refusal(folder)


def test_old_rotary_buffers_and_a_tied_head_are_no_left_overs(make_checkpoint: Make) -> None:
    folder = make_checkpoint("LlamaForCausalLM", tie_word_embeddings=True)
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
        "lm_head.weight": torch.zeros(288, 48),
    }
    rewrite(folder, lambda tensors: tensors.update(extra))
    check(folder)


def test_a_truncated_file_is_named(make_checkpoint: Make) -> None:
    folder = make_checkpoint()
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    message = refusal(folder)
    assert "model.safetensors" in message
    assert "last tensor" in message


def test_a_file_cut_in_its_header_is_named(make_checkpoint: Make) -> None:
    folder = make_checkpoint()
    path = folder / "model.safetensors"
    for size in (0, 5, 8, 200):
        path.write_bytes(path.read_bytes()[:size])
        assert "cut short" in refusal(folder)


def test_overlapping_tensors_are_named(make_checkpoint: Make) -> None:
    folder = make_checkpoint()

    def overlap(text: str) -> str:
        header = json.loads(text)
        names = [name for name in header if name.endswith("o_proj.weight")]
        header[names[1]]["data_offsets"] = header[names[0]]["data_offsets"]
        return json.dumps(header)

    rewrite_header(folder, overlap)
    assert "o_proj.weight' overlaps" in refusal(folder) or "leaves a gap" in refusal(folder)


def test_a_name_that_stands_twice_in_a_header_is_named(make_checkpoint: Make) -> None:
    folder = make_checkpoint()
    twice = '{"model.norm.weight":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},'
    rewrite_header(folder, lambda text: twice + text[1:])
    assert "'model.norm.weight' twice" in refusal(folder)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F99", "shape": [48], "data_offsets": [0, 192]},
        {"dtype": "F32", "shape": [-48], "data_offsets": [0, 192]},
        {"dtype": "F32", "shape": [1 << 63, 2], "data_offsets": [0, 192]},
        {"dtype": "F32", "shape": [48], "data_offsets": [0, 191]},
        {"dtype": "F32", "shape": [48], "data_offsets": [0]},
        {"dtype": "F32", "shape": 48, "data_offsets": [0, 192]},
        {"dtype": [], "shape": [48], "data_offsets": [0, 192]},
        {"dtype": "F32", "shape": [1 << 61] * 1000, "data_offsets": [0, 192]},
        7,
    ],
)
def test_a_lie_in_a_header_is_named(make_checkpoint: Make, entry: Any) -> None:
    folder = make_checkpoint()

    def lie(text: str) -> str:
        return json.dumps({**json.loads(text), "model.norm.weight": entry})

    rewrite_header(folder, lie)
    assert "'model.norm.weight'" in refusal(folder)


def test_headers_that_are_no_objects_are_refused(make_checkpoint: Make) -> None:
    folder = make_checkpoint()
    for text in ("[]", '{"__metadata__": {"a": 1}}', "{", "[" * 100_000, "nul"):
        rewrite_header(folder, lambda _, text=text: text)  # type: ignore[misc]
        assert "header" in refusal(folder)


def test_a_header_of_any_length_is_not_parsed(
    make_checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint()
    architecture = read_architecture(folder)
    entry = '"%06x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'
    many = "".join(entry % i for i in range(100_001))
    for text, reason in ((" " * 10_000_000, "the limit is 10,000,000"), (many, "100,000 tensors")):
        rewrite_header(folder, lambda _, text=text: f"{{{text}}}")  # type: ignore[misc]
        monkeypatch.setattr("localllm.model.safetensors_header.json.loads", pytest.fail)
        with pytest.raises(CheckpointError, match=reason):
            check_weights([folder / "model.safetensors"], architecture)
        monkeypatch.undo()


def test_the_tensors_of_all_files_together_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from checkpoints import tiny_config, write_checkpoint

    folder = write_checkpoint(tmp_path / "m", tiny_config("LlamaForCausalLM"), num_shards=2)
    check(folder)  # of 21 tensors
    monkeypatch.setattr("localllm.model.tensor_files.MAX_TENSORS", 20)
    assert "over 20 tensors" in refusal(folder)


def test_a_shard_that_is_not_there_is_named_with_a_tensor_it_holds(tmp_path: Path) -> None:
    from checkpoints import tiny_config, write_checkpoint

    folder = write_checkpoint(tmp_path / "m", tiny_config("LlamaForCausalLM"), num_shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    message = refusal(folder)
    assert "shard model-00002-of-00002.safetensors is missing" in message
    assert "model." in message


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "a\0b", 7])
def test_an_index_that_points_outside_is_refused_and_nothing_is_opened(
    make_checkpoint: Make, name: Any
) -> None:
    folder = make_checkpoint()
    index = {"weight_map": {"model.norm.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "points outside" in refusal(folder)


def test_a_shard_whose_name_no_file_can_have_is_missing(make_checkpoint: Make) -> None:
    folder = make_checkpoint()
    index = {"weight_map": {"model.norm.weight": "x" * 5000 + ".safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "is missing" in refusal(folder)


def test_a_pickle_is_not_loaded_and_the_way_out_is_named(make_checkpoint: Make) -> None:
    folder = make_checkpoint()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = refusal(folder)
    assert "pytorch_model.bin" in message
    assert "safetensors" in message


def test_an_unknown_architecture_names_the_page_of_those_that_are_known(
    make_checkpoint: Make, edit_json: Callable[..., None]
) -> None:
    folder = make_checkpoint()
    edit_json(folder / "config.json", architectures=["MambaForCausalLM"])
    message = refusal(folder)
    assert "MambaForCausalLM" in message
    assert "docs/models.md" in message
    assert "vLLM" in message


def test_a_quantized_checkpoint_is_refused_by_method(
    make_checkpoint: Make, edit_json: Callable[..., None]
) -> None:
    folder = make_checkpoint()
    edit_json(folder / "config.json", quantization_config={"quant_method": "mystery"})
    assert "mystery" in refusal(folder)


def load(folder: Path, dtype: str) -> None:
    architecture = read_architecture(folder)
    load_decoder(folder, architecture, EngineConfig(dtype=dtype, max_num_seqs=1))  # type: ignore[arg-type]


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.k_norm.weight",
        "model.layers.1.self_attn.v_proj.weight",
        "model.layers.1.self_attn.k_proj.bias",
        "lm_head.weight",
    ],
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_is_refused(
    make_checkpoint: Make, stored: str, name: str, value: float
) -> None:
    folder = make_checkpoint(torch_dtype=stored, attention_bias=True)
    rewrite(folder, lambda tensors: tensors[name].view(-1)[-1].fill_(value))
    with pytest.raises(CheckpointError, match="not finite") as caught:
        load(folder, "bfloat16")
    assert repr(name) in caught.value.message
    assert caught.value.where == str(folder / "model.safetensors")


def test_a_value_that_the_asked_dtype_does_not_hold_is_refused(make_checkpoint: Make) -> None:
    folder = make_checkpoint(torch_dtype="bfloat16")
    rewrite(folder, lambda tensors: tensors["lm_head.weight"][3, 4].fill_(1e5))
    load(folder, "bfloat16")
    with pytest.raises(CheckpointError, match="too large for float16") as caught:
        load(folder, "float16")
    assert "--dtype bfloat16" in caught.value.hint


def test_the_bytes_of_fp8_that_are_no_number_are_known() -> None:
    for byte in range(256):
        codes = torch.tensor([0, byte, 0x80], dtype=torch.uint8).view(torch.float8_e4m3fn)
        assert is_finite(codes) == bool(codes.float().isfinite().all()), byte


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_place_hides_a_value_that_is_not_finite(dtype: torch.dtype) -> None:
    # Vectors are shorter than this, and some values are behind the last whole one.
    for place in range(67):
        values = torch.randn(67).to(dtype)
        assert is_finite(values)
        values[place] = torch.nan
        assert not is_finite(values)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells what is mapped")
def test_a_tensor_on_its_way_to_a_device_is_read_where_the_file_is_mapped(
    make_checkpoint: Make,
) -> None:
    folder = make_checkpoint()
    architecture = read_architecture(folder)
    weights = check_weights(find_weight_files(folder), architecture)
    with open_source(weights) as source:
        tensor = source.plain("model.layers.1.mlp.up_proj.weight")
        address, mapped = tensor.data_ptr(), None
        for line in Path("/proc/self/maps").read_text().splitlines():
            start, end = (int(bound, 16) for bound in line.split()[0].split("-"))
            if start <= address < end:
                mapped = line.split()[-1]
    assert mapped == str(folder / "model.safetensors")


def test_a_table_beside_a_head_stays_in_its_file(make_checkpoint: Make) -> None:
    def unread(folder: Path, dtype: torch.dtype) -> int:
        weights = check_weights(find_weight_files(folder), read_architecture(folder))
        return weights.unread_bytes(dtype)

    folder = make_checkpoint(tie_word_embeddings=False)
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert table.dtype == torch.float32
    assert unread(folder, torch.float32) == table.nbytes
    assert unread(folder, torch.bfloat16) == 0  # each value is converted
    tied = make_checkpoint(tie_word_embeddings=True)
    assert unread(tied, torch.float32) == 0  # the head reads all of it
