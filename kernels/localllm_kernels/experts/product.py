"""Products of experts: each pair of a row and one of its experts is multiplied with that expert's
weight.

    y[pair, n] = Σ_g scale[e, n, g] · Σ_{k in g} (code[e, n, k] − zero[e, n, g]) · x[row, k]

For few pairs each is a task of its own, and nothing is sorted; else a task is some pairs of one
expert (`experts/tasks.py`), which read its weight once. A task's rows are the columns of the matrix
units' products and the outputs their rows, and inputs are added up in one order. So a pair's result
has the same bits in any task, by itself or among others.

The gate can be included: then a program computes the same outputs of gate and up. A weight of one
expert is that of a plain product. GGUF's blocks are multiplied as values that have been rounded to
x's type (`block_codes.py`), weights on a trellis with rotated rows (`trellis.py`).
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm_kernels.coded_blocks import BLOCK_SIZES, type_constants
from localllm_kernels.compiling.aot import AotSpec, Work
from localllm_kernels.compiling.launch import Workspace, present
from localllm_kernels.experts.stacked_weight import (
    FOUR_BITS,
    STACKED_KINDS,
    STEP,
    StackedKind,
    StackedWeight,
    unpack_halves,
)
from localllm_kernels.experts.tasks import Tasks
from localllm_kernels.pointwise.gate import GateKind, gate_reference, parts_of
from localllm_kernels.pointwise.gate_launch import gate_constants, gated
from localllm_kernels.pointwise.rotate_rows import rotate_rows
from localllm_kernels.primitives.block_codes import STEP as STEP_OF_BLOCKS
from localllm_kernels.primitives.block_codes import block_values
from localllm_kernels.primitives.e4m3 import from_e4m3
from localllm_kernels.primitives.trellis_windows import windows_from
from localllm_kernels.trellis import BYTES, IN_BYTES, TABLE, Mixing, unpack_windows

OUTPUTS = 64  # of a task: the rows of a product on Hopper's matrix units
FEW = 16  # pairs of a task, the least that Triton multiplies
MANY = 32
_OF_BLOCKS = tl.constexpr(STEP_OF_BLOCKS)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@triton.jit
def _values(codes, zeros, dtype: tl.constexpr, KIND: tl.constexpr):
    """Codes as values, without their scale; exact. `zeros`: [outputs], for 4-bit integers."""
    if KIND == 2:
        return from_e4m3(codes).to(dtype)
    if KIND == 3:
        # A mantissa of 128 or of 1,024, with the same excess in the zero.
        if dtype == tl.bfloat16:
            wide = (codes.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
            return wide - (zeros.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)[:, None]
        if dtype == tl.float16:
            wide = (codes.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)
            return wide - (zeros.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)[:, None]
        return codes.to(dtype) - zeros.to(dtype)[:, None]
    if KIND == 4 or KIND == 6:
        # The exponent and the fraction where the type has them; a power of two puts the bias right.
        if dtype == tl.float32:
            bits = codes.to(tl.int32)
            small = ((bits & 8) << 28 | (bits & 7) << 22).to(tl.float32, bitcast=True)
            return small * 8.507059173023462e37  # 2^126
        bits = codes.to(tl.int16)
        if dtype == tl.float16:
            small = ((bits & 8) << 12 | (bits & 7) << 9).to(tl.float16, bitcast=True)
            return small * 16384.0
        small = ((bits & 8) << 12 | (bits & 7) << 6).to(tl.bfloat16, bitcast=True)
        return small * 8.507059173023462e37
    return codes.to(dtype)


@triton.jit
def _spread_scales(
    scales_ptr,
    columns,
    is_column,
    group,
    num_groups,
    dtype: tl.constexpr,
    GROUPS: tl.constexpr,
    APART: tl.constexpr,
):
    """The scales of GROUPS groups, `group` being the first and APART from one to the next, for 16
    codes each: [outputs, 16 · GROUPS].
    """
    groups = group + APART * tl.arange(0, GROUPS)
    at = columns.to(tl.int64)[:, None] * num_groups + groups[None, :]
    stored = tl.load(
        scales_ptr + at, mask=is_column[:, None] & (groups < num_groups)[None, :], other=0
    )
    scales = _power(stored, dtype) if APART == 1 else from_e4m3(stored).to(dtype)
    spread = tl.broadcast_to(scales[:, :, None], [columns.shape[0], GROUPS, 16])
    return tl.reshape(spread, [columns.shape[0], 16 * GROUPS])


@triton.jit
def _power(exponents, dtype: tl.constexpr):
    """2^(exponent - 127) in a type with the exponents of float32."""
    # Of 0, the bits are those of 2^-127, below the normal numbers.
    if dtype == tl.bfloat16:
        bits = exponents.to(tl.int16)
        return tl.where(bits == 0, 1 << 6, bits << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    bits = exponents.to(tl.int32)
    return tl.where(bits == 0, 1 << 22, bits << 23).to(tl.float32, bitcast=True).to(dtype)


@triton.jit
def _add_step(
    acc,
    x_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    steps_ptr,
    row_at,
    is_row,
    columns,
    is_column,
    start,
    width_in,
    row_length,
    num_groups,
    KIND: tl.constexpr,
    TYPE: tl.constexpr,
    NUM_VALUES: tl.constexpr,
    NUM_BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    STEP: tl.constexpr,
):
    """`acc` [outputs, pairs] plus STEP inputs from `start` on."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    part = tl.zeros_like(acc)
    zeros = tl.full(columns.shape, 8, tl.uint8)
    if KIND != 0 and KIND != 5 and KIND != 7:
        of_group = columns.to(tl.int64) * num_groups + start // GROUP
        if HAS_ZEROS:
            zeros = tl.load(zeros_ptr + of_group, mask=is_column, other=0)
    if KIND == 3 or KIND == 4 or KIND == 6:
        inside = tl.arange(0, STEP // 2)
        low = start + inside // 16 * 32 + inside % 16
        is_low = low < width_in
        x_low = tl.load(
            x_ptr + row_at[None, :] + low[:, None],
            mask=is_row[None, :] & is_low[:, None],
            other=0.0,
        )
        x_high = tl.load(
            x_ptr + row_at[None, :] + low[:, None] + 16,
            mask=is_row[None, :] & is_low[:, None],
            other=0.0,
        )
        at = columns.to(tl.int64)[:, None] * row_length + (start // 2 + inside)[None, :]
        codes = tl.load(codes_ptr + at, mask=is_column[:, None] & is_low[None, :], other=0)
        low_values, high_values = (
            _values(codes & 15, zeros, dtype, KIND),
            _values(codes >> 4, zeros, dtype, KIND),
        )
        # A step has several groups of floats: each value gets its scale, which is exact.
        if KIND == 4:
            scales = _spread_scales(
                scales_ptr, columns, is_column, start // 32, num_groups, dtype, STEP // 32, 1
            )
            low_values, high_values = low_values * scales, high_values * scales
        if KIND == 6:
            # The low halves of bytes are a group, the high ones the next.
            group = start // 16
            low_values *= _spread_scales(
                scales_ptr, columns, is_column, group, num_groups, dtype, STEP // 32, 2
            )
            high_values *= _spread_scales(
                scales_ptr, columns, is_column, group + 1, num_groups, dtype, STEP // 32, 2
            )
        part = tl.dot(low_values, x_low, part, input_precision="ieee")
        part = tl.dot(high_values, x_high, part, input_precision="ieee")
    elif KIND == 5:
        output_at = columns.to(tl.int64) * row_length
        for after in tl.static_range(0, STEP, _OF_BLOCKS):
            first = start + after
            inputs = first + tl.arange(0, _OF_BLOCKS)
            x = tl.load(
                x_ptr + row_at[None, :] + inputs[:, None],
                mask=is_row[None, :] & (inputs < width_in)[:, None],
                other=0.0,
            )
            values = block_values(
                codes_ptr, output_at, is_column, first, width_in, TYPE, NUM_VALUES, NUM_BYTES
            )
            part = tl.dot(values.to(dtype), x, part, input_precision="ieee")
    else:
        inputs = start + tl.arange(0, STEP)
        is_input = inputs < width_in
        x = tl.load(
            x_ptr + row_at[None, :] + inputs[:, None],
            mask=is_row[None, :] & is_input[:, None],
            other=0.0,
        )
        if KIND == 7:
            row_ptr = codes_ptr + columns.to(tl.int64) * row_length
            windows = windows_from(row_ptr, is_column, start, width_in, STEP)
            values = tl.load(steps_ptr + windows)
        else:
            at = columns.to(tl.int64)[:, None] * row_length + inputs[None, :]
            codes = tl.load(codes_ptr + at, mask=is_column[:, None] & is_input[None, :], other=0)
            values = _values(codes, zeros, dtype, KIND)
        part = tl.dot(values, x, part, input_precision="ieee")
    if KIND >= 1 and KIND <= 3:
        part *= tl.load(scales_ptr + of_group, mask=is_column, other=0).to(tl.float32)[:, None]
    return acc + part


@triton.jit
def _experts_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    factors_ptr,
    steps_ptr,
    bias_ptr,
    chosen_ptr,
    order_ptr,
    table_ptr,
    slots_ptr,
    out_ptr,
    top_k,
    width_in,
    width_out,
    row_length,
    num_groups,
    KIND: tl.constexpr,
    TYPE: tl.constexpr,
    NUM_VALUES: tl.constexpr,
    NUM_BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_TASKS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    GATE: tl.constexpr,
    SLOPE: tl.constexpr,
    CUBE: tl.constexpr,
    STEEP: tl.constexpr,
    LIMIT: tl.constexpr,
    PAIRS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
):
    """`top_k`: pairs that read the same row of x; `row_length`: codes of an output as they are
    stored; GATE: -1 for none.
    """
    has_up: tl.constexpr = GATE >= 0 and GATE != 3
    task = tl.program_id(1)
    inside = tl.arange(0, PAIRS)
    if HAS_TASKS:
        expert = tl.load(table_ptr + 3 * task)
        first = tl.load(table_ptr + 3 * task + 1)
        count = tl.load(table_ptr + 3 * task + 2)
        is_row = inside < count
        pairs = tl.load(order_ptr + first + inside, mask=is_row, other=0)
    else:
        expert = tl.load(chosen_ptr + task)
        count = 1
        is_row = inside < count
        pairs = task + inside
    if HAS_SLOTS:
        expert = tl.load(slots_ptr + expert)
    if (count == 0) | (expert < 0):
        return
    outputs = width_out // 2 if has_up else width_out
    columns = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_column = columns < outputs
    row_at = (pairs // top_k).to(tl.int64) * width_in
    of_expert = expert.to(tl.int64) * width_out
    if KIND < 3:
        row_length = width_in  # which takes no register of its own
    codes_ptr += of_expert * row_length
    scales_ptr += of_expert * num_groups
    zeros_ptr += of_expert * num_groups
    acc = tl.zeros([OUTPUTS, PAIRS], tl.float32)
    up = tl.zeros([OUTPUTS, PAIRS], tl.float32)
    # The values of gate and up do not fit in registers together for blocks and trellises: one
    # follows the other, and nothing is loaded ahead.
    IS_APART: tl.constexpr = KIND == 5 or KIND == 7
    STAGES: tl.constexpr = 1 if IS_APART else None
    for start in tl.range(0, width_in, STEP, num_stages=STAGES):
        acc = _add_step(
            acc, x_ptr, codes_ptr, scales_ptr, zeros_ptr, steps_ptr, row_at, is_row, columns,
            is_column, start, width_in, row_length, num_groups, KIND, TYPE, NUM_VALUES,
            NUM_BYTES, GROUP, HAS_ZEROS, STEP,
        )  # fmt: skip
        if has_up and not IS_APART:
            up = _add_step(
                up, x_ptr, codes_ptr, scales_ptr, zeros_ptr, steps_ptr, row_at, is_row,
                columns + outputs, is_column, start, width_in, row_length, num_groups, KIND,
                TYPE, NUM_VALUES, NUM_BYTES, GROUP, HAS_ZEROS, STEP,
            )  # fmt: skip
    if has_up and IS_APART:
        for start in tl.range(0, width_in, STEP, num_stages=STAGES):
            up = _add_step(
                up, x_ptr, codes_ptr, scales_ptr, zeros_ptr, steps_ptr, row_at, is_row,
                columns + outputs, is_column, start, width_in, row_length, num_groups, KIND,
                TYPE, NUM_VALUES, NUM_BYTES, GROUP, HAS_ZEROS, STEP,
            )  # fmt: skip
    if KIND == 6 or KIND == 7:
        factors_ptr += of_expert
        acc *= tl.load(factors_ptr + columns, mask=is_column, other=0.0)[:, None]
        if has_up:
            up *= tl.load(factors_ptr + outputs + columns, mask=is_column, other=0.0)[:, None]
    if HAS_BIAS:
        bias_ptr += of_expert
        acc += tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)[:, None]
    if GATE >= 0:
        if HAS_BIAS and has_up:
            bias = tl.load(bias_ptr + outputs + columns, mask=is_column, other=0.0)
            up += bias.to(tl.float32)[:, None]
        acc = gated(acc, up, GATE, SLOPE, CUBE, STEEP, LIMIT)
    at = pairs.to(tl.int64)[None, :] * outputs + columns[:, None]
    is_inside = is_row[None, :] & is_column[:, None]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=is_inside)


@dataclass(frozen=True, slots=True)
class Pairs:
    """Who multiplies with whom. `chosen`: int32 [rows, top_k]; `tasks`: None for a task per pair;
    `slots`: int32 [experts], where in a weight each expert is, -1 for those to be left out; None if
    all are in their places.
    """

    chosen: Tensor
    tasks: Tasks | None = None
    slots: Tensor | None = None


def step_of(kind: str, group: int) -> int:
    """The inputs of a program's turn: at most a group; of blocks two steps, see block_matmul.py; of
    trellises half of one, whose values fit in registers.
    """
    if kind == "blocks":
        return 2 * STEP_OF_BLOCKS
    if kind == "trellis3":
        return STEP // 2
    return min(STEP, group) if kind == "int4" else STEP


def rows_for(weight: StackedWeight, x: Tensor) -> Tensor:
    """`x` as it is multiplied with `weight`."""
    return x if weight.mixing is None else rotate_rows(x.contiguous(), weight.mixing.signs)


def expert_product(
    x: Tensor,
    weight: StackedWeight,
    pairs: Pairs,
    gate: GateKind | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`x`: [rows, in], or [rows · top_k, in], a row for each pair, as `rows_for` gives them ->
    [rows · top_k, out], in the order of the pairs; with the gate, half as wide. Pairs that are left
    out are not written to `out`.
    """
    x = x.contiguous()
    num_pairs = pairs.chosen.numel()
    outputs = weight.width_out // (1 if gate is None else parts_of(gate))
    if out is None:
        out = x.new_empty(num_pairs, outputs)
    if num_pairs == 0:
        return out
    tasks = pairs.tasks
    num_tasks = num_pairs if tasks is None else len(tasks.table)
    codes = weight.codes.view(torch.uint8) if weight.kind == "fp8" else weight.codes
    _experts_kernel[(triton.cdiv(outputs, OUTPUTS), num_tasks)](
        x,
        codes,
        present(weight.scales, x),
        present(weight.zeros, x),
        present(weight.factors, x),
        x if weight.mixing is None else weight.mixing.steps,
        present(weight.bias, x),
        pairs.chosen.contiguous(),
        pairs.chosen if tasks is None else tasks.order,
        pairs.chosen if tasks is None else tasks.table,
        present(pairs.slots, pairs.chosen),
        out,
        num_pairs // len(x),
        weight.width_in,
        weight.width_out,
        codes.shape[2],
        weight.width_in // weight.group,
        KIND=STACKED_KINDS.index(weight.kind),
        **_of_blocks(weight.block_type),
        GROUP=weight.group,
        HAS_ZEROS=weight.zeros is not None,
        HAS_BIAS=weight.bias is not None,
        HAS_TASKS=tasks is not None,
        HAS_SLOTS=pairs.slots is not None,
        **_of_gate(gate),
        PAIRS=FEW if tasks is None else tasks.most,
        OUTPUTS=OUTPUTS,
        STEP=step_of(weight.kind, weight.group),
        num_warps=4,
    )
    return out


def _of_blocks(block_type: str | None) -> dict[str, Any]:
    if block_type is None:
        return {"TYPE": "", "NUM_VALUES": 0, "NUM_BYTES": 0}
    return type_constants(block_type)


def _of_gate(gate: GateKind | None) -> dict[str, Any]:
    constants = gate_constants(gate or "silu")
    kind = constants.pop("KIND")
    return {"GATE": -1 if gate is None else kind, **constants}


def expert_product_reference(
    x: Tensor, weight: StackedWeight, chosen: Tensor, gate: GateKind | None = None
) -> Tensor:
    """The same in float64."""
    flat = chosen.flatten().long()
    rows = x.double().repeat_interleave(len(flat) // len(x), dim=0)
    out = torch.einsum("pk,pnk->pn", rows, dequantized(weight)[flat])
    if weight.bias is not None:
        out = out + weight.bias.double()[flat]
    # Of values in float64 the gate is computed in float32.
    return out if gate is None else gate_reference(out, gate)


def dequantized(weight: StackedWeight) -> Tensor:
    """[experts, out, in] in float64, on a trellis for rotated inputs; not of blocks."""
    if weight.kind == "plain":
        return weight.codes.double()
    if weight.factors is not None and weight.kind == "trellis3":
        steps = torch.tensor(TABLE, dtype=torch.float64)
        windows = unpack_windows(weight.codes[:, :, 1:].contiguous())
        return steps[windows.long()] * weight.factors.double()[:, :, None]
    assert weight.scales is not None
    scales = weight.scales.double()
    if weight.kind in ("mxfp4", "nvfp4"):
        table = torch.tensor([*E2M1, *(-each for each in E2M1)], dtype=torch.float64)
        values = table[unpack_halves(weight.codes).long()]
        if weight.factors is None:
            scales = 2 ** (scales - 127)
        else:
            factors = weight.factors.double()[:, :, None]
            scales = weight.scales.view(torch.float8_e4m3fn).double() * factors
    elif weight.kind == "int4":
        zeros = torch.full_like(scales, 8) if weight.zeros is None else weight.zeros.double()
        codes = unpack_halves(weight.codes).double()
        values = (codes.view(*zeros.shape, -1) - zeros[..., None]).flatten(2)
    else:
        values = weight.codes.double()
    return (values.view(*scales.shape, -1) * scales[..., None]).flatten(2)


@dataclass(frozen=True, slots=True)
class _Example:
    """`by_pair`: nothing was sorted, and `most` does not matter; `block_type`: of GGUF's blocks."""

    kind: StackedKind
    group: int
    gate: GateKind | None
    most: int
    by_pair: bool
    block_type: str | None = None

    @property
    def row_bytes(self) -> float:
        """Bytes of the 4,096 weights of an output."""
        if self.block_type is not None:
            num_values, num_bytes = BLOCK_SIZES[self.block_type]
            return _WIDTH // num_values * num_bytes
        if self.kind == "trellis3":
            return _WIDTH // IN_BYTES * BYTES
        of_group = {"int4": 2, "mxfp4": 1, "nvfp4": 1}.get(self.kind, 0)
        of_value = 0.5 if self.kind in FOUR_BITS else 2 if self.kind == "plain" else 1
        return _WIDTH * (of_value + of_group / self.group)

    def __call__(self, workspace: Workspace) -> None:
        bf16, uint8 = torch.bfloat16, torch.uint8
        types = {"plain": bf16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
        is_on_trellis = self.kind == "trellis3"
        stored = _WIDTH // 2 if self.kind in FOUR_BITS else _WIDTH
        if self.block_type is not None or is_on_trellis:
            stored = int(self.row_bytes) + is_on_trellis
        scales = torch.empty(
            *(8, 128, _WIDTH // self.group),
            dtype={"mxfp4": uint8, "nvfp4": uint8, "fp8": torch.float32}.get(self.kind, bf16),
        )
        weight = StackedWeight(
            self.kind,
            torch.empty(8, 128, stored, dtype=types.get(self.kind, uint8)),
            None if self.kind in ("blocks", "trellis3") else scales,
            zeros=None,
            bias=None,
            width_in=_WIDTH,
            block_type=self.block_type,
            factors=torch.empty(8, 128) if self.kind in ("nvfp4", "trellis3") else None,
            mixing=Mixing.of(_WIDTH, bf16, torch.device("cpu")) if is_on_trellis else None,
        )
        x, chosen = torch.empty(1, _WIDTH, dtype=bf16), torch.zeros(1, 8, dtype=torch.int32)
        tasks = None if self.by_pair else Tasks(chosen, chosen, self.most)
        expert_product(x, weight, Pairs(chosen, tasks), self.gate)


def _spec(example: _Example) -> AotSpec:
    gate = example.gate
    form = example.block_type or f"{example.kind} groups of {example.group}"
    words = f"{' by pair' if example.by_pair else ''}{f', {gate}' if gate else ''}"
    return AotSpec(
        _experts_kernel,
        f"{form}, {example.most} pairs{words}",
        example,
        max_stack=0 if example.block_type is None else 16,  # some values, for some types and cards
        multiples_of_16=("width_in", "width_out")
        if example.kind == "trellis3"
        else ("width_in", "width_out", "row_length"),
        # The types of most weights in most files stand for the others. Of blocks and
        # trellises, gate and up are loops of their own.
        work=Work(
            "weight",
            1 if gate is None or example.kind in ("blocks", "trellis3") else 2,
            example.row_bytes / _WIDTH,
            times=("OUTPUTS", "STEP"),
        )
        # mxfp4 stands for nvfp4.
        if example.block_type in (None, "Q4_K", "Q6_K") and example.kind != "nvfp4"
        else None,
    )


_WIDTH = 4096
_FORMS: dict[StackedKind, int] = {
    **{"plain": 4096, "int8": 4096, "fp8": 128},
    **{"int4": 128, "mxfp4": 32, "nvfp4": 16, "trellis3": 4096},
}
# The gate, the pairs of a task, and whether nothing was sorted.
_WAYS: tuple[tuple[GateKind | None, int, bool], ...] = (
    ("silu", FEW, True),
    (None, FEW, False),
    ("silu", MANY, False),
)
AOT_SPECS = [
    _spec(_Example(kind, group, gate, most, by_pair))
    for kind, group in _FORMS.items()
    for gate, most, by_pair in _WAYS
]
AOT_SPECS += [
    _spec(_Example("blocks", _WIDTH, gate, most, by_pair, name))
    for name in BLOCK_SIZES
    for gate, most, by_pair in _WAYS
]
