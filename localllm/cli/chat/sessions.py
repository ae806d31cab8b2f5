"""`localllm sessions`: saved conversations."""

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.cli.draw.columns import aligned
from localllm.cli.draw.files import user_path
from localllm.cli.draw.output import is_terminal, json_line, note, show_controls, write_stdout
from localllm.cli.draw.terminal import may_delete
from localllm.cli.draw.words import age
from localllm.cli.flags import suggestions
from localllm.cli.flags.common import Everything, JsonLines, JsonObject, Yes
from localllm.errors import RequestError

if TYPE_CHECKING:
    from localllm.chat.store import SavedSession, SessionStore

sessions = typer.Typer(
    invoke_without_command=True,
    help="List, show, rename, export, import and delete saved conversations.",
)
Name = Annotated[
    str,
    typer.Argument(
        help="The conversation's name or number.",
        show_default=False,
        autocompletion=suggestions.sessions,
    ),
]


@sessions.callback()
def _alone(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        list_sessions()


@sessions.command("ls", hidden=True)
@sessions.command("list")
def list_sessions(
    text: Annotated[
        str | None,
        typer.Argument(help="Only those with this text in their name, questions or answers."),
    ] = None,
    json_output: JsonLines = False,
) -> None:
    """List saved conversations, newest first."""
    store = _store()
    rows = store.rows()
    found = store.rows(text) if text else rows
    if rows and not found:
        note(f"none of the {len(rows)} conversations matches {show_controls(repr(text))}")
    if json_output:
        for row in found:
            write_stdout(json_line(asdict(row)))
        return
    if not rows:
        note("nothing is saved yet; conversations are saved automatically: localllm chat")
        return
    cells = [
        (
            str(row.id),
            row.name or "",
            str(row.num_turns),
            age(time.time() - row.updated_s),
            row.model,
            row.title,
        )
        for row in found
    ]
    header = ("ID", "NAME", "TURNS", "USED", "MODEL", "FIRST QUESTION")
    write_stdout(show_controls("\n".join(aligned([header, *cells]))) + "\n")


@sessions.command()
def show(
    name: Name,
    json_output: JsonObject = False,
) -> None:
    """Print a conversation as Markdown."""
    transcript = _store().get(name).transcript
    text = transcript.to_json() if json_output else transcript.to_markdown()
    write_stdout(show_controls(text) if is_terminal(sys.stdout) else text)


@sessions.command()
def export(
    name: Name,
    path: Annotated[
        Path | None,
        typer.Argument(help="A new .md or .json file; stdout if not given.", show_default=False),
    ] = None,
) -> None:
    """Write a conversation to a file."""
    from localllm.cli.repl.transcript_files import export_transcript

    if path is None:
        show(name)
        return
    transcript = _store().get(name).transcript
    export_transcript(transcript, user_path(str(path)))
    note(f"wrote {len(transcript.messages)} messages to {path}")


@sessions.command()
def rename(
    name: Name, new: Annotated[str, typer.Argument(help="The new name.", show_default=False)]
) -> None:
    """Rename a conversation."""
    from localllm.chat.store import check_name

    check_name(new)
    store = _store()
    store.rename(store.get(name), new)
    note(f"renamed to {show_controls(new)}")


@sessions.command("import")
def import_(
    path: Annotated[Path, typer.Argument(help="An exported .json file.")],
) -> None:
    """Import an exported conversation."""
    from localllm.cli.repl.transcript_files import read_transcript

    session = _store().create(read_transcript(user_path(str(path))))
    note(f"imported as session {session.id}; localllm chat --session {session.id} continues it")


@sessions.command("delete", hidden=True)
@sessions.command()
def rm(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names or numbers.", show_default=False, autocompletion=suggestions.sessions
        ),
    ] = None,
    everything: Everything = False,
    yes: Yes = False,
) -> None:
    """Delete conversations for good."""
    store = _store()
    if bool(names) == everything:
        raise RequestError("give either names or --all", hint="localllm sessions list")
    found: list[SavedSession] = []
    if everything:
        found = [store.load(row.id) for row in store.rows()]
    else:
        found = [store.get(name) for name in names or []]
    count = f"{len(found)} conversation{'s' * (len(found) != 1)}"
    if not may_delete(count, yes):
        return
    for session in found:
        store.remove(session.id)
    note(f"deleted {count}")


def _store() -> "SessionStore":
    from localllm.chat.store import SessionStore
    from localllm.user.places import sessions_file

    return SessionStore(sessions_file())
