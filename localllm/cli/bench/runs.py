"""The runs of `bench`: on a local model, on a server, or on kernels alone."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localllm.cli.bench.flags import RandomWeightFlags, Suites
from localllm.cli.draw.interrupt import ctrl_c_raises
from localllm.cli.draw.output import is_terminal, note
from localllm.cli.flags.values import parse_choice
from localllm.engine.config import EngineConfig
from localllm.errors import RequestError

if TYPE_CHECKING:
    from localllm.bench.report import Report
    from localllm.bench.results import Result, Suite
    from localllm.bench.subject import Subject

DEFAULT_RANDOM_SHAPE = "qwen3-0.6b"
DEFAULT_KERNEL_SHAPE = "llama-3.1-8b"


@dataclass(frozen=True, slots=True)
class Measured:
    """A report, and whether Ctrl-C ended the run early."""

    report: "Report"
    was_interrupted: bool


def bench_model(
    model: str | None, drawn: RandomWeightFlags, config: EngineConfig, asked: Suites
) -> Measured:
    """Measure a model in this process, or a shape with random weights. Raises: RequestError."""
    from localllm.bench.environment import describe_environment
    from localllm.bench.report import Report, describe_model
    from localllm.bench.startup import seconds_since_start

    imports_s = seconds_since_start()
    subject = _open(model, drawn, config, asked)
    from localllm.cli.bench.suites import make_suites

    suites = make_suites(subject, config, asked, imports_s)
    was_interrupted = _run(suites)
    limits = next((suite.limits for suite in suites if suite.limits is not None), None)
    place = describe_environment(subject.device) | {"kv_cache_dtype": config.kv_cache_dtype}
    report = Report(place, describe_model(subject), limits, asked.workload.seed, _results(suites))
    return Measured(report, was_interrupted)


def bench_server(url: str, model: str | None, asked: Suites) -> Measured:
    """Measure a running server over HTTP. Raises: LocalLLMError if it does not answer."""
    from localllm.bench.environment import describe_environment
    from localllm.bench.remote import RemoteSuite, Server
    from localllm.bench.report import Report
    from localllm.bench.workload import Mix

    server = Server.find(url, model, os.environ.get("OPENAI_API_KEY"))
    suites: list[Suite] = [
        # Each suite has its own requests: those of another may be in the server's cache.
        RemoteSuite(
            server, Mix(vocab_size=1 << 16, seed=1000 * asked.workload.seed + 10 * i), at_once
        )
        for i, at_once in enumerate(asked.batches)
    ]
    was_interrupted = _run(suites)
    described = {"name": server.model, "url": server.endpoint.url}
    place = describe_environment(None)
    return Measured(
        Report(place, described, None, asked.workload.seed, _results(suites)), was_interrupted
    )


def bench_kernels(alias: str | None, asked: Suites) -> Measured:
    """Measure Triton's kernels at a model's sizes. Raises: LocalLLMError without a GPU."""
    from localllm.bench.environment import describe_environment
    from localllm.bench.kernels import kernel_suite
    from localllm.bench.operators import Clock
    from localllm.bench.report import Report
    from localllm.engine.chosen_device import select_device
    from localllm.hub.catalog_shape import catalog_shape
    from localllm.operators.graph_timer import GraphTimer

    name = alias or DEFAULT_KERNEL_SHAPE
    architecture, _ = catalog_shape(name)
    device = select_device(EngineConfig(device="cuda"))
    suite = kernel_suite(architecture, device, Clock(GraphTimer(device), asked.workload.repeats))
    was_interrupted = _run([suite])
    described = {"name": name, "kernels": "triton"}
    place = describe_environment(device)
    report = Report(place, described, suite.limits, asked.workload.seed, suite.results())
    return Measured(report, was_interrupted)


def _open(
    model: str | None, drawn: RandomWeightFlags, config: EngineConfig, asked: Suites
) -> "Subject":
    from localllm.bench.subject import open_random, open_subject
    from localllm.model.random_weights import WEIGHT_KINDS

    if not drawn.random_weights:
        if drawn.weights is not None:
            raise RequestError("--weights needs --random-weights", param="weights")
        return open_subject(model, config, asked.longest)
    kind = parse_choice("weights", drawn.weights or WEIGHT_KINDS[0], WEIGHT_KINDS)
    alias = model or DEFAULT_RANDOM_SHAPE
    return open_random(alias, kind, config, asked.longest, asked.workload.seed)


def _run(suites: "list[Suite]") -> bool:
    """Run the suites in order; return whether Ctrl-C interrupted them, which skips the rest."""
    with _progress_line() as progress:
        try:
            for suite in suites:
                suite.run(progress)
        except KeyboardInterrupt:
            note("interrupted; results so far:")
            return True
    return False


def _results(suites: "list[Suite]") -> "list[Result]":
    return [result for suite in suites for result in suite.results()]


@contextmanager
def _progress_line() -> Iterator[Callable[[str], None]]:
    """Show on stderr what is being measured, if stderr is a terminal."""
    with ctrl_c_raises():  # what was measured so far is still written
        if not is_terminal(sys.stderr):
            yield lambda what: None
            return
        from rich.console import Console
        from rich.status import Status

        with Status("starting", console=Console(stderr=True)) as status:
            yield status.update
