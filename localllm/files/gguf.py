"""GGUF files read as hostile input: every claim of a header is checked before it is used.

Source: `docs/gguf.md` and `src/gguf.cpp` of ggml. A file holds keys with values, then the names,
types, sizes and places of its tensors, then their data. A model may be split over several files.
"""

import mmap
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from struct import Struct
from struct import error as StructError
from typing import Any, TypeAlias

from localllm.errors import CheckpointError, UnsupportedModelError
from localllm.files.model_file import open_model_file

MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # the second one only says that numbers may be big-endian
MAX_HEADER_BYTES, MAX_KEYS, MAX_TENSORS = 256 << 20, 1 << 14, 1 << 16
MAX_NAME_BYTES, MAX_STRING_BYTES, MAX_ELEMENTS = 1 << 16, 64 << 20, 1 << 22
MAX_DIMENSIONS, MAX_ALIGNMENT, MAX_FILES = 4, 1 << 20, 999
_REDOWNLOAD = "download the file again"


@dataclass(frozen=True, slots=True)
class BlockType:
    """How values are stored: `num_values` of a row in a block of `num_bytes`."""

    name: str
    num_values: int
    num_bytes: int


# By ids in files. Source: `src/ggml-common.h` of ggml.
BLOCK_TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    24: BlockType("I8", 1, 1),
    25: BlockType("I16", 1, 2),
    26: BlockType("I32", 1, 4),
    27: BlockType("I64", 1, 8),
    28: BlockType("F64", 1, 8),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
    40: BlockType("NVFP4", 64, 36),
    41: BlockType("Q1_0", 128, 18),
    42: BlockType("Q2_0", 64, 18),
}
EIGHT_BITS = BLOCK_TYPES[8]
# Q4_0 and IQ4_NL in the order of one processor's registers, as files of late 2024 had them.
_WITHDRAWN = (4, 5, 31, 32, 33, 36, 37, 38)

_SCALARS = {
    0: Struct("<B"), 1: Struct("<b"), 2: Struct("<H"), 3: Struct("<h"), 4: Struct("<I"),
    5: Struct("<i"), 6: Struct("<f"), 7: Struct("<B"), 10: Struct("<Q"), 11: Struct("<q"),
    12: Struct("<d"),
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9
_U32, _I32, _U64, _I64 = _SCALARS[4], _SCALARS[5], _SCALARS[10], _SCALARS[11]

# A number, a flag, a text, an array of numbers or flags, or a list of texts.
GgufValue: TypeAlias = int | float | bool | str | memoryview | list[str]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file: `shape` as torch has it, rows first; `start`: where its bytes begin."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    file: Path
    start: int

    @property
    def num_bytes(self) -> int:
        """Bytes of its data."""
        return prod(self.shape) // self.type.num_values * self.type.num_bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Keys and tensors of a model: the keys of its first file, the tensors of all its files."""

    keys: Mapping[str, GgufValue]
    tensors: Mapping[str, GgufTensor]
    files: tuple[Path, ...]


def read_gguf(path: Path, *, has_texts: bool = True) -> GgufHeader:
    """Read the header of a model's file, and those of the others if it is split; `path` may be any
    of them. Without `has_texts` lists of texts are left empty: a vocabulary takes most of the time.

    Raises: as `open_model_file`; CheckpointError for a header that is broken or contradicts itself
    or its file, and for a split model of which a file is missing.
    """
    files = split_files(path)
    first = files[0]
    keys, tensors = _read_part(first, len(files), has_texts)
    count = keys.get("split.count", 0)
    if not isinstance(count, int) or not 0 <= count <= MAX_FILES:
        raise _error(first, f"it claims to be split in {count!r:.40} files")
    if count < 2:
        return GgufHeader(keys, tensors, (first,))
    if len(files) != count:
        raise _error(
            first,
            f"it is one of {count} files, which must be named like NAME-00001-of-{count:05}.gguf",
        )
    if keys.get("split.no") != 0:
        raise _error(first, f"by its name it is the first file, but it says {keys.get('split.no')}")
    for number, file in enumerate(files[1:], 1):
        others, more = _read_part(file, count, has_texts)
        if others.get("split.no") != number or others.get("split.count") != count:
            raise _error(file, f"it is not file {number + 1} of {count}")
        for name in more:
            if name in tensors:
                raise _error(file, f"tensor {name!r:.120} is in {tensors[name].file.name} too")
        tensors |= more
    if keys.get("split.tensors.count") != len(tensors):
        raise _error(
            first,
            f"its files hold {len(tensors):,} tensors, not "
            f"{keys.get('split.tensors.count')!r:.40} as it says",
        )
    return GgufHeader(keys, tensors, files)


def holds_header(path: Path) -> bool:
    """Whether the beginning of a file, as far as it has been fetched, holds all of its header.

    Raises: as `open_model_file`; CheckpointError for a header that is broken.
    """
    try:
        with _mapped(path) as data:
            _Reader(path, data, has_texts=False).listed()
    except _CutError:
        return False
    return True


_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def split_files(path: Path) -> tuple[Path, ...]:
    """All files of a model as the name of one of them tells, the first one first."""
    found = _SPLIT.fullmatch(path.name)
    if found is None or not 1 <= int(found[3]) <= MAX_FILES:
        return (path,)
    count = int(found[3])
    return tuple(path.with_name(f"{found[1]}-{i + 1:05}-of-{count:05}.gguf") for i in range(count))


def _read_part(
    path: Path, count: int, has_texts: bool
) -> tuple[dict[str, GgufValue], dict[str, GgufTensor]]:
    """One of the `count` files of a model. Raises: as `read_gguf`, and where it is missing."""
    if count > 1 and not os.path.lexists(path):
        raise CheckpointError(
            f"{path.name} is missing, one of the {count} files of the model",
            where=str(path),
            hint="put it beside the others",
        )
    with _mapped(path) as data:
        return _Reader(path, data, has_texts).read()


def _mapped(path: Path) -> mmap.mmap:
    with open_model_file(path) as file:
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise _error(path, "it is empty") from error


class _CutError(CheckpointError):
    """The data end before the header does."""


class _Reader:
    """Reads one header from its beginning to its end."""

    def __init__(self, path: Path, data: mmap.mmap, has_texts: bool) -> None:
        self._path, self._data, self._at, self._has_texts = path, data, 0, has_texts
        self._end = min(len(data), MAX_HEADER_BYTES)

    def read(self) -> tuple[dict[str, GgufValue], dict[str, GgufTensor]]:
        """Keys, and tensors with their places."""
        keys, tensors, offsets = self.listed()
        return keys, dict(self._placed(tensors, offsets, self._alignment(keys)))

    def listed(self) -> tuple[dict[str, GgufValue], dict[str, GgufTensor], list[int]]:
        """Keys, and tensors with their offsets, whether or not the file holds their data."""
        try:
            num_tensors, num_keys = self._begin()
            keys = dict[str, GgufValue]()
            for _ in range(num_keys):
                name = self._text(MAX_NAME_BYTES, "the name of a key")
                if name in keys:
                    raise self._error(f"it has key {name!r:.120} twice")
                keys[name] = self._value(name)
            tensors = dict[str, GgufTensor]()
            offsets = list[int]()
            for _ in range(num_tensors):
                tensor, offset = self._tensor()
                if tensor.name in tensors:
                    raise self._error(f"it has tensor {tensor.name!r:.120} twice")
                tensors[tensor.name] = tensor
                offsets.append(offset)
        except StructError as error:
            raise self._cut() from error
        return keys, tensors, offsets

    def _begin(self) -> tuple[int, int]:
        if self._data[:4] != MAGIC:
            raise self._error(f"it does not begin with {MAGIC.decode()}")
        self._at = 4
        version = self._number(_U32)
        if version and version & 0xFFFF == 0:
            raise UnsupportedModelError(
                f"{self._path.name} is big-endian",
                where=str(self._path),
                hint="a file for little-endian machines",
            )
        if version not in _VERSIONS:
            raise UnsupportedModelError(
                f"{self._path.name} has version {version} of GGUF, and only 2 and 3 can be read",
                where=str(self._path),
                hint="convert the model again with a newer llama.cpp",
            )
        num_tensors, num_keys = self._number(_I64), self._number(_I64)
        for what, count, most in (
            ("tensors", num_tensors, MAX_TENSORS),
            ("keys", num_keys, MAX_KEYS),
        ):
            if not 0 <= count <= most:
                raise self._error(f"it claims {count:,} {what}; the limit is {most:,}")
        return num_tensors, num_keys

    def _value(self, name: str) -> GgufValue:
        kind = self._number(_I32)
        if kind == _STRING:
            return self._text(MAX_STRING_BYTES, f"the text of {name!r:.120}")
        if kind == _ARRAY:
            return self._array(name)
        if kind not in _SCALARS:
            raise self._error(f"key {name!r:.120} has the unknown type {kind}")
        value: int | float = self._number(_SCALARS[kind])
        if kind != _BOOL:
            return value
        if value not in (0, 1):
            raise self._error(f"key {name!r:.120} is neither true nor false")
        return value == 1

    def _array(self, name: str) -> GgufValue:
        kind, count = self._number(_I32), self._number(_U64)
        if count > MAX_ELEMENTS:
            raise self._error(
                f"key {name!r:.120} claims {count:,} values; the limit is {MAX_ELEMENTS:,}"
            )
        if kind == _STRING:
            return self._texts(count, name)
        if kind not in _SCALARS:
            raise self._error(f"key {name!r:.120} is a list of the unknown type {kind}")
        bytes_ = self._take(count * _SCALARS[kind].size)
        if kind == _BOOL and bytes_.strip(b"\0\1"):
            raise self._error(f"key {name!r:.120} has values that are neither true nor false")
        form: Any = "?" if kind == _BOOL else _SCALARS[kind].format[1:]
        return memoryview(bytes_).cast(form)

    def _texts(self, count: int, name: str) -> list[str]:
        """Hundreds of thousands of a vocabulary, so as little as possible is called for each."""
        data, at, end, unpack = self._data, self._at, self._end, _U64.unpack_from
        texts = list[str]()
        if not self._has_texts:
            for _ in range(count):
                at += 8 + unpack(data, at)[0]
            self._at = at
            if at > end:
                raise self._cut()
            return texts
        try:
            for _ in range(count):
                start = at + 8
                at = start + unpack(data, at)[0]
                if at > end:
                    raise self._cut()
                texts.append(data[start:at].decode())
        except UnicodeDecodeError as error:
            raise self._error(f"a text of {name!r:.120} is not valid UTF-8") from error
        self._at = at
        return texts

    def _alignment(self, keys: Mapping[str, GgufValue]) -> int:
        alignment = keys.get("general.alignment", 32)
        if (
            type(alignment) is not int
            or not 1 <= alignment <= MAX_ALIGNMENT
            or alignment & (alignment - 1)
        ):
            raise self._error(
                f"general.alignment is {alignment!r:.40}, no power of two up to {MAX_ALIGNMENT:,}"
            )
        return alignment

    def _tensor(self) -> tuple[GgufTensor, int]:
        name = self._text(MAX_NAME_BYTES, "the name of a tensor")
        told = f"tensor {name!r:.120}"
        num_dimensions = self._number(_U32)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._error(f"{told} has {num_dimensions:,} dimensions")
        sizes = [self._number(_I64) for _ in range(num_dimensions)]
        kind, offset = self._number(_I32), self._number(_U64)
        if any(size < 1 for size in sizes) or prod(sizes) >= 1 << 48:
            raise self._error(f"{told} has the sizes {sizes}")
        if kind in _WITHDRAWN:
            raise UnsupportedModelError(
                f"{told} has a type that llama.cpp has withdrawn ({kind})",
                where=str(self._path),
                hint="convert the model again: Q4_0 takes its place",
            )
        if kind not in BLOCK_TYPES:
            raise self._error(f"{told} has the unknown type {kind}")
        block = BLOCK_TYPES[kind]
        if sizes[0] % block.num_values:
            raise self._error(
                f"{told} has rows of {sizes[0]:,} values, which are no whole blocks of {block.name}"
            )
        return GgufTensor(name, block, tuple(reversed(sizes)), self._path, 0), offset

    def _placed(
        self, tensors: Mapping[str, GgufTensor], offsets: list[int], alignment: int
    ) -> Iterator[tuple[str, GgufTensor]]:
        """The tensors with their places, which must follow each other."""
        base, size, end = _aligned(self._at, alignment), len(self._data), 0
        for (name, tensor), offset in zip(tensors.items(), offsets, strict=True):
            if offset != _aligned(end, alignment):
                raise self._error(f"tensor {name!r:.120} does not follow the one before it")
            end = offset + tensor.num_bytes
            if base + end > size:
                raise self._error(
                    f"tensor {name!r:.120} ends behind byte {base + end:,}, the file at {size:,}: "
                    "it is cut short"
                )
            yield name, replace(tensor, start=base + offset)
        if tensors and size > base + _aligned(end, alignment):
            raise self._error(f"it holds {size - base - end:,} bytes that no tensor has")

    def _text(self, most: int, what: str) -> str:
        length = self._number(_U64)
        if length > most:
            raise self._error(f"{what} claims {length:,} bytes; the limit is {most:,}")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError as error:
            raise self._error(f"{what} is not valid UTF-8") from error

    def _number(self, form: Struct) -> Any:
        [value] = form.unpack_from(self._data, self._at)
        self._at += form.size
        if self._at > self._end:
            raise self._cut()
        return value

    def _take(self, count: int) -> bytes:
        start, self._at = self._at, self._at + count
        if self._at > self._end:
            raise self._cut()
        return self._data[start : self._at]

    def _cut(self) -> CheckpointError:
        if self._end < len(self._data):
            return self._error(f"its header is larger than {MAX_HEADER_BYTES:,} bytes")
        problem = "it is cut short: its header is not complete"
        return _error(self._path, problem, _CutError)

    def _error(self, problem: str) -> CheckpointError:
        return _error(self._path, problem)


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def _error(
    path: Path, problem: str, kind: type[CheckpointError] = CheckpointError
) -> CheckpointError:
    return kind(f"broken GGUF file {path.name}: {problem}", where=str(path), hint=_REDOWNLOAD)
