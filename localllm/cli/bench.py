"""`localllm bench`: how fast, and how far from what the hardware could do."""

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from localllm.cli import flag_values, options, suggestions
from localllm.cli.output import is_terminal, note, show_controls, write_stdout
from localllm.engine.config import EngineConfig
from localllm.engine.speculation_config import SpeculationConfig
from localllm.errors import ExitCode, RequestError

if TYPE_CHECKING:
    from localllm.bench.report import Report
    from localllm.bench.results import Suite
    from localllm.bench.subject import Subject

DEFAULT_RANDOM_SHAPE = "qwen3-0.6b"
DEFAULT_KERNEL_SHAPE = "llama-3.1-8b"
PROMPT_TOKENS, DECODE_TOKENS = 512, 128
PREFIX_TOKENS = 2000
PREFIX_SEQS = 16  # the cache has to hold the shared beginning beside the others
LOAD_SEQS, LOAD_TOKENS = 64, 1024
SPEC_PROMPT_TOKENS, SPEC_DECODE_TOKENS, SPEC_BATCHES = 700, 64, "1,8,64"
VERIFY_SEQS = 8
ROOM = 64  # tokens of context beside what the tests need


def bench(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Alias, org/name or folder; pocket if not given.",
            autocompletion=suggestions.models,
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        options.option("-p", "--prompt-tokens", help="Prefill so many tokens (512); 0: none."),
    ] = None,
    decode_tokens: Annotated[
        int | None,
        options.option("-n", "--decode-tokens", help="Decode so many tokens (128); 0: none."),
    ] = None,
    depth: Annotated[
        str, options.option("--depth", help="Tokens before those: 0 or 0,4096.")
    ] = "0",
    batch: Annotated[
        str | None,
        options.option("--batch", help="Requests that decode together: 1 or 1,4,16."),
    ] = None,
    repeats: Annotated[
        int, options.option("-r", "--repeats", help="Rounds; the median is told, and the spread.")
    ] = 5,
    random_weights: Annotated[
        bool,
        options.option(
            "--random-weights",
            help="No download: a shape of the catalogue with weights drawn at random.",
        ),
    ] = False,
    weights: Annotated[
        str | None,
        options.option("--weights", help="What the random ones are.", choices=options.WEIGHT_KINDS),
    ] = None,
    serve_load: Annotated[
        bool, typer.Option("--serve-load", help="Many requests: latencies, throughput, batching.")
    ] = False,
    prefix: Annotated[
        bool, typer.Option("--prefix", help="What the prefix cache gives, and costs.")
    ] = False,
    paging: Annotated[
        bool, typer.Option("--paging", help="What blocks save against contiguous memory.")
    ] = False,
    contended: Annotated[
        bool,
        typer.Option("--contended", help="Decode beside busy processes, which it starts itself."),
    ] = False,
    compare: Annotated[
        str | None, typer.Option("--compare", help="Alternate with transformers.")
    ] = None,
    url: Annotated[
        str | None, typer.Option("--url", help="Load an OpenAI-compatible server instead.")
    ] = None,
    spec: Annotated[
        bool, typer.Option("--spec", help="What drafts give, on text that repeats and on other.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Same text with drafts, cache, chunks and in a batch?")
    ] = False,
    ops: Annotated[bool, typer.Option("--ops", help="Each operator against torch's.")] = False,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Each Triton kernel at a model's sizes, on a GPU.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures to this file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw them: FILE.png or FILE.html.")
    ] = None,
    seed: Annotated[int, options.option("--seed", help="Of prompts, arrivals and weights.")] = 0,
    ctx: options.Context = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = 0.9,
    reserve: options.Reserve = None,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    backend: options.Backend = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    self_check: options.SelfCheck = True,
    dtype: options.DTypeName = "auto",
    kv_cache_dtype: options.KVCacheDTypeName = "auto",
    deterministic: options.Deterministic = False,
    drafter: Annotated[
        str, typer.Option("--drafter", help="Of --spec and --verify: ngram or draft:MODEL.")
    ] = "ngram",
    spec_max: options.SpecMax = options.SPEC_MAX,
    spec_ngram: options.SpecNgram = options.SPEC_NGRAM,
) -> int:
    """Measure speed, as a share of what the memory and the arithmetic of this machine allow.

    Without a flag that names a suite: prefill and decode.
    """
    speculation = flag_values.parse_speculation(drafter, spec_max, spec_ngram)
    asked = Suites(
        speed=not (serve_load or prefix or paging or contended or compare or spec or verify or ops),
        serve_load=serve_load,
        prefix=prefix,
        paging=paging,
        contended=contended,
        compare=_check_compare(compare),
        spec=spec,
        verify=verify,
        ops=ops,
        prompt_tokens=prompt_tokens,
        decode_tokens=decode_tokens,
        depths=parse_counts("depth", depth),
        batches=parse_counts("batch", batch or (SPEC_BATCHES if spec else "1")),
        repeats=repeats,
        seed=seed,
    )
    if plot is not None:
        from localllm.bench.plot import check_plot

        check_plot(plot)
    for path in (json_file, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise RequestError(f"there is no folder {path.absolute().parent}", param="json")
    if url is not None:
        report, was_interrupted = _bench_server(url, model, asked)
    elif kernels:
        report, was_interrupted = _bench_kernels(model or DEFAULT_KERNEL_SHAPE, asked)
    else:
        config = options.EngineFlags(
            ctx,
            gpu_memory_utilization,
            reserve,
            max_num_seqs,
            max_num_batched_tokens,
            False,
            backend,
            device,
            dtype,
            kv_cache_dtype,
            deterministic,
            speculation if spec or verify else SpeculationConfig("off"),
            threads=threads,
            self_check=self_check,
        ).config(default_max_num_seqs=asked.num_seqs)
        report, was_interrupted = _bench_model(model, random_weights, weights, config, asked)
    _write(report, json_file, plot)
    return ExitCode.SIGINT if was_interrupted else ExitCode.OK


@dataclass(frozen=True, slots=True)
class Suites:
    """Which suites, and their sizes; None: what fits."""

    speed: bool
    serve_load: bool
    prefix: bool
    paging: bool
    contended: bool
    compare: bool
    spec: bool
    verify: bool
    ops: bool
    prompt_tokens: int | None
    decode_tokens: int | None
    depths: tuple[int, ...]
    batches: tuple[int, ...]
    repeats: int
    seed: int

    @property
    def num_seqs(self) -> int:
        """The most requests at once."""
        own = max(LOAD_SEQS if self.serve_load else 1, PREFIX_SEQS if self.prefix else 1)
        own = max(own, VERIFY_SEQS if self.verify else 1)
        return max(own, *self.batches)

    @property
    def longest(self) -> int:
        """Tokens of the longest request that the suites make."""
        lengths = [self.tokens(self.prompt_tokens, PROMPT_TOKENS)]
        lengths.append(self.tokens(self.decode_tokens, DECODE_TOKENS))
        lengths = [max(self.depths) + max(lengths)]
        lengths += [LOAD_TOKENS] if self.serve_load else []
        lengths += [PREFIX_TOKENS] if self.prefix else []
        if self.spec or self.verify:
            said = self.tokens(self.decode_tokens, SPEC_DECODE_TOKENS)
            lengths.append(SPEC_PROMPT_TOKENS + said)
        return max(lengths) + ROOM

    def tokens(self, given: int | None, default: int) -> int:
        """A length as given, or its default."""
        return default if given is None else given


def _check_compare(name: str | None) -> bool:
    if name not in (None, "transformers"):
        raise RequestError(f"--compare knows transformers, not {name!r:.40}", param="compare")
    return name is not None


def _bench_model(
    model: str | None,
    random_weights: bool,
    weights: str | None,
    config: EngineConfig,
    asked: Suites,
) -> "tuple[Report, bool]":
    from localllm.bench.environment import describe_environment
    from localllm.bench.report import Report, describe_model
    from localllm.bench.startup import seconds_since_start

    imports_s = seconds_since_start()
    subject = _open(model, random_weights, weights, config, asked)
    suites = _make_suites(subject, config, asked, imports_s)
    was_interrupted = _run(suites)
    results = [result for suite in suites for result in suite.results()]
    limits = next((suite.limits for suite in suites if suite.limits is not None), None)
    place = describe_environment(subject.device) | {"kv_cache_dtype": config.kv_cache_dtype}
    report = Report(place, describe_model(subject), limits, asked.seed, results)
    return report, was_interrupted


def _bench_server(url: str, model: str | None, asked: Suites) -> "tuple[Report, bool]":
    from localllm.bench.environment import describe_environment
    from localllm.bench.remote import RemoteSuite, Server
    from localllm.bench.report import Report
    from localllm.bench.workload import Mix

    server = Server.find(url, model, os.environ.get("OPENAI_API_KEY"))
    suites: list[Suite] = [
        # Each with requests of its own: those of another may be in the server's cache.
        RemoteSuite(server, Mix(vocab_size=1 << 16, seed=1000 * asked.seed + 10 * i), at_once)
        for i, at_once in enumerate(asked.batches)
    ]
    was_interrupted = _run(suites)
    results = [result for suite in suites for result in suite.results()]
    described = {"name": server.model, "url": server.endpoint.url}
    return Report(describe_environment(None), described, None, asked.seed, results), was_interrupted


def _bench_kernels(alias: str, asked: Suites) -> "tuple[Report, bool]":
    from localllm.bench.environment import describe_environment
    from localllm.bench.kernels import KernelSuite
    from localllm.bench.report import Report
    from localllm.engine.loading import select_device
    from localllm.hub.catalog_shape import catalog_shape

    architecture, _ = catalog_shape(alias)
    device = select_device(EngineConfig(device="cuda"))
    suite = KernelSuite(architecture, device, asked.repeats)
    was_interrupted = _run([suite])
    described = {"name": alias, "kernels": "triton"}
    place = describe_environment(device)
    return Report(place, described, suite.limits, asked.seed, suite.results()), was_interrupted


def _write(report: "Report", json_file: Path | None, plot: Path | None) -> None:
    from localllm.cli.bench_table import report_text

    width = shutil.get_terminal_size().columns if is_terminal(sys.stdout) else None
    write_stdout(show_controls(report_text(report, width)))
    if json_file is not None:
        report.write(json_file)
    if plot is not None:
        from localllm.bench.plot import write_plot

        write_plot(report, plot)


def _open(
    model: str | None,
    random_weights: bool,
    weights: str | None,
    config: EngineConfig,
    asked: Suites,
) -> "Subject":
    from localllm.bench.subject import open_random, open_subject
    from localllm.model.random_weights import WEIGHT_KINDS

    if not random_weights:
        if weights is not None:
            raise RequestError("--weights goes with --random-weights", param="weights")
        return open_subject(model, config, asked.longest)
    kind = weights or WEIGHT_KINDS[0]
    if kind not in WEIGHT_KINDS:
        raise RequestError(
            f"--weights must be {', '.join(WEIGHT_KINDS)}, found {kind!r:.40}", param="weights"
        )
    alias = model or DEFAULT_RANDOM_SHAPE
    return open_random(alias, cast(Any, kind), config, asked.longest, asked.seed)


def _make_suites(
    subject: "Subject", config: EngineConfig, asked: Suites, imports_s: float
) -> "list[Suite]":
    """The start first, which happens once; then what was asked for."""
    from localllm.bench.compare import CompareSuite
    from localllm.bench.contended import ContendedSuite
    from localllm.bench.load import LoadSuite
    from localllm.bench.operators import OperatorSuite
    from localllm.bench.paging import PagingSuite
    from localllm.bench.prefix import PrefixSuite
    from localllm.bench.python_share import PythonShareSuite
    from localllm.bench.speculation import SpeculationSuite
    from localllm.bench.speed import SpeedSuite, SpeedTests
    from localllm.bench.startup import StartupSuite
    from localllm.bench.verify import VerifySuite
    from localllm.bench.workload import Mix

    context = subject.engine.context_length
    room = context - max(asked.depths) - 2
    num_prompt = asked.tokens(asked.prompt_tokens, min(PROMPT_TOKENS, room))
    num_decode = asked.tokens(asked.decode_tokens, min(DECODE_TOKENS, room))
    tests = SpeedTests(
        num_prompt, num_decode, asked.depths, asked.batches, asked.repeats, asked.seed
    )
    tests.check(context, config.max_num_seqs)
    suites: list[Suite] = [StartupSuite(subject, imports_s)]
    if asked.speed:
        suites.append(SpeedSuite(subject, tests))
    if asked.serve_load:
        suites.append(
            LoadSuite(subject, Mix.within(context, subject.architecture.vocab_size, asked.seed))
        )
        suites.append(PythonShareSuite(subject, config, (1, 16), asked.repeats))
    if asked.prefix:
        length = min(PREFIX_TOKENS, context - 2)
        suites.append(PrefixSuite(subject, length, asked.repeats, asked.seed))
    if asked.paging:
        suites.append(PagingSuite(asked.seed))
    if asked.contended:
        suites.append(ContendedSuite(subject, num_decode, asked.repeats, asked.seed))
    if asked.compare:
        suites.append(CompareSuite(subject, tests))
    if asked.spec:
        num_tokens = asked.tokens(asked.decode_tokens, min(SPEC_DECODE_TOKENS, room))
        counts = (num_tokens, asked.repeats, asked.seed)
        suites.append(SpeculationSuite(subject, asked.batches, *counts))
    if asked.verify:
        num_tokens = asked.tokens(asked.decode_tokens, min(SPEC_DECODE_TOKENS, room))
        suites.append(VerifySuite(subject, num_tokens, asked.seed))
    if asked.ops:
        suites.append(OperatorSuite(subject, asked.repeats))
    return suites


def _run(suites: "list[Suite]") -> bool:
    """Run one after the other; whether it was interrupted, in which case the rest is left out."""
    with _progress_line() as progress:
        try:
            for suite in suites:
                suite.run(progress)
        except KeyboardInterrupt:
            note("interrupted; what is measured so far:")
            return True
    return False


@contextmanager
def _progress_line() -> Iterator[Callable[[str], None]]:
    """What is being measured, on stderr where that is a terminal."""
    # Ctrl-C is an exception here: what was measured is still written.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if not is_terminal(sys.stderr):
            yield lambda what: None
            return
        from rich.console import Console
        from rich.status import Status

        with Status("starting", console=Console(stderr=True)) as status:
            yield status.update
    finally:
        signal.signal(signal.SIGINT, previous)


def parse_counts(name: str, text: str) -> tuple[int, ...]:
    """`0,4096` as numbers, each once. Raises: RequestError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) <= 9 for part in parts):
        raise RequestError(f"--{name} must be like 1 or 1,4,16, found {text!r:.40}", param=name)
    return tuple(dict.fromkeys(map(int, parts)))
