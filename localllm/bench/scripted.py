"""A model that outputs a given text at its own speed: the computation is real, the text is set.

The number of accepted drafts depends on the text alone, and the cost of a step on the model alone.
So even with random weights, the text can be one that a good model would write.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from localllm.engine.sampler import accept_draft
from localllm.schedule.runner import Launched, Runner
from localllm.schedule.sampling_params import SamplingParams
from localllm.schedule.scheduler import SampledToken, ScheduledBatch


class ScriptedRunner(Runner):
    """A runner that returns the tokens of `scripts`, by request id, where there is one."""

    def __init__(self, runner: Runner, scripts: dict[int, Sequence[int]]) -> None:
        self._runner, self._scripts = runner, scripts

    @property
    def overlaps(self) -> bool:
        return self._runner.overlaps

    def needs_ids(self, params: SamplingParams) -> bool:
        return self._runner.needs_ids(params)

    def launch(self, batch: ScheduledBatch) -> Launched:
        return _Scripted(self._runner.launch(batch), batch, self._scripts)

    @property
    def is_warm(self) -> bool:
        return self._runner.is_warm

    def work_ahead(self) -> bool:
        return self._runner.work_ahead()

    def release_memory(self) -> None:
        self._runner.release_memory()


@dataclass(frozen=True, slots=True)
class _Scripted(Launched):
    launched: Launched
    batch: ScheduledBatch
    scripts: dict[int, Sequence[int]]

    @property
    def hidden(self) -> tuple[Tensor, ...]:
        return self.launched.hidden

    def wait(self) -> list[list[SampledToken]]:
        tokens = []
        caught_up = [entry for entry in self.batch.requests if entry.catches_up]
        for entry, own in zip(caught_up, self.launched.wait(), strict=True):
            script = self.scripts.get(entry.request.request_id)
            if script is None:
                tokens.append(own)
            else:
                said = entry.known_end - entry.request.num_prompt_tokens
                rest = (SampledToken(token) for token in script[said : said + entry.num_samples])
                tokens.append(accept_draft(entry.draft, rest))
        return tokens
