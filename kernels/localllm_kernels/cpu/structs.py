"""The structures of operators.h and decoder.c, field by field."""

import ctypes
from ctypes import Structure, c_float, c_int64, c_void_p
from enum import IntEnum

import torch

from localllm_kernels.attention.kv_cache import KVCache


class IntegerWeight(Structure):
    """See operators.h."""

    _fields_ = (
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("zeros", c_void_p),
        ("bias", c_void_p),
        ("bits", c_int64),
        ("scale_kind", c_int64),
        ("width_out", c_int64),
        ("width_in", c_int64),
        ("group_size", c_int64),
    )


class FloatWeight(Structure):
    """See operators.h."""

    _fields_ = (
        ("values", c_void_p),
        ("bias", c_void_p),
        ("width_out", c_int64),
        ("width_in", c_int64),
        ("is_bfloat16", c_int64),
    )


class ProductKind(IntEnum):
    """See operators.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INTEGER = 2


class Product(Structure):
    """See operators.h."""

    _fields_ = (("kind", c_int64), ("weight", c_void_p))


class StateSlots(Structure):
    """See state_slots.h."""

    _fields_ = (
        ("slots", c_void_p),
        ("bounds", c_void_p),
        ("starts", c_void_p),
        ("stands", c_void_p),
        ("settled", c_void_p),
        ("saves", c_void_p),
        ("num_requests", c_int64),
        ("num_saves", c_int64),
    )


class ShortConv(Structure):
    """See short_conv.h."""

    _fields_ = (
        ("rows", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("kept", c_void_p),
        ("out", c_void_p),
        ("width", c_int64),
        ("taps", c_int64),
        ("ring", c_int64),
    )


class Inputs(Structure):
    """See state_slots.h."""

    _fields_ = (
        ("first", c_void_p),
        ("second", c_void_p),
        ("first_stride", c_int64),
        ("second_stride", c_int64),
        ("width", c_int64),
        ("second_width", c_int64),
        ("kept", c_void_p),
        ("ring", c_int64),
    )


class ConvWeights(Structure):
    """See state_slots.h."""

    _fields_ = (("conv", c_void_p), ("bias", c_void_p), ("taps", c_int64), ("width", c_int64))


class Recurrence(Structure):
    """See recurrence.h."""

    _fields_ = (
        ("conv", ConvWeights),
        ("decay", c_void_p),
        ("bias", c_void_p),
        ("skip", c_void_p),
        ("norm", c_void_p),
        ("keys", c_int64),
        ("values", c_int64),
        ("key_width", c_int64),
        ("value_width", c_int64),
        ("query", c_int64),
        ("key", c_int64),
        ("value", c_int64),
        ("is_delta", c_int64),
        ("eps", c_float),
        ("most", c_float),
    )


class RecurrenceCall(Structure):
    """See recurrence.h."""

    _fields_ = (
        ("net", ctypes.POINTER(Recurrence)),
        ("inputs", Inputs),
        ("gate", c_void_p),
        ("gate_stride", c_int64),
        ("matrices", c_void_p),
        ("has_half", c_int64),
        ("out", c_void_p),
    )


class Routing(Structure):
    """See route.h."""

    _fields_ = (
        ("logits", c_void_p),
        ("correction", c_void_p),
        ("scales", c_void_p),
        ("chosen", c_void_p),
        ("factors", c_void_p),
        ("rows", c_int64),
        ("experts", c_int64),
        ("top_k", c_int64),
        ("is_sigmoid", c_int64),
        ("renormalises", c_int64),
        ("groups", c_int64),
        ("chosen_groups", c_int64),
        ("group_best", c_int64),
        ("factor", c_float),
    )


class Expert(Structure):
    """See experts.h."""

    _fields_ = (("gate_up", Product), ("down", Product))


class Experts(Structure):
    """See experts.h."""

    _fields_ = (
        ("experts", ctypes.POINTER(Expert)),
        ("count", c_int64),
        ("hidden", c_int64),
        ("inner", c_int64),
        ("gate", c_int64),
    )


class Routed(Structure):
    """See experts.h."""

    _fields_ = (
        ("x", c_void_p),
        ("chosen", c_void_p),
        ("factors", c_void_p),
        ("y", c_void_p),
        ("rows", c_int64),
        ("top_k", c_int64),
    )


class Mixture(Structure):
    """See experts.h."""

    _fields_ = (("router", Product), ("routing", Routing), ("experts", Experts))


class KVKind(IntEnum):
    """See operators.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    FP8 = 3


_KV_KINDS = {
    torch.float32: KVKind.FLOAT32,
    torch.bfloat16: KVKind.BFLOAT16,
    torch.int8: KVKind.INT8,
    torch.float8_e4m3fn: KVKind.FP8,
}


class CKVCache(Structure):
    """KVCache of operators.h: the cache of a layer, or of the first of a stack of layers."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_scales", c_void_p),
        ("value_scales", c_void_p),
        ("kind", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("block_size", c_int64),
    )

    @classmethod
    def none(cls, head_dim: int) -> "CKVCache":
        """A cache without heads, which nothing is written to."""
        return cls(None, None, None, None, KVKind.FLOAT32, 0, head_dim, 1)

    @classmethod
    def of(cls, cache: KVCache) -> "CKVCache":
        """`cache`: with or without a first dimension of layers."""
        *_, kv_heads, block_size, head_dim = cache.key.shape
        scales = (cache.key_scales, cache.value_scales)
        return cls(
            cache.key.data_ptr(),
            cache.value.data_ptr(),
            *(None if each is None else each.data_ptr() for each in scales),
            _KV_KINDS[cache.key.dtype],
            kv_heads,
            head_dim,
            block_size,
        )


class AttentionShape(Structure):
    """See operators.h."""

    _fields_ = (
        ("cache", CKVCache),
        ("heads", c_int64),
        ("window", c_int64),
        ("scale", c_float),
        ("cap", c_float),
        ("sinks", c_void_p),
        ("num_hidden", c_int64),
    )


class Rotation(Structure):
    """See operators.h."""

    _fields_ = (
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("eps", c_float),
        ("slots", c_void_p),
        ("cache", CKVCache),
        ("rows", c_int64),
        ("num_stored", c_int64),
        ("heads", c_int64),
        ("has_values", c_int64),
        ("norms_values", c_int64),
        ("stride", c_int64),
    )


class HeadNormKind(IntEnum):
    """See decoder.c."""

    HEADS = 0
    TURNED = 1
    ROWS = 2


class Layer(Structure):
    """See decoder.c."""

    _fields_ = (
        ("input_norm", c_void_p),
        ("attention_after", c_void_p),
        ("mlp_norm", c_void_p),
        ("mlp_after", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("sinks", c_void_p),
        ("qkv", Product),
        ("output", Product),
        ("gate_up", Product),
        ("down", Product),
        ("mixture", ctypes.POINTER(Mixture)),
        ("recurrence", ctypes.POINTER(Recurrence)),
        ("factors", Product),
        ("inputs_at", c_int64),
        ("gate_at", c_int64),
        ("factors_at", c_int64),
        ("first_width", c_int64),
        ("window", c_int64),
        ("num_hidden", c_int64),
        ("group", c_int64),
        ("place", c_int64),
        ("rotation", c_int64),
    )


class Decoder(Structure):
    """See decoder.c."""

    _fields_ = (
        ("layers", ctypes.POINTER(Layer)),
        ("last_norm", c_void_p),
        ("num_layers", c_int64),
        ("hidden", c_int64),
        ("inner", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("eps", c_float),
        ("scale", c_float),
        ("cap", c_float),
        ("share", c_float),
        ("gate", c_int64),
        ("norm_kind", c_int64),
        ("has_gate", c_int64),
        ("first_width", c_int64),
        ("mixed_width", c_int64),
        ("factors_width", c_int64),
    )


class State(Structure):
    """See decoder.c."""

    _fields_ = (
        ("kept", c_void_p),
        ("matrices", c_void_p),
        ("ring", c_int64),
        ("has_half", c_int64),
    )


class Angles(Structure):
    """See decoder.c."""

    _fields_ = (("cos", c_void_p), ("sin", c_void_p))


class Batch(Structure):
    """See decoder.c."""

    _fields_ = (
        ("rotations", ctypes.POINTER(Angles)),
        ("growth", c_void_p),
        ("starts", c_void_p),
        ("lengths", c_void_p),
        ("rows", c_int64),
        ("num_stored", c_int64),
        ("seqs", c_int64),
        ("slots", ctypes.POINTER(StateSlots)),
        ("states", ctypes.POINTER(State)),
    )


class Group(Structure):
    """See decoder.c."""

    _fields_ = (
        ("slots", c_void_p),
        ("tables", c_void_p),
        ("max_blocks", c_int64),
        ("first", CKVCache),
        ("layer_bytes", c_int64),
        ("layer_scales", c_int64),
    )


class Head(Structure):
    """See head.c."""

    _fields_ = (
        ("decoder", ctypes.POINTER(Decoder)),
        ("embeddings", c_void_p),
        ("has_half", c_int64),
        ("embedding_scale", c_float),
        ("embedding_norm", c_void_p),
        ("hidden_norm", c_void_p),
        ("join", Product),
        ("output", Product),
        ("drafted", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
    )


class Drafting(Structure):
    """See head.c."""

    _fields_ = (
        ("table", c_void_p),
        ("tokens", c_void_p),
        ("keys", c_void_p),
        ("num_blocks", c_int64),
        ("start", c_int64),
        ("end", c_int64),
        ("num_drafts", c_int64),
        ("temperature", c_float),
    )


# In the order of decoder.c's `struct_bytes`.
STRUCTURES: tuple[type[Structure], ...] = (
    IntegerWeight,
    FloatWeight,
    Product,
    CKVCache,
    AttentionShape,
    Rotation,
    Layer,
    Decoder,
    Angles,
    Batch,
    Group,
    State,
)


# In the order of experts.c's `expert_struct_bytes`.
EXPERT_STRUCTURES: tuple[type[Structure], ...] = (Expert, Experts, Routed, Routing, Mixture)

# In the order of recurrence.c's `recurrence_struct_bytes`.
RECURRENCE_STRUCTURES: tuple[type[Structure], ...] = (
    StateSlots,
    Inputs,
    ConvWeights,
    Recurrence,
    RecurrenceCall,
)

# In the order of head.c's `head_struct_bytes`.
HEAD_STRUCTURES: tuple[type[Structure], ...] = (Head, Drafting)


def find_difference(library: ctypes.CDLL) -> str:
    """The structure whose size in the library differs from its size here; empty if all agree."""
    structures = (*STRUCTURES, *EXPERT_STRUCTURES, *RECURRENCE_STRUCTURES, *HEAD_STRUCTURES)
    sizes = [
        *(c_int64 * len(STRUCTURES)).in_dll(library, "struct_bytes"),
        *(c_int64 * len(EXPERT_STRUCTURES)).in_dll(library, "expert_struct_bytes"),
        *(c_int64 * len(RECURRENCE_STRUCTURES)).in_dll(library, "recurrence_struct_bytes"),
        *(c_int64 * len(HEAD_STRUCTURES)).in_dll(library, "head_struct_bytes"),
    ]
    for structure, num_bytes in zip(structures, sizes, strict=True):
        if ctypes.sizeof(structure) != num_bytes:
            own = ctypes.sizeof(structure)
            return f"{structure.__name__} has {own} bytes in structs.py and {num_bytes} in C"
    return ""
