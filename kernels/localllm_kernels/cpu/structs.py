"""The structures of the headers, as ctypes has them; their fields are described there."""

from ctypes import Structure
from enum import IntEnum
from pathlib import Path

import torch

from localllm_kernels.attention.kv_cache import KVCache
from localllm_kernels.cpu.declarations import Declarations

DECLARATIONS = Declarations.of_folder(Path(__file__).parent)
_struct, _value = DECLARATIONS.struct, DECLARATIONS.value


class ScaleKind(IntEnum):
    """`scale_kind` of an IntegerWeight."""

    FLOAT32 = _value("SCALE_FLOAT32")
    BFLOAT16 = _value("SCALE_BFLOAT16")
    OUTPUT = _value("SCALE_OUTPUT")
    E8M0 = _value("SCALE_E8M0")


class ProductKind(IntEnum):
    """`kind` of a Product."""

    FLOAT32 = _value("FLOAT32")
    BFLOAT16 = _value("BFLOAT16")
    INTEGER = _value("INTEGER")


class KVKind(IntEnum):
    """`kind` of a CKVCache."""

    FLOAT32 = _value("KV_FLOAT32")
    BFLOAT16 = _value("KV_BFLOAT16")
    INT8 = _value("KV_INT8")
    FP8 = _value("KV_FP8")


class HeadNormKind(IntEnum):
    """`norm_kind` of a Decoder."""

    HEADS = _value("NORM_HEADS")
    TURNED = _value("NORM_TURNED")
    ROWS = _value("NORM_ROWS")


_KV_KINDS = {
    torch.float32: KVKind.FLOAT32,
    torch.bfloat16: KVKind.BFLOAT16,
    torch.int8: KVKind.INT8,
    torch.float8_e4m3fn: KVKind.FP8,
}


@_struct("IntegerWeight")
class IntegerWeight(Structure):
    """See operators.h."""


@_struct("FloatWeight")
class FloatWeight(Structure):
    """See operators.h."""


@_struct("Product")
class Product(Structure):
    """See operators.h."""


@_struct("StateSlots")
class StateSlots(Structure):
    """See state_slots.h."""


@_struct("ShortConv")
class ShortConv(Structure):
    """See short_conv.h."""


@_struct("Inputs")
class Inputs(Structure):
    """See state_slots.h."""


@_struct("ConvWeights")
class ConvWeights(Structure):
    """See state_slots.h."""


@_struct("Recurrence")
class Recurrence(Structure):
    """See recurrence.h."""


@_struct("RecurrenceCall")
class RecurrenceCall(Structure):
    """See recurrence.h."""


@_struct("Routing")
class Routing(Structure):
    """See route.h."""


@_struct("Expert")
class Expert(Structure):
    """See experts.h."""


@_struct("Experts")
class Experts(Structure):
    """See experts.h."""


@_struct("Routed")
class Routed(Structure):
    """See experts.h."""


@_struct("Mixture")
class Mixture(Structure):
    """See experts.h."""


@_struct("KVCache")
class CKVCache(Structure):
    """The cache of a layer, or of the first of a stack of layers; see operators.h."""

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


@_struct("AttentionShape")
class AttentionShape(Structure):
    """See operators.h."""


@_struct("Rotation")
class Rotation(Structure):
    """See operators.h."""


@_struct("Layer")
class Layer(Structure):
    """See decoder.h."""


@_struct("Decoder")
class Decoder(Structure):
    """See decoder.h."""


@_struct("State")
class State(Structure):
    """See decoder.h."""


@_struct("Angles")
class Angles(Structure):
    """See decoder.h."""


@_struct("Batch")
class Batch(Structure):
    """See decoder.h."""


@_struct("Group")
class Group(Structure):
    """See decoder.h."""


@_struct("Head")
class Head(Structure):
    """See head.h."""


@_struct("Drafting")
class Drafting(Structure):
    """See head.h."""
