"""`localllm quantize`: a checkpoint in fewer bits, with the proof of what it cost."""

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from localllm.cli import options, suggestions
from localllm.cli.output import is_terminal, json_line, note, write_stdout
from localllm.cli.user_input import read_file
from localllm.cli.warm import offer_to_warm
from localllm.engine.config import EngineConfig
from localllm.errors import ExitCode, RequestError

# Those of `recipe`, whose module needs torch.
METHODS = ("rtn", "awq", "gptq", "awq+gptq", "int8", "fp8")
FILE_FORMATS = ("compressed-tensors", "awq", "gptq", "fp8")

if TYPE_CHECKING:
    from localllm.quantize.recipe import Recipe
    from localllm.quantize.report import Outcome
    from localllm.quantize.run import Progress, QuantizeRequest


def quantize(
    model: Annotated[
        str, typer.Argument(help="Alias, org/name or folder.", autocompletion=suggestions.models)
    ],
    out: Annotated[
        Path | None, typer.Argument(help="The new folder; in localllm's cache if not given.")
    ] = None,
    method: Annotated[
        str, options.option("--method", help="How it is rounded.", choices=METHODS)
    ] = "gptq",
    bits: Annotated[int | None, typer.Option("--bits", help="4, or 8 for int8 and fp8.")] = None,
    group_size: Annotated[
        int, options.option("--group-size", help="Weights that share a scale: 32, 64 or 128.")
    ] = 128,
    symmetric: Annotated[
        bool | None,
        typer.Option("--sym/--asym", help="Without or with zero points; the format decides."),
    ] = None,
    file_format: Annotated[
        str, options.option("--format", help="How it is written.", choices=FILE_FORMATS)
    ] = "compressed-tensors",
    head: Annotated[
        str,
        options.option(
            "--head", help="The output head: as it is, or int8.", choices=("keep", "int8")
        ),
    ] = "keep",
    calib_text: Annotated[
        Path | None, typer.Option("--calib-text", help="Calibrate on this text file.")
    ] = None,
    calib_dataset: Annotated[
        str | None, typer.Option("--calib-dataset", help="Calibrate on a data set of the hub.")
    ] = None,
    calib_samples: Annotated[
        int, options.option("--calib-samples", help="Windows of calibration text.")
    ] = 128,
    calib_seqlen: Annotated[
        int, options.option("--calib-seqlen", help="Tokens in each of them.")
    ] = 512,
    seed: Annotated[int, options.option("--seed", help="Of the text that the model writes.")] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on at the last whole layer of an unfinished run.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say sizes and time, and do nothing.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Measure the result against the source.")
    ] = True,
    max_kl: Annotated[
        float | None, typer.Option("--max-kl", help="Exit 10 if the mean KL is over this.")
    ] = None,
    max_ppl_increase: Annotated[
        float | None,
        typer.Option("--max-ppl-increase", help="Exit 10 if the perplexity grows by more, in %."),
    ] = None,
    json_output: Annotated[bool, options.option("--json", help="One JSON object.")] = False,
    device: options.Device = "auto",
    threads: options.Threads = None,
) -> int:
    """Make a checkpoint in fewer bits, measure what it cost, and write a report beside it.

    Without --calib-text or --calib-dataset the model writes its own calibration text.
    """
    _check_flags(bits, method, head, verify, (max_kl, max_ppl_increase))
    if calib_text is not None and calib_dataset is not None:
        raise RequestError("either --calib-text or --calib-dataset", param="calib_text")
    text = None if calib_text is None else read_file(calib_text)
    from localllm.engine.loading import select_device
    from localllm.quantize.calibrate import CalibrationRequest
    from localllm.quantize.recipe import Recipe
    from localllm.quantize.run import QuantizeRequest, quantize_model

    recipe = Recipe(
        method=cast(Any, method),
        group_size=group_size,
        symmetric=file_format != "awq" if symmetric is None else symmetric,
        file_format=cast(Any, file_format),
        int8_head=head == "int8",
    )
    request = QuantizeRequest(
        model=model,
        out=out or _default_out(model, recipe),
        recipe=recipe,
        calibration=CalibrationRequest(
            text=text,
            text_name=None if calib_text is None else calib_text.name,
            dataset=calib_dataset,
            num_windows=calib_samples,
            length=calib_seqlen,
            seed=seed,
        ),
        device=select_device(EngineConfig(device=cast(Any, device))),
        resume=resume,
        verify=verify,
        threads=threads,
    )
    if dry_run:
        _print_plan(request, json_output)
        return ExitCode.OK
    with _progress_bar() as progress:
        outcome = quantize_model(request, progress)
    _print_outcome(outcome, json_output)
    if request.device.type == "cuda":
        offer_to_warm(str(outcome.out))
    return _verdict(outcome, max_kl, max_ppl_increase)


def _check_flags(
    bits: int | None,
    method: str,
    head: str,
    verify: bool,
    thresholds: tuple[float | None, float | None],
) -> None:
    wanted_bits = 8 if method in ("int8", "fp8") else 4
    if bits not in (None, wanted_bits):
        raise RequestError(f"{method} makes {wanted_bits} bits, not {bits}", param="bits")
    if head not in ("keep", "int8"):
        raise RequestError(f"--head must be keep or int8, found {head!r:.40}", param="head")
    if not verify and thresholds != (None, None):
        raise RequestError("a threshold needs the measurement", hint="leave --no-verify out")


def _default_out(model: str, recipe: "Recipe") -> Path:
    """A folder in localllm's cache, named for the model and what is made of it."""
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
    from localllm.quantize.source import open_unquantized

    checkpoint, source = open_unquantized(request.model, request.recipe)
    asked = request.calibration
    plan = estimate(source, request.recipe, asked, request.device)
    if as_json:
        write_stdout(json_line({"model": checkpoint.name, "out": request.out, **asdict(plan)}))
        return
    share = plan.result_bytes / plan.source_bytes
    lines = [
        f"{checkpoint.name}: {request.recipe.summary}",
        f"weights now   {plan.source_bytes / 1e6:>12,.1f} MB",
        f"weights then  {plan.result_bytes / 1e6:>12,.1f} MB ({share:.0%})",
        f"time, about   {plan.seconds / 60:>12,.1f} min on {request.device.type}",
        f"folder        {request.out}",
    ]
    write_stdout("\n".join(lines) + "\n")


def _print_outcome(outcome: "Outcome", as_json: bool) -> None:
    from localllm.quantize.report import as_json as report_json
    from localllm.quantize.report import summary_rows, worst_layers

    if as_json:
        write_stdout(json_line({"out": outcome.out, **report_json(outcome)}))
        return
    rows = [("", "source", "result"), *summary_rows(outcome)]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [
        f"{name:<{widths[0]}}  {source:>{widths[1]}}  {result:>{widths[2]}}".rstrip()
        for name, source, result in rows
    ]
    worst = ", ".join(f"{name} {error:.2%}" for name, error in worst_layers(outcome)[:3])
    lines += [
        f"largest output errors: {worst}",
        f"{outcome.seconds:.0f} s, peak {outcome.peak_bytes / 1e9:.2f} GB",
        "",
        f"localllm chat {shlex.quote(str(outcome.out))}",
    ]
    write_stdout("\n".join(lines) + "\n")


def _verdict(outcome: "Outcome", max_kl: float | None, max_ppl_increase: float | None) -> int:
    missed = []
    quality = outcome.quality
    if quality is not None and quality.against is not None:
        against = quality.against
        increase = 100 * (quality.perplexity / against.perplexity - 1)
        if max_kl is not None and not against.kl_mean <= max_kl:
            missed.append(f"the mean KL divergence {against.kl_mean:.4g} is over {max_kl:g}")
        if max_ppl_increase is not None and not increase <= max_ppl_increase:
            missed.append(f"the perplexity grew by {increase:.3g} %, over {max_ppl_increase:g} %")
    for line in missed:
        note(line)
    return ExitCode.QUALITY if missed else ExitCode.OK


@contextmanager
def _progress_bar() -> Iterator["Progress"]:
    """A bar on stderr where that is a terminal, else a line a stage.

    A signal ends the process at once: whatever is in the work folder is whole, and an exception
    out of the middle of a library may end as another one.
    """
    if not is_terminal(sys.stderr):
        with _leaving_on_signals(lambda: None):
            yield _note_stage
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[remark]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: int, total: int, remark: str) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total, remark=remark)
            bar.update(tasks[stage], completed=done, total=total, remark=remark)

        with _leaving_on_signals(bar.stop):
            yield show


@contextmanager
def _leaving_on_signals(tidy_up: Callable[[], None]) -> Iterator[None]:
    def leave(signum: int, frame: object) -> None:
        tidy_up()
        note("stopped; the same command with --resume goes on at the last whole layer")
        os._exit(ExitCode.SIGINT if signum == signal.SIGINT else ExitCode.SIGTERM)

    previous = {signum: signal.signal(signum, leave) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _note_stage(stage: str, done: int, total: int, remark: str) -> None:
    if done == total or stage == "layers":
        note(f"{stage} {done}/{total} {remark}".rstrip())
