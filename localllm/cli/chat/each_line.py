"""`chat --each-line`: a question for each line of stdin, a line of stdout for each answer."""

import sys
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from localllm.answer.side_by_side import Answering, InOneEngine, SideBySide
from localllm.cli.chat.answer import describe_completion
from localllm.cli.chat.ask_once import check_remote_form, note_lost_template
from localllm.cli.chat.request import ChatRequest
from localllm.cli.draw.interrupt import DeferredInterrupt
from localllm.cli.draw.output import (
    StdoutClosedError,
    is_terminal,
    json_line,
    note,
    print_error,
    show_controls,
    write_stdout,
)
from localllm.cli.draw.status_line import StatusLine
from localllm.cli.draw.words import duration
from localllm.cli.input.input_lines import InputLine, InputLines
from localllm.cli.input.user_input import join_raw
from localllm.errors import ExitCode, LocalLLMError
from localllm.process.ending import Speaker
from localllm.schedule.sampling_params import SamplingParams

if TYPE_CHECKING:
    from localllm.answer.completion import Completion
    from localllm.chat.conversation import ChatSession

# Lines that are held, answered or not, per line that is being answered: a slow answer at the head
# does not stop the others, and memory stays bounded.
_HELD_SHARE = 4
_MAX_HELD_CHARS = 64 << 20
_LOOK_S, _SHOWN_S = 0.05, 0.5
# Seeds are 64-bit numbers.
_NUM_SEEDS = 1 << 64


@dataclass(frozen=True, slots=True)
class _Row:
    """A line, and its answer under way; None for a blank or an unreadable line."""

    line: InputLine
    answering: Answering | None

    @property
    def is_over(self) -> bool:
        return self.answering is None or self.answering.is_over


def answer_lines(request: ChatRequest) -> int:
    """Answer each line of stdin, and return the exit code. Raises: LocalLLMError."""
    flags = request.flags.lines
    lines = InputLines(flags.field, flags.skip)
    session = request.open_session()
    note_lost_template(session)
    run = _Run(request, session, lines)
    try:
        return run.run()
    finally:
        run.close()
        session.close()


class _Run:
    """The rows that are held, in the order of the input, and what was counted so far."""

    def __init__(self, request: ChatRequest, session: "ChatSession", lines: InputLines) -> None:
        self._request, self._session, self._lines = request, session, lines
        self._params = session.model.sampling_params(**request.sampling)
        self._answers = _side_by_side(session)
        self._rows: deque[_Row] = deque()
        self._held_chars = 0
        self._num_done = self._num_failed = self._num_tokens = 0
        self._last_number = request.flags.lines.skip
        self._first_byte: int | None = None
        self._done_bytes = 0
        self._began_s = time.monotonic()
        self._status: StatusLine | None = None

    def run(self) -> int:
        with ExitStack() as stack:
            if is_terminal(sys.stderr):
                self._status = stack.enter_context(StatusLine(self._describe, _SHOWN_S))
            interrupt = stack.enter_context(_Interrupt(self))
            try:
                while self._goes_on() and not interrupt.requested:
                    self._fill()
                    self._write_finished()
                    self._wait()
            except StdoutClosedError:
                raise
            except BaseException:
                self._end_status()
                self.say_how_to_go_on()
                raise
        if interrupt.requested:
            self.say_how_to_go_on()
            return ExitCode.SIGINT
        self._note_end()
        return ExitCode.FAILURE if self._num_failed else ExitCode.OK

    def close(self) -> None:
        """Abort what is not answered."""
        self._answers.close()

    def say_how_to_go_on(self) -> None:
        """Say which lines are answered, and how to answer the others."""
        done = f"line {self._last_number:,} is the last one answered"
        if self._last_number == 0:
            done = "no line is answered"
        note(f"{done}; --skip {self._last_number} goes on behind it")

    def _goes_on(self) -> bool:
        return bool(self._rows) or not self._lines.is_over

    def _num_open(self) -> int:
        return sum(not row.is_over for row in self._rows)

    def _fill(self) -> None:
        """Begin to answer as many lines as there is room for; without any, wait for one."""
        most = self._request.engine.max_num_seqs
        while (
            (num_open := self._num_open()) < most
            and len(self._rows) < _HELD_SHARE * most
            and self._held_chars < _MAX_HELD_CHARS
        ):
            line = self._lines.take(0.0 if self._rows or num_open else _LOOK_S)
            if line is None:
                return
            if self._first_byte is None:
                self._first_byte = line.end - len(line.text)
            self._rows.append(_Row(line, self._begin(line)))
            self._held_chars += len(line.text)

    def _begin(self, line: InputLine) -> Answering | None:
        if line.error is not None or not line.text:
            return None
        shared = self._request.text or ""
        question = join_question(line.text, shared, is_raw=self._request.flags.prompt.raw)
        return self._answers.begin(self._session.asked_alone(question), self._seeded(line.number))

    def _seeded(self, number: int) -> SamplingParams:
        """The parameters of a line: its seed depends on --seed and its number alone."""
        seed = self._params.seed
        if seed is None or number == 1:
            return self._params
        other = seed + number - 1
        return replace(self._params, seed=other - _NUM_SEEDS if other >= _NUM_SEEDS else other)

    def _wait(self) -> None:
        if any(not row.is_over for row in self._rows):
            self._answers.advance()

    def _write_finished(self) -> None:
        while self._rows and self._rows[0].is_over:
            row = self._rows.popleft()
            self._held_chars -= len(row.line.text)
            self._say(self._write, row)
            self._last_number, self._done_bytes = row.line.number, row.line.end
            self._num_done += 1

    def _write(self, row: _Row) -> None:
        completion = None if row.answering is None else row.answering.completion
        error = self._error(row, completion)
        if error is not None:
            self._num_failed += 1
            print_error(f"line {row.line.number:,}: {error.message}", error.where, error.hint)
        if completion is not None:
            self._num_tokens += completion.num_generated_tokens
        if self._request.form == "json":
            write_stdout(json_line(self._described(row.line, completion, error)))
            return
        text = "" if completion is None or error is not None else in_one_line(completion.text)
        write_stdout((show_controls(text) if is_terminal(sys.stdout) else text) + "\n")

    def _error(self, row: _Row, completion: "Completion | None") -> LocalLLMError | None:
        """Why a line failed, as its own command would."""
        if row.answering is None:
            return row.line.error
        if row.answering.error is not None or completion is None:
            return row.answering.error
        if completion.finish_reason == "length":
            cut = f"cut after {completion.num_generated_tokens:,} tokens"
            if self._request.has_grammar or self._request.flags.answer.fail_on_length:
                return LocalLLMError(cut, hint="-n sets the limit")
            if "max_tokens" not in self._request.sampling:
                note(f"line {row.line.number:,}: {cut}", dim=True)
        try:
            check_remote_form(self._request, self._params, completion)
        except LocalLLMError as error:
            return error
        return None

    def _described(
        self, line: InputLine, completion: "Completion | None", error: LocalLLMError | None
    ) -> dict[str, Any]:
        found: dict[str, Any] = {"line": line.number}
        found |= {"input": line.text} if line.id is None else {"id": line.id}
        if completion is not None and completion.error is None:
            found |= describe_completion(self._session.model, completion, self._params)
        elif error is None:
            found["text"] = ""
        if error is not None:
            told = {"message": error.message, "where": error.where, "hint": error.hint}
            found["error"] = {name: text for name, text in told.items() if text}
        return found

    def _say(self, write: Any, row: _Row) -> None:
        if self._status is None:
            write(row)
        else:
            self._status.say(lambda: write(row))

    def _end_status(self) -> None:
        if self._status is not None:
            self._status.end()

    def _describe(self) -> str | None:
        """The line that shows how far it is."""
        took_s = time.monotonic() - self._began_s
        parts = [f"{self._num_done:,} lines answered", f"{self._num_open()} in work"]
        if self._num_failed:
            parts.append(f"{self._num_failed:,} failed")
        if self._num_tokens:
            parts.append(f"{self._num_tokens / took_s:.0f} tokens/s")
        total, first = self._lines.num_bytes, self._first_byte
        if total and first is not None and self._done_bytes > first:
            share = (self._done_bytes - first) / max(1, total - first)
            left_s = took_s * (1 - share) / share
            parts.append(f"{self._done_bytes / total:.0%}, about {duration(left_s)} left")
        return " · ".join(parts)

    def _note_end(self) -> None:
        """Say how many lines failed; on a terminal, what was done."""
        skip = self._request.flags.lines.skip
        if skip > self._lines.num_read:
            note(f"--skip {skip} leaves out all {self._lines.num_read:,} lines")
        elif self._num_failed:
            note(f"{self._num_failed:,} of {self._num_done:,} lines failed")
        elif is_terminal(sys.stderr):
            took = duration(time.monotonic() - self._began_s)
            note(f"{self._num_done:,} lines answered in {took}", dim=True)


class _Interrupt(DeferredInterrupt, Speaker):
    """Ctrl-C, which also says how to go on if a step takes so long that the program is ended."""

    def __init__(self, run: _Run) -> None:
        super().__init__(ends_program=True)
        self._run = run

    def say_last_words(self) -> None:
        self._run.say_how_to_go_on()


def join_question(line: str, shared: str, *, is_raw: bool) -> str:
    """A line and what all lines share, as if the line had been piped into a command of its own."""
    if is_raw or not shared:
        return join_raw([line, shared])
    return f"{line}\n\n" + shared.strip("\n")


def in_one_line(text: str) -> str:
    """`text` with each line break, and the spaces around it, as one space."""
    return " ".join(filter(None, (line.strip() for line in text.splitlines())))


def _side_by_side(session: "ChatSession") -> SideBySide:
    model = session.model
    from localllm.attach.remote import RemoteModel

    if isinstance(model, RemoteModel):
        from localllm.attach.remote_side_by_side import OnServer

        return OnServer(model)
    return InOneEngine(model)
