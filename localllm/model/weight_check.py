"""Check the headers of a checkpoint's files against its config, before any weight is read."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.errors import CheckpointError
from localllm.model.architecture import EMBEDDING, HEAD, TABLE, Architecture, layer_name
from localllm.model.gguf.tensors import GgufInfo
from localllm.model.join import CLUSTER_TOKENS, DRAFTED
from localllm.model.packed.scheme import Scheme, StoredTensor
from localllm.model.per_layer_inputs import TABLE as PER_LAYER_TABLE
from localllm.model.stacked_experts import unstack
from localllm.model.stored_names import own_tensors
from localllm.model.tensor_files import read_headers
from localllm.model.tensor_info import TensorInfo

if TYPE_CHECKING:
    import torch

    from localllm_kernels.compiling.traits import WeightLayout

LOADABLE_DTYPES = ("F32", "F16", "BF16")
# Buffers that old exports stored with the weights, although they follow from the config; and scales
# of keys, values, inputs and outputs that other programs round, and ours does not.
_IGNORED = re.compile(
    r".*\.(rotary_emb\.(inv_freq|cos_cached|sin_cached)"
    r"|((q|k|v|kv|qkv)_proj\.|attn\.)?(q|k|v|kv|prob)_(scale|zero_point)"
    r"|(input|output|activation)_(scale|zero_point|global_scale))"
)
# What stands beside a plain weight that is to be rounded as it is used.
_OF_ROUNDING = re.compile(r".*\.weight_(scale|zero_point|g_idx|scale_inv)")
# What files may hold of a tied head, which is read from the table.
_OF_HEAD = f"{HEAD}.weight", f"{HEAD}.weight_scale"
# Tables of which rows are read.
_TABLES = EMBEDDING, PER_LAYER_TABLE
# Tensors with token ids, and their dtypes.
_IDS, _INTEGERS = (DRAFTED, CLUSTER_TOKENS), ("I32", "I64")


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """A quantized linear in the files: its scheme, its tensors by suffix, and the layout that
    decides its kernels. `num_dense`: the values of one that is dequantized as it is loaded, see
    LinearGroup; 0 for others.
    """

    scheme: Scheme
    parts: Mapping[str, TensorInfo]
    layout: "WeightLayout"
    num_dense: int = 0

    @property
    def packed_bytes(self) -> int:
        """Bytes in the files of one that stays quantized."""
        return 0 if self.num_dense else sum(info.num_bytes for info in self.parts.values())

    @property
    def resident_bytes(self) -> float:
        """Upper bound on the bytes of one that stays quantized, once it is loaded."""
        return self.packed_bytes * self.scheme.resident_share

    def read_bytes(self, item_bytes: int) -> int:
        """Bytes that a product reads; plain values take `item_bytes` each."""
        return round(self.packed_bytes * self.scheme.read_share) + self.num_dense * item_bytes


@dataclass(frozen=True, slots=True)
class WeightMap:
    """Where each tensor is: plain ones by tensor name, quantized linears by linear name."""

    plain: Mapping[str, TensorInfo]
    quantized: Mapping[str, StoredLinear]

    @property
    def files(self) -> set[Path]:
        """The files that hold them."""
        parts = (info for linear in self.quantized.values() for info in linear.parts.values())
        return {info.file for info in (*self.plain.values(), *parts)}

    @property
    def kinds(self) -> set[str]:
        """The kinds of the packed weights that stay packed."""
        return {each.layout.kind for each in self.quantized.values() if not each.num_dense}

    def find_quantized(self, linear: str) -> StoredLinear | None:
        """A quantized linear; of a tied head the table. None if it is plain."""
        if linear == HEAD and f"{HEAD}.weight" not in self.plain and HEAD not in self.quantized:
            linear = TABLE
        return self.quantized.get(linear)

    def layouts(self, linears: Iterable[str]) -> "set[WeightLayout | None]":
        """The layouts of these linears, which decide the kernels; None for a plain one."""
        kept = {name: each for name, each in self.quantized.items() if not each.num_dense}
        return {kept[name].layout if name in kept else None for name in linears}

    def linear_bytes(self, linear: str, item_bytes: int) -> int:
        """Bytes of a loaded linear without its bias; plain values take `item_bytes` each."""
        if linear in self.quantized:
            found = self.quantized[linear]
            return int(found.resident_bytes) + found.num_dense * item_bytes
        return prod(self.plain[f"{linear}.weight"].shape) * item_bytes

    def unread_bytes(self, dtype: "torch.dtype") -> int:
        """Bytes of a table of embeddings that stays in its file: one beside a head, in blocks or
        in the `dtype` of the model. Only the rows of tokens in use are read.
        """
        if HEAD not in self.quantized and f"{HEAD}.weight" not in self.plain:
            return 0
        in_blocks = self.quantized.get(TABLE)
        if in_blocks is not None:
            return round(in_blocks.packed_bytes)
        table = self.plain.get(EMBEDDING)
        return table.num_bytes if table is not None and table.has(dtype) else 0

    def resident_bytes(self, item_bytes: int) -> int:
        """Bytes of the loaded weights; values of plain tensors take `item_bytes` each."""
        packed = sum(linear.resident_bytes for linear in self.quantized.values())
        num_plain = sum(prod(info.shape) for info in self.plain.values())
        num_plain += sum(linear.num_dense for linear in self.quantized.values())
        return int(packed) + num_plain * item_bytes


def check_weights(files: list[Path], architecture: Architecture) -> WeightMap:
    """Check the files' headers against the config; nothing is loaded yet.

    Raises: CheckpointError naming a tensor that is missing, left over, in two files, of an
    unsupported dtype, or of a shape that contradicts the config; UnsupportedModelError for an
    unknown quantization.
    """
    found = own_tensors(read_headers(files), architecture)
    further = further_tensors(found, architecture)
    own = {name: info for name, info in found.items() if name not in further}
    return check_tensors(unstack(own, architecture), architecture)


def further_tensors(found: Collection[str], architecture: Architecture) -> set[str]:
    """The names of layers that predict further tokens, beside the model's own; see mtp.py."""
    behind = f"{layer_name(architecture.num_layers)}."
    has_behind = f"{behind}eh_proj.weight" in found or f"{behind}enorm.weight" in found
    beginnings = ("mtp.", behind) if has_behind else ("mtp.",)
    return {name for name in found if name.startswith(beginnings)}


def check_tensors(
    found: Mapping[str, TensorInfo],
    architecture: Architecture,
    stored_name: Callable[[str], str] = str,
) -> WeightMap:
    """Check tensors by own names; `stored_name`: those in files. Raises: as `check_weights`."""
    expected = {
        name: StoredTensor((shape,), _INTEGERS if name in _IDS else LOADABLE_DTYPES)
        for name, shape in architecture.tensors().items()
    }
    shapes, dense = architecture.linears(), architecture.dense_linears()
    for table in _TABLES:
        if table in expected:
            [of_table] = expected[table].shapes
            shapes[table.removesuffix(".weight")] = of_table[0], of_table[1]
    quantized = {}
    claimed: set[str] = set()
    for linear, scheme in _find_schemes(found, architecture, shapes).items():
        stored = _stored_tensors(linear, scheme, shapes[linear])
        of_linear = {f"{linear}.{name}": each for name, each in stored.items()}
        parts = _collect(found, of_linear, architecture, stored_name)
        quantized[linear] = StoredLinear(
            scheme,
            {name.removeprefix(f"{linear}."): info for name, info in parts.items()},
            scheme.layout(shapes[linear][1]),
            prod(shapes[linear]) if linear in dense else 0,
        )
        claimed |= parts.keys()
        del expected[f"{linear}.weight"]
        # Some tools write a bias of zeros where the architecture has none.
        bias = StoredTensor((shapes[linear][:1],), LOADABLE_DTYPES, is_optional=True)
        expected.setdefault(f"{linear}.bias", bias)
    plain = _collect(found, expected, architecture, stored_name)
    unread, is_quantized = architecture.unread(), architecture.quantization is not None
    for name, info in found.items():
        is_tied_head = name in _OF_HEAD and architecture.tie_word_embeddings
        is_unread = name.rpartition(".")[0] in unread
        is_known = name in plain or name in claimed or is_tied_head or is_unread
        is_rounding = is_quantized and _OF_ROUNDING.fullmatch(name) is not None
        is_rounding = is_rounding and f"{name.rpartition('.')[0]}.weight" in plain
        if not is_known and not is_rounding and not _IGNORED.fullmatch(name):
            raise CheckpointError(
                f"tensor {info.name!r} is left over: {architecture.name} has no place for it",
                where=str(info.file),
                hint="config.json may name the wrong architecture or too few layers",
            )
    return WeightMap(plain, quantized)


def _stored_tensors(linear: str, scheme: Scheme, shape: tuple[int, int]) -> dict[str, StoredTensor]:
    try:
        return scheme.stored(*shape)
    except ValueError as error:
        raise CheckpointError(
            f"{linear} cannot be quantized as config.json says: {error}",
            where="config.json: quantization_config",
        ) from error


def _collect(
    found: Mapping[str, TensorInfo],
    expected: Mapping[str, StoredTensor],
    architecture: Architecture,
    stored_name: Callable[[str], str],
) -> dict[str, TensorInfo]:
    tensors = {}
    for name, tensor in expected.items():
        if name in found:
            _check_tensor(found[name], tensor)
            tensors[name] = found[name]
        elif not tensor.is_optional:
            raise CheckpointError(
                f"tensor {stored_name(name)!r} is missing ({architecture.name} needs it)",
                where=_describe({info.file for info in found.values()}),
                hint="download the model again",
            )
    return tensors


def _find_schemes(
    found: Mapping[str, TensorInfo], architecture: Architecture, linears: Iterable[str]
) -> dict[str, Scheme]:
    if architecture.quantization is None:
        return {}
    # Imported here: it needs torch, which takes seconds to import.
    from localllm.model.quantization_config import read_quantization

    quantization = read_quantization(architecture.quantization)
    if quantization is None:
        return {}
    schemes = {}
    # The config calls linears as the files do.
    stored = {name.rpartition(".")[0]: info.name.rpartition(".")[0] for name, info in found.items()}
    for linear in linears:
        weight = found.get(f"{linear}.weight")
        if weight is not None and weight.dtype in LOADABLE_DTYPES:
            continue
        known = quantization.schemes_of(stored.get(linear, linear))
        marked = [
            each
            for each in known
            if (marker := found.get(f"{linear}.{each.marker}")) and each.takes(marker.dtype)
        ]
        is_missing = f"{linear}.weight" not in found and f"{linear}.weight" not in _TABLES
        if known and (marked or is_missing):
            schemes[linear] = (marked or known)[0]
    return schemes


def _check_tensor(info: TensorInfo, expected: StoredTensor) -> None:
    if info.shape not in expected.shapes:
        raise CheckpointError(
            f"tensor {info.name!r} has shape {list(info.shape)}, "
            f"config.json asks for {list(expected.shapes[0])}",
            where=str(info.file),
            hint="config.json and weights are from different models or revisions",
        )
    # Blocks are dequantized as they are loaded where no product takes them.
    if info.dtype not in expected.dtypes and not isinstance(info, GgufInfo):
        raise CheckpointError(
            f"tensor {info.name!r} has dtype {info.dtype}; can load {', '.join(expected.dtypes)}",
            where=str(info.file),
        )


def _describe(files: set[Path]) -> str:
    names = sorted(file.name for file in files)
    return ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
