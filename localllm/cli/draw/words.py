"""Quantities as text for a terminal."""

from localllm.answer.overflow import UNKNOWN_CONTEXT


def context(used: int, length: int) -> str:
    """How much of a context is used."""
    return f"context {used:,}" if length == UNKNOWN_CONTEXT else f"context {used:,}/{length:,}"


def size(num_bytes: float) -> str:
    """Bytes in the decimal unit that leaves one to three digits before the point."""
    value, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit in ("B", "kB") else f"{value:.1f} {unit}"


def age(seconds: float) -> str:
    """How long ago, in the largest whole unit."""
    for unit, each in (("day", 86400), ("hour", 3600), ("minute", 60)):
        count = int(max(0.0, seconds) // each)
        if count:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def duration(seconds: float) -> str:
    """A duration, in the unit that suits its length."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:.1f} h"
