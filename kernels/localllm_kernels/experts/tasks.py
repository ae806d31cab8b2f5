"""The pairs of a row and one of its experts, put side by side by expert without asking the device
how many there are.

A pair's number is row · top_k + place. Those of one expert stay in the order of their rows. A task
is up to `most` pairs of one expert. Expert e, with n pairs behind the b pairs of the experts before
it, has the tasks from b // most + e on: they suffice, since

    (b + n) // most + 1  ≥  b // most + ceil(n / most)

and whoever launches knows their number, num_pairs // most + num_experts, without a look. Tasks that
are left over have no pairs.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm_kernels.compiling.aot import AotSpec

BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Tasks:
    """`order`: int32 [num_pairs], pairs by expert; `table`: int32 [num_tasks, 3], the expert of a
    task, its first place in `order`, and its number of pairs, at most `most`.
    """

    order: Tensor
    table: Tensor
    most: int


@triton.jit(do_not_specialize=["num_pairs"])
def _tasks_kernel(
    chosen_ptr, order_ptr, table_ptr, num_pairs, MOST: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per expert."""
    expert = tl.program_id(0)
    inside = tl.arange(0, BLOCK)
    first, count = 0, 0
    for start in range(0, num_pairs, BLOCK):
        pairs = start + inside
        chosen = tl.load(chosen_ptr + pairs, mask=pairs < num_pairs, other=1 << 30)
        first += tl.sum((chosen < expert).to(tl.int32), axis=0)
        is_own = (chosen == expert).to(tl.int32)
        count += tl.sum(is_own, axis=0)
    place = first
    for start in range(0, num_pairs, BLOCK):
        pairs = start + inside
        chosen = tl.load(chosen_ptr + pairs, mask=pairs < num_pairs, other=1 << 30)
        is_own = (chosen == expert).to(tl.int32)
        at = place + tl.cumsum(is_own, axis=0) - 1
        tl.store(order_ptr + at, pairs, mask=is_own != 0)
        place += tl.sum(is_own, axis=0)
    task = first // MOST + expert
    end = (first + count) // MOST + expert + 1
    done = first
    while task < end:
        tl.store(table_ptr + 3 * task, expert)
        tl.store(table_ptr + 3 * task + 1, done)
        tl.store(table_ptr + 3 * task + 2, tl.minimum(first + count - done, MOST))
        done = tl.minimum(done + MOST, first + count)
        task += 1


def expert_tasks(chosen: Tensor, num_experts: int, most: int) -> Tasks:
    """`chosen`: int32 [rows, top_k]."""
    chosen = chosen.contiguous()
    num_pairs = chosen.numel()
    order = torch.empty(num_pairs, dtype=torch.int32, device=chosen.device)
    table = order.new_empty(num_pairs // most + num_experts, 3)
    _tasks_kernel[(num_experts,)](chosen, order, table, num_pairs, MOST=most, BLOCK=BLOCK)
    return Tasks(order, table, most)


def expert_tasks_reference(chosen: Tensor, num_experts: int, most: int) -> Tasks:
    """The same by sorting."""
    flat = chosen.flatten()
    order = flat.sort(stable=True).indices.int()
    rows, first = [], 0
    for expert, count in enumerate(torch.bincount(flat, minlength=num_experts).tolist()):
        end = (first + count) // most + expert + 1
        for task in range(first // most + expert, end):
            done = min((task - first // most - expert) * most, count)
            rows.append((expert, first + done, min(count - done, most)))
        first += count
    return Tasks(order, torch.tensor(rows, dtype=torch.int32), most)


AOT_SPECS = [
    AotSpec(
        _tasks_kernel,
        "tasks of 16 pairs",
        lambda _: expert_tasks(torch.zeros(64, 8, dtype=torch.int32), 128, 16),
    )
]
