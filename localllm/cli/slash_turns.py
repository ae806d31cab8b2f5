"""The commands of a conversation that change or keep what was said."""

import shlex
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.chat.transcript import Transcript, make_title
from localllm.cli.files import user_path, write_new_file
from localllm.cli.output import note, show_controls
from localllm.cli.terminal import confirm
from localllm.cli.words import age
from localllm.errors import ContextLengthError, LocalLLMError, RequestError

if TYPE_CHECKING:
    from localllm.cli.repl import Repl

_LISTED = 15
# Lines of an answer that are shown when a conversation is taken up again.
_RECALLED_LINES, _RECALLED_CHARS = 6, 400


def regenerate(repl: "Repl", argument: str) -> None:
    """`/regen`"""
    repl.regenerate()


def resume(repl: "Repl", argument: str) -> None:
    """`/continue`"""
    if repl.is_full:
        raise RequestError(
            "the context is full, so the answer cannot go on", hint=repl.way_to_room()
        )
    repl.answer(repl.session.resume)


def retry(repl: "Repl", argument: str) -> None:
    """`/retry`"""
    question = repl.session.unanswered
    if question is not None:
        repl.answer(lambda params: repl.session.reply(question, params))
    else:
        repl.regenerate()


def edit(repl: "Repl", argument: str) -> None:
    """`/edit`"""
    question = repl.session.unanswered
    if question is None:
        if not repl.session.turns:
            raise RequestError("there is no question to change yet")
        question = repl.session.turns[-1].question
    note("Enter asks it anew, Ctrl-C leaves it as it is", dim=True)
    text = repl.editor.edit(question)
    if text is None or text.strip() in ("", question.strip()):
        note("nothing was changed")
        return
    if text.startswith("/") and not question.startswith("/"):
        raise RequestError(
            "nothing was changed: that looks like a command", hint="type it at the prompt >"
        )
    taken = repl.session.undo()
    before = repl.last_completion
    try:
        repl.ask(text)
    except LocalLLMError:
        if taken is not None and taken.is_answered and repl.last_completion is before:
            # It was refused: what stood there stands again.
            repl.session.turns.append(taken)
            repl.session.unanswered = None
            repl.save()
        raise


def undo(repl: "Repl", argument: str) -> None:
    """`/undo`"""
    turn = repl.session.undo()
    if turn is None:
        note("there is nothing to take back")
    else:
        note(f"taken back: {show_controls(make_title(turn.question))}")
        repl.used_tokens = repl.session.count_tokens()
        repl.save()


def clear(repl: "Repl", argument: str) -> None:
    """`/clear`"""
    was_saved = repl.recorder is not None and repl.recorder.session is not None
    repl.start_anew()
    note("a new conversation" + ("; the old one is in /sessions" if was_saved else " begins"))


def compact(repl: "Repl", argument: str) -> None:
    """`/compact`"""
    session = repl.session
    if not session.can_be_summarised:
        raise RequestError("there is nothing to summarise yet")
    used, params = repl.used_tokens, repl.params()
    try:
        completion, events, put = session.summarise(params)
    except ContextLengthError as error:
        raise RequestError(
            error.message, where=error.where, hint="/model NAME, one with a longer context"
        ) from error
    repl.show(completion, events)
    if completion.error is not None:
        raise completion.error
    if completion.finish_reason == "length":
        why = "it ran on until the context was full"
        if completion.num_generated_tokens == params.max_tokens:
            why = "/set max-tokens allows more"
        note(f"the summary is not complete, so nothing was changed; {why}")
        return
    if completion.finish_reason != "stop":
        note("the summary is not complete, so nothing was changed")
        return
    if not confirm("go on from this summary in place of the older turns? [Y/n] ", default=True):
        note("nothing was changed")
        return
    if repl.recorder is not None:
        repl.recorder.begin()  # the whole conversation stays saved as it was
    put(completion.text)
    repl.last_completion = None
    repl.save()
    now = session.count_tokens()
    repl.used_tokens = now
    note(f"the context held {used:,} tokens and holds {now:,} now; the whole is in /sessions")


def save(repl: "Repl", argument: str) -> None:
    """`/save`"""
    if repl.recorder is None:
        raise RequestError("this conversation is not saved", hint="start without --no-save")
    name = argument.strip()
    if not name:
        saved = repl.recorder.session
        if saved is None:
            note("it is saved by itself from the first question on; /save NAME gives it a name")
        else:
            note(f"saved as session {saved.name or saved.id}; /save NAME gives it a name")
        return
    check_name(name)
    repl.recorder.rename(name, repl.session.transcript())
    if Path(name).suffix in (".md", ".json"):
        note(f"that is its name; /export {name} writes a file", dim=True)
    command = f"localllm chat --session {shlex.quote(name)}"
    note(f"this conversation is {name!r}; {command} goes on with it")


def load(repl: "Repl", argument: str) -> None:
    """`/load`"""
    if repl.recorder is None:
        raise RequestError("sessions are off", hint="start without --no-save")
    if not argument:
        raise RequestError("/load needs a name or a number", hint="/sessions lists them")
    path = user_path(argument)
    if path.suffix == ".json" and path.is_file() and repl.recorder.find(argument) is None:
        transcript = read_transcript(path)
        repl.start_anew()
        repl.session.system = transcript.system
        repl.session.restore(transcript.turns)
        recall(repl, transcript)
        repl.save()
        return
    try:
        saved = repl.recorder.get(argument)
    except RequestError as error:
        hint = "/sessions lists them; a file that /export wrote is read too, if it ends in .json"
        raise RequestError(error.message, where=error.where, hint=hint) from error
    repl.start_anew()
    repl.recorder.begin(session=saved)
    repl.session.system = saved.transcript.system
    repl.session.restore(saved.transcript.turns)
    recall(repl, saved.transcript)


def recall(repl: "Repl", transcript: Transcript) -> None:
    """Show where a conversation stands that is taken up again."""
    turns = repl.session.turns
    repl.used_tokens = repl.session.count_tokens()
    tell = partial(note, dim=True)
    tell(f"{len(turns)} turn{'s' if len(turns) != 1 else ''}, {repl.used_tokens:,} tokens")
    if turns:
        tell(f"> {show_controls(make_title(turns[-1].question, 200))}")
        answer = turns[-1].answer.strip()
        shown = "…" * (len(answer) > _RECALLED_CHARS) + answer[-_RECALLED_CHARS:]
        for line in show_controls(shown).splitlines()[-_RECALLED_LINES:]:
            tell(f"  {line}")
        if turns[-1].finish_reason is None:
            tell("it was interrupted there; /continue goes on")
    if repl.session.unanswered is not None:
        tell(f"not answered: {show_controls(make_title(repl.session.unanswered))}; /retry asks it")
    if transcript.model != repl.session.model.name:
        tell(f"it was {transcript.model} that answered; /model {transcript.model} brings it back")


def list_sessions(repl: "Repl", argument: str) -> None:
    """`/sessions`"""
    if repl.recorder is None:
        raise RequestError("sessions are off", hint="start without --no-save")
    rows = repl.recorder.rows()
    if not rows:
        note("nothing is saved yet")
    current = repl.recorder.session
    for row in rows[:_LISTED]:
        mark = "*" if current is not None and row.id == current.id else " "
        name = row.name or str(row.id)
        when = age(time.time() - row.updated_s)
        turns = f"{row.num_turns} turn{'s' * (row.num_turns != 1)}"
        note(show_controls(f"{mark} {name:12.40}  {turns:>9}  {when:15}  {row.title}"))
    if len(rows) > _LISTED:
        note(f"  and {len(rows) - _LISTED} more: localllm sessions list", dim=True)
    if rows:
        note("/load NAME goes on with one", dim=True)


def export(repl: "Repl", argument: str) -> None:
    """`/export`"""
    transcript = repl.session.transcript()
    export_transcript(transcript, user_path(argument) if argument else Path())
    note(f"{len(transcript.messages)} messages are in {argument}")


def export_transcript(transcript: Transcript, path: Path) -> None:
    """Write a conversation to a new `.md` or `.json` file. Raises: RequestError, DiskError."""
    if path.suffix not in (".md", ".json"):
        raise RequestError(
            "the path must end in .md or .json", param="path", hint="for instance chat.md"
        )
    is_json = path.suffix == ".json"
    write_new_file(path, transcript.to_json() if is_json else transcript.to_markdown())


def read_transcript(path: Path) -> Transcript:
    """The conversation in a `.json` file. Raises: RequestError."""
    try:
        return Transcript.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(
            f"{path.name} is not a conversation: {error!s:.200}",
            param="path",
            hint="a .json file that /export wrote",
        ) from error


def check_name(name: str) -> None:
    """Raises: RequestError for what cannot name a session."""
    if name.isdigit():
        raise RequestError(
            f"{name:.40} cannot name a session: it is a number, which each has anyway",
            param="session",
            hint="a name with a letter in it",
        )
    if not name.strip() or len(name) > 60 or not name.isprintable() or name.startswith("-"):
        raise RequestError(
            f"{name!r:.80} cannot name a session",
            param="session",
            hint="up to 60 letters, figures and signs, not figures alone",
        )
