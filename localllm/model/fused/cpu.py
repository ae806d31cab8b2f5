"""All layers of a decoder in one call of the C library; see decoder.c."""

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import Structure

import torch
from torch import Tensor

from localllm.model.blocks.attention import Attention, AttentionSpec
from localllm.model.blocks.experts import MixtureOfExperts
from localllm.model.blocks.recurrence import Recurrence
from localllm.model.fused.decoder import FusedDecoder, UniformLayer
from localllm.model.inputs import ForwardBatch
from localllm.model.norm import Norm
from localllm.model.paged_kv_cache import PagedKVCache
from localllm.model.rope import RopeTable, Rotation
from localllm_kernels.attention.four_bits import OWN_KEYS
from localllm_kernels.attention.kv_cache import KVCache
from localllm_kernels.cpu import structs
from localllm_kernels.cpu.experts import CExperts
from localllm_kernels.cpu.ops import recurrence_struct, routing_struct, slots_in_c
from localllm_kernels.cpu.product import CProduct
from localllm_kernels.cpu.structs import pointer
from localllm_kernels.cpu.team import Team
from localllm_kernels.pointwise.gate import GATE_KINDS
from localllm_kernels.recurrence.state_cache import StateCache


class CpuDecoder(FusedDecoder):
    """The layers and the final norm, built once; all products must be the library's own.

    Scratch memory is kept from call to call.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        team: Team,
        layers: Sequence[UniformLayer],
        places: Sequence[tuple[int, int] | None],
        last_norm: Norm,
        share: float,
    ) -> None:
        """`places`: each attention's cache group and its place in that group; `share`: the factor
        on the blocks' outputs.
        """
        # Keep alive the tensors that the structures point to.
        self._layers, self._last_norm = layers, last_norm
        attentions = [layer.mixer for layer in layers if isinstance(layer.mixer, Attention)]
        sizes = attentions[0].spec
        self._ropes = list(dict.fromkeys(each.rope for each in attentions))
        self._structs = (structs.Layer * len(layers))()
        for i, (layer, place) in enumerate(zip(layers, places, strict=True)):
            self._structs[i] = _layer(layer, place, self._ropes)
        widest = _widths(self._structs, sizes.num_heads * sizes.head_dim)
        self.library, self.team = library, team
        self.struct = structs.Decoder(
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
            sizes.scores.cap or 0.0,
            share,
            _gate(layers[0]),
            _norm_kind(sizes),
            sizes.linears.has_gate,
            *widest,
        )
        self._growth = sizes.scores.growth
        self._scratch = torch.empty(0, dtype=torch.uint8)
        # The newest cache, and its groups: pointers are slow to find.
        self._groups: tuple[PagedKVCache, ctypes.Array[Structure]] | None = None

    def takes(self, batch: ForwardBatch) -> bool:
        return True

    def __call__(
        self,
        hidden: Tensor,
        rotations: Mapping[RopeTable, Rotation],
        batch: ForwardBatch,
        kv_cache: PagedKVCache,
        taps: Sequence[int],
    ) -> tuple[Tensor, Mapping[int, Tensor]]:
        """Raises: MemoryError."""
        rows = hidden.shape[0]
        decoder = ctypes.addressof(self.struct)
        needed = self.library.decoder_scratch_bytes(decoder, rows)
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        out = hidden.clone()
        turns = [rotations[rope] for rope in self._ropes]
        angles = [structs.Angles(turn.cos.data_ptr(), turn.sin.data_ptr()) for turn in turns]
        growth = None if self._growth is None else self._growth.factors(batch.positions)
        slots, arrays, states = None, None, None
        if kv_cache.recurrent:
            assert batch.states is not None
            slots, arrays = slots_in_c(batch.states.on_host)
            states = (structs.State * len(self._layers))()
            for i, cache in kv_cache.recurrent.items():
                states[i] = _state(cache)
        asked = structs.Batch(
            (structs.Angles * len(angles))(*angles),
            pointer(growth),
            batch.cu_seqlens_q.data_ptr(),
            batch.seq_lens.data_ptr(),
            rows,
            batch.tables[0].slot_mapping.shape[0],
            len(batch.seq_lens),
            None if slots is None else ctypes.pointer(slots),
            states,
        )
        if self._groups is None or self._groups[0] is not kv_cache:
            self._groups = kv_cache, group_structs(kv_cache)
        groups = self._groups[1]
        for group, tables in zip(groups, batch.tables, strict=True):
            group.slots = tables.slot_mapping.data_ptr()
            group.tables = tables.block_tables.data_ptr()
            group.max_blocks = tables.block_tables.shape[1]
        streams = {i: torch.empty_like(out) for i in taps if i < len(self._layers)}
        tapped = None
        if streams:
            pointers = (pointer(streams.get(i)) for i in range(len(self._layers)))
            tapped = (ctypes.c_void_p * len(self._layers))(*pointers)
        failed = self.library.decoder_forward(
            decoder,
            ctypes.addressof(asked),
            groups,
            len(groups),
            tapped,
            out.data_ptr(),
            self._scratch.data_ptr(),
            self.team.size,
        )
        del arrays  # which the slots point to
        if failed:
            raise MemoryError("out of memory for the layers' tasks")
        return out, streams


def group_structs(kv_cache: PagedKVCache) -> "ctypes.Array[Structure]":
    """The groups of a cache, without a batch's tables."""
    found = (structs.Group * len(kv_cache.stacks))(*map(_group, kv_cache.stacks))
    for coded, uncoded in kv_cache.uncoded.items():
        found[coded].own_keys, found[coded].uncoded = OWN_KEYS, uncoded
        found[uncoded].is_uncoded = True
    return found


def _group(stack: KVCache) -> Structure:
    scales = stack.key_scales
    return structs.Group(
        first=structs.cache_struct(stack),
        layer_bytes=stack.key[0].nbytes,
        layer_scales=0 if scales is None else scales[0].nbytes,
    )


def _state(cache: StateCache) -> Structure:
    has_half = cache.matrix is not None and cache.matrix.dtype == torch.float16
    return structs.State(
        cache.rows.data_ptr(), pointer(cache.matrix), cache.rows.shape[1], has_half
    )


def _layer(
    layer: UniformLayer, place: tuple[int, int] | None, ropes: Sequence[RopeTable]
) -> Structure:
    found = structs.Layer()
    names = ("input_norm", "attention_after", "mlp_norm", "mlp_after")
    for name, norm in zip(names, layer.norms, strict=True):
        setattr(found, name, pointer(None if norm is None else norm.weight))
    match layer.mixer:
        case Attention() as attention:
            _set_attention(found, attention)
            found.group, found.place = place or (0, 0)
            found.rotation = ropes.index(attention.rope)
        case mixer:
            _set_recurrence(found, mixer)
    if isinstance(layer.mlp, MixtureOfExperts):
        found.mixture = ctypes.pointer(_mixture(layer.mlp))
    else:
        found.gate_up, found.down = map(_product, layer.mlp.products)
    return found


def _set_attention(found: Structure, attention: Attention) -> None:
    norms = attention.norms
    if norms is not None:
        assert norms.key is not None
        found.query_norm, found.key_norm = (pointer(n.weight) for n in (norms.query, norms.key))
    found.sinks = pointer(attention.sinks)
    found.qkv, found.output = map(_product, attention.products)
    found.first_width = _c_product(attention.qkv_proj).weight.width_out
    found.window = attention.spec.window or 0
    found.num_hidden = attention.spec.scores.num_hidden


def _set_recurrence(found: Structure, mixer: Recurrence) -> None:
    heads = mixer.heads
    found.recurrence = ctypes.pointer(recurrence_struct(mixer.weights, heads))
    found.qkv, found.output = _product(mixer.in_proj), _product(mixer.out_proj)
    found.first_width = _c_product(mixer.in_proj).weight.width_out
    found.inputs_at, found.gate_at = mixer.inputs_at, mixer.gate_at
    if mixer.factors is None:
        found.factors_at = found.first_width - heads.factors
    else:
        found.factors, found.factors_at = _product(mixer.factors), -1


def _widths(layers: ctypes.Array[Structure], heads_width: int) -> tuple[int, int, int]:
    """The most outputs of a first product, inputs of a second one, and factors."""
    recurrences = [layer.recurrence.contents for layer in layers if layer.recurrence]
    values = [each.values * each.value_width for each in recurrences]
    return (
        max(layer.first_width for layer in layers),
        max([heads_width, *values]),
        max([0, *(2 * each.values for each in recurrences)]),
    )


def _mixture(block: MixtureOfExperts) -> Structure:
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


def _norm_kind(sizes: AttentionSpec) -> int:
    if sizes.norms is None or sizes.has_head_norms:
        return structs.value("NORM_HEADS")
    return structs.value("NORM_TURNED" if sizes.norms.is_late else "NORM_ROWS")


def _product(product: object) -> Structure:
    return _c_product(product).struct


def _c_product(product: object) -> CProduct:
    assert isinstance(product, CProduct)
    return product
