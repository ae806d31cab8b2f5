"""The drafts of a head in one call of the C library; see head.c."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import Structure
from typing import TYPE_CHECKING, NamedTuple

import torch

from localllm.model.fused.cpu import CpuDecoder, group_structs
from localllm.model.packed.int8 import Int8Weight
from localllm_kernels.cpu import structs
from localllm_kernels.cpu.product import CProduct

if TYPE_CHECKING:
    from torch import Tensor

    from localllm.model.ends import Embedding, Head
    from localllm.model.join import Join
    from localllm.model.paged_kv_cache import PagedKVCache
    from localllm.model.rope import RopeTable


# How tables of embeddings lie in memory, by the names in operators.h.
_VALUES = {
    torch.float32: "VALUES_FLOAT32",
    torch.bfloat16: "VALUES_BFLOAT16",
    torch.int8: "VALUES_INT8",
}


class DraftRequest(NamedTuple):
    """A request for which a head drafts `num_drafts` tokens behind its newest one; if 0, it only
    makes the entries of the tokens.

    `token_ids`: those of the slots from `start` on, the newest last; slots count from the first
    block of `table`. `keys`: of the noise of each draft; `temperature`: 0 for the likeliest token.
    """

    table: array[int]
    token_ids: Sequence[int]
    start: int
    num_drafts: int
    keys: Sequence[int]
    temperature: float

    @property
    def end(self) -> int:
        """One past the slot of the newest token."""
        return self.start + len(self.token_ids)


class CpuHead:
    """A head whose layer and products are the library's own."""

    def __init__(
        self, decoder: CpuDecoder, embedding: Embedding, join: Join, head: Head, rope: RopeTable
    ) -> None:
        """See `supports`."""
        # Keep alive the tensors that the structure points to.
        self._kept = (decoder, embedding, join, head, rope)
        assert isinstance(join.linear, CProduct)
        assert join.embedding is not None
        assert join.hidden is not None
        assert isinstance(head.projection, CProduct)
        table = embedding.table
        values, self._scales = table, None
        if isinstance(table, Int8Weight):
            values, self._scales = table.codes, table.scales.float()
        assert isinstance(values, torch.Tensor)
        self._scale = head.scale
        # One row for all positions of a rope that turns nothing, but C reads one for each.
        self._rope = rope.cos.contiguous(), rope.sin.contiguous()
        self._struct = structs.Head(
            ctypes.pointer(decoder.struct),
            values.data_ptr(),
            structs.value(_VALUES[values.dtype]),
            structs.pointer(self._scales),
            embedding.scale,
            join.embedding.weight.data_ptr(),
            join.hidden.weight.data_ptr(),
            join.linear.struct,
            head.projection.struct,
            structs.pointer(head.drafted),
            *(each.data_ptr() for each in self._rope),
        )
        self._groups: tuple[PagedKVCache, ctypes.Array[Structure]] | None = None
        self._draft, self._team = decoder.library.head_draft, decoder.team

    @staticmethod
    def supports(decoder: object, embedding: Embedding, join: Join, head: Head) -> bool:
        """Whether there is such a call for these."""
        products = (join.linear, head.projection)
        norms = (join.embedding, join.hidden)
        table = embedding.table
        values = table.codes if isinstance(table, Int8Weight) else table
        return (
            isinstance(decoder, CpuDecoder)
            and all(isinstance(product, CProduct) for product in products)
            and all(norm and _rounded(norm.eps) == decoder.struct.eps for norm in norms)
            and not any(norm and norm.is_centred for norm in norms)
            and join.fusion is None
            and isinstance(values, torch.Tensor)
            and values.dtype in _VALUES
            and head.cap is None
        )

    def __call__(
        self, requests: Sequence[DraftRequest], hidden: Tensor, kv_cache: PagedKVCache
    ) -> list[list[int]]:
        """The drafts of each request, those with more of them first. `hidden`: what stands before
        each of their tokens, [rows, hidden]. Raises: MemoryError.
        """
        asked = (structs.Drafting * len(requests))()
        kept = []
        for own, each in zip(asked, requests, strict=True):
            tokens, keys = array("q", each.token_ids), array("Q", each.keys)
            addresses = [x.buffer_info()[0] for x in (each.table, tokens, keys)]
            own.table, own.tokens, own.keys = addresses
            own.num_blocks, own.start, own.end = len(each.table), each.start, each.end
            own.num_drafts, own.temperature = each.num_drafts, each.temperature / self._scale
            kept.append((tokens, keys))
        most = max(1, requests[0].num_drafts)
        found = (ctypes.c_int64 * (len(requests) * most))()
        if self._groups is None or self._groups[0] is not kv_cache:
            self._groups = kv_cache, group_structs(kv_cache)
        failed = self._draft(
            ctypes.addressof(self._struct),
            asked,
            len(requests),
            hidden.data_ptr(),
            self._groups[1],
            found,
            self._team.size,
        )
        if failed:
            raise MemoryError("out of memory for the drafts of a head")
        return [found[i * most : i * most + each.num_drafts] for i, each in enumerate(requests)]


def _rounded(value: float) -> float:
    """As it is kept in the library."""
    return ctypes.c_float(value).value
