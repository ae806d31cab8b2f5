"""The report beside the weights: `localllm_quant.json` for programs, `README.md` for people."""

import json
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from localllm.answer.evaluation import Evaluation
from localllm.quantize.layer import LEAST_ROWS
from localllm.quantize.recipe import GROUP_SIZES, Recipe
from localllm.quantize.source import Ends
from localllm.user.version import __version__

NUM_WORST = 5
# A loss that a user should hear of: a perplexity larger by this share, or a KL divergence that
# means as much. The next smaller model of a family loses about as much.
LARGE_LOSS = 0.15
# Tokens of calibration for each input of a linear below which more of them help.
_ENOUGH_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a quantization.

    `widest`: inputs of the widest linear. `expert_rows`: the calibration's tokens that each expert
    saw, by its last linear; empty without experts or calibration. `quality` is None if nothing was
    verified; the speeds are None also if noise exceeds their difference.
    """

    out: Path
    recipe: Recipe
    source: str
    source_bytes: int
    result_bytes: int
    ends: Ends
    widest: int
    calibration: Mapping[str, Any] | None
    layer_errors: Mapping[str, float]
    expert_rows: Mapping[str, int]
    quality: Evaluation | None
    decode_tokens_per_s: tuple[float, float] | None
    seconds: float
    peak_bytes: int


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Everything that was measured."""
    speeds = outcome.decode_tokens_per_s
    return {
        "source": outcome.source,
        "recipe": asdict(outcome.recipe),
        "calibration": outcome.calibration,
        "bytes": {"source": outcome.source_bytes, "result": outcome.result_bytes},
        "embedding_and_head": asdict(outcome.ends),
        "quality": None if outcome.quality is None else asdict(outcome.quality),
        "decode_tokens_per_s": None
        if speeds is None
        else {"source": speeds[0], "result": speeds[1]},
        "layer_errors": outcome.layer_errors,
        "expert_rows": outcome.expert_rows,
        "seconds": round(outcome.seconds, 1),
        "peak_bytes": outcome.peak_bytes,
        "versions": {
            "localllm": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def worst_layers(outcome: Outcome) -> list[tuple[str, float]]:
    """The linears with the largest errors, largest first."""
    ordered = sorted(outcome.layer_errors.items(), key=lambda item: -item[1])
    return ordered[:NUM_WORST]


def summary_rows(outcome: Outcome) -> list[tuple[str, str, str]]:
    """The measurements before and after: (name, source, result)."""
    rows = [
        ("size", f"{outcome.source_bytes / 1e6:,.1f} MB", f"{outcome.result_bytes / 1e6:,.1f} MB"),
    ]
    quality = outcome.quality
    if quality is not None and quality.against is not None:
        against = quality.against
        rows += [
            ("perplexity", f"{against.perplexity:.3f}", f"{quality.perplexity:.3f}"),
            ("KL divergence, mean", "", f"{against.kl_mean:.5f}"),
            ("KL divergence, 99th percentile", "", f"{against.kl_p99:.4f}"),
            ("same likeliest token", "", f"{against.same_top1:.2%}"),
        ]
    if outcome.decode_tokens_per_s is not None:
        before, after = outcome.decode_tokens_per_s
        rows.append(("decode, tokens/s", f"{before:.1f}", f"{after:.1f}"))
    return rows


def expert_line(outcome: Outcome) -> str:
    """What the experts saw of the calibration; empty where there are none."""
    rows = outcome.expert_rows
    if not rows:
        return ""
    unseen = [name for name, count in rows.items() if count < LEAST_ROWS]
    line = (
        f"each of {len(rows):,} experts saw {min(rows.values()):,} to {max(rows.values()):,} tokens"
    )
    if not unseen:
        return line
    names = ", ".join(unseen[:NUM_WORST]) + (" …" if len(unseen) > NUM_WORST else "")
    return f"{line}; {len(unseen):,} saw under {LEAST_ROWS} and are rounded to nearest: {names}"


def large_loss(outcome: Outcome) -> str:
    """How much worse the result is than its source; empty if that is little or was not measured."""
    quality = outcome.quality
    if quality is None or quality.against is None:
        return ""
    before, after = quality.against.perplexity, quality.perplexity
    if after <= (1 + LARGE_LOSS) * before and math.exp(quality.against.kl_mean) <= 1 + LARGE_LOSS:
        return ""
    return (
        f"the result is much worse than its source: perplexity {before:.4g} became {after:.4g}, "
        f"and {1 - quality.against.same_top1:.0%} of the likeliest tokens are others"
    )


def finer_flags(outcome: Outcome) -> str:
    """The flags of a run that would lose less: the first of those that this one left out."""
    recipe, calibration = outcome.recipe, outcome.calibration
    if recipe.method in ("int8", "fp8"):
        return "the source as it is, or another --method"
    if not recipe.uses_inputs:
        return "--method gptq, or --method int8"
    assert calibration is not None
    num_tokens = calibration["windows"] * calibration["length"]
    if num_tokens < _ENOUGH_TOKENS * outcome.widest:
        return f"more --calib-samples ({num_tokens:,} tokens are few), or --method int8"
    if recipe.method == "trellis":
        return f"--bits 4 --group-size {GROUP_SIZES[0]}, or --method int8"
    if not recipe.is_int4:
        return f"--method gptq --group-size {GROUP_SIZES[0]}, or --method int8"
    if recipe.group_size > GROUP_SIZES[0]:
        return f"--group-size {GROUP_SIZES[0]}, or --method int8"
    return "--method int8"


def write_report(folder: Path, outcome: Outcome) -> None:
    """Write both reports into `folder`."""
    text = json.dumps(as_json(outcome), indent=2, ensure_ascii=False)
    (folder / "localllm_quant.json").write_text(text + "\n", encoding="utf-8")
    (folder / "README.md").write_text(_as_markdown(outcome), encoding="utf-8")


def _as_markdown(outcome: Outcome) -> str:
    recipe = outcome.recipe
    lines = [
        f"# {outcome.out.name}",
        "",
        f"`{outcome.source}`, quantized by localllm: {recipe.summary}, in {recipe.format_name}.",
        "",
        "| | source | result |",
        "|---|---|---|",
        *(f"| {name} | {source} | {result} |" for name, source, result in summary_rows(outcome)),
        "",
    ]
    if outcome.quality is not None:
        lines += [
            f"Measured on {outcome.quality.num_tokens:,} tokens of text held back from the "
            "calibration, with float32 activations.",
            "",
        ]
    loss = large_loss(outcome)
    if loss:
        lines += [f"**{loss[0].upper()}{loss[1:]}.** Try {finer_flags(outcome)}.", ""]
    if outcome.calibration is not None:
        calibration = outcome.calibration
        lines += [
            f"Calibrated on {calibration['windows']} × {calibration['length']} tokens, "
            f"{calibration['source']} (sha256 `{calibration['sha256']}`).",
            "",
        ]
    lines += [f"Of the result, {outcome.ends.summary}.", ""]
    if outcome.expert_rows:
        lines += [f"Experts: {expert_line(outcome)}.", ""]
    lines += ["Largest output errors:", "", "| linear | error |", "|---|---|"]
    lines += [f"| {name} | {error:.3%} |" for name, error in worst_layers(outcome)]
    return "\n".join(lines) + "\n"
