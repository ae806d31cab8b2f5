"""The commands of a conversation that change, save or restore its turns."""

import shlex
import time
from functools import partial
from pathlib import Path

from localllm.chat.store import check_name
from localllm.chat.transcript import Transcript, make_title
from localllm.cli.draw.files import user_path
from localllm.cli.draw.output import note, show_controls
from localllm.cli.draw.terminal import confirm
from localllm.cli.draw.words import age
from localllm.cli.repl.repl import Repl
from localllm.cli.repl.transcript_files import export_transcript, read_transcript
from localllm.errors import ContextLengthError, LocalLLMError, RequestError

_LISTED = 15
# How much of the last answer is shown when a conversation is resumed.
_RECALLED_LINES, _RECALLED_CHARS = 6, 400


def regenerate(repl: Repl, argument: str) -> None:
    """`/regen`: answer the last question again."""
    repl.regenerate()


def resume(repl: Repl, argument: str) -> None:
    """`/continue`: continue an answer that was cut or stopped."""
    if repl.is_full:
        raise RequestError(
            "the context is full, so the answer cannot continue", hint=repl.way_to_room()
        )
    repl.answer(repl.session.resume)


def retry(repl: Repl, argument: str) -> None:
    """`/retry`: ask an unanswered question again, or regenerate the last answer."""
    question = repl.session.unanswered
    if question is not None:
        repl.answer(lambda params: repl.session.reply(question, params))
    else:
        repl.regenerate()


def edit(repl: Repl, argument: str) -> None:
    """`/edit`: change the last question and ask it again."""
    question = repl.session.unanswered
    if question is None:
        if not repl.session.turns:
            raise RequestError("there is no question to change yet")
        question = repl.session.turns[-1].question
    note("Enter asks it again, Ctrl-C leaves it as it is", dim=True)
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
            # It was refused: restore the old turn.
            repl.session.turns.append(taken)
            repl.session.unanswered = None
            repl.save()
        raise


def undo(repl: Repl, argument: str) -> None:
    """`/undo`: remove the last question and its answer."""
    turn = repl.session.undo()
    if turn is None:
        note("there is nothing to undo")
    else:
        repl.used_tokens = repl.session.count_tokens()
        repl.save()
        note(f"removed: {show_controls(make_title(turn.question))}")


def clear(repl: Repl, argument: str) -> None:
    """`/clear`: begin a new conversation."""
    was_saved = repl.recorder is not None and repl.recorder.session is not None
    repl.start_anew()
    note("a new conversation" + ("; the old one is in /sessions" if was_saved else " begins"))


def compact(repl: Repl, argument: str) -> None:
    """`/compact`: summarise the older turns, and continue from the summary if the user agrees."""
    session = repl.session
    if not session.can_be_summarised:
        raise RequestError("there is nothing to summarise yet")
    used, params = repl.used_tokens, repl.params()
    try:
        completion, events, put = session.summarise(params)
    except ContextLengthError as error:
        raise RequestError(
            error.message, where=error.where, hint="/model NAME with a longer context"
        ) from error
    repl.show(completion, events)
    if completion.error is not None:
        raise completion.error
    if completion.finish_reason == "length":
        why = "it filled the context"
        if completion.num_generated_tokens == params.max_tokens:
            why = "/set max-tokens allows more"
        note(f"the summary is incomplete, so nothing was changed; {why}")
        return
    if completion.finish_reason != "stop":
        note("the summary is incomplete, so nothing was changed")
        return
    if not confirm("replace the older turns with this summary? [Y/n] ", default=True):
        note("nothing was changed")
        return
    if repl.recorder is not None:
        repl.recorder.begin()  # the whole conversation stays saved as it was
    put(completion.text)
    repl.last_completion = None
    repl.save()
    now = session.count_tokens()
    repl.used_tokens = now
    note(f"the context went from {used:,} to {now:,} tokens; all turns are still in /sessions")


def save(repl: Repl, argument: str) -> None:
    """`/save`: name the conversation, or say under which name it is saved."""
    if repl.recorder is None:
        raise RequestError("this conversation is not saved", hint="start without --no-save")
    name = argument.strip()
    if not name:
        saved = repl.recorder.session
        if saved is None:
            note("it is saved automatically from the first question on; /save NAME names it")
        else:
            note(f"saved as session {saved.name or saved.id}; /save NAME names it")
        return
    check_name(name)
    repl.recorder.rename(name, repl.session.transcript())
    if Path(name).suffix in (".md", ".json"):
        note(f"that is its name; /export {name} writes a file", dim=True)
    command = f"localllm chat --session {shlex.quote(name)}"
    note(f"this conversation is named {name!r}; {command} continues it")


def load(repl: Repl, argument: str) -> None:
    """`/load`: continue a saved conversation, or an exported .json file."""
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
        hint = "/sessions lists them; a .json file written by /export works too"
        raise RequestError(error.message, where=error.where, hint=hint) from error
    repl.start_anew()
    repl.recorder.begin(session=saved)
    repl.session.system = saved.transcript.system
    repl.session.restore(saved.transcript.turns)
    recall(repl, saved.transcript)


def recall(repl: Repl, transcript: Transcript) -> None:
    """Show the last turn of a conversation that is resumed."""
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
            tell("the answer was interrupted here; /continue resumes it")
    if repl.session.unanswered is not None:
        tell(f"not answered: {show_controls(make_title(repl.session.unanswered))}; /retry asks it")
    if transcript.model != repl.session.model.name:
        tell(f"{transcript.model} answered so far; /model {transcript.model} switches back")


def list_sessions(repl: Repl, argument: str) -> None:
    """`/sessions`: list the saved conversations."""
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
        note("/load NAME continues one", dim=True)


def export(repl: Repl, argument: str) -> None:
    """`/export`: write the conversation to a file."""
    transcript = repl.session.transcript()
    export_transcript(transcript, user_path(argument) if argument else Path())
    note(f"wrote {len(transcript.messages)} messages to {argument}")
