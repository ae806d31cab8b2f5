"""Weight files in memory: their tensors against safetensors' own, and memory that is given back."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from localllm.model.mapped_file import MappedFile
from localllm.model.safetensors_header import read_header
from localllm.model.tensor_info import ITEM_BYTES, Part, plain_view
from localllm.model.weight_check import WeightMap
from localllm.model.weights import CheckpointWeights, WeightReader
from localllm_kernels import TORCH_OPS

MB = 1 << 20


def resident_bytes_of(path: Path) -> int:
    """How much of a file's map this process holds."""
    maps = Path("/proc/self/smaps")
    if not maps.exists():
        pytest.skip("this system does not say how much of its files a process holds")
    _, of_file, rest = maps.read_text().partition(f" {path}\n")
    assert of_file
    [resident] = [line for line in rest.splitlines()[:6] if line.startswith("Rss:")]
    return int(resident.split()[1]) * 1024


def test_tensors_of_all_dtypes_are_those_that_safetensors_reads(tmp_path: Path) -> None:
    bytes_ = torch.arange(48, dtype=torch.uint8)
    tensors = {
        str(dtype): bytes_.clone().view(dtype).view(3, -1)
        for dtype in {
            *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
            *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
            *(torch.uint64, torch.uint32, torch.uint16),
            *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
            *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
        }
    }
    tensors |= {"flags": torch.tensor([True, False]), "none": torch.empty(0, 4)}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    data, header = MappedFile(path).bytes, read_header(path)
    assert {info.dtype for info in header.values()} == ITEM_BYTES.keys()
    for name, expected in load_file(path).items():
        found = header[name].read(data)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        found, expected = (each.reshape(-1).view(torch.uint8) for each in (found, expected))
        assert torch.equal(found, expected), name


def test_a_tensor_at_any_byte_is_read(tmp_path: Path) -> None:
    values = torch.arange(8, dtype=torch.float32)
    data = torch.cat([torch.zeros(3, dtype=torch.uint8), values.view(torch.uint8)])
    assert torch.equal(plain_view(data, 3, "F32", (2, 4)), values.view(2, 4))


def test_a_part_is_rows_of_one_matrix(tmp_path: Path) -> None:
    stacked = torch.arange(2 * 6 * 4, dtype=torch.float32).view(2, 6, 4)
    path = tmp_path / "model.safetensors"
    save_file({"before": torch.zeros(5), "stacked": stacked}, path)
    info, data = read_header(path)["stacked"], MappedFile(path).bytes
    for is_transposed, expected in ((False, stacked[1, 1::2]), (True, stacked[1].T[1::2])):
        part = Part((6, 4), 1, 1, 2, len(expected), is_transposed)
        one = type(info)(info.name, path, "F32", tuple(expected.shape), part, info.start)
        assert torch.equal(one.read(data), expected)


def test_what_was_read_is_given_back(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(32 * MB // 4)}, path)
    file = MappedFile(path)
    weight = read_header(path)["weight"].read(file.bytes)
    assert weight.sum() == 32 * MB // 4
    assert resident_bytes_of(path) > 30 * MB
    file.release()
    assert resident_bytes_of(path) < MB
    assert weight[-1] == 1  # it is still there


def test_of_a_large_tensor_little_lies_in_memory_twice(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a.weight": torch.ones(1024, 80 * MB // 4096)}, path)
    file = MappedFile(path)
    most, whole = 0, file.release

    def release() -> None:
        nonlocal most
        most = max(most, resident_bytes_of(path))
        whole()

    file.release = release  # type: ignore[method-assign]
    source = CheckpointWeights(WeightMap(read_header(path), {}), {path: file})
    reader = WeightReader(source, torch.bfloat16, torch.device("cpu"), TORCH_OPS)
    assert bool((reader.read("a.weight") == 1).all())
    assert 0 < most < 40 * MB
    # Where nothing has to be done to it, it lies there once, in its file.
    plain = WeightReader(source, torch.float32, torch.device("cpu"), TORCH_OPS).read("a.weight")
    stored = read_header(path)["a.weight"].read(file.bytes)
    assert plain.data_ptr() == stored.data_ptr()
