"""Rotary embedding as `config.json` gives it: the base frequency, and how it is stretched."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from localllm.errors import CheckpointError, brief
from localllm.model.config_fields import REDOWNLOAD, ConfigFields

RopeKind = Literal["default", "linear", "llama3", "yarn", "none"]
# As config.json names them.
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn")


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
    # Length of the context before stretching, which llama3 and yarn are defined against.
    original_max_position_embeddings: int = 2048
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


# Queries and keys as they are, whatever their position (Kazemnejad et al. 2023, "NoPE").
NO_ROPE = RopeConfig(kind="none")


def read_rope(fields: ConfigFields, max_positions: int) -> RopeConfig:
    """Merge `rope_parameters` (new) or `rope_theta` + `rope_scaling` (old) into one row.

    Raises: CheckpointError.
    """
    raw, where = fields.raw, fields.where
    merged: dict[str, Any] = {"rope_theta": raw.get("rope_theta")}
    for name in ("rope_scaling", "rope_parameters"):
        part = raw.get(name)
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
    if kind not in ROPE_KINDS:
        raise CheckpointError(
            f"rope scaling {brief(kind)} is not supported; known: {', '.join(ROPE_KINDS)}",
            where=where,
            hint="another model of the family, or another engine for this one",
        )
    if raw.get("original_max_position_embeddings") is not None:
        merged["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
    read = ConfigFields(merged, f"{where}: rope")
    original = read.integer("original_max_position_embeddings", 1, 1 << 28, default=max_positions)
    if kind == "yarn" and merged.get("factor") is None:
        merged["factor"] = max_positions / original
    if kind != "default" and merged.get("factor") is None:
        read.fail("factor", "a number (the rope type needs it)")
    for values in (merged, raw):
        if values.get("partial_rotary_factor") not in (None, 1, 1.0):
            ConfigFields(values, where).fail("partial_rotary_factor", "1.0 (no other is supported)")
    return RopeConfig(
        theta=read.number("rope_theta", 1.0, 1e12, default=10000.0),
        kind=kind,
        factor=read.number("factor", 1e-3, 1e6, default=1.0),
        low_freq_factor=read.number("low_freq_factor", 1e-3, 1e6, default=1.0),
        high_freq_factor=read.number("high_freq_factor", 1e-3, 1e6, default=4.0),
        beta_fast=read.number("beta_fast", 1e-3, 1e6, default=32.0),
        beta_slow=read.number("beta_slow", 1e-3, 1e6, default=1.0),
        original_max_position_embeddings=original,
        attention_factor=read.optional_number("attention_factor", 0.0, 1e6),
        mscale=read.optional_number("mscale", 0.0, 1e6),
        mscale_all_dim=read.optional_number("mscale_all_dim", 0.0, 1e6),
        truncate=read.flag("truncate", default=True),
    )
