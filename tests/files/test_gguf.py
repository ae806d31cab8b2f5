"""GGUF headers: what the format's own package writes, and what nobody should."""

import re
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from localllm.errors import CheckpointError, LocalLLMError
from localllm.files.gguf import read_gguf


def text(value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(
    name: str, sizes: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0, **more: Any
) -> bytes:
    dimensions = more.get("num_dimensions", len(sizes))
    packed = struct.pack(f"<I{len(sizes)}q", dimensions, *sizes)
    return text(name) + packed + struct.pack("<IQ", kind, offset)


def header(keys: list[bytes], tensors: list[bytes], **more: Any) -> bytes:
    """A file with 16 bytes of data."""
    counts = more.get("num_tensors", len(tensors)), more.get("num_keys", len(keys))
    begin = more.get("magic", b"GGUF") + struct.pack("<Iqq", more.get("version", 3), *counts)
    data = begin + b"".join([*keys, *tensors])
    return data.ljust(-(-len(data) // 32) * 32, b"\0") + more.get("data", bytes(16))


NAME = key("general.name", 8, text("x"))


def test_a_sound_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(header([NAME, key("yes", 7, b"\1")], [tensor("a")]))
    found = read_gguf(path)
    assert found.keys == {"general.name": "x", "yes": True}
    assert (found.tensors["a"].shape, found.tensors["a"].num_bytes) == ((4,), 16)
    assert path.read_bytes()[found.tensors["a"].start :] == bytes(16)


def write(path: Path, arrays: dict[str, np.ndarray[Any, Any]], **split: int) -> None:
    writer = gguf.GGUFWriter(path, "llama", **split)  # type: ignore[arg-type]
    writer.add_uint32("a.number", 7)
    writer.add_int64("a.negative", -5)
    writer.add_float32("a.float", 0.25)
    writer.add_bool("a.flag", False)
    writer.add_string("a.text", "ä\n")
    writer.add_array("a.texts", ["one", "", "zwölf"])
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_array("a.floats", [0.5, -1.0])
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


ARRAYS = {
    "first": np.arange(24, dtype=np.float32).reshape(2, 12),
    "second": np.arange(7, dtype=np.float16),
    "third": np.arange(64, dtype=np.float32).reshape(2, 1, 32),
}


@pytest.mark.parametrize("most", [0, 1])
def test_what_the_package_writes_is_read(tmp_path: Path, most: int) -> None:
    write(tmp_path / "model.gguf", ARRAYS, **({"split_max_tensors": most} if most else {}))
    paths = sorted(tmp_path.glob("*.gguf"))
    assert len(paths) == (3 if most else 1)
    for path in paths:
        found = read_gguf(path)
        own = {name: each for name, each in found.keys.items() if name.startswith("a.")}
        numbers, floats = own.pop("a.numbers"), own.pop("a.floats")
        assert own == {
            "a.number": 7,
            "a.negative": -5,
            "a.float": 0.25,
            "a.flag": False,
            "a.text": "ä\n",
            "a.texts": ["one", "", "zwölf"],
        }
        assert (list(numbers), list(floats)) == ([1, 2, 3], [0.5, -1.0])  # type: ignore[arg-type]
        assert found.tensors.keys() == ARRAYS.keys()
        for name, array in ARRAYS.items():
            each = found.tensors[name]
            assert each.shape == array.shape
            data = each.file.read_bytes()[each.start :][: each.num_bytes]
            assert data == array.tobytes()


def test_a_split_model_needs_all_its_files(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", ARRAYS, split_max_tensors=1)
    first, second, third = sorted(tmp_path.glob("*.gguf"))
    whole = second.read_bytes()
    second.unlink()
    for each in (first, third):
        with pytest.raises(CheckpointError, match=f"{second.name} is missing, one of the 3 files"):
            read_gguf(each)
    second.write_bytes(third.read_bytes())
    with pytest.raises(CheckpointError, match="it is not file 2 of 3"):
        read_gguf(first)
    second.write_bytes(whole)
    first.rename(tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match="must be named like"):
        read_gguf(tmp_path / "other.gguf")


U32, I64 = 4, 11
HOSTILE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "it is empty"),
    "another file": (header([], [], magic=b"GGML"), "does not begin with GGUF"),
    "version 1": (header([], [], version=1), "version 1"),
    "version 0": (header([], [], version=0), "version 0"),
    "version 4": (header([], [], version=4), "version 4"),
    "big-endian": (header([], [], version=3 << 24), "big-endian"),
    "tensors below zero": (header([], [], num_tensors=-1), "claims -1 tensors"),
    "tensors without end": (header([], [], num_tensors=1 << 62), "the limit is"),
    "keys without end": (header([], [], num_keys=1 << 62), "the limit is"),
    "keys that are not there": (header([NAME], [], num_keys=2, data=b""), "cut short"),
    "a key twice": (header([NAME, NAME], []), "key 'general.name' twice"),
    "a key of no type": (header([key("a", 13, b"")], []), "unknown type 13"),
    "a type below zero": (header([key("a", 0xFFFFFFFF, b"")], []), "unknown type -1"),
    "a flag of two": (header([key("a", 7, b"\2")], []), "neither true nor false"),
    "flags of two": (
        header([key("a", 9, struct.pack("<IQ", 7, 2) + b"\1\2")], []),
        "neither true nor false",
    ),
    "a text without end": (header([key("a", 8, struct.pack("<Q", 1 << 63))], []), "claims"),
    "a text behind the end": (header([key("a", 8, struct.pack("<Q", 1000))], []), "cut short"),
    "a text that is none": (header([key("a", 8, text(b"\xff"))], []), "not valid UTF-8"),
    "a name that is none": (header([text(b"\xff") + bytes(12)], []), "not valid UTF-8"),
    "a list without end": (header([key("a", 9, struct.pack("<IQ", 4, 1 << 63))], []), "claims"),
    "a list behind the end": (header([key("a", 9, struct.pack("<IQ", 4, 900))], []), "cut short"),
    "texts behind the end": (header([key("a", 9, struct.pack("<IQ", 8, 9))], []), "cut short"),
    "a text of a list without end": (
        header([key("a", 9, struct.pack("<IQQ", 8, 1, (1 << 64) - 8))], []),
        "cut short",
    ),
    "a text of a list that is none": (
        header([key("a", 9, struct.pack("<IQ", 8, 1) + text(b"\xff"))], []),
        "not valid UTF-8",
    ),
    "lists of lists": (header([key("a", 9, struct.pack("<IQ", 9, 1))], []), "unknown type 9"),
    "alignment 0": (header([key("general.alignment", 4, bytes(4))], []), "no power of two"),
    "alignment 3": (header([key("general.alignment", 4, b"\3\0\0\0")], []), "no power of two"),
    "alignment 2^31": (header([key("general.alignment", 4, b"\0\0\0\x80")], []), "no power of two"),
    "alignment of a text": (
        header([key("general.alignment", 8, text("32"))], []),
        "no power of two",
    ),
    "a tensor twice": (
        header([], [tensor("a"), tensor("a", offset=32)], data=bytes(48)),
        "tensor 'a' twice",
    ),
    "no dimensions": (header([], [tensor("a", ())]), "0 dimensions"),
    "five dimensions": (header([], [tensor("a", (1, 1, 1, 1, 1))]), "5 dimensions"),
    "dimensions without end": (header([], [tensor("a", num_dimensions=1 << 31)]), "dimensions"),
    "a size of zero": (header([], [tensor("a", (4, 0))]), "has the sizes"),
    "a size below zero": (header([], [tensor("a", (-4,))]), "has the sizes"),
    "sizes whose product overflows": (header([], [tensor("a", (1 << 40, 1 << 40))]), "the sizes"),
    "a tensor of no type": (header([], [tensor("a", kind=99)]), "unknown type 99"),
    "a withdrawn type": (header([], [tensor("a", (32,), kind=31)]), "withdrawn"),
    "a type of activations": (header([], [tensor("a", (32,), kind=9)]), "unknown type 9"),
    "rows of no whole blocks": (header([], [tensor("a", (48,), kind=2)]), "no whole blocks"),
    "a tensor behind the end": (header([], [tensor("a", (5,))]), "cut short"),
    "a tensor of all memory": (header([], [tensor("a", (1 << 45,))]), "cut short"),
    "a gap": (header([], [tensor("a", offset=32)], data=bytes(48)), "does not follow"),
    "an overlap": (
        header([], [tensor("a"), tensor("b")], data=bytes(48)),
        "'b' does not follow the one before it",
    ),
    "an offset without end": (header([], [tensor("a", offset=(1 << 64) - 32)]), "not follow"),
    "data of nobody": (header([], [tensor("a")], data=bytes(99)), "bytes that no tensor has"),
    "split in texts": (header([key("split.count", 8, text("2"))], []), "split in '2' files"),
    "split in too many": (header([key("split.count", 4, b"\0\0\0\1")], []), "split in"),
    "split without company": (header([key("split.count", 2, b"\2\0")], []), "must be named like"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_wrong_is_told(tmp_path: Path, name: str) -> None:
    data, told = HOSTILE[name]
    path = tmp_path / "a.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=re.escape(told)) as caught:
        read_gguf(path)
    assert caught.value.hint


def test_a_file_that_is_cut_anywhere_is_told(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", ARRAYS)
    whole = (tmp_path / "model.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for length in (*range(1, len(whole) - 64, 7), len(whole) - 33):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            read_gguf(path)


def mutate(whole: bytes, seed: int) -> bytes:
    """Some bytes of the header are others."""
    random, data = np.random.default_rng(seed), bytearray(whole)
    for _ in range(random.integers(1, 5)):
        place, what = int(random.integers(4, len(whole) - 400)), random.integers(0, 4)
        if what == 0:
            data[place : place + 1] = bytes([random.integers(0, 256)])
        elif what == 1:
            data[place : place + 8] = bytes(8)
        elif what == 2:
            data[place : place + 8] = b"\xff" * 8
        else:
            del data[place : place + int(random.integers(1, 40))]
    return bytes(data)


@pytest.mark.parametrize(
    "seeds", [range(200), pytest.param(range(2000), marks=pytest.mark.hostile)]
)
def test_a_mutated_header_is_read_or_refused(tmp_path: Path, seeds: range) -> None:
    write(tmp_path / "model.gguf", ARRAYS)
    whole, path = (tmp_path / "model.gguf").read_bytes(), tmp_path / "other.gguf"
    refused = 0
    for seed in seeds:
        path.write_bytes(mutate(whole, seed))
        try:
            read_gguf(path)
        except LocalLLMError:
            refused += 1
    assert refused > len(seeds) // 2
