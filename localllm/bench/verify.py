"""Checks that the same request gives the same text: with and without drafts, from a cold and a
warm cache, with its prompt in one piece and in chunks, alone and in a batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import nan

from localllm.bench.results import Result, Suite
from localllm.bench.speculation import make_scripts
from localllm.bench.subject import Subject
from localllm.engine.engine import Engine
from localllm.schedule.request import TokenEvent
from localllm.schedule.sampling_params import MAX_LOGPROBS, SamplingParams
from localllm.schedule.scheduler import Scheduler

# Chunk size of the runs that prefill in chunks.
CHUNK_TOKENS = 48
_SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_p=0.95, seed=1),
    SamplingParams(temperature=0.7, repetition_penalty=1.2, seed=2),
)

Prompt = tuple[list[int], SamplingParams]
Answers = list[list[TokenEvent]]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two runs of a request diverge: the position in the answer, the two tokens, and how far
    each run had its own token's logit above the other's (NaN if unknown).
    """

    prompt: int
    position: int
    tokens: tuple[int, int]
    gaps: tuple[float, float]


@dataclass(frozen=True, slots=True)
class _Way:
    """How to run the requests: `drafts` names drafters; in one batch or one by one."""

    name: str
    drafts: str = ""
    caches: bool = False
    chunks: bool = False
    together: bool = False


def _ways(drafters: Sequence[str]) -> list[_Way]:
    """All ways; `drafters`: each drafter's name, the last one that of all together."""
    return [
        *(_Way(f"drafts: {name}", drafts=name) for name in drafters),
        _Way("from a warm cache", caches=True),
        _Way("prompts in chunks", chunks=True),
        _Way("in one batch", together=True),
        _Way("all combined", drafts=drafters[-1], caches=True, chunks=True, together=True),
    ]


class VerifySuite(Suite):
    """The texts of the speculation suite as prompts, each greedy and sampled."""

    def __init__(
        self,
        subject: Subject,
        num_tokens: int,
        seed: int,
    ) -> None:
        self._subject = subject
        self._prompts = [
            (
                script.prompts[0],
                replace(params, max_tokens=num_tokens, ignore_eos=True, logprobs=MAX_LOGPROBS),
            )
            for script in make_scripts(subject, num_tokens, seed)
            if script.answer is not None  # the others have a prompt of these
            for params in _SAMPLINGS
        ]
        self._found: list[tuple[_Way, list[Difference], int]] = []

    def run(self, progress: Callable[[str], None]) -> None:
        """Run each prompt plainly, then in every other way."""
        progress("plain")
        plain = self._answers(_Way("plain"))
        assert self._subject.speculator is not None
        for way in _ways([*self._subject.speculator.parts()]):
            progress(way.name)
            # A warm cache takes a second run.
            answers = [self._answers(way) for _ in range(1 + way.caches)][-1]
            num_accepted = sum(event.is_draft for answer in answers for event in answer)
            self._found.append((way, differences(plain, answers), num_accepted))

    def results(self) -> list[Result]:
        return [
            Result(
                "verify",
                way.name,
                {"prompts": len(self._prompts)},
                {
                    "identical": not found,
                    "accepted_tokens": num_accepted,
                    "differences": [
                        {
                            "prompt": each.prompt,
                            "position": each.position,
                            "tokens": list(each.tokens),
                            "logit_gaps": list(each.gaps),
                        }
                        for each in found
                    ],
                },
                describe(found, len(self._prompts), num_accepted if way.drafts else None),
            )
            for way, found, num_accepted in self._found
        ]

    def _answers(self, way: _Way) -> Answers:
        own = self._subject.engine.scheduler
        config = replace(own.config, enable_prefix_caching=way.caches)
        if way.chunks:
            config = replace(config, max_num_batched_tokens=CHUNK_TOKENS)
        speculator = None
        if way.drafts:
            assert self._subject.speculator is not None
            speculator = self._subject.speculator.parts()[way.drafts]
        scheduler = Scheduler(config, own.groups)
        engine = self._subject.engine.beside(scheduler=scheduler, speculator=speculator)
        if way.together:
            return run_together(engine, self._prompts)
        return [run_together(engine, [prompt])[0] for prompt in self._prompts]


def run_together(engine: Engine, prompts: Sequence[Prompt]) -> Answers:
    """Run all prompts in the engine at once, and return the events of each."""
    answers: dict[int, list[TokenEvent]] = {engine.add_request(*each): [] for each in prompts}
    while engine.has_unfinished():
        for event in engine.step():
            answers[event.request_id].append(event)
    return list(answers.values())


def differences(plain: Answers, others: Answers) -> list[Difference]:
    """The first difference in each pair of answers that differ."""
    found = []
    for prompt, (one, other) in enumerate(zip(plain, others, strict=True)):
        for position, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            if mine.token_id == theirs.token_id:
                continue
            tokens = (mine.token_id or 0, theirs.token_id or 0)
            gaps = (_gap(mine, *tokens), _gap(theirs, *reversed(tokens)))
            found.append(Difference(prompt, position, tokens, gaps))
            break
    return found


def describe(found: Sequence[Difference], num_prompts: int, num_accepted: int | None) -> str:
    """Summarise the differences in one line."""
    drafts = "" if num_accepted is None else f", {num_accepted:,} tokens from drafts"
    if not found:
        return f"identical{drafts}"
    first = found[0]
    return (
        f"{len(found)} of {num_prompts} differ{drafts}; prompt {first.prompt} at token "
        f"{first.position}: {first.tokens[0]} by {first.gaps[0]:.2g}, then {first.tokens[1]} "
        f"by {first.gaps[1]:.2g}"
    )


def _gap(event: TokenEvent, own: int, other: int) -> float:
    """How far the logit of `own`, the event's token, is above that of `other`."""
    assert event.logprobs is not None
    logprobs = dict(event.logprobs.top) | {own: event.logprobs.logprob}
    return logprobs[own] - logprobs.get(other, nan)
