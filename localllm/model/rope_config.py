"""Rotary embedding as `config.json` gives it: the base frequency, and how it is stretched."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from localllm.errors import CheckpointError, UnsupportedModelError, brief
from localllm.model.config_fields import OTHER_ENGINE, REDOWNLOAD, ConfigFields

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional", "none"]
# As config.json names them.
ROPE_KINDS: tuple[RopeKind, ...] = (
    *("default", "linear", "llama3", "yarn", "longrope", "proportional"),
)
# What the first files called longrope; places in images, which texts do not have; and a stretching
# that begins behind `max_position_embeddings`, to which contexts are limited.
_OTHER_KINDS = {"su": "longrope", "mrope": "default", "dynamic": "default"}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base frequency and how it is stretched beyond the trained context."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    # Context length before stretching, relative to which llama3, yarn and longrope are defined.
    original_max_position_embeddings: int = 2048
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    # Longrope: what the wavelength of each pair is multiplied by, up to the original context length
    # and beyond it.
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    # The share of a head's values that turn, and whether pairs stand side by side in a head of the
    # checkpoint, or the second values of all pairs after the first ones.
    partial: float = 1.0
    is_interleaved: bool = False

    def rotary_width(self, head_dim: int) -> int:
        """Values of a head that turn."""
        return int(head_dim * self.partial)

    def temperature(self, weight: float) -> float:
        """What YaRN multiplies queries and keys by, so that a stretched context does not flatten
        the softmax (Peng et al. 2023, section 3.4); `weight`: `mscale` or `mscale_all_dim`.
        """
        return 1.0 if self.factor <= 1 else 0.1 * weight * math.log(self.factor) + 1.0

    def pair_factors(self, max_positions: int) -> tuple[float, ...]:
        """The factors of longrope for a context of `max_positions`; empty for other kinds.

        The context that was configured decides, and not how long a text is so far: keys that are in
        the cache cannot be turned again.
        """
        is_long = max_positions > self.original_max_position_embeddings
        return self.long_factors if is_long else self.short_factors

    def order(self, head_dim: int) -> tuple[int, ...] | None:
        """The rows of a head in the checkpoint in the order that is computed with: the first values
        of all pairs, then the second ones. None where that is the checkpoint's own.

        Values that do not turn are pairs that turn by no angle. Dot products of queries and keys
        do not depend on the order of a head's rows.
        """
        width = self.rotary_width(head_dim)
        if self.kind in ("none", "proportional") or (width == head_dim and not self.is_interleaved):
            return None
        step = 2 if self.is_interleaved else 1
        first = [step * i for i in range(width // 2)]
        gap = 1 if self.is_interleaved else width // 2
        rest = range(width, head_dim)
        half = len(rest) // 2
        second = [i + gap for i in first]
        return (*first, *rest[:half], *second, *rest[half:])


# Queries and keys stay as they are at every position (Kazemnejad et al. 2023, "NoPE").
NO_ROPE = RopeConfig(kind="none")


def read_rope(
    fields: ConfigFields, max_positions: int, layer_type: str | None = None
) -> RopeConfig:
    """The rotary embedding of all layers, or of those of a type: `rope_parameters` (new) or
    `rope_theta` and `rope_scaling` (old), merged into one config.

    Raises: CheckpointError.
    """
    where = fields.where
    merged: dict[str, Any] = {"rope_theta": fields.get("rope_theta")}
    for name in ("rope_scaling", "rope_parameters"):
        part = fields.get(name)
        if isinstance(part, Mapping) and layer_type in part:
            part = part[layer_type]
        if part is None:
            continue
        if not isinstance(part, Mapping):
            raise CheckpointError(
                f"config field {name!r} must be an object, found {brief(part)}",
                where=where,
                hint=REDOWNLOAD,
            )
        merged.update(part)
    kind = merged.get("rope_type", merged.get("type")) or "default"
    kind = _OTHER_KINDS.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in ROPE_KINDS:
        raise UnsupportedModelError(
            f"rope scaling {brief(kind)} is not supported; known: {', '.join(ROPE_KINDS)}",
            where=where,
            hint=OTHER_ENGINE,
        )
    if fields.get("original_max_position_embeddings") is not None:
        merged["original_max_position_embeddings"] = fields.get("original_max_position_embeddings")
    read = ConfigFields(merged, f"{where}: rope")
    original = read.integer("original_max_position_embeddings", 1, 1 << 28, default=max_positions)
    if kind in ("yarn", "longrope") and merged.get("factor") is None:
        merged["factor"] = max_positions / original
    if kind in ("linear", "llama3", "yarn") and merged.get("factor") is None:
        read.fail("factor", "a number (the rope type needs it)")
    own_part = fields.get("partial_rotary_factor")
    if merged.get("partial_rotary_factor") is None:
        merged["partial_rotary_factor"] = own_part
    return RopeConfig(
        theta=read.number("rope_theta", 1.0, 1e12, default=10000.0),
        kind=kind,
        factor=1.0 if kind == "default" else read.number("factor", 1e-3, 1e6, default=1.0),
        low_freq_factor=read.number("low_freq_factor", 1e-3, 1e6, default=1.0),
        high_freq_factor=read.number("high_freq_factor", 1e-3, 1e6, default=4.0),
        beta_fast=read.number("beta_fast", 1e-3, 1e6, default=32.0),
        beta_slow=read.number("beta_slow", 1e-3, 1e6, default=1.0),
        original_max_position_embeddings=original,
        attention_factor=read.optional_number("attention_factor", 0.0, 1e6),
        mscale=read.nonzero_number("mscale", 0.0, 1e6),
        mscale_all_dim=read.nonzero_number("mscale_all_dim", 0.0, 1e6),
        truncate=read.flag("truncate", default=True),
        short_factors=_read_factors(read, "short_factor", kind),
        long_factors=_read_factors(read, "long_factor", kind),
        partial=read.number("partial_rotary_factor", 0.0, 1.0, default=1.0),
    )


def with_default_rope(fields: ConfigFields, rope: Mapping[str, Any]) -> ConfigFields:
    """The fields with one `rope_parameters`: that of the file, under either name, or `rope`."""
    given = fields.get("rope_parameters") or fields.get("rope_scaling") or rope
    return fields.changed({"rope_scaling": None, "rope_parameters": given})


def _read_factors(fields: ConfigFields, name: str, kind: RopeKind) -> tuple[float, ...]:
    if kind != "longrope":
        return ()
    found = fields.numbers(name, 1e-3, 1e6, most=1024)
    if not found:
        fields.fail(name, "a list of numbers (the rope type needs it)")
    return found
