"""Make the suites of `bench` that run on a model, with their sizes.

Imported once a model is open: all of this imports torch.
"""

from collections.abc import Iterator

from localllm.bench.compare import CompareSuite
from localllm.bench.contended import ContendedSuite
from localllm.bench.load import LoadSuite
from localllm.bench.operators import model_suite
from localllm.bench.paging import PagingSuite
from localllm.bench.prefix import PrefixSuite
from localllm.bench.python_share import PythonShareSuite
from localllm.bench.results import Suite
from localllm.bench.speculation import SpeculationSuite
from localllm.bench.speed import SpeedSuite, SpeedTests
from localllm.bench.startup import StartupSuite
from localllm.bench.subject import Subject
from localllm.bench.verify import VerifySuite
from localllm.bench.workload import Mix
from localllm.cli.bench.flags import (
    DECODE_TOKENS,
    PREFIX_TOKENS,
    PROMPT_TOKENS,
    SPEC_DECODE_TOKENS,
    SPEC_PROMPT_TOKENS,
    Suites,
)
from localllm.engine.config import EngineConfig


def make_suites(
    subject: Subject, config: EngineConfig, asked: Suites, imports_s: float
) -> list[Suite]:
    """The start-up suite first, since start-up happens once; then the requested suites. Raises:
    RequestError for sizes that cannot run.
    """
    context, workload = subject.engine.context_length, asked.workload
    room = context - max(asked.depths) - 2  # tokens of a test after the greatest depth
    num_prompt = asked.tokens(workload.prompt_tokens, min(PROMPT_TOKENS, room))
    num_decode = asked.tokens(workload.decode_tokens, min(DECODE_TOKENS, room))
    counts = (asked.depths, asked.batches, workload.repeats, workload.seed)
    tests = SpeedTests(num_prompt, num_decode, *counts)
    tests.check(context, config.max_num_seqs)
    num_spec = asked.tokens(workload.decode_tokens, min(SPEC_DECODE_TOKENS, room))
    return [StartupSuite(subject, imports_s), *_asked(subject, config, asked, tests, num_spec)]


def _asked(
    subject: Subject, config: EngineConfig, asked: Suites, tests: SpeedTests, num_spec_tokens: int
) -> Iterator[Suite]:
    context, chosen, workload = subject.engine.context_length, asked.chosen, asked.workload
    repeats, seed = workload.repeats, workload.seed
    if asked.speed:
        yield SpeedSuite(subject, tests)
    if chosen.serve_load:
        yield LoadSuite(subject, Mix.within(context, subject.architecture.vocab_size, seed))
        yield PythonShareSuite(subject, config, (1, 16), repeats)
    if chosen.prefix:
        yield PrefixSuite(subject, min(PREFIX_TOKENS, context - 2), repeats, seed)
    if chosen.paging:
        yield PagingSuite(seed)
    if chosen.contended:
        yield ContendedSuite(subject, tests.num_decode, repeats, seed)
    if chosen.compare:
        yield CompareSuite(subject, tests)
    if asked.spec:
        num_prompt = asked.tokens(workload.prompt_tokens, SPEC_PROMPT_TOKENS)
        yield SpeculationSuite(
            subject, asked.batches, num_spec_tokens, repeats, seed, asked.texts, num_prompt
        )
    if chosen.verify:
        yield VerifySuite(subject, num_spec_tokens, seed)
    if chosen.ops:
        yield model_suite(subject, repeats)
