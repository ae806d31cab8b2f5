"""Load a model from a source of weights, streaming in one tensor at a time."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from localllm.errors import CheckpointError, UnsupportedModelError
from localllm.model.architecture import EMBEDDING, HEAD, LABELS, Architecture, layer_name
from localllm.model.blocks.block import Parts
from localllm.model.decoder import DecoderModel
from localllm.model.ends import ClusteredHead, Embedding, Head
from localllm.model.fused.choose import fuse_head, fuse_layers
from localllm.model.gguf.tensors import GgufInfo
from localllm.model.join import (
    BACK,
    CLUSTER_TOKENS,
    CLUSTERS,
    DRAFTED,
    FUSION,
    JOIN,
    DraftedAs,
    Fusion,
    Join,
    JoinSpec,
)
from localllm.model.layer import Layer
from localllm.model.linear import (
    DequantizedLinear,
    ExpertByExpert,
    FixedRows,
    HeadByHead,
    HeadsTogether,
    Linear,
    OrderedInputs,
    OrderedOutputs,
    Projection,
    SplitLinear,
    fuse,
    packed_linear,
)
from localllm.model.mapped_file import MappedFile
from localllm.model.norm import Norm, NormSpec
from localllm.model.packed.blocks import BlockWeight
from localllm.model.packed.gguf_blocks import BLOCKS, dequantize_blocks
from localllm.model.packed.int8 import Int8Weight
from localllm.model.packed.weight import PackedWeight
from localllm.model.per_layer_inputs import PROJECTION, TABLE, PerLayerInputs
from localllm.model.rope import RopeTable, RopeTables
from localllm.model.rope_config import RopeConfig
from localllm.model.weight_check import WeightMap
from localllm_kernels import TORCH_OPS, Ops
from localllm_kernels.linears import ExpertsProduct
from localllm_kernels.pointwise.gate import GateKind

logger = logging.getLogger(__name__)
# Of a tensor so much is copied at a time: it lies in memory twice. A larger one, as a table of
# embeddings, stays in its file where nothing has to be done to it.
_COPIED_BYTES = 32 << 20


class WeightSource(Protocol):
    """A source of weights: plain tensors by name, quantized linears by linear name."""

    def has_plain(self, name: str) -> bool:
        """Whether there is an unquantized tensor of that name."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of that tensor."""

    def plain(self, name: str) -> Tensor:
        """That tensor, in any float dtype on any device."""

    def place(self, name: str) -> tuple[str, str]:
        """That tensor's name where it comes from, and where that is, for messages."""

    @property
    def keeps_floats(self) -> bool:
        """Whether plain tensors stay as they are stored where the library multiplies with them so,
        whatever the model computes in: files that hold several types mean each of them.
        """
        return False

    def release(self) -> None:
        """Give back the memory of what was read; it may be read again."""
        return

    def has_quantized(self, linear: str) -> bool:
        """Whether the linear of that name is quantized."""

    def quantized(self, linear: str, device: torch.device) -> PackedWeight:
        """Its weight on `device`. Raises: CheckpointError where its parts are inconsistent."""


def dense_weight(source: WeightSource, name: str, dtype: torch.dtype) -> Tensor:
    """A tensor by its name in an unquantized checkpoint; dequantized if it is quantized."""
    linear = name.removesuffix(".weight")
    if source.has_quantized(linear):
        return source.quantized(linear, torch.device("cpu")).dequantize(dtype)
    return source.plain(name).to(dtype)


@dataclass(frozen=True, slots=True)
class CheckpointWeights(WeightSource):
    """The weights in a checkpoint's files, which are open."""

    weights: WeightMap
    files: Mapping[Path, MappedFile]

    def has_plain(self, name: str) -> bool:
        return name in self.weights.plain

    def shape(self, name: str) -> tuple[int, ...]:
        return self.weights.plain[name].shape

    def plain(self, name: str) -> Tensor:
        info = self.weights.plain[name]
        tensor = info.read(self.files[info.file].bytes)
        if tensor.dtype == torch.uint8 and info.dtype in BLOCKS:
            return dequantize_blocks(BLOCKS[info.dtype], tensor)
        return tensor

    def place(self, name: str) -> tuple[str, str]:
        info = self.weights.plain[name]
        return info.name, str(info.file)

    @property
    def keeps_floats(self) -> bool:
        # The norms at least are plain.
        return isinstance(next(iter(self.weights.plain.values()), None), GgufInfo)

    def release(self) -> None:
        if not self.keeps_floats:  # blocks are used where they lie, of other files little
            for file in self.files.values():
                file.release()

    def has_quantized(self, linear: str) -> bool:
        return linear in self.weights.quantized

    def quantized(self, linear: str, device: torch.device) -> PackedWeight:
        stored = self.weights.quantized[linear]
        parts = {
            suffix: info.read(self.files[info.file].bytes).contiguous().to(device)
            for suffix, info in stored.parts.items()
        }
        for suffix, tensor in parts.items():
            if not is_finite(tensor):
                info = stored.parts[suffix]
                raise _not_finite(info.name, str(info.file))
        try:
            return stored.scheme.read(parts)
        except ValueError as error:
            raise CheckpointError(
                f"the quantized weight of {linear!r} is invalid: {error}",
                where=str(stored.parts[stored.scheme.marker].file),
                hint="download the model again",
            ) from error


def load_model(
    source: WeightSource,
    architecture: Architecture,
    *,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
    deterministic: bool = False,
    expert_slots: int | None = None,
) -> DecoderModel:
    """Load a decoder's tensors, one at a time, into fused weights.

    `deterministic`: products give a row the same bits in any batch; `expert_slots`: experts of a
    layer that have a place on the device, None for all.

    Raises: CheckpointError for a quantized weight whose parts are inconsistent, and for a value
    that is not finite.
    """
    has_fixed_rows = deterministic and not ops.traits.rows_alike
    reader = WeightReader(
        source, dtype, device, ops, has_fixed_rows=has_fixed_rows, expert_slots=expert_slots
    )
    ropes = RopeTables(max_model_len, device)
    embedding = reader.embedding(architecture)
    layers = tuple(reader.layer(architecture, i, ropes) for i in range(architecture.num_layers))
    norm, head = reader.last_norm(architecture), reader.head(architecture, embedding)
    per_layer = reader.per_layer_inputs(architecture, ops)
    if reader.without_kernel:
        is_blocks = BlockWeight.kind in reader.without_kernel
        has_kernel_in_bf16 = is_blocks and device.type == "cpu" and dtype != torch.bfloat16
        logger.warning(
            "no kernel multiplies with %s here: they are dequantized for each product, which is "
            "slow%s",
            " and ".join(
                "GGUF blocks" if kind == BlockWeight.kind else f"{kind} weights"
                for kind in sorted(reader.without_kernel)
            ),
            "; try: --dtype bfloat16" if has_kernel_in_bf16 else "",
        )
    return DecoderModel(
        architecture=architecture,
        num_whole=architecture.last_state,
        embedding=embedding,
        layers=layers,
        norm=norm,
        head=head,
        ropes=ropes,
        ops=ops,
        per_layer=per_layer,
        labels=reader.read(LABELS) if architecture.num_labels else None,
        fused=fuse_layers(architecture, layers, norm, ops),
        looks=expert_slots is not None,
    )


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The weights of a head that drafts for a model, which its target need not be loaded for;
    `embedding`, `head`: None where they are the target's.
    """

    architecture: Architecture
    layers: tuple[Layer, ...]
    norm: Norm | None
    join: Join
    embedding: Embedding | None
    head: Head | ClusteredHead | None
    ropes: RopeTables

    def beside(self, target: DecoderModel) -> DecoderModel:
        """The head of `target`, with whose device and operators it was loaded."""
        embedding, scale = self.embedding, self.architecture.embedding_scale
        if embedding is None:
            embedding = target.embedding
            if scale != embedding.scale:
                embedding = embedding.scaled(scale)
        head = self.head or target.head
        fused = fuse_layers(self.architecture, self.layers, self.norm, target.ops)
        return DecoderModel(
            architecture=self.architecture,
            num_whole=self.architecture.last_state,
            embedding=embedding,
            layers=self.layers,
            norm=self.norm,
            head=head,
            ropes=self.ropes,
            ops=target.ops,
            join=self.join,
            fused=fused,
            fused_drafts=fuse_head(fused, self.layers, embedding, self.join, head),
        )


def load_head(
    source: WeightSource,
    architecture: Architecture,
    *,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
) -> HeadWeights:
    """Load a head that drafts for a model. On a CPU its linears are rounded to 8 bits, which are
    read and multiplied faster: its errors cost drafts, not text. `architecture`: see mtp.py,
    eagle.py and assistant.py.

    Raises: as `load_model`.
    """
    reader = WeightReader(source, dtype, device, ops, rounds=device.type == "cpu")
    spec = architecture.join
    assert spec is not None
    ropes = RopeTables(max_model_len, device)
    return HeadWeights(
        architecture,
        tuple(reader.layer(architecture, i, ropes) for i in range(architecture.num_layers)),
        reader.last_norm(architecture) if spec.has_last_norm else None,
        reader.join(spec),
        reader.embedding(architecture) if spec.has_embedding else None,
        reader.drafting_head(architecture),
        ropes,
    )


@contextmanager
def open_source(weights: WeightMap) -> Iterator[CheckpointWeights]:
    """The weights in files that `check_weights` has passed, open while the `with` block runs."""
    source = CheckpointWeights(weights, {file: MappedFile(file) for file in weights.files})
    yield source
    source.release()


@contextmanager
def open_weights(
    weights: WeightMap, dtype: torch.dtype, device: torch.device, ops: Ops = TORCH_OPS
) -> Iterator["WeightReader"]:
    """A reader for the files of `weights`, open while the `with` block runs."""
    with open_source(weights) as source:
        yield WeightReader(source, dtype, device, ops)


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite, that is neither NaN nor infinite; integers always are.

    One pass over the memory finds the least and the greatest value; a NaN becomes both.
    """
    if not tensor.dtype.is_floating_point:
        return True
    if tensor.dtype == torch.float8_e4m3fn:
        # It has no infinity, and two NaNs: 0x7f, the greatest int8, and 0xff, the greatest uint8.
        signed, unsigned = (tensor.view(kind).max() for kind in (torch.int8, torch.uint8))
        return int(signed) != 0x7F and int(unsigned) != 0xFF
    return bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


def _not_finite(name: str, where: str) -> CheckpointError:
    return CheckpointError(
        f"tensor {name!r} holds values that are not finite (NaN or infinity)",
        where=where,
        hint="download the model again; if that does not help, the checkpoint is broken",
    )


def _too_large(name: str, where: str, dtype: torch.dtype) -> CheckpointError:
    kind = str(dtype).removeprefix("torch.")
    return CheckpointError(
        f"tensor {name!r} holds values that are too large for {kind}",
        where=where,
        hint="--dtype bfloat16 or --dtype float32",
    )


class WeightReader(Parts):
    """Reads tensors, linears and layers by name; stacks the rows of several linears.

    Plain tensors are read in `dtype`. `has_fixed_rows`: see `FixedRows`; `expert_slots`: see
    `load_model`; `rounds`: plain linears become 8-bit ones where the library multiplies these.
    """

    def __init__(
        self,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        ops: Ops,
        *,
        has_fixed_rows: bool = False,
        expert_slots: int | None = None,
        rounds: bool = False,
    ) -> None:
        self._rounds = rounds
        self._expert_slots = expert_slots
        self._has_fixed_rows = has_fixed_rows
        self._source = source
        self._dtype, self._device = dtype, device
        # Kinds of weights that are dequantized for each product.
        self.without_kernel = set[str]()
        self._linears, self._has_wide_rows = ops.linears, ops.traits.wide_rows
        self._keeps_floats = self._has_wide_rows and source.keeps_floats
        self._row_unit = ops.traits.row_unit
        # Of a layer: what its names begin with, and the rotations.
        self._prefix, self._ropes = "", RopeTables(0, device)

    def read(self, *names: str, dtype: torch.dtype | None = None) -> Tensor:
        """One plain tensor, or several stacked along their rows; `dtype`: the reader's by default.

        Raises: CheckpointError for a value that is not finite.
        """
        dtype, names = dtype or self._dtype, tuple(self._prefix + name for name in names)
        shapes = [self._source.shape(name) for name in names]
        rows = sum(shape[0] for shape in shapes)
        fused, start = None, 0
        for name in names:
            whole = self._source.plain(name)
            stays = (dtype, self._device) == (whole.dtype, whole.device)
            if stays and len(names) == 1 and whole.nbytes > _COPIED_BYTES:
                fused = whole
            elif fused is None:
                fused = torch.empty((rows, *shapes[0][1:]), dtype=dtype, device=self._device)
            num_rows = max(1, _COPIED_BYTES * len(whole) // max(1, whole.nbytes))
            for stored in torch.split(whole, num_rows):
                part = fused[start : start + len(stored)]
                if fused is not whole:
                    part.copy_(stored)
                # Checked here, while it is still in the processor's cache, or on the GPU.
                if not is_finite(part):
                    if is_finite(stored):
                        raise _too_large(*self._source.place(name), dtype)
                    raise _not_finite(*self._source.place(name))
                start += len(stored)
                if len(stored) == num_rows:
                    self.release()
        assert fused is not None
        return fused

    def vector(self, *names: str) -> Tensor:
        """Like `read`, for vectors added or multiplied elementwise; in the dtype of the rows."""
        values = self.read(*names, dtype=self._kept_dtype(names))
        return values.float() if self._has_wide_rows else values

    def _kept_dtype(self, names: Sequence[str]) -> torch.dtype:
        """What plain tensors are read in: the model's dtype, or their own where that is kept."""
        if not self._keeps_floats or self._dtype == torch.float32:
            return self._dtype
        kinds = {self._source.plain(self._prefix + name).dtype for name in names}
        return kinds.pop() if len(kinds) == 1 else torch.float32

    def exact_vector(self, name: str) -> Tensor:
        return self.read(name, dtype=torch.float32)

    def rope(self, config: RopeConfig, width: int) -> RopeTable:
        return self._ropes.table(config, width)

    def linear(
        self,
        *names: str,
        order: Sequence[int] | None = None,
        columns: Sequence[int] | None = None,
    ) -> Projection:
        """Linears of one kind become one product."""
        rows, inputs = (
            None if each is None else torch.tensor(each, device=self._device)
            for each in (order, columns)
        )
        quantized = [name for name in names if self._source.has_quantized(self._prefix + name)]
        if not quantized:
            biases = [f"{name}.bias" for name in names if self._has_plain(f"{name}.bias")]
            weights = [f"{name}.weight" for name in names]
            weight = self.read(*weights, dtype=self._kept_dtype(weights))
            bias = self.vector(*biases) if biases else None
            if rows is not None:
                weight, bias = weight[rows], None if bias is None else bias[rows]
            if inputs is not None:
                weight = weight[:, inputs.argsort()]
            return self._plain(weight, bias)
        if inputs is not None:
            return OrderedInputs(self.linear(*names, order=order), inputs)
        parts = [self._source.quantized(self._prefix + name, self._device) for name in quantized]
        fused = fuse(parts) if len(parts) == len(names) else None
        if fused is None:
            split = SplitLinear(tuple(self.linear(name) for name in names))
            return split if rows is None else OrderedOutputs(split, rows)
        bias = self._biases(names, parts)
        if rows is not None:
            fused, bias = fused.take_rows(rows), None if bias is None else bias[rows]
        return self._packed(fused, bias, is_in_place=names == (HEAD,))

    def heads(
        self, name: str, num_heads: int, rows: slice, *, is_transposed: bool = False
    ) -> Projection:
        if self._source.has_quantized(self._prefix + name):
            stored = self._source.quantized(self._prefix + name, self._device)
            weight = stored.dequantize(self._dtype)
        else:
            weight = self.read(f"{name}.weight")
        parts = weight.view(num_heads, -1, weight.shape[1])[:, rows]
        if is_transposed:
            parts = parts.transpose(1, 2)
        if self._device.type == "cpu":
            # torch's batched product would not give a row the same bits in any batch.
            return HeadByHead(tuple(self._plain(part.contiguous(), None) for part in parts))
        return self._fixed(HeadsTogether(parts.transpose(1, 2).contiguous()))

    def experts(
        self, gate_up: Sequence[Sequence[str]], down: Sequence[Sequence[str]], kind: GateKind
    ) -> ExpertsProduct:
        slots = self._expert_slots
        together = self._together(gate_up, down, kind)
        if slots is None:
            if together is not None:
                return together
            first, last = (
                tuple(self.linear(*names) for names in of_all) for of_all in (gate_up, down)
            )
            return ExpertByExpert(first, last, self._row_unit)
        from localllm_kernels.experts.gpu_experts import GpuExperts
        from localllm_kernels.experts.slotted_experts import SlottedExperts

        if isinstance(together, GpuExperts):
            return SlottedExperts.of(together, min(slots, len(gate_up)), self._device)
        raise UnsupportedModelError(
            "these experts cannot stay in host memory: no kernel takes all of them alike",
            where=self._prefix + gate_up[0][0],
            hint="--device cpu, or a checkpoint with experts of one type and without act-order",
        )

    def _together(
        self, gate_up: Sequence[Sequence[str]], down: Sequence[Sequence[str]], kind: GateKind
    ) -> ExpertsProduct | None:
        """All experts as one product, in host memory if they have slots; None without a kernel."""
        if self._linears is None:
            return None
        reader = copy(self)
        reader.without_kernel = set()
        # Such a product gives a row the same bits in any batch.
        reader._linears, reader._has_fixed_rows = self._linears.of_experts, False
        if self._expert_slots is not None:
            reader._device = torch.device("cpu")
        first, last = ([reader.linear(*names) for names in each] for each in (gate_up, down))
        return reader._linears.experts(first, last, kind)

    def embedding(self, architecture: Architecture) -> Embedding:
        """The embedding table."""
        row_dtype = torch.float32 if self._has_wide_rows else self._dtype
        return self._table(EMBEDDING, architecture.embedding_scale, row_dtype)

    def _table(self, name: str, scale: float, row_dtype: torch.dtype) -> Embedding:
        """A table of which only rows are read, as it is stored."""
        linear = name.removesuffix(".weight")
        table: Tensor | PackedWeight
        if self._source.has_quantized(linear):
            table = self._source.quantized(linear, self._device)
        else:
            table = self.read(name, dtype=self._kept_dtype([name]))
        self.release()
        return Embedding.of(table, scale, row_dtype, self._dtype)

    def head(self, architecture: Architecture, embedding: Embedding) -> Head:
        """The output head; the embedding table if there is no separate head."""
        has_own = self._source.has_quantized(HEAD) or self._has_plain(f"{HEAD}.weight")
        table = embedding.table
        if has_own:
            product = self.linear(HEAD)
        elif isinstance(table, Tensor):
            product = self._plain(table, None)
        else:
            product = self._packed(table, None, is_in_place=True)
        return Head(product, architecture.logit_scale, architecture.logit_cap)

    def drafting_head(self, architecture: Architecture) -> Head | ClusteredHead | None:
        """The output head of a head that drafts; None where it is the target's."""
        assert architecture.join is not None
        spec = architecture.join
        if spec.num_drafted is None:
            return None
        if spec.clusters is not None:
            tokens = self._ids(CLUSTER_TOKENS, architecture.vocab_size)
            table, active = self.read(f"{HEAD}.weight"), spec.clusters.num_active
            of_clusters = tokens.view(spec.clusters.number, -1)
            return ClusteredHead(self.linear(CLUSTERS), of_clusters, table, active)
        own = Head(self.linear(HEAD), architecture.logit_scale, architecture.logit_cap)
        if spec.drafted_as is DraftedAs.ALL:
            return own
        drafted = self._ids(
            DRAFTED, architecture.vocab_size, are_offsets=spec.drafted_as is DraftedAs.OFFSETS
        )
        return replace(own, drafted=drafted, vocab_size=architecture.vocab_size)

    def _ids(self, name: str, vocab_size: int, *, are_offsets: bool = False) -> Tensor:
        """A tensor of token ids, int64; `are_offsets`: see `DraftedAs.OFFSETS`."""
        ids = self._source.plain(name).long()
        if are_offsets:
            ids = ids + torch.arange(len(ids))
        if bool((ids < 0).any() or (ids >= vocab_size).any()):
            stored_name, where = self._source.place(name)
            raise CheckpointError(
                f"tensor {stored_name!r} holds ids that are not of the {vocab_size:,} tokens",
                where=where,
                hint="the head may be of another model",
            )
        return ids.to(self._device)

    def join(self, spec: JoinSpec) -> Join:
        """The join of a head that drafts."""
        fusion = None
        if spec.fusion is not None:
            norms = tuple(map(self._norm, spec.fusion.norms))
            fusion = Fusion(self.linear(FUSION), norms)
        return Join(
            None if spec.is_wide else self.linear(JOIN),
            None if spec.embedding is None else self._norm(spec.embedding),
            None if spec.hidden is None else self._norm(spec.hidden),
            spec.adds_normed,
            fusion,
            None if spec.width is None else self.linear(BACK),
        )

    def last_norm(self, architecture: Architecture) -> Norm:
        """The norm after the last layer."""
        return self._norm(architecture.norm)

    def _norm(self, spec: NormSpec) -> Norm:
        return spec.with_weight(self.vector(f"{spec.name}.weight"))

    def per_layer_inputs(self, architecture: Architecture, ops: Ops) -> PerLayerInputs | None:
        """The inputs of layers besides the residual stream, None if there are none."""
        spec = architecture.per_layer
        if spec is None:
            return None
        linear, norm = self.linear(PROJECTION), self._norm(spec.norm)
        table = self._table(TABLE, 1.0, self._dtype)
        return PerLayerInputs(spec, table, linear, norm, ops)

    def layer(self, architecture: Architecture, index: int, ropes: RopeTables) -> Layer:
        """One layer with its weights."""
        parts = copy(self)
        parts._prefix, parts._ropes = f"{layer_name(index)}.", ropes
        layer = architecture.layers[index].build(parts)
        self.release()
        return layer

    def release(self) -> None:
        """Give back the memory of what was read; it may be read again."""
        self._source.release()

    def _packed(
        self, weight: PackedWeight, bias: Tensor | None, *, is_in_place: bool = False
    ) -> Projection:
        product = packed_linear(weight, bias, self._dtype, self._linears, is_in_place=is_in_place)
        if isinstance(product, DequantizedLinear):
            self.without_kernel.add(weight.kind)
        return self._fixed(product)

    def _plain(self, weight: Tensor, bias: Tensor | None) -> Projection:
        linears = self._linears
        product = None
        if linears is not None and self._rounds:
            # In bfloat16 the library rounds the inputs too, as it does for a quantized model.
            rounded = Int8Weight.rounded(weight.float())
            product = linears.packed(rounded.coded(), bias, torch.bfloat16)
        if product is None:
            product = Linear(weight, bias) if linears is None else linears.plain(weight, bias)
        return self._fixed(product)

    def _fixed(self, product: Projection) -> Projection:
        return FixedRows(product) if self._has_fixed_rows else product

    def _biases(self, names: Sequence[str], parts: Sequence[PackedWeight]) -> Tensor | None:
        biases = [f"{name}.bias" for name in names if self._has_plain(f"{name}.bias")]
        if not biases:
            return None
        zeros = torch.zeros(1, dtype=self.vector(biases[0]).dtype, device=self._device)
        return torch.cat(
            [
                self.vector(f"{name}.bias")
                if self._has_plain(f"{name}.bias")
                else zeros.expand(part.shape[0])
                for name, part in zip(names, parts, strict=True)
            ]
        )

    def _has_plain(self, name: str) -> bool:
        return self._source.has_plain(self._prefix + name)
