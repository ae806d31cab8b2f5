"""The flags of `bench`, and the suites and sizes that they select."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from localllm.cli.flags.engine_flags import WEIGHT_KINDS, DraftFlags
from localllm.cli.flags.groups import Flags, flag, only, setting
from localllm.cli.flags.values import parse_choice, parse_speculation
from localllm.cli.input.user_input import read_file
from localllm.drafting.speculation_config import SpeculationConfig
from localllm.errors import RequestError

PROMPT_TOKENS, DECODE_TOKENS = 512, 128
PREFIX_TOKENS = 2000
PREFIX_SEQS = 16  # the cache must hold the shared prefix beside the other prompts
LOAD_SEQS, LOAD_TOKENS = 64, 1024
SPEC_PROMPT_TOKENS, SPEC_DECODE_TOKENS, SPEC_BATCHES = 700, 64, "1,8,64"
VERIFY_SEQS = 8
ROOM = 64  # tokens of context beyond what the tests need


@dataclass(frozen=True, slots=True)
class WorkloadFlags(Flags):
    """How many tokens and requests, and how many rounds."""

    prompt_tokens: int | None = setting(None, "-p", help="Tokens to prefill (512); 0: none.")
    decode_tokens: int | None = setting(None, "-n", help="Tokens to decode (128); 0: none.")
    depth: str = setting("0", help="Tokens in the context before those: 0 or 0,4096.")
    batch: str | None = setting(help="Requests that decode together: 1 or 1,4,16.")
    repeats: int = setting(5, "-r", help="Rounds; the median and the spread are reported.")
    seed: int = setting(0, help="Seed of prompts, arrivals and weights.", section="Sampling")


@dataclass(frozen=True, slots=True)
class RandomWeightFlags(Flags):
    """Random weights in place of a model's own."""

    random_weights: bool = setting(
        False, help="No download: a shape from the catalogue with random weights."
    )
    weights: str | None = setting(help="Format of the random weights.", choices=WEIGHT_KINDS)


@dataclass(frozen=True, slots=True)
class SuiteFlags(Flags):
    """What to measure; without a flag, prefill and decode."""

    serve_load: bool = flag(False, help="Many requests: latencies, throughput, batching.")
    prefix: bool = flag(False, help="Gain and cost of the prefix cache.")
    paging: bool = flag(False, help="Memory that blocks save over contiguous allocation.")
    contended: bool = flag(False, help="Decode beside busy processes that it starts itself.")
    compare: str | None = flag(help="Compare with transformers, in alternating runs.")
    url: str | None = flag(help="Measure an OpenAI-compatible server instead.")
    verify: bool = flag(
        False, help="Check that drafts, cache, chunks and batch do not change the text."
    )
    ops: bool = flag(False, help="Time each operator against torch's.")
    kernels: bool = flag(False, help="Time each Triton kernel at a model's sizes, on a GPU.")


@dataclass(frozen=True, slots=True)
class ReportFlags(Flags):
    """The files to write the results to, besides the printed table."""

    json_file: Path | None = flag(None, "--json", help="Write all results to this file.")
    plot: Path | None = flag(help="Plot them to FILE.png or FILE.html.")

    def check(self) -> None:
        """Raises: RequestError for a file that could not be written at the end of the run."""
        if self.plot is not None:
            from localllm.bench.plot import check_plot

            check_plot(self.plot)
        for path in (self.json_file, self.plot):
            if path is not None and not path.absolute().parent.is_dir():
                raise RequestError(f"there is no folder {path.absolute().parent}", param="json")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchDraftFlags(Flags):
    """Whether to measure the gain of drafts, and which drafter to use."""

    spec: bool = flag(
        False,
        help="Gain of drafts, on text that repeats and on text that does not.",
        section=DraftFlags.section,
    )
    drafter: str = flag(
        "auto",
        help="Who drafts, for --spec and --verify: auto, or ngram, head, eagle:HEAD, "
        "draft:MODEL (joined by +).",
    )
    text: list[Path] | None = flag(help="For --spec: what the model goes on from in its own words.")
    lengths: Annotated[DraftFlags, only("spec_max", "spec_ngram")]

    def read_texts(self) -> tuple[str, ...]:
        """The files of `--text`. Raises: RequestError."""
        return tuple(read_file(path) for path in self.text or ())

    def config(self) -> SpeculationConfig:
        """The SpeculationConfig that the flags specify. Raises: RequestError."""
        return parse_speculation(self.drafter, self.lengths.spec_max, self.lengths.spec_ngram)


@dataclass(frozen=True, slots=True)
class Suites:
    """Which suites to run, and their sizes; None: what fits."""

    chosen: SuiteFlags
    workload: WorkloadFlags
    spec: bool
    depths: tuple[int, ...]
    batches: tuple[int, ...]
    texts: tuple[str, ...] = ()

    @property
    def speed(self) -> bool:
        """Whether to measure prefill and decode, since nothing else is chosen."""
        flags = self.chosen
        loads = (flags.serve_load, flags.prefix, flags.paging, flags.contended)
        return not any((*loads, flags.compare, self.spec, flags.verify, flags.ops))

    @property
    def num_seqs(self) -> int:
        """The largest number of requests at once."""
        chosen = self.chosen
        own = max(LOAD_SEQS if chosen.serve_load else 1, PREFIX_SEQS if chosen.prefix else 1)
        own = max(own, VERIFY_SEQS if chosen.verify else 1)
        return max(own, *self.batches)

    @property
    def longest(self) -> int:
        """Tokens of the longest request that the suites make."""
        num_prompt, num_decode = self.workload.prompt_tokens, self.workload.decode_tokens
        own = self.tokens(num_prompt, PROMPT_TOKENS), self.tokens(num_decode, DECODE_TOKENS)
        lengths = [max(self.depths) + max(own)]
        lengths += [LOAD_TOKENS] if self.chosen.serve_load else []
        lengths += [PREFIX_TOKENS] if self.chosen.prefix else []
        if self.spec or self.chosen.verify:
            said = self.tokens(num_decode, SPEC_DECODE_TOKENS)
            lengths.append(self.tokens(num_prompt, SPEC_PROMPT_TOKENS) + said)
        return max(lengths) + ROOM

    def tokens(self, given: int | None, default: int) -> int:
        """A length as given, or its default."""
        return default if given is None else given


def read_suites(
    workload: WorkloadFlags, flags: SuiteFlags, drafts: BenchDraftFlags | None = None
) -> Suites:
    """The suites that the flags select. Raises: RequestError."""
    if flags.compare is not None:
        parse_choice("compare", flags.compare, ("transformers",))
    spec = drafts is not None and drafts.spec
    return Suites(
        flags,
        workload,
        spec,
        depths=parse_counts("depth", workload.depth),
        batches=parse_counts("batch", workload.batch or (SPEC_BATCHES if spec else "1")),
        texts=() if drafts is None else drafts.read_texts(),
    )


def parse_counts(name: str, text: str) -> tuple[int, ...]:
    """`0,4096` as numbers, each once. Raises: RequestError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) <= 9 for part in parts):
        raise RequestError(f"--{name} must be like 1 or 1,4,16, found {text!r:.40}", param=name)
    return tuple(dict.fromkeys(map(int, parts)))
