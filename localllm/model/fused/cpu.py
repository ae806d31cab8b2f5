"""All layers of a decoder in one call of the C library; see decoder.c."""

import ctypes
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from localllm.model.blocks.attention import AttentionSpec
from localllm.model.blocks.block import Rotation
from localllm.model.blocks.experts import MixtureOfExperts
from localllm.model.fused.decoder import UniformLayer
from localllm.model.inputs import ForwardBatch, GroupTables, PagedKVCache
from localllm.model.norm import Norm
from localllm.model.rope import RopeTable
from localllm_kernels.cpu import structs
from localllm_kernels.cpu.experts import CExperts
from localllm_kernels.cpu.linear import CProduct
from localllm_kernels.cpu.ops import routing_struct
from localllm_kernels.gate import GATE_KINDS
from localllm_kernels.kv_cache import KVCache


class CpuDecoder:
    """The layers and the final norm, built once; all products must be the library's own.

    Scratch memory is kept from call to call.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        layers: Sequence[UniformLayer],
        places: Sequence[tuple[int, int]],
        last_norm: Norm,
        share: float,
    ) -> None:
        """`places`: each layer's cache group and its place in that group; `share`: the factor on
        the blocks' outputs.
        """
        # Keep alive the tensors that the structures point to.
        self._layers, self._last_norm = layers, last_norm
        sizes = layers[0].attention.spec
        self._ropes = list(dict.fromkeys(layer.attention.rope for layer in layers))
        numbers = [self._ropes.index(layer.attention.rope) for layer in layers]
        self._structs = (structs.Layer * len(layers))(*map(_layer, layers, places, numbers))
        self._decoder = structs.Decoder(
            self._structs,
            last_norm.weight.data_ptr(),
            len(layers),
            last_norm.weight.shape[0],
            _inner_size(layers[0]),
            sizes.num_heads,
            sizes.num_kv_heads,
            sizes.head_dim,
            last_norm.eps,
            sizes.score_scale,
            sizes.cap or 0.0,
            share,
            _gate(layers[0]),
            _norm_kind(sizes),
        )
        self._growth = sizes.growth
        self._forward = library.decoder_forward
        self._forward.argtypes = [
            *3 * [ctypes.c_void_p],
            ctypes.c_int64,
            *3 * [ctypes.c_void_p],
            ctypes.c_int64,
        ]
        self._scratch_bytes = library.decoder_scratch_bytes
        self._scratch_bytes.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        self._scratch_bytes.restype = ctypes.c_int64
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def takes(self, batch: ForwardBatch) -> bool:
        """See FusedDecoder."""
        return True

    def __call__(
        self,
        hidden: Tensor,
        rotations: Mapping[RopeTable, Rotation],
        batch: ForwardBatch,
        kv_cache: PagedKVCache,
        taps: Sequence[int],
    ) -> tuple[Tensor, Mapping[int, Tensor]]:
        """See FusedDecoder. Raises: MemoryError."""
        rows = hidden.shape[0]
        decoder = ctypes.addressof(self._decoder)
        needed = self._scratch_bytes(decoder, rows)
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        out = hidden.clone()
        turns = [rotations[rope] for rope in self._ropes]
        angles = [structs.Angles(turn.cos.data_ptr(), turn.sin.data_ptr()) for turn in turns]
        growth = None if self._growth is None else self._growth.factors(batch.positions)
        asked = structs.Batch(
            (structs.Angles * len(angles))(*angles),
            _pointer(growth),
            batch.cu_seqlens_q.data_ptr(),
            batch.seq_lens.data_ptr(),
            rows,
            batch.tables[0].slot_mapping.shape[0],
            len(batch.seq_lens),
        )
        groups = (structs.Group * len(kv_cache.stacks))(*map(_group, batch.tables, kv_cache.stacks))
        streams = {i: torch.empty_like(out) for i in taps if i < len(self._layers)}
        tapped = None
        if streams:
            pointers = (_pointer(streams.get(i)) for i in range(len(self._layers)))
            tapped = (ctypes.c_void_p * len(self._layers))(*pointers)
        failed = self._forward(
            decoder,
            ctypes.addressof(asked),
            groups,
            len(groups),
            tapped,
            out.data_ptr(),
            self._scratch.data_ptr(),
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("out of memory for the attention's tasks")
        return out, streams


def _group(tables: GroupTables, stack: KVCache) -> structs.Group:
    scales = stack.key_scales
    return structs.Group(
        tables.slot_mapping.data_ptr(),
        tables.block_tables.data_ptr(),
        tables.block_tables.shape[1],
        structs.CKVCache.of(stack),
        stack.key[0].nbytes,
        0 if scales is None else scales[0].numel(),
    )


def _layer(layer: UniformLayer, place: tuple[int, int], rotation: int) -> structs.Layer:
    norms = layer.attention.norms
    vectors = (
        *layer.norms,
        None if norms is None else norms.query,
        None if norms is None else norms.key,
    )
    qkv, output = map(_product, layer.attention.products)
    gate_up = down = structs.Product()
    mixture = None
    if isinstance(layer.mlp, MixtureOfExperts):
        mixture = ctypes.pointer(_mixture(layer.mlp))
    else:
        gate_up, down = map(_product, layer.mlp.products)
    return structs.Layer(
        *(_pointer(None if norm is None else norm.weight) for norm in vectors),
        _pointer(layer.attention.sinks),
        qkv,
        output,
        gate_up,
        down,
        mixture,
        layer.attention.spec.window or 0,
        *place,
        rotation,
    )


def _mixture(block: MixtureOfExperts) -> structs.Mixture:
    assert isinstance(block.experts, CExperts)
    routing = routing_struct(block.routing, block.spec.router.num_experts)
    return structs.Mixture(_product(block.router), routing, block.experts.struct)


def _inner_size(layer: UniformLayer) -> int:
    """Of the feed-forward; experts have memory of their own."""
    if isinstance(layer.mlp, MixtureOfExperts):
        return 0
    width: int = _c_product(layer.mlp.down_proj).weight.width_in
    return width


def _gate(layer: UniformLayer) -> int:
    return 0 if isinstance(layer.mlp, MixtureOfExperts) else GATE_KINDS.index(layer.mlp.spec.gate)


def _norm_kind(sizes: AttentionSpec) -> structs.HeadNormKind:
    if sizes.norms is None or sizes.has_head_norms:
        return structs.HeadNormKind.HEADS
    return structs.HeadNormKind.TURNED if sizes.norms.is_late else structs.HeadNormKind.ROWS


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _product(product: object) -> structs.Product:
    return _c_product(product).struct


def _c_product(product: object) -> CProduct:
    assert isinstance(product, CProduct)
    return product
