"""A GGUF file's tensors by the names that the loader knows, and their bytes as they lie in it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from localllm.files.gguf import BLOCK_TYPES, MAGIC, BlockType, GgufTensor, read_gguf
from localllm.files.model_file import open_model_file
from localllm.model.gguf.families import family_of
from localllm.model.gguf.family import GgufFamily
from localllm.model.gguf.keys import GgufKeys
from localllm.model.gguf.names import TOP, USUAL
from localllm.model.gguf.rope import FACTORS, FREQUENCIES, LONG, SHORT
from localllm.model.tensor_info import ITEM_BYTES, MAX_TENSORS, TensorInfo, plain_view

if TYPE_CHECKING:
    from torch import Tensor

# What config_of has read.
_OF_CONFIG = {FACTORS, SHORT, LONG}
_LAYER = re.compile(r"blk\.(\d{1,4})\.([a-z0-9_.]+?)(\.weight|\.bias|\.scale|\.input_scale)?")

# Endings of the scales of a whole tensor, which some types of blocks have beside them.
_OF_TENSORS = (".scale", ".input_scale")

# What a reader of a tensor undoes: a norm's weight is stored plus 1; a decay as -exp of what the
# checkpoint holds. Its logarithm is that again but for the last bit, and one formula in the engine
# serves all files. "paired": in each head of queries and keys, values that turn together stand side
# by side; the loader takes them so, and `quantize` writes them as checkpoints do.
Change = Literal["raised", "decay", "paired"]


@dataclass(frozen=True, slots=True)
class GgufInfo(TensorInfo):
    """A tensor of a GGUF file, or rows of one; `dtype`: the name of its type, `shape`: as the
    loader has it, rows first.

    `type`: how its values are stored; `change`: what to undo; `head_dim`: rows of a head, of a
    "paired" one.
    """

    type: BlockType = BLOCK_TYPES[0]
    change: Change | None = None
    head_dim: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of its data, in blocks."""
        return prod(self.shape) // self.type.num_values * self.type.num_bytes

    def read(self, data: "Tensor") -> "Tensor":
        """The tensor: of floats in its dtype, else uint8 [..., bytes of a row]; a view of `data`,
        all bytes of its file, if nothing is undone.
        """
        values = self._stored(data)
        match self.change:
            case "raised":
                return values - 1
            case "decay":
                return values.neg().log()
            case "paired":
                pairs = values.view(-1, self.head_dim // 2, 2, *values.shape[1:])
                return pairs.transpose(1, 2).reshape(values.shape)
            case _:
                return values

    def _stored(self, data: "Tensor") -> "Tensor":
        if self.dtype in ITEM_BYTES:
            return plain_view(data, self.start, self.dtype, self.shape)
        raw = data[self.start : self.start + self.num_bytes]
        return raw.view(*self.shape[:-1], -1)


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF files do, whatever its name. Raises: as `open_model_file`."""
    with open_model_file(path) as file:
        return file.read(len(MAGIC)) == MAGIC


def read_gguf_infos(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a model, by the loader's names.

    Raises: as `read_gguf` and GgufKeys; CheckpointError for two tensors of one name.
    """
    header = read_gguf(path, has_texts=False)
    keys = GgufKeys(header)
    family = family_of(keys)
    assert family is not None, "config_of comes first"
    found = dict[str, TensorInfo]()
    for tensor in header.tensors.values():
        if tensor.name in _OF_CONFIG or FREQUENCIES.fullmatch(tensor.name):
            continue
        for name, info in _infos(tensor, family):
            if name in found:
                raise keys.error(f"tensors {found[name].name!r} and {tensor.name!r} are the same")
            found[name] = info
        if len(found) > MAX_TENSORS:
            raise keys.error(f"it holds over {MAX_TENSORS:,} tensors")
    return found


def _infos(tensor: GgufTensor, family: GgufFamily) -> Iterator[tuple[str, GgufInfo]]:
    """A tensor by its own name; one of all experts as a tensor for each."""
    names = own_names(tensor.name, family)
    own = _in_own_shape(tensor, _change_of(tensor.name, family))
    if tensor.name.endswith(_OF_TENSORS) and names[0].endswith(_OF_TENSORS):
        yield from _scales(own, names)
        return
    if "{}" not in names[0] or len(own.shape) < 2 or own.shape[0] > MAX_TENSORS:
        yield from zip(names, _rows(own, len(names)), strict=True)
        return
    for number, expert in enumerate(_rows(own, own.shape[0])):
        # Without the dimension of experts, of which this holds one.
        expert = replace(expert, shape=expert.shape[1:])
        for name, part in zip(names, _rows(expert, len(names)), strict=True):
            yield name.format(number), part


def _scales(own: GgufInfo, names: tuple[str, ...]) -> Iterator[tuple[str, GgufInfo]]:
    """The scale of a whole tensor, for each of its parts; or those of all experts."""
    if "{}" not in names[0]:
        yield from ((name, own) for name in names)
        return
    for number, expert in enumerate(_rows(own, min(prod(own.shape), MAX_TENSORS) or 1)):
        yield from ((name.format(number), expert) for name in names)


def _rows(info: GgufInfo, count: int) -> Iterator[GgufInfo]:
    """A tensor in `count` equal parts, one below the other; those of one that cannot be parted so
    are refused for their shape.
    """
    first, *rest = info.shape
    part = replace(info, shape=(first // count, *rest))
    for number in range(count):
        yield replace(part, start=info.start + number * part.num_bytes)


def _change_of(name: str, family: GgufFamily) -> Change | None:
    if name.endswith(".ssm_a"):
        return "decay"
    is_norm = name.endswith("norm.weight") and not name.endswith(".ssm_norm.weight")
    return "raised" if family.has_raised_norms and is_norm else None


def _in_own_shape(tensor: GgufTensor, change: Change | None) -> GgufInfo:
    """A tensor in the shape that checkpoints have: the converter leaves out or adds dimensions."""
    shape, kind = tensor.shape, tensor.name.split(".", 2)[-1]
    if kind in ("ssm_conv1d.weight", "shortconv.conv.weight") and len(shape) == 2:
        shape = shape[0], 1, shape[1]
    elif kind in ("ssm_a", "ssm_d", "ssm_norm.weight"):
        shape = (prod(shape),)
    elif kind == "ffn_gate_inp_shexp.weight" and len(shape) == 1:
        shape = 1, shape[0]
    elif kind in ("attn_k_b.weight", "attn_v_b.weight") and len(shape) == 3:
        shape = shape[0] * shape[1], shape[2]
    return GgufInfo(
        tensor.name, tensor.file, tensor.type.name, shape, None, tensor.start, tensor.type, change
    )


def own_names(name: str, family: GgufFamily) -> tuple[str, ...]:
    """The loader's names of a tensor or of its parts, with "{}" for the number of an expert; the
    same name if it has no place, to be refused when the others are checked.
    """
    base, dot, ending = name.rpartition(".")
    top = family.top.get(base) or TOP.get(base)
    if top is not None:
        return (f"{top}{dot}{ending}",)
    found = _LAYER.fullmatch(name)
    if found is None:
        return (name,)
    layer, kind, ending = found[1], found[2], found[3] or ""
    own = family.names.get(f"{kind}{ending}")
    if own is None:
        own, inner = (), family.names.get(kind) or USUAL.get(kind)
        if inner is None:
            return (name,)
        own = tuple(f"{each}{ending}" for each in ((inner,) if isinstance(inner, str) else inner))
    return tuple(
        f"model.layers.{layer}.{each}" for each in ((own,) if isinstance(own, str) else own)
    )
