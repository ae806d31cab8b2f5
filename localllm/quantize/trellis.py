"""Rounding to a trellis, with the feedback of GPTQ.

A weight's value also decides which ones its neighbours can have, so none is final before those
after it are known: each row keeps the best way to every state. The cost of a way is the growth of
the output's error, which GPTQ's columns minimize one by one.
"""

import torch
from torch import Tensor

from localllm.model.packed.trellis import TrellisWeight
from localllm.quantize.inverse import DampedInverse
from localllm_kernels import TORCH_OPS, Ops
from localllm_kernels.trellis import STEP, pack_windows, rotated, signs

# Columns whose values become final at a time, and those ahead that are looked at.
_FINAL, _AHEAD = 32, 16


def round_trellis(
    weight: Tensor, hessian: Tensor | None = None, ops: Ops = TORCH_OPS
) -> TrellisWeight:
    """`weight`, float32 [out, in], rounded towards the least error of its outputs.

    `hessian`: [in, in], the second moments of the inputs; None: towards the weights themselves.
    """
    width = weight.shape[1]
    by = signs(width).to(weight.device)
    turned = rotated(weight, by)
    least = torch.finfo(torch.float32).tiny
    scales = turned.square().mean(1).sqrt().clamp(min=least) * STEP
    if hessian is None:
        moments = factor = torch.eye(width, device=weight.device)
    else:
        moments = rotated(rotated(hessian, by).T, by)
        factor = DampedInverse.of(moments, is_ordered=True).factor.contiguous()
    rounded = TrellisWeight(_windows(turned / scales[:, None], factor, ops), scales)
    # The best scales for these steps.
    steps = rounded.steps()
    reached = steps @ moments
    power = (steps * reached).sum(1)
    better = (turned * reached).sum(1) / power.clamp(min=least)
    return TrellisWeight(rounded.codes, torch.where(power > 0, better, scales))


def _windows(work: Tensor, factor: Tensor, ops: Ops) -> Tensor:
    """The packed windows of `work`, in steps; it is changed."""
    num_rows, width = work.shape
    found = torch.empty(num_rows, width, dtype=torch.uint8, device=work.device)
    states = torch.zeros(num_rows, dtype=torch.uint8, device=work.device)
    for start in range(0, width, _FINAL):
        end, ahead = min(start + _FINAL, width), min(start + _FINAL + _AHEAD, width)
        here = slice(start, ahead)
        found[:, start:end], errors = ops.best_ways(
            work[:, here], factor[here, here], states, end - start
        )
        work[:, end:].addmm_(errors, factor[start:end, end:], alpha=-1)
    return pack_windows(found)
