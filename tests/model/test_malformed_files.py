"""Files of a checkpoint that are no JSON, or JSON of other kinds: a clean refusal each time."""

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from every_family import EVERY_FAMILY, small_config

from localllm.engine.config import EngineConfig
from localllm.engine.loaded_decoder import load_decoder
from localllm.errors import LocalLLMError
from localllm.model.families.table import architecture_of, read_architecture

Make = Callable[..., Path]
NORM = '"model.norm.weight":{"dtype":"F32","shape":[48],"data_offsets":[0,192]}'
DEEP = "[" * 100_000


def load(folder: Path) -> None:
    architecture = read_architecture(folder)
    load_decoder(folder, architecture, EngineConfig(dtype="float32", max_num_seqs=1))


def assert_refused(folder: Path, file: str) -> None:
    with pytest.raises(LocalLLMError) as caught:
        load(folder)
    assert file in f"{caught.value.message} {caught.value.where}"
    str(caught.value).encode()


def with_header(folder: Path, change: Callable[[str], bytes]) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    [length] = struct.unpack("<Q", data[:8])
    header = change(data[8 : 8 + length].decode())
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.encode("utf-16"),
        lambda text: text.encode("utf-16-le"),
        lambda text: text.encode("utf-32-be"),
        lambda text: text.encode("utf-8-sig"),
        lambda text: b" " + text.encode(),
        lambda text: text.encode() + b"\0\0",
        lambda text: text.encode()[:-1] + b'\xff"}',
        lambda text: text.replace("[48]", "[48.0]").encode(),
        lambda text: text.replace("[48]", "[NaN]").encode(),
        lambda text: text.replace("[48]", f"[{'9' * 5000}]").encode(),
        lambda text: text.replace('"shape"', f'"more":{DEEP},"shape"').encode(),
        lambda text: text.replace("model.norm.weight", "\\ud800").encode(),
        lambda text: text.replace("[48]", "[48,-0]").encode(),
        lambda text: text.replace('"F32"', '"F8_E8M0"').encode(),
        lambda text: text.replace('"F32"', "null").encode(),
    ],
)
def test_a_header_that_is_not_one(make_checkpoint: Make, change: Callable[[str], bytes]) -> None:
    folder = make_checkpoint()
    with_header(folder, change)
    assert_refused(folder, "model.safetensors")


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b'"text"',
        b"[]",
        b"{",
        b'{"a": 1}}',
        b"\0\0\0\0",
        b"\xff\xfe{\0}\0",
        '{"architectures": ["LlamaForCausalLM"]}'.encode("utf-32"),
        b'{"architectures": "\xe9"}',
        b'{"architectures": ["\\ud800"], "weight_map": {"\\ud800": "\\ud800.safetensors"}}',
        f'{{"weight_map": {DEEP}'.encode(),
        f'{{"hidden_size": {"9" * 5000}}}'.encode(),
        b'{"architectures": [["LlamaForCausalLM"]], "weight_map": {"a": ["b.safetensors"]}}',
        b'{"architectures": {"0": 1}, "weight_map": {"a": null}}',
        b'{"architectures": [], "weight_map": "model.safetensors"}',
    ],
)
def test_a_json_file_that_is_not_one(make_checkpoint: Make, file: str, data: bytes) -> None:
    folder = make_checkpoint()
    (folder / file).write_bytes(data)
    assert_refused(folder, file)


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_any_field_of_any_other_kind(family: str) -> None:
    config = small_config(family)
    names = {*config, "rope_scaling", "rope_parameters", "quantization_config", "layer_types"}
    names |= {"per_layer_config", "dtype", "id2label", "mlp_only_layers", "time_step_limit"}
    for name in sorted(names):
        for value in ([{}], {"a": [{}]}, "\ud800", 1 << 70, 1e308, -1, True):
            try:
                architecture_of({**config, name: value})
            except LocalLLMError as error:
                str(error).encode()
