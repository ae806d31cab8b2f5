"""Which saved conversation a `chat` goes on with, and whether it is saved at all."""

from collections.abc import Iterator
from contextlib import contextmanager

from localllm.chat.recorder import Recorder
from localllm.chat.store import SavedSession
from localllm.chat.transcript import Transcript
from localllm.cli.output import note, show_controls
from localllm.cli.slash_turns import check_name
from localllm.errors import LocalLLMError, RequestError
from localllm.user.places import sessions_file


def open_recorder() -> Recorder:
    """Saves into the user's data folder, and warns on stderr."""
    return Recorder(sessions_file(), lambda text: note(f"warning: {text}"))


def find_session(recorder: Recorder, name: str | None, *, goes_on: bool) -> SavedSession | None:
    """The conversation to go on with: the named one, or the latest; None where a new one begins,
    under that name.

    Raises: RequestError where both are asked for, or the latest and there is none; DiskError.
    """
    if name is not None and goes_on:
        raise RequestError(
            "--continue is the last conversation, --session a named one", hint="leave out one"
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
            note(f"a new conversation, {show_controls(repr(name))}", dim=True)
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
    """Have a conversation with its question on disk before a model is loaded and asked; where that
    fails, what is saved is as it was before.
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
