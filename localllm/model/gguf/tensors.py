"""A GGUF file's tensors by the names that the loader knows, and their bytes as they lie in it."""

import mmap
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.files.gguf import MAGIC, GgufTensor, read_gguf
from localllm.files.model_file import open_model_file
from localllm.model.gguf.families import USUAL, GgufFamily, family_of
from localllm.model.gguf.keys import GgufKeys
from localllm.model.gguf.rope import FACTORS, LONG, SHORT
from localllm.model.tensor_info import Part, TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
# What config_of has read.
_OF_CONFIG = {FACTORS, SHORT, LONG}
_LAYER = re.compile(r"blk\.(\d{1,4})\.([a-z0-9_]+)(\.weight|\.bias|\.scale)?")


@dataclass(frozen=True, slots=True)
class GgufInfo(TensorInfo):
    """A tensor of a GGUF file; `dtype`: the name of its type, `shape`: as torch has it, rows first.

    `stored`: where it lies; `is_raised`: it is stored plus 1.
    """

    stored: GgufTensor | None = None
    is_raised: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of its data, in blocks."""
        assert self.stored is not None
        parts = self.stored.shape[0] if self.part is not None else 1
        return self.stored.num_bytes // parts

    def read(self, handle: "Tensor") -> "Tensor":
        """The tensor: of floats in its dtype, else uint8 [..., bytes of a row]; a view of `handle`,
        see `open_gguf`.
        """
        import torch

        assert self.stored is not None
        first = self.stored.start + (self.part.index * self.num_bytes if self.part else 0)
        raw = handle[first : first + self.num_bytes]
        plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        if self.dtype not in plain:
            return raw.view(*self.shape[:-1], -1)
        if first % plain[self.dtype].itemsize:
            raw = raw.clone()  # of a file without alignment
        values = raw.view(plain[self.dtype]).view(self.shape)
        return values - 1 if self.is_raised else values


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF files do, whatever its name. Raises: as `open_model_file`."""
    with open_model_file(path) as file:
        return file.read(len(MAGIC)) == MAGIC


def read_gguf_infos(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a model, by the loader's names.

    Raises: as `read_gguf` and GgufKeys; CheckpointError for a tensor that has no place in the
    architecture.
    """
    header = read_gguf(path)
    keys = GgufKeys(header)
    family = family_of(keys)
    assert family is not None, "config_of comes first"
    found = dict[str, TensorInfo]()
    for tensor in header.tensors.values():
        if tensor.name not in _OF_CONFIG:
            for name, info in _infos(tensor, family):
                found[name] = info
    return found


def _infos(tensor: GgufTensor, family: GgufFamily) -> Iterator[tuple[str, GgufInfo]]:
    """A tensor by its own name; one of all experts as a tensor for each."""
    name = own_name(tensor.name, family)
    is_raised = family.has_raised_norms and tensor.name.endswith("norm.weight")
    whole = GgufInfo(
        tensor.name, tensor.file, tensor.type.name, tensor.shape, None, tensor, is_raised
    )
    if "{}" not in name:
        yield name, whole
        return
    count, *shape = tensor.shape
    for number in range(count):
        part = Part(number, 0, 1, shape[0] if shape else 1, False)
        yield (
            name.format(number),
            GgufInfo(tensor.name, tensor.file, tensor.type.name, tuple(shape), part, tensor),
        )


def own_name(name: str, family: GgufFamily) -> str:
    """The loader's name of a tensor, with "{}" for the number of an expert; the same name if it has
    no place, to be refused when the others are checked.
    """
    base, dot, ending = name.rpartition(".")
    if base in _TOP:
        return f"{_TOP[base]}{dot}{ending}"
    found = _LAYER.fullmatch(name)
    if found is None:
        return name
    layer, kind, ending = found[1], found[2], found[3] or ""
    own = family.names.get(f"{kind}{ending}")
    if own is None:
        inner = family.names.get(kind) or USUAL.get(kind)
        if inner is None:
            return name
        own = inner + ending
    return f"model.layers.{layer}.{own}"


@contextmanager
def open_gguf(path: Path) -> Iterator["Tensor"]:
    """All bytes of a file, uint8, mapped as long as a view of them is in use. Raises: as
    `open_model_file`.
    """
    import torch

    with open_model_file(path) as file:
        # A map that could be written, privately, which nobody does: torch warns of others.
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    yield torch.frombuffer(mapped, dtype=torch.uint8)
