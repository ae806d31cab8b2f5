"""`localllm eval`: how well a model predicts a text."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localllm.cli import options, suggestions
from localllm.cli.output import is_terminal, json_line, note, write_stdout
from localllm.cli.user_input import gather_prompt, read_file
from localllm.engine.speculation_config import SpeculationConfig
from localllm.errors import ExitCode, RequestError

if TYPE_CHECKING:
    from localllm.answer.evaluation import Evaluation


def evaluate_model(
    model: Annotated[
        str, typer.Argument(help="Alias, org/name or folder.", autocompletion=suggestions.models)
    ],
    text: Annotated[
        list[Path] | None, typer.Option("--text", help="A text file; stdin without one.")
    ] = None,
    against: Annotated[
        str | None, typer.Option("--against", help="A reference model with the same tokenizer.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option("--stride", help="Tokens a window moves on; half of it if unset.")
    ] = None,
    max_ppl: Annotated[
        float | None, typer.Option("--max-ppl", help="Exit 10 if the perplexity is over this.")
    ] = None,
    max_kl: Annotated[
        float | None, typer.Option("--max-kl", help="Exit 10 if the mean KL is over this.")
    ] = None,
    json_output: Annotated[bool, options.option("--json", help="One JSON object.")] = False,
    ctx: options.Context = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = 0.9,
    reserve: options.Reserve = None,
    backend: options.Backend = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    self_check: options.SelfCheck = True,
    dtype: options.DTypeName = "auto",
    kv_cache_dtype: options.KVCacheDTypeName = "auto",
) -> int:
    """Measure the perplexity of a text by sliding windows of --ctx tokens (2048 if unset).

    Against another model also the KL divergence from it, and how often both hold the same token
    likeliest.
    """
    if max_kl is not None and against is None:
        raise RequestError("--max-kl needs --against", param="max_kl")
    content = "".join(read_file(path) for path in text) if text else gather_prompt(None)
    if not content:
        raise RequestError("no text to measure on", hint="--text FILE, or pipe a text into it")
    config = options.EngineFlags(
        ctx,
        gpu_memory_utilization,
        reserve,
        None,
        512,
        True,
        backend,
        device,
        dtype,
        kv_cache_dtype,
        False,
        SpeculationConfig("off"),
        threads=threads,
        self_check=self_check,
    ).config(default_max_num_seqs=1)
    from localllm.answer.evaluation import evaluate

    models = [model] if against is None else [model, against]
    with _progress_bar() as progress:
        evaluation = evaluate(content, models, config, stride=stride, progress=progress)
    write_stdout(_as_json(evaluation) if json_output else _as_text(evaluation))
    return _verdict(evaluation, max_ppl, max_kl)


def _verdict(evaluation: "Evaluation", max_ppl: float | None, max_kl: float | None) -> int:
    missed = []
    if max_ppl is not None and not evaluation.perplexity <= max_ppl:
        missed.append(f"the perplexity {evaluation.perplexity:.4g} is over {max_ppl:g}")
    if max_kl is not None and evaluation.against and not evaluation.against.kl_mean <= max_kl:
        missed.append(f"the mean KL divergence {evaluation.against.kl_mean:.4g} is over {max_kl:g}")
    for line in missed:
        note(line)
    return ExitCode.QUALITY if missed else ExitCode.OK


def _as_json(evaluation: "Evaluation") -> str:
    described: dict[str, Any] = asdict(evaluation)
    described = {"tokens" if k == "num_tokens" else k: v for k, v in described.items()}
    return json_line(described)


def _as_text(evaluation: "Evaluation") -> str:
    lines = [
        f"{evaluation.model}: perplexity {evaluation.perplexity:.4f} "
        f"over {evaluation.num_tokens:,} tokens"
    ]
    against = evaluation.against
    if against is not None:
        lines += [
            f"{against.model}: perplexity {against.perplexity:.4f}",
            f"KL divergence: mean {against.kl_mean:.6f}, 99th percentile {against.kl_p99:.6f}",
            f"same likeliest token: {against.same_top1:.2%}",
        ]
    return "\n".join(lines) + "\n"


@contextmanager
def _progress_bar() -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, where that is a terminal."""
    if not is_terminal(sys.stderr):
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    # So that Ctrl-C unwinds through the bar, which shows the cursor again.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("tokens", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
