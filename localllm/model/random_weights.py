"""Random weights in the shape of a model, to measure its speed without downloading it.

A token costs the same whatever the weights are, so any weights will do to measure speed and memory.
They are drawn so that logits have an ordinary size.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from localllm.model.architecture import HEAD, TABLE, Architecture
from localllm.model.packed.table import PACKED_TYPES, PackedType
from localllm.model.packed.weight import PackedWeight
from localllm.model.weights import WeightSource
from localllm_kernels.compiling.traits import WeightLayout

WeightKind = Literal["bf16", "int4", "int8", "fp8", "mxfp4", "nvfp4", "trellis3", "mxfp4-experts"]
WEIGHT_KINDS: tuple[WeightKind, ...] = get_args(WeightKind)
# As gpt-oss is published: everything but the experts is bfloat16.
_EXPERTS_ALONE = "mxfp4-experts"


@dataclass(frozen=True, slots=True)
class RandomWeights(WeightSource):
    """Random weights; seed and name determine the tensor on a given device.

    Linears are of `kind`, for mxfp4-experts those of experts only. If all are quantized, embedding
    and head are int8, as `localllm quantize` writes them; a tied head is the embedding.
    """

    architecture: Architecture
    kind: WeightKind
    device: torch.device
    seed: int = 0
    # Looked up for every tensor; building them each time would take seconds for a large model.
    _linears: Mapping[str, tuple[int, int]] = field(init=False, repr=False, compare=False)
    _ends: Mapping[str, tuple[int, int]] = field(init=False, repr=False, compare=False)
    _tensors: Mapping[str, tuple[int, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        tensors = self.architecture.tensors()
        linears, ends = self.architecture.quantized(), {}
        if self.kind == _EXPERTS_ALONE:
            experts = self.architecture.expert_linears()
            linears = {name: shape for name, shape in linears.items() if name in experts}
        elif self.kind == "bf16":
            linears = {}
        else:
            shapes = {name: tensors.get(f"{name}.weight") for name in (TABLE, HEAD)}
            ends = {name: (shape[0], shape[1]) for name, shape in shapes.items() if shape}
        object.__setattr__(self, "_linears", linears)
        object.__setattr__(self, "_ends", ends)
        object.__setattr__(self, "_tensors", tensors)

    def has_plain(self, name: str) -> bool:
        is_quantized = self.has_quantized(name.removesuffix(".weight"))
        return not is_quantized and name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name]

    def plain(self, name: str) -> Tensor:
        """In bfloat16."""
        shape = self.shape(name)
        values = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        values.normal_(generator=self._generator(name))
        if "norm" in name or "scalar" in name:
            return 1 + 0.1 * values
        is_linear = len(shape) == 2 and "embed_tokens" not in name
        return values.mul_(shape[1] ** -0.5 if is_linear else 0.1)

    def place(self, name: str) -> tuple[str, str]:
        return name, "drawn at random"

    def has_quantized(self, linear: str) -> bool:
        return linear in self._linears or linear in self._ends

    def quantized(self, linear: str, device: torch.device) -> PackedWeight:
        weight = self._type_of(linear).draw(self._quantized_shape(linear), self._generator(linear))
        return weight if self.device == device else _moved(weight, device)

    def linear_bytes(self, linear: str, item_bytes: int = 2) -> int:
        """Stored bytes of a linear, of a tied head those of the embedding; plain values take
        `item_bytes` each; 0 if there is none.
        """
        if linear == HEAD and self.architecture.tie_word_embeddings:
            linear = TABLE
        if self.has_quantized(linear):
            return self._type_of(linear).stored_bytes(self._quantized_shape(linear))
        return item_bytes * prod(self._tensors.get(f"{linear}.weight", (0,)))

    def resident_bytes(self, item_bytes: int) -> int:
        """Bytes of all weights; values of plain tensors take `item_bytes` each."""
        plain = sum(prod(shape) for name, shape in self._tensors.items() if self.has_plain(name))
        return plain * item_bytes + sum(map(self.linear_bytes, (*self._linears, *self._ends)))

    @property
    def published_bytes(self) -> int:
        """Bytes of all weights with embedding and head in 16 bits, as publishers leave them."""
        added = (2 * prod(shape) - self.linear_bytes(name) for name, shape in self._ends.items())
        return self.resident_bytes(2) + sum(added)

    def layouts(self, linears: Iterable[str]) -> set[WeightLayout | None]:
        """The layouts of these linears, which decide the kernels; None for a plain one."""
        return {self._layout(name) if self.has_quantized(name) else None for name in linears}

    def _layout(self, linear: str) -> WeightLayout:
        width_in, packed = self._quantized_shape(linear)[1], self._type_of(linear)
        return WeightLayout(packed.weight.kind, width_in, packed.group(width_in))

    def _type_of(self, linear: str) -> PackedType:
        return PACKED_TYPES["int8" if linear in self._ends else self.kind.partition("-")[0]]

    def _quantized_shape(self, linear: str) -> tuple[int, int]:
        return self._ends.get(linear) or self._linears[linear]

    def _generator(self, name: str) -> torch.Generator:
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        return torch.Generator(self.device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _moved(weight: PackedWeight, device: torch.device) -> PackedWeight:
    tensors: dict[str, Any] = {each.name: getattr(weight, each.name) for each in fields(weight)}
    moved = {name: t.to(device) for name, t in tensors.items() if isinstance(t, Tensor)}
    return replace(weight, **moved)
