"""Torch's operators where a GPU has kernels: as launches, which a RecordingDevice captures.

Whole models are computed with them where a test is about steps, captures and replays, not about
what a kernel computes: Triton's interpreter takes some thirty times as long.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from recording_device import Launch
from torch import Tensor

from localllm.model.linear import ExpertByExpert
from localllm_kernels import TORCH_OPS, Ops
from localllm_kernels.attention.kv_cache import KVCache
from localllm_kernels.linears import ExpertsProduct, Linears, Product
from localllm_kernels.pointwise.gate import GateKind
from localllm_kernels.recurrence.recurrence import Heads, RecurrenceRows
from localllm_kernels.sampling.sample import sample_reference

_ROTATE, _ATTEND = Launch(TORCH_OPS.rotate_and_store), Launch(TORCH_OPS.paged_attention)
_CONVOLVE, _RECUR = Launch(TORCH_OPS.short_conv), Launch(TORCH_OPS.recurrence)


def launched_ops() -> Ops:
    """A table whose steps can be captured."""
    return replace(
        TORCH_OPS,
        traits=replace(TORCH_OPS.traits, captures=True, row_unit=1),
        rotate_and_store=_rotate_and_store,
        paged_attention=_paged_attention,
        short_conv=_short_conv,
        recurrence=_recurrence,
        linears=_TorchLinears(),
        sample=sample_reference,
    )


def _rotate_and_store(
    qkv: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None, *rest: Any, **how: Any
) -> Tensor:
    num_tokens, heads, head_dim = qkv.shape
    if cache is not None:
        heads -= (2 if how.get("has_values", True) else 1) * cache.key.shape[1]
    query = qkv.new_empty(num_tokens, heads, head_dim)
    _ROTATE(query, qkv, cos, sin, cache, *rest, **how)
    return query


def _paged_attention(
    query: Tensor, cache: KVCache, *, value_dim: int | None = None, **how: Any
) -> Tensor:
    width = query.shape[2] if value_dim is None else value_dim
    out = query.new_empty(*query.shape[:2], width)
    _ATTEND(out, query, cache, value_dim=width, **how)
    return out


def _short_conv(rows: Tensor, *rest: Any) -> Tensor:
    out = rows.new_empty(len(rows), rows.shape[1] // 3)
    _CONVOLVE(out, rows, *rest)
    return out


def _recurrence(rows: RecurrenceRows, weights: Any, heads: Heads, *rest: Any) -> Tensor:
    out = rows.inputs.new_empty(len(rows.inputs), heads.values)
    _RECUR(out, rows, weights, heads, *rest)
    return out


@dataclass(frozen=True)
class _LaunchedExperts:
    """See ExpertsProduct."""

    experts: ExpertByExpert

    @property
    def each(self) -> Sequence[Product]:
        return self.experts.each

    def __call__(
        self, x: Tensor, chosen: Tensor, factors: Tensor, gate: Callable[[Tensor], Tensor]
    ) -> Tensor:
        out = x.new_empty(x.shape)
        Launch(self.experts)(out, x, chosen, factors, gate)
        return out


class _TorchLinears:
    """Torch's product with plain weights, and no kernel for others; see Linears."""

    @property
    def of_experts(self) -> Linears:
        return self

    def plain(self, weight: Tensor, bias: Tensor | None) -> Product:
        return lambda x: F.linear(x, weight, bias)

    def packed(self, *weight: Any) -> None:
        pass

    def experts(
        self, gate_up: Sequence[Product], down: Sequence[Product], kind: GateKind
    ) -> ExpertsProduct:
        return _LaunchedExperts(ExpertByExpert(tuple(gate_up), tuple(down)))
