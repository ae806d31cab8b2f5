"""Which saved conversation `chat` continues, and how a question is saved before it is asked."""

from collections.abc import Iterator
from contextlib import contextmanager

from localllm.chat.recorder import Recorder
from localllm.chat.store import SavedSession, check_name
from localllm.chat.transcript import Transcript
from localllm.cli.draw.output import note, show_controls
from localllm.errors import LocalLLMError, RequestError
from localllm.user.places import sessions_file


def open_recorder() -> Recorder:
    """A recorder that saves to the user's data folder and warns on stderr."""
    return Recorder(sessions_file(), lambda text: note(f"warning: {text}"))


def find_session(recorder: Recorder, name: str | None, *, goes_on: bool) -> SavedSession | None:
    """The conversation to continue: the named one, or the latest; None to begin a new one, under
    that name if one is given.

    Raises: RequestError if both are requested, or the latest although none is saved; DiskError.
    """
    if name is not None and goes_on:
        raise RequestError(
            "--continue and --session cannot be combined",
            hint="--continue for the last conversation, or --session for a named one",
        )
    if name is not None:
        found = recorder.find(name)
        if found is None and name.isdigit():
            raise RequestError(
                f"there is no session {name:.40}", param="session", hint="localllm sessions list"
            )
        if found is None:
            check_name(name)
        recorder.check_writable()
        if found is None:
            note(f"new conversation {show_controls(repr(name))}", dim=True)
        recorder.begin(name=name, session=found)
        return found
    if not goes_on:
        return None
    found = recorder.latest()
    if found is None and not recorder.has_set_aside:
        raise RequestError(
            "no conversation is saved yet", param="continue", hint="leave out --continue"
        )
    recorder.check_writable()
    recorder.begin(session=found)
    return found


@contextmanager
def question_saved(recorder: Recorder | None, asked: Transcript) -> Iterator[None]:
    """Save the conversation with its question before a model is loaded and asked; if that fails
    with a LocalLLMError, restore what was saved before.
    """
    if recorder is None:
        yield
        return
    recorder.save(asked)
    try:
        yield
    except LocalLLMError:
        recorder.take_back()
        raise
