"""`localllm quantize`: quantize a checkpoint, and measure what that costs in quality."""

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from localllm.cli.draw.columns import aligned
from localllm.cli.draw.output import json_line, note, print_error, write_stdout
from localllm.cli.draw.words import duration, size
from localllm.cli.flags.common import JsonResult, Model
from localllm.cli.flags.engine_flags import EngineFlags
from localllm.cli.flags.groups import only, takes_flags
from localllm.cli.models.warm import offer_to_warm
from localllm.cli.quantize.flags import QualityFlags, QuantizeFlags
from localllm.cli.quantize.progress import progress_bar
from localllm.engine.config import EngineConfig
from localllm.errors import ExitCode

if TYPE_CHECKING:
    from localllm.quantize.recipe import Recipe
    from localllm.quantize.report import Outcome
    from localllm.quantize.run import QuantizeRequest


@takes_flags
def quantize(
    model: Model,
    out: Annotated[
        Path | None, typer.Argument(help="The new folder; in localllm's cache if not given.")
    ] = None,
    *,
    flags: QuantizeFlags,
    json_output: JsonResult = False,
    engine: Annotated[EngineFlags, only("device", "threads")],
) -> int:
    """Quantize a checkpoint, measure the loss of quality, and write a report beside it.

    Without --calib-text or --calib-dataset the model writes its own calibration text.
    """
    request = _read_request(model, out, flags, engine)
    if flags.run.dry_run:
        _print_plan(request, json_output)
        return ExitCode.OK
    outcome = _quantize(request)
    _print_outcome(outcome, json_output)
    if request.device.type == "cuda":
        offer_to_warm(str(outcome.out))
    return _verdict(outcome, flags.quality)


def _read_request(
    model: str, out: Path | None, flags: QuantizeFlags, engine: EngineFlags
) -> "QuantizeRequest":
    """Raises: RequestError."""
    flags.recipe.check()
    flags.quality.check()
    text = flags.calibration.read_text()
    from localllm.engine.chosen_device import select_device
    from localllm.quantize.run import QuantizeRequest

    recipe = flags.recipe.recipe(model)
    return QuantizeRequest(
        model=model,
        out=out or _default_out(model, recipe),
        recipe=recipe,
        calibration=flags.calibration.request(text),
        device=select_device(EngineConfig(device=cast(Any, engine.device))),
        resume=flags.run.resume,
        verify=flags.quality.verify,
        threads=engine.threads,
    )


def _quantize(request: "QuantizeRequest") -> "Outcome":
    from localllm.quantize.estimate import expect_stages
    from localllm.quantize.run import quantize_model

    with progress_bar(expect_stages(request)) as progress:
        return quantize_model(request, progress)


def _default_out(model: str, recipe: "Recipe") -> Path:
    """A folder in localllm's cache, named after the model and the recipe."""
    from localllm.hub.local_models import quantized_folder

    name = Path(model).name.replace("@", "-") or "model"
    parts = [name, recipe.method.replace("+", "-")]
    if recipe.is_int4:
        parts.append(f"g{recipe.group_size}")
    if recipe.file_format != "compressed-tensors":
        parts.append(recipe.file_format)
    return quantized_folder() / "-".join(parts)


def _print_plan(request: "QuantizeRequest", as_json: bool) -> None:
    from localllm.quantize.estimate import estimate

    plan = estimate(request)
    if as_json:
        write_stdout(json_line({"model": request.model, "out": request.out, **asdict(plan)}))
        return
    share = plan.result_bytes / plan.source_bytes
    device = "GPU" if request.device.type == "cuda" else "CPU"
    lines = [
        f"{request.model}: {request.recipe.summary}",
        f"weights now    {size(plan.source_bytes):>9}",
        f"weights after  {size(plan.result_bytes):>9}  ({share:.0%} of that)",
        f"time, about    {duration(plan.seconds):>9}  on this {device}",
        f"folder         {request.out}",
        plan.ends.summary,
    ]
    write_stdout("\n".join(lines) + "\n")


def _print_outcome(outcome: "Outcome", as_json: bool) -> None:
    from localllm.quantize.report import as_json as report_json
    from localllm.quantize.report import expert_line, summary_rows, worst_layers

    if as_json:
        write_stdout(json_line({"out": outcome.out, **report_json(outcome)}))
        return
    rows = [("", "source", "result"), *summary_rows(outcome)]
    lines = aligned(rows, right={1, 2})
    worst = ", ".join(f"{name} {error:.2%}" for name, error in worst_layers(outcome)[:3])
    lines += [
        f"largest output errors: {worst}",
        *([expert_line(outcome)] if outcome.expert_rows else []),
        outcome.ends.summary,
        f"{outcome.seconds:.0f} s, peak {outcome.peak_bytes / 1e9:.2f} GB",
        "",
        f"localllm chat {shlex.quote(str(outcome.out))}",
    ]
    write_stdout("\n".join(lines) + "\n")


def _verdict(outcome: "Outcome", flags: QualityFlags) -> int:
    """Say what the result lost, if that is much or more than was allowed."""
    from localllm.quantize.report import finer_flags, large_loss

    missed = _missed(outcome, flags)
    if missed:
        print_error(
            "; ".join(missed), f"written to {outcome.out} all the same", finer_flags(outcome)
        )
        return ExitCode.QUALITY
    loss = large_loss(outcome)
    if loss:
        note(f"warning: {loss}")
        note(f"  try: {finer_flags(outcome)}")
    return ExitCode.OK


def _missed(outcome: "Outcome", flags: QualityFlags) -> list[str]:
    """What exceeds the thresholds that the user set."""
    missed = []
    max_kl, max_ppl_increase = flags.max_kl, flags.max_ppl_increase
    quality = outcome.quality
    if quality is not None and quality.against is not None:
        against = quality.against
        increase = 100 * (quality.perplexity / against.perplexity - 1)
        if max_kl is not None and not against.kl_mean <= max_kl:
            missed.append(f"the mean KL divergence {against.kl_mean:.4g} is over {max_kl:g}")
        if max_ppl_increase is not None and not increase <= max_ppl_increase:
            missed.append(f"the perplexity grew by {increase:.3g} %, over {max_ppl_increase:g} %")
    return missed
