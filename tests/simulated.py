"""Speculation on a machine whose steps take what a function says: no model, no clock."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from scheduling import make_scheduler

from localllm.drafting.speculator import PlannedStep, Speculator, StepOutcome
from localllm.engine.sampler import accept_draft
from localllm.schedule.request import Request
from localllm.schedule.sampling_params import SamplingParams
from localllm.schedule.scheduler import SampledToken, ScheduledBatch


@dataclass
class Simulated:
    """What decoding took behind the prompts, by the machine's own clock, and without drafts."""

    seconds: float = 0.0
    plain_seconds: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0

    @property
    def speedup(self) -> float:
        return self.plain_seconds / self.seconds


class Launched(NamedTuple):
    """A step that is being computed."""

    batch: ScheduledBatch
    seconds: float
    planned: PlannedStep | None


def simulate(
    speculator: Speculator,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    step_seconds: Callable[[int], float],
    token_seconds: float = 0.0,
    *,
    overlaps: bool = False,
    wait_seconds: float = 0.0,
) -> Simulated:
    """Let requests say their texts, (prompt, answer) each, all at once; `token_seconds`: what each
    token of the longest draft takes besides its row. `overlaps`: a step is scheduled before the
    tokens of the last one are known, unless it waits for them, which takes `wait_seconds`.
    """
    scheduler = make_scheduler(num_blocks=1 << 16, budget=1024, seqs=64, size=16)
    answers: dict[Request, Sequence[int]] = {}
    for i, (prompt, answer) in enumerate(texts):
        request = Request(
            request_id=i,
            sample=0,
            num_prompt_tokens=len(prompt),
            token_ids=list(prompt),
            params=SamplingParams(),
            seed=0,
            stop_token_ids=frozenset(),
            max_total_tokens=len(prompt) + len(answer),
        )
        answers[request] = answer
        scheduler.add(request)
    found = Simulated()

    def collect(launched: Launched) -> None:
        batch, sampled = launched.batch, []
        for entry in batch.requests:
            if entry.catches_up:
                said = entry.known_end - entry.request.num_prompt_tokens
                rest = [*answers[entry.request][said : said + entry.num_samples]]
                rest += [0] * (entry.num_samples - len(rest))
                sampled.append(accept_draft(entry.draft, map(SampledToken, rest)))
        scheduler.update(batch, sampled)
        speculator.learn(StepOutcome(batch, sampled, launched.seconds, launched.planned))
        if len(batch.requests) == sum(entry.known_end - entry.start for entry in batch.requests):
            found.seconds += launched.seconds
            found.num_steps += 1
            found.num_tokens += sum(map(len, sampled))
        for entry in batch.requests:
            if not scheduler.has_unfinished() or entry.request not in scheduler.running:
                speculator.forget(entry.request)

    in_flight: Launched | None = None
    while scheduler.has_unfinished():
        drafts = speculator.plan(scheduler.running, is_ahead=in_flight is not None)
        has_waited = drafts is None
        if has_waited and in_flight is not None:
            collect(in_flight)
            in_flight = None
            drafts = speculator.plan(scheduler.running)
        batch = scheduler.schedule(drafts)
        before, in_flight = in_flight, None
        if batch.requests:
            planned = speculator.fill(batch)
            num_rows = sum(entry.num_scheduled_tokens for entry in batch.requests)
            speculator.beside(batch, [torch.zeros(num_rows, 1)])
            longest = max((len(entry.draft) for entry in batch.requests), default=0)
            seconds = step_seconds(num_rows) + token_seconds * longest + wait_seconds * has_waited
            launched = Launched(batch, seconds, planned)
            if overlaps:
                in_flight = launched
            else:
                collect(launched)
        if before is not None:
            collect(before)
    # Without drafts all requests say a token a step.
    for i in range(1, max(len(answer) for _, answer in texts)):
        found.plain_seconds += step_seconds(sum(len(answer) > i for _, answer in texts))
    return found
