"""Print one answer on stdout, in the requested format."""

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from localllm.cli.draw.output import json_line, write_stdout
from localllm.cli.draw.prefill_progress import with_progress
from localllm.cli.draw.render import AnswerView, PlainPrinter, TextPrinter
from localllm.cli.draw.thoughts import ThoughtsMode
from localllm.errors import ExitCode, LocalLLMError
from localllm.schedule.sampling_params import SamplingParams

if TYPE_CHECKING:
    from localllm.answer.answerer import Answerer
    from localllm.answer.completion import Completion, TokenInfo
    from localllm.answer.event_stream import EventStream

AnswerForm = Literal["text", "json", "stream-json", "code"]


@dataclass(frozen=True, slots=True)
class AnswerPrinter:
    """Prints the events of one completion; Ctrl-C stops it and keeps the text so far."""

    loaded: "Answerer"
    completion: "Completion"
    params: SamplingParams
    printer: TextPrinter
    thoughts: ThoughtsMode

    def print(self, events: "EventStream", form: AnswerForm) -> None:
        """Read `events` to the end and print them in the format `form`."""
        match form:
            case "text":
                self._text(events)
            case "json":
                self._json_object(events)
            case "stream-json":
                self._json_lines(events)
            case "code":
                self._code_block(events)

    def exit_code(self, fail_on_length: bool = False) -> int:
        """The command's exit code; a cut answer fails if it had to follow a grammar.

        Raises: the request's error, if it had one.
        """
        if self.completion.error is not None:
            raise self.completion.error
        if self.completion.finish_reason is None:
            return ExitCode.SIGINT
        may_be_cut = not fail_on_length and self.params.grammar is None
        if not may_be_cut and self.completion.finish_reason == "length":
            return ExitCode.LENGTH
        return ExitCode.OK

    def _text(self, events: "EventStream") -> None:
        view = AnswerView(self.printer, self.thoughts)
        try:
            for event in with_progress(events):
                view.push(event)
        finally:
            # Text before an error is shown, and the error starts on a new line.
            if self.completion.error is None or self.completion.samples[0].tokens:
                view.finish()

    def _json_object(self, events: "EventStream") -> None:
        deque(with_progress(events), maxlen=0)
        if self.completion.error is None:
            _print_json(describe_completion(self.loaded, self.completion, self.params))

    def _json_lines(self, events: "EventStream") -> None:
        for event in with_progress(events):
            if event.thinking:
                token = None if event.text else event.token
                _print_json({"type": "thinking", **self._describe(event.thinking, token)})
            if event.text or (event.token is not None and not event.thinking):
                _print_json({"type": "text", **self._describe(event.text, event.token)})
        if self.completion.error is None:
            described = describe_completion(self.loaded, self.completion, self.params)
            _print_json({"type": "done", **described})

    def _code_block(self, events: "EventStream") -> None:
        deque(with_progress(events), maxlen=0)
        code = find_code(self.completion.text)
        if code is None and self.completion.finish_reason in ("stop", "length"):
            raise LocalLLMError(
                "the answer contains no fenced code block",
                hint="leave out --extract-code to see the answer",
            )
        if code is not None:
            printer = PlainPrinter()
            printer.push(code)
            printer.finish()

    def _describe(self, text: str, token: "TokenInfo | None") -> dict[str, Any]:
        described: dict[str, Any] = {"text": text}
        if self.params.logprobs is not None and token is not None:
            described["token"] = _describe_token(self.loaded, token)
        return described


def find_code(text: str) -> str | None:
    """The first fenced code block of a markdown text, at any nesting depth."""
    from markdown_it import MarkdownIt

    tokens = MarkdownIt("commonmark").parse(text)
    return next((token.content for token in tokens if token.type == "fence"), None)


def describe_completion(
    loaded: "Answerer", completion: "Completion", params: SamplingParams
) -> dict[str, Any]:
    """The object that `chat --json` prints, as documented in docs/chat.md."""
    ended = completion.last_token_s or completion.started_s
    is_remote = completion.is_remote  # only the server knows what was drafted
    described: dict[str, Any] = {
        "model": loaded.name,
        "text": completion.text,
        **({"thinking": completion.thinking} if completion.thinking else {}),
        "finish_reason": str(completion.finish_reason or "abort"),
        **({} if completion.stop_string is None else {"stop_string": completion.stop_string}),
        "usage": {
            "prompt_tokens": completion.num_prompt_tokens,
            "cached_tokens": completion.num_cached_tokens,
            "completion_tokens": completion.num_generated_tokens,
            "drafted_tokens": None if is_remote else completion.num_drafted_tokens,
            "accepted_tokens": None if is_remote else completion.num_accepted_tokens,
            "drafts": None
            if is_remote
            else {
                each.drafter: {"drafted": each.num_drafted, "accepted": each.num_accepted}
                for each in completion.drafts
            },
        },
        "timing": {
            "load_s": round(loaded.load_s, 4),
            "ttft_s": round(completion.ttft_s, 4),
            "prefill_tokens_per_s": round(completion.prefill_tokens_per_s, 1),
            "decode_tokens_per_s": round(completion.decode_tokens_per_s, 1),
            "total_s": round(loaded.load_s + ended - completion.started_s, 4),
        },
        "truncated": None
        if completion.truncation is None
        else {
            "dropped_tokens": completion.truncation.num_tokens,
            "dropped_turns": completion.truncation.num_turns,
            "policy": completion.truncation.policy,
        },
    }
    if params.logprobs is not None:
        tokens = completion.samples[0].tokens
        described["tokens"] = [_describe_token(loaded, token) for token in tokens]
    return described


def _describe_token(loaded: "Answerer", token: "TokenInfo") -> dict[str, Any]:
    assert token.logprobs is not None
    return {
        "id": token.token_id,
        "text": loaded.decode([token.token_id]),
        "logprob": token.logprobs.logprob,
        "top": [{"id": i, "logprob": logprob} for i, logprob in token.logprobs.top],
    }


def _print_json(value: dict[str, Any]) -> None:
    write_stdout(json_line(value))
