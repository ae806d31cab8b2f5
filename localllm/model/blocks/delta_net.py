"""The gated delta net of Qwen3.5: a matrix for each head that is read and corrected by each token,
in place of attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from localllm.model.blocks.block import (
    BlockSpec,
    InputsFrom,
    LinearGroup,
    Parts,
    RecurrentState,
    RowBytes,
    Work,
)
from localllm.model.blocks.recurrence import Recurrence
from localllm.model.dtypes import StateDType

if TYPE_CHECKING:
    from localllm_kernels.recurrence.recurrence import Heads

_OWN = "linear_attn."
_DECAY, _BIAS = f"{_OWN}A_log", f"{_OWN}dt_bias"


@dataclass(frozen=True, slots=True)
class DeltaNetNames:
    """How a checkpoint stores the linears of queries, keys, values and gate, those of the factors b
    and a, the output, the convolution, and the norm.

    One linear for the first or the second has the rows of each key head side by side (Qwen3-Next).
    """

    inputs: tuple[str, ...]
    factors: tuple[str, ...]
    output: str
    conv: tuple[str, ...]
    norm: str


# Of Qwen3.5, of Qwen3-Next, of its GGUF files, and of OLMo hybrid.
PARTS = DeltaNetNames(
    ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"), "out_proj", ("conv1d",), "norm"
)
WHOLE = DeltaNetNames(("in_proj_qkvz",), ("in_proj_ba",), "out_proj", ("conv1d",), "norm")
WHOLE_FACTORS = replace(WHOLE, inputs=PARTS.inputs)
EACH = DeltaNetNames(
    ("q_proj", "k_proj", "v_proj", "g_proj"),
    ("b_proj", "a_proj"),
    "o_proj",
    ("q_conv1d", "k_conv1d", "v_conv1d"),
    "o_norm",
)


@dataclass(frozen=True, slots=True)
class DeltaNetSpec(BlockSpec):
    """The sizes of a gated delta net: heads of keys and of values, their widths, the taps of the
    convolution before it, the `eps` of its norm, and how much of a correction is written at `most`;
    see recurrence.py of the kernels.

    `is_tiled`: in files the first value heads of all key heads come first, then the second ones;
    else those of a key head stand side by side, as the kernels have them.
    """

    hidden_size: int
    num_keys: int
    num_values: int
    key_width: int
    value_width: int
    taps: int
    eps: float
    most: float = 1.0
    names: DeltaNetNames = PARTS
    is_tiled: bool = False
    state_dtype: StateDType = "float32"

    @property
    def heads(self) -> Heads:
        """As the kernels take them."""
        from localllm_kernels.recurrence.recurrence import Heads

        return Heads(self.num_keys, self.num_values, self.key_width, self.value_width, True)

    @property
    def _keys(self) -> int:
        return self.num_keys * self.key_width

    @property
    def _values(self) -> int:
        return self.num_values * self.value_width

    @property
    def _conv_width(self) -> int:
        return 2 * self._keys + self._values

    @property
    def _convs(self) -> tuple[str, ...]:
        return tuple(f"{_OWN}{name}.weight" for name in self.names.conv)

    @property
    def _norm(self) -> str:
        return f"{_OWN}{self.names.norm}.weight"

    def _linears(
        self, names: tuple[str, ...], widths: tuple[int, ...]
    ) -> tuple[tuple[str, int], ...]:
        return tuple((f"{_OWN}{name}", width) for name, width in zip(names, widths, strict=True))

    @property
    def products(self) -> tuple[LinearGroup, ...]:
        keys, values = self._keys, self._values
        widths = {1: (2 * keys + 2 * values,), 2: (2 * keys + values, values)}
        inputs = self._linears(
            self.names.inputs, widths.get(len(self.names.inputs), (keys, keys, values, values))
        )
        count = len(self.names.factors)
        factors = self._linears(self.names.factors, (2 * self.num_values // count,) * count)
        output = self._linears((self.names.output,), (self.hidden_size,))
        return (
            LinearGroup("factors", factors, self.hidden_size, is_kept=True),
            LinearGroup("qkv and gate", inputs, self.hidden_size),
            LinearGroup("output", output, values, inputs=InputsFrom.OTHER),
        )

    @property
    def vectors(self) -> Mapping[str, tuple[int, ...]]:
        keys, values = self._keys, self._values
        widths = (self._conv_width,) if len(self._convs) == 1 else (keys, keys, values)
        shapes: dict[str, tuple[int, ...]] = {
            name: (width, 1, self.taps) for name, width in zip(self._convs, widths, strict=True)
        }
        heads = {_DECAY: (self.num_values,), _BIAS: (self.num_values,)}
        return {**shapes, **heads, self._norm: (self.value_width,)}

    @property
    def recurrence(self) -> RecurrentState:
        matrix = (self.num_values, self.key_width, self.value_width)
        width = self._conv_width + 2 * self.num_values
        return RecurrentState(self.taps - 1, width, matrix, self.state_dtype)

    @property
    def workspace(self) -> int:
        return 3 * self._conv_width + 4 * self._values

    def work(self, context: int, row_bytes: RowBytes) -> Work:
        values = self.num_values * self.key_width * self.value_width
        # The state is read and written.
        return Work(2 * self.recurrence.num_bytes(), 8 * values + 2 * self.taps * self._conv_width)

    def launches(self, *, is_fused: bool) -> int:
        """The matrices, what rings keep, and the norm with its gate."""
        return 3

    def describe(self) -> str:
        return (
            f"a delta rule of {self.num_values} heads of {self.key_width} by {self.value_width} "
            f"with {self.num_keys} of keys"
        )

    def build(self, parts: Parts) -> Recurrence:
        import torch

        from localllm_kernels.recurrence.recurrence import RecurrenceWeights

        heads, factors, inputs, output = self._value_heads(), *self.products
        convs = torch.cat([parts.vector(name).float().flatten(1) for name in self._convs])
        decay, bias = (parts.vector(name).float() for name in (_DECAY, _BIAS))
        if heads is not None:
            convs, decay, bias = convs[self._channels(heads)], decay[heads], bias[heads]
        weights = RecurrenceWeights(
            convs.T.contiguous(),
            None,
            -decay.exp(),
            bias,
            None,
            parts.vector(self._norm).float(),
            self.eps,
            self.most,
        )
        # Of a block of 256 values of a row two heads have a half each: so the row stays as it is,
        # and what it is multiplied with is put into its order.
        columns = None if heads is None else self._inverse(heads)
        return Recurrence(
            parts.linear(*inputs.names, order=self._input_order(heads)),
            parts.linear(*output.names, columns=columns),
            weights,
            self.heads,
            inputs_at=0,
            gate_at=self._conv_width,
            factors=parts.linear(*factors.names, order=self._factor_order(heads)),
        )

    def _value_heads(self) -> list[int] | None:
        """Which value head of the files each of the kernels is; None if they are the same."""
        share = self.num_values // self.num_keys
        if not self.is_tiled or share == 1 or self.num_keys == 1:
            return None
        return [i * self.num_keys + key for key in range(self.num_keys) for i in range(share)]

    def _values_of(self, heads: list[int], first: int) -> list[int]:
        """The numbers of the heads' values, which begin with `first`."""
        width = self.value_width
        return [first + head * width + i for head in heads for i in range(width)]

    def _channels(self, heads: list[int]) -> list[int]:
        return [*range(2 * self._keys), *self._values_of(heads, 2 * self._keys)]

    def _inverse(self, heads: list[int]) -> list[int]:
        """Which value of the kernels each of the files is."""
        places = self._values_of(heads, 0)
        return sorted(range(len(places)), key=places.__getitem__)

    def _input_order(self, heads: list[int] | None) -> list[int] | None:
        if heads is not None:
            return [*self._channels(heads), *self._values_of(heads, self._conv_width)]
        if len(self.names.inputs) > 1:
            return None
        values = self.num_values // self.num_keys * self.value_width
        return self._order(self.key_width, self.key_width, values, values)

    def _factor_order(self, heads: list[int] | None) -> list[int] | None:
        if heads is not None:
            return [*heads, *(self.num_values + head for head in heads)]
        share = self.num_values // self.num_keys
        return None if len(self.names.factors) > 1 else self._order(share, share)

    def _order(self, *widths: int) -> list[int]:
        """The rows of parts that stand side by side for each key head, part by part."""
        stride, first, rows = sum(widths), 0, list[int]()
        for width in widths:
            starts = [head * stride + first for head in range(self.num_keys)]
            rows += [start + i for start in starts for i in range(width)]
            first += width
        return rows
