"""The structures of the headers, as ctypes has them; their fields are described there."""

from ctypes import Structure
from pathlib import Path

import torch
from torch import Tensor

from localllm_kernels.attention.four_bits import FOUR_BITS
from localllm_kernels.attention.kv_cache import KVCache
from localllm_kernels.cpu.declarations import Declarations

DECLARATIONS = Declarations.of_folder(Path(__file__).parent)
# Of an enumeration's constant, by its name in C.
value = DECLARATIONS.value

# operators.h
IntegerWeight = DECLARATIONS.struct("IntegerWeight")
FloatWeight = DECLARATIONS.struct("FloatWeight")
BlockRows = DECLARATIONS.struct("BlockRows")
BlockWeight = DECLARATIONS.struct("BlockWeight")
Product = DECLARATIONS.struct("Product")
CKVCache = DECLARATIONS.struct("KVCache")
AttentionShape = DECLARATIONS.struct("AttentionShape")
Rotation = DECLARATIONS.struct("Rotation")
# state_slots.h, short_conv.h, recurrence.h
StateSlots = DECLARATIONS.struct("StateSlots")
ShortConv = DECLARATIONS.struct("ShortConv")
Inputs = DECLARATIONS.struct("Inputs")
ConvWeights = DECLARATIONS.struct("ConvWeights")
Recurrence = DECLARATIONS.struct("Recurrence")
RecurrenceCall = DECLARATIONS.struct("RecurrenceCall")
# route.h, experts.h
Routing = DECLARATIONS.struct("Routing")
Expert = DECLARATIONS.struct("Expert")
Experts = DECLARATIONS.struct("Experts")
Routed = DECLARATIONS.struct("Routed")
Mixture = DECLARATIONS.struct("Mixture")
# decoder.h, head.h
Layer = DECLARATIONS.struct("Layer")
Decoder = DECLARATIONS.struct("Decoder")
State = DECLARATIONS.struct("State")
Angles = DECLARATIONS.struct("Angles")
Batch = DECLARATIONS.struct("Batch")
Group = DECLARATIONS.struct("Group")
Head = DECLARATIONS.struct("Head")
Drafting = DECLARATIONS.struct("Drafting")

_KV_KINDS = {
    torch.float32: value("KV_FLOAT32"),
    torch.bfloat16: value("KV_BFLOAT16"),
    torch.int8: value("KV_INT8"),
    torch.float8_e4m3fn: value("KV_FP8"),
    FOUR_BITS: value("KV_INT4"),
}


def pointer(tensor: Tensor | None) -> int | None:
    """The address of its values; None (NULL) if there is no tensor."""
    return None if tensor is None else tensor.data_ptr()


def cache_struct(cache: KVCache) -> Structure:
    """The cache of a layer, or with a first dimension of layers that of the first one."""
    *_, kv_heads, block_size, _ = cache.key.shape
    tensors = cache.key, cache.value, cache.key_scales, cache.value_scales
    coding, kind = cache.coding, _KV_KINDS[cache.key.dtype]
    coded: tuple[Tensor | None, ...] = (cache.key_means,)
    if coding is not None:
        coded = coding.means, coding.factors, coding.feedback
    pointers = [*map(pointer, (*tensors, *coded))]
    sizes = kv_heads, cache.head_dim, block_size
    return CKVCache(*pointers, *(None,) * (7 - len(pointers)), kind, *sizes, cache.is_turned)


def no_cache(head_dim: int) -> Structure:
    """A cache without heads, which nothing is written to."""
    return CKVCache(kind=value("KV_FLOAT32"), head_dim=head_dim, block_size=1)


def uncoded_struct(cache: KVCache) -> Structure:
    """Where a cache has its uncoded keys and values; without heads if that is nowhere."""
    return no_cache(cache.head_dim) if cache.uncoded is None else cache_struct(cache.uncoded)
