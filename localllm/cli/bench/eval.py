"""`localllm eval`: how well a model predicts a text."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from localllm.cli.draw.output import is_terminal, json_line, print_error, write_stdout
from localllm.cli.flags.common import JsonResult, Model
from localllm.cli.flags.engine_flags import EngineFlags
from localllm.cli.flags.groups import Flags, flag, only, takes_flags
from localllm.cli.input.user_input import gather_prompt, read_file
from localllm.drafting.speculation_config import SpeculationConfig
from localllm.engine.config import EngineConfig
from localllm.errors import ExitCode, RequestError

if TYPE_CHECKING:
    from localllm.answer.evaluation import Evaluation


@dataclass(frozen=True, slots=True)
class EvaluationFlags(Flags):
    """What to measure, on which text, and how bad the result may be."""

    text: list[Path] | None = flag(help="A text file; stdin if not given.")
    against: str | None = flag(help="A reference model with the same tokenizer.")
    stride: int | None = flag(help="Tokens that a window advances; half of it if unset.")
    max_ppl: float | None = flag(help="Exit 10 if the perplexity is over this.")
    max_kl: float | None = flag(help="Exit 10 if the mean KL divergence is over this.")

    def read_text(self) -> str:
        """The text of the files, or of stdin. Raises: RequestError if there is none."""
        files = self.text
        content = "".join(read_file(path) for path in files) if files else gather_prompt(None)
        if not content:
            raise RequestError("no text to measure on", hint="--text FILE, or pipe a text into it")
        return content


EngineOfEvaluation = Annotated[
    EngineFlags,
    only(
        "ctx",
        "gpu_memory_utilization",
        "reserve",
        "expert_memory",
        "backend",
        "device",
        "threads",
        "self_check",
        "dtype",
        "kv_cache_dtype",
        "state_dtype",
    ),
]


@takes_flags
def evaluate_model(
    model: Model,
    flags: EvaluationFlags,
    json_output: JsonResult = False,
    *,
    engine: EngineOfEvaluation,
) -> int:
    """Measure perplexity on a text, in sliding windows of --ctx tokens (2048 if unset).

    With --against, also measure the KL divergence from another model, and how often both predict
    the same most likely token. --kv-cache-dtype is the first model's alone, so a model against
    itself shows what its cache loses.
    """
    if flags.max_kl is not None and flags.against is None:
        raise RequestError("--max-kl needs --against", param="max_kl")
    content, config = flags.read_text(), _config(engine)
    from localllm.answer.evaluation import evaluate

    models = [model] if flags.against is None else [model, flags.against]
    with _progress_bar() as progress:
        evaluation = evaluate(content, models, config, stride=flags.stride, progress=progress)
    write_stdout(_as_json(evaluation) if json_output else _as_text(evaluation))
    return _verdict(evaluation, flags.max_ppl, flags.max_kl)


def _config(flags: EngineFlags) -> EngineConfig:
    """The engine's config: no prefix cache, since windows share no prefix, and no drafts."""
    config = flags.config(1, SpeculationConfig("off"))
    return replace(config, max_num_batched_tokens=512, enable_prefix_caching=False)


def _verdict(evaluation: "Evaluation", max_ppl: float | None, max_kl: float | None) -> int:
    missed = []
    if max_ppl is not None and not evaluation.perplexity <= max_ppl:
        missed.append(f"the perplexity {evaluation.perplexity:.4g} is over {max_ppl:g}")
    if max_kl is not None and evaluation.against and not evaluation.against.kl_mean <= max_kl:
        missed.append(f"the mean KL divergence {evaluation.against.kl_mean:.4g} is over {max_kl:g}")
    if not missed:
        return ExitCode.OK
    print_error("; ".join(missed), evaluation.model, "a copy in more bits, or a larger model")
    return ExitCode.QUALITY


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
    """A bar on stderr, if that is a terminal."""
    if not is_terminal(sys.stderr):
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    # Lets Ctrl-C unwind through the bar, which shows the cursor again.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("tokens", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
