"""Weights drawn at random in the shape of a model: its speed without its download.

A token costs the same whatever the weights say, so speed and memory can be measured with any. They
are drawn so that logits have an ordinary size.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Literal

import torch
from torch import Tensor

from localllm.model.architecture import HEAD, Architecture
from localllm.model.quantized import Fp8Weight, Int4Weight, Int8Weight, QuantizedWeight

WeightKind = Literal["bf16", "int4", "int8", "fp8"]
WEIGHT_KINDS: tuple[WeightKind, ...] = ("bf16", "int4", "int8", "fp8")
_GROUP_SIZE = 128


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """A `WeightSource` of drawn weights; the same seed and name give the same tensor on a device.

    Linears are of `kind`; beside quantized ones stands an int8 head of its own, also where the
    embedding is tied.
    """

    architecture: Architecture
    kind: WeightKind
    device: torch.device
    seed: int = 0
    # Asked for each tensor, and made anew each time they would take seconds for a large model.
    _linears: Mapping[str, tuple[int, int]] = field(init=False, repr=False, compare=False)
    _tensors: Mapping[str, tuple[int, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_linears", self.architecture.linears())
        object.__setattr__(self, "_tensors", self.architecture.tensors())

    def has_plain(self, name: str) -> bool:
        """See WeightSource."""
        is_quantized = self.has_quantized(name.removesuffix(".weight"))
        return not is_quantized and name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """See WeightSource."""
        return self._tensors[name]

    def plain(self, name: str) -> Tensor:
        """See WeightSource; bfloat16."""
        shape = self.shape(name)
        values = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        values.normal_(generator=self._generator(name))
        if "norm" in name:
            return 1 + 0.1 * values
        is_linear = len(shape) == 2 and "embed_tokens" not in name
        return values.mul_(shape[1] ** -0.5 if is_linear else 0.1)

    def place(self, name: str) -> str:
        """See WeightSource."""
        return "drawn at random"

    def has_quantized(self, linear: str) -> bool:
        """See WeightSource."""
        return self.kind != "bf16" and self._linear_shape(linear) is not None

    def quantized(self, linear: str, device: torch.device) -> QuantizedWeight:
        """See WeightSource."""
        shape = self._linear_shape(linear)
        assert shape is not None
        generator = self._generator(linear)
        deviation = shape[1] ** -0.5  # of the values

        def codes(low: int, high: int, dtype: torch.dtype, columns: int) -> Tensor:
            drawn = torch.empty((shape[0], columns), dtype=dtype, device=self.device)
            return drawn.random_(low, high, generator=generator).to(device)

        def scales(count: tuple[int, ...], of_codes: float, dtype: torch.dtype) -> Tensor:
            return torch.full(count, deviation / of_codes, dtype=dtype, device=device)

        if linear == HEAD or self.kind == "int8":
            drawn = codes(-127, 128, torch.int8, shape[1])
            return Int8Weight(drawn, scales(shape[:1], 73.3, torch.bfloat16))
        if self.kind == "int4":
            group_size = self.group_size(shape[1])
            packed = codes(0, 256, torch.uint8, shape[1] // 2)
            groups = (shape[0], shape[1] // group_size)
            return Int4Weight(packed, scales(groups, 4.61, torch.bfloat16), None)
        values = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        values = values.normal_(generator=generator).to(torch.float8_e4m3fn).to(device)
        return Fp8Weight(values, scales((shape[0], 1), 1.0, torch.float32), (1, shape[1]))

    def linear_bytes(self, linear: str) -> int:
        """Bytes of a linear as it is stored; 0 where there is none of that name."""
        shape = self._linear_shape(linear)
        if shape is None:
            tied = self.architecture.tie_word_embeddings and linear == HEAD
            return 2 * prod(self._head_shape) if tied else 0
        if self.kind == "bf16":
            return 2 * prod(shape)
        if linear == HEAD or self.kind == "int8":
            return prod(shape) + 2 * shape[0]
        if self.kind == "int4":
            return prod(shape) // 2 + 2 * prod(shape) // self.group_size(shape[1])
        return prod(shape) + 4 * shape[0]

    def resident_bytes(self, item_bytes: int) -> int:
        """Bytes of all weights, plain tensors with `item_bytes` a value."""
        plain = sum(prod(shape) for name, shape in self._tensors.items() if self.has_plain(name))
        quantized = [*self._linears, HEAD] if self.kind != "bf16" else []
        return plain * item_bytes + sum(map(self.linear_bytes, dict.fromkeys(quantized)))

    @staticmethod
    def group_size(width_in: int) -> int:
        """Inputs to a scale in int4: 128, or less where that does not divide the width."""
        return next(size for size in (_GROUP_SIZE, 64, 32, 16, width_in) if width_in % size == 0)

    @property
    def _head_shape(self) -> tuple[int, int]:
        return self.architecture.vocab_size, self.architecture.hidden_size

    def _linear_shape(self, linear: str) -> tuple[int, int] | None:
        """(out, in) of a linear; the head is one of its own where it is quantized."""
        if linear == HEAD:
            is_own = self.kind != "bf16" or not self.architecture.tie_word_embeddings
            return self._head_shape if is_own else None
        return self._linears.get(linear)

    def _generator(self, name: str) -> torch.Generator:
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        return torch.Generator(self.device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
