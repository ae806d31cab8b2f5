"""Make the suites of `bench` that run on a model, with their sizes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localllm.cli.bench.flags import (
    DECODE_TOKENS,
    PREFIX_TOKENS,
    PROMPT_TOKENS,
    SPEC_DECODE_TOKENS,
    SPEC_PROMPT_TOKENS,
    Suites,
)
from localllm.engine.config import EngineConfig

if TYPE_CHECKING:
    from localllm.bench.results import Suite
    from localllm.bench.speed import SpeedTests
    from localllm.bench.subject import Subject


def make_suites(
    subject: "Subject", config: EngineConfig, asked: Suites, imports_s: float
) -> "list[Suite]":
    """The start-up suite first, since start-up happens once; then the requested suites. Raises:
    RequestError for sizes that cannot run.
    """
    from localllm.bench.startup import StartupSuite

    maker = _Maker(subject, config, asked)
    tests = maker.speed_tests()
    tests.check(subject.engine.context_length, config.max_num_seqs)
    return [StartupSuite(subject, imports_s), *maker.suites(tests)]


@dataclass(frozen=True, slots=True)
class _Maker:
    subject: "Subject"
    config: EngineConfig
    asked: Suites

    @property
    def room(self) -> int:
        """Tokens that a test may use after the greatest depth."""
        return self.subject.engine.context_length - max(self.asked.depths) - 2

    @property
    def num_spec_tokens(self) -> int:
        return self.asked.tokens(self.asked.decode_tokens, min(SPEC_DECODE_TOKENS, self.room))

    def speed_tests(self) -> "SpeedTests":
        from localllm.bench.speed import SpeedTests

        asked = self.asked
        num_prompt = asked.tokens(asked.prompt_tokens, min(PROMPT_TOKENS, self.room))
        num_decode = asked.tokens(asked.decode_tokens, min(DECODE_TOKENS, self.room))
        counts = (asked.depths, asked.batches, asked.repeats, asked.seed)
        return SpeedTests(num_prompt, num_decode, *counts)

    def suites(self, tests: "SpeedTests") -> "Iterator[Suite]":
        asked = self.asked
        if asked.speed:
            yield self._speed(tests)
        if asked.serve_load:
            yield from self._load()
        if asked.prefix:
            yield self._prefix()
        if asked.paging:
            yield self._paging()
        if asked.contended:
            yield self._contended(tests.num_decode)
        if asked.compare:
            yield self._compare(tests)
        if asked.spec:
            yield self._speculation()
        if asked.verify:
            yield self._verify()
        if asked.ops:
            yield self._operators()

    def _speed(self, tests: "SpeedTests") -> "Suite":
        from localllm.bench.speed import SpeedSuite

        return SpeedSuite(self.subject, tests)

    def _load(self) -> "Iterator[Suite]":
        from localllm.bench.load import LoadSuite
        from localllm.bench.python_share import PythonShareSuite
        from localllm.bench.workload import Mix

        context = self.subject.engine.context_length
        yield LoadSuite(
            self.subject,
            Mix.within(context, self.subject.architecture.vocab_size, self.asked.seed),
        )
        yield PythonShareSuite(self.subject, self.config, (1, 16), self.asked.repeats)

    def _prefix(self) -> "Suite":
        from localllm.bench.prefix import PrefixSuite

        length = min(PREFIX_TOKENS, self.subject.engine.context_length - 2)
        return PrefixSuite(self.subject, length, self.asked.repeats, self.asked.seed)

    def _paging(self) -> "Suite":
        from localllm.bench.paging import PagingSuite

        return PagingSuite(self.asked.seed)

    def _contended(self, num_decode: int) -> "Suite":
        from localllm.bench.contended import ContendedSuite

        return ContendedSuite(self.subject, num_decode, self.asked.repeats, self.asked.seed)

    def _compare(self, tests: "SpeedTests") -> "Suite":
        from localllm.bench.compare import CompareSuite

        return CompareSuite(self.subject, tests)

    def _speculation(self) -> "Suite":
        from localllm.bench.speculation import SpeculationSuite

        asked = self.asked
        return SpeculationSuite(
            self.subject,
            asked.batches,
            self.num_spec_tokens,
            asked.repeats,
            asked.seed,
            asked.texts,
            asked.tokens(asked.prompt_tokens, SPEC_PROMPT_TOKENS),
        )

    def _verify(self) -> "Suite":
        from localllm.bench.verify import VerifySuite

        return VerifySuite(self.subject, self.num_spec_tokens, self.asked.seed)

    def _operators(self) -> "Suite":
        from localllm.bench.operators import model_suite

        return model_suite(self.subject, self.asked.repeats)
