"""A model that says what it is told to, for looking at how an answer is shown.

Everything above the engine is real: tokenizer, text engine, conversation, terminal.

    python tests/scripted.py FOLDER [--step-ms 1] [--prefill-ms 0] ANSWER-FILE…

runs the conversation on this terminal; FOLDER is a checkpoint (its tokenizer and template), each
answer is the text of the next file.
"""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from localllm.answer.loaded_model import LoadedModel
from localllm.answer.text_engine import TextEngine
from localllm.engine.config import EngineConfig
from localllm.errors import ContextLengthError
from localllm.hub.generation_config import GenerationDefaults
from localllm.schedule.matcher import Matcher
from localllm.schedule.prompt_progress import PromptProgress
from localllm.schedule.request import FinishReason, TokenEvent
from localllm.schedule.request_check import EngineLimits
from localllm.schedule.sampling_params import SamplingParams
from localllm.text.context import Context
from localllm.text.tokenizer import Tokenizer


@dataclass
class ScriptedEngine:
    """Says the answers one after the other, a token a step."""

    answers: list[list[int]]
    step_s: float = 0.0
    prefill_steps: int = 0
    context: Context = field(default_factory=lambda: Context(32768, "another model"))
    limits: EngineLimits = field(
        default_factory=lambda: EngineLimits(1 << 20, 1 << 15, 1 << 15, frozenset())
    )
    prompts: list[list[int]] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    _running: dict[int, list[int]] = field(default_factory=dict)
    _waiting: dict[int, int] = field(default_factory=dict)
    _room: dict[int, int] = field(default_factory=dict)

    def add_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        salt: bytes = b"",
        matcher: Matcher | None = None,
        borders: Sequence[int] = (),
        num_to_keep: int = 0,
    ) -> int:
        if len(prompt) >= self.context.length:
            raise ContextLengthError(f"the prompt has {len(prompt)} tokens", param="prompt")
        request_id = len(self.prompts)
        self.prompts.append(list(prompt))
        self.params.append(params)
        self._running[request_id] = self._rest_of_answer(list(prompt), request_id)
        room = self.context.length - len(prompt)
        self._room[request_id] = min(params.max_tokens or room, room)
        self._waiting[request_id] = self.prefill_steps
        return request_id

    def finish(self) -> None:
        self._running.clear()

    def _rest_of_answer(self, prompt: list[int], request_id: int) -> list[int]:
        """The next answer, or what is left of an earlier one that the prompt ends with."""
        for earlier, answer in zip(self.prompts[:-1], self.answers, strict=False):
            said = prompt[len(earlier) :]
            if said and prompt[: len(earlier)] == earlier and answer[: len(said)] == said:
                return answer[len(said) :]
        return list(self.answers[min(request_id, len(self.answers) - 1)])

    def work_ahead(self) -> bool:
        return False

    def prompt_progress(self, request_id: int) -> PromptProgress | None:
        if request_id not in self._running:
            return None
        total = len(self.prompts[request_id])
        computed = total - self._waiting[request_id] * total // (self.prefill_steps or 1)
        return PromptProgress(computed, total, computed / total)

    def has_unfinished(self) -> bool:
        return bool(self._running)

    def step(self) -> list[TokenEvent]:
        time.sleep(self.step_s)
        events = []
        for request_id, left in list(self._running.items()):
            if self._waiting[request_id]:
                self._waiting[request_id] -= 1
                continue
            if not left:  # the end token, which has no text
                del self._running[request_id]
                events.append(TokenEvent(request_id, 0, 0, FinishReason.STOP))
                continue
            token_id, self._room[request_id] = left.pop(0), self._room[request_id] - 1
            reason = None if self._room[request_id] else FinishReason.LENGTH
            if reason is not None:
                del self._running[request_id]
            events.append(TokenEvent(request_id, 0, token_id, reason))
        return events

    def abort(self, request_id: int, sample: int | None = None) -> list[TokenEvent]:
        if self._running.pop(request_id, None) is None:
            return []
        return [TokenEvent(request_id, 0, None, FinishReason.ABORT)]


def scripted_model(
    folder: Path, answers: Sequence[str], step_s: float = 0.0, prefill_steps: int = 0
) -> LoadedModel:
    """A model with the tokenizer of `folder` that gives `answers` in turn."""
    tokenizer = Tokenizer.from_folder(folder)
    ids = [tokenizer.encode(a, add_special_tokens=False, parse_special=True) for a in answers]
    engine = ScriptedEngine(ids, step_s, prefill_steps)
    return LoadedModel(
        "scripted",
        TextEngine(engine, tokenizer),  # type: ignore[arg-type]
        GenerationDefaults({"temperature": 0.7}, ()),
        load_s=0.0,
    )


def main() -> None:
    from localllm.chat.conversation import ChatSession
    from localllm.chat.recorder import Recorder
    from localllm.cli.draw.output import note
    from localllm.cli.draw.render import Shown
    from localllm.cli.repl.repl import Repl
    from localllm.cli.repl.slash_commands import COMMANDS
    from localllm.user.places import sessions_file

    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("answers", type=Path, nargs="+")
    parser.add_argument("--step-ms", type=float, default=1.0)
    parser.add_argument("--prefill-steps", type=int, default=0)
    parser.add_argument("--render", default="auto")
    parser.add_argument("--thoughts", default="show")
    parser.add_argument("--ctx", type=int, default=32768)
    args = parser.parse_args()
    answers = [path.read_text(encoding="utf-8") for path in args.answers]
    model = scripted_model(args.folder, answers, args.step_ms / 1000, args.prefill_steps)
    shown = Shown(args.render, thoughts=args.thoughts)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    model.text_engine.engine.context = Context(args.ctx, "another model")  # type: ignore[misc]
    recorder = Recorder(sessions_file(), note)
    sys.exit(Repl(ChatSession(model), EngineConfig(), {}, shown, recorder).run(COMMANDS))


if __name__ == "__main__":
    main()
