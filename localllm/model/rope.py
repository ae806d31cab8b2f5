"""Rotary embedding tables: the angles of every position, with the scalings for long contexts."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.model.rope_config import RopeConfig


@dataclass(frozen=True, slots=True, eq=False)
class RopeTable:
    """Cosines and sines of every position, float32 [max_positions, head_dim / 2]. Where no position
    turns, all rows are one in memory.

    A table equals only itself, so that it can be a dictionary key.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def build(
        cls, rope: RopeConfig, head_dim: int, max_positions: int, device: torch.device
    ) -> "RopeTable":
        """Tables for positions 0 to `max_positions` - 1."""
        frequencies, scale = inverse_frequencies(rope, head_dim, max_positions)
        # Rows of 576 without a rotation would take hundreds of megabytes of ones and zeros.
        num_rows = 1 if rope.kind == "none" else max_positions
        angles = torch.outer(torch.arange(num_rows, dtype=torch.float32), frequencies)
        # Pairs that do not turn are not scaled either.
        still = (0, head_dim // 2 - len(frequencies))
        cos = F.pad(angles.cos() * scale, still, value=1.0).to(device)
        sin = F.pad(angles.sin() * scale, still).to(device)
        return cls(cos.expand(max_positions, -1), sin.expand(max_positions, -1))


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of the batch's positions, float32 [num_tokens, head_dim / 2]."""

    cos: Tensor
    sin: Tensor


class RopeTables:
    """The tables of a model's layers, each built once, for positions 0 to `max_positions` - 1."""

    def __init__(self, max_positions: int, device: torch.device) -> None:
        self.num_positions, self.device = max_positions, device
        self._tables: dict[tuple[RopeConfig, int], RopeTable] = {}

    def table(self, config: RopeConfig, width: int) -> RopeTable:
        """The table for heads of `width`."""
        if (config, width) not in self._tables:
            table = RopeTable.build(config, width, self.num_positions, self.device)
            self._tables[config, width] = table
        return self._tables[config, width]

    def rotations(self, positions: Tensor) -> dict[RopeTable, Rotation]:
        """The rotations of `positions`, int64 [num_tokens], by every table."""
        return {
            table: Rotation(table.cos[positions], table.sin[positions])
            for table in self._tables.values()
        }


def inverse_frequencies(
    rope: RopeConfig, head_dim: int, max_positions: int
) -> tuple[Tensor, float]:
    """Angle per position of each pair that turns, float32 [pairs], and a factor on cosine and sine,
    for a context of `max_positions`.

    Sources: linear: Chen et al. 2023 (position interpolation); llama3: the Llama 3.1 release;
    yarn: Peng et al. 2023, section 3; longrope: Ding et al. 2024, section 3; proportional: the
    Gemma 4 release, whose exponents are those of a head that turns as a whole.
    """
    width = rope.rotary_width(head_dim)
    exponents = torch.arange(0, width, 2, dtype=torch.float32)
    exponents /= head_dim if rope.kind == "proportional" else width
    plain = 1.0 / rope.theta**exponents
    match rope.kind:
        case "linear" | "proportional":
            return plain / rope.factor, 1.0
        case "llama3":
            return _llama3(plain, rope), 1.0
        case "yarn":
            return _yarn(plain, rope, width)
        case "longrope":
            factors = torch.tensor(rope.pair_factors(max_positions))
            return plain / factors, _longrope_attention_factor(rope)
        case "none":
            return torch.zeros_like(plain), 1.0
        case _:
            return plain, 1.0


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Short wavelengths stay, long ones are stretched, those between are blended."""
    original = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / plain
    longest_kept = original / rope.high_freq_factor
    shortest_stretched = original / rope.low_freq_factor
    blend = (original / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * plain / rope.factor + blend * plain
    stretched = torch.where(wavelengths > shortest_stretched, plain / rope.factor, plain)
    between = (wavelengths <= shortest_stretched) & (wavelengths >= longest_kept)
    return torch.where(between, blended, stretched)


def _yarn(plain: Tensor, rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Stretch the pairs that turn slowly, keep those that turn fast, ramp in between."""
    original = rope.original_max_position_embeddings

    def pair_with_rotations(rotations: float) -> float:
        turns = original / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = pair_with_rotations(rope.beta_fast), pair_with_rotations(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the ramp needs a width
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    kept = 1 - ramp.clamp(0, 1)
    frequencies = plain / rope.factor * (1 - kept) + plain * kept
    return frequencies, _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return rope.temperature(rope.mscale) / rope.temperature(rope.mscale_all_dim)
    return rope.temperature(1.0)


def _longrope_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position_embeddings))
