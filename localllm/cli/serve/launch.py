"""`localllm launch`: start an agent or editor that uses a model here."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.cli.draw.output import is_terminal, note, write_stdout
from localllm.cli.draw.terminal import confirm
from localllm.cli.flags import common, suggestions
from localllm.cli.flags.common import Yes
from localllm.cli.flags.groups import Flags, setting, takes_flags
from localllm.errors import RequestError
from localllm.files.private_files import make_private_folder, write_private
from localllm.hub.catalog import BUILT_IN_MODEL, resolve_model
from localllm.launch.programs import PROGRAMS, Program
from localllm.launch.settings import DEFAULT_PORT, Endpoint, FileChange, Settings
from localllm.user.settings import default_model

if TYPE_CHECKING:
    from collections.abc import Sequence

# Agents begin with prompts of some ten thousand tokens.
_SHORT_CONTEXT = 24576
_MISSING = 127  # as a shell has it


@dataclass(frozen=True, slots=True)
class LaunchFlags(Flags):
    """The server, and whether anything is started."""

    exclusive = (("remote", "port"),)

    port: int = setting(DEFAULT_PORT, help="Port of a server that runs, or is started; 0: any.")
    remote: str | None = setting(
        help="A server elsewhere, which gets the key and what the program asks.", metavar="URL"
    )
    api_key: str | None = setting(help="The key of a server that runs; better in LOCALLLM_API_KEY.")
    ctx: str | None = setting(
        None, "--ctx", "-c", help="Context length of a server that is started."
    )
    dry_run: bool = setting(False, help="Only show what would be set; start nothing.")


@takes_flags
def launch(
    program: Annotated[
        str, typer.Argument(help=" | ".join(PROGRAMS), autocompletion=suggestions.programs)
    ],
    model: Annotated[
        str | None,
        common.model(
            "Alias, org/name, folder or GGUF file; the one of the server that runs if not given."
        ),
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="For the program, behind --.", show_default=False),
    ] = None,
    *,
    launch: LaunchFlags,
    yes: Yes = False,
) -> int:
    """Start an agent or editor that uses a model here.

    It asks the server that runs, or a new one that ends with it.
    """
    known = PROGRAMS.get(program)
    if known is None:
        raise RequestError(
            f"there is no program {program!r:.60} here",
            param="program",
            hint=f"one of {', '.join(PROGRAMS)}",
        )
    if launch.dry_run:
        _show(known, known.settings(_imagined(model, launch)), arguments or [])
        return 0
    executable = next(filter(None, map(shutil.which, known.executables)), None)
    if executable is None:
        raise RequestError(f"{known.title} is not installed", param="program", hint=known.install)
    with _server(model, launch) as endpoint:
        if endpoint.context_length < _SHORT_CONTEXT:
            note(
                f"the context is {endpoint.context_length:,} tokens; agents need "
                f"{_SHORT_CONTEXT:,} or more, from a model and a server that have them",
                dim=True,
            )
        settings = known.settings(endpoint)
        for change in settings.files:
            _write(change, known, is_agreed=yes)
        return _run(known, executable, settings, arguments or [])


def _imagined(model: str | None, flags: LaunchFlags) -> Endpoint:
    """The server that runs, or else the one that would be started, without its key."""
    found = _found_server(model, flags)
    if found is not None:
        return replace(found, key=found.key and "KEY")
    note("no server runs there; one would be started, with a key where KEY stands")
    from localllm.cli.flags.values import parse_context

    asked = parse_context(flags.ctx) if flags.ctx else None
    name = model or _model()
    url = f"http://127.0.0.1:{flags.port}"
    return Endpoint(url, name, asked or _context_of(name), "KEY")


def _context_of(model: str) -> int:
    """The context that a server of the model would have on this machine. Raises: LocalLLMError."""
    from localllm.cost.planning import plan_model, shape_of, this_machine
    from localllm.engine.config import EngineConfig

    config = EngineConfig()
    plan = plan_model(
        shape_of(resolve_model(model), None), this_machine(config, measures=False), config
    )
    return plan.memory.max_model_len


def _found_server(model: str | None, flags: LaunchFlags) -> Endpoint | None:
    """The server that runs. Raises: RequestError for one of another model; LocalLLMError."""
    from localllm.launch.server import ask_server, find_server

    key = flags.api_key or ""
    if flags.remote is not None:
        return ask_server(flags.remote, model, key)
    found = find_server(flags.port, key) if flags.port else None
    if found is not None and model not in (None, found.model):
        raise RequestError(
            f"{found.model!r:.60} is served on port {flags.port}",
            param="port",
            hint="another --port, or --port 0",
        )
    return found


def _model() -> str:
    return default_model() or BUILT_IN_MODEL


@contextmanager
def _server(model: str | None, flags: LaunchFlags) -> Iterator[Endpoint]:
    """Raises: LocalLLMError."""
    from localllm.launch.server import started_server

    found = _found_server(model, flags)
    if found is not None:
        note(f"{found.model} answers at {found.url}", dim=True)
        yield found
        return
    if flags.port:
        note(f"no server of yours runs on port {flags.port}; one is started", dim=True)
    more = [] if flags.ctx is None else ["--ctx", flags.ctx]
    with started_server(
        model or _model(), flags.port, more, lambda line: note(line, dim=True)
    ) as endpoint:
        yield endpoint


def _show(program: Program, settings: Settings, arguments: "Sequence[str]") -> None:
    """What would be set, as lines for a shell, and files."""
    for name, value in settings.variables.items():
        write_stdout(f"export {name}={shlex.quote(value)}\n")
    write_stdout(shlex.join([*settings.command, *arguments]) + "\n")
    for change in settings.files:
        kind = "localllm's own file" if change.is_own else f"after a question, in {program.title}'s"
        write_stdout(f"\n# {kind}: {change.path}\n{change.addition}")


def _write(change: FileChange, program: Program, *, is_agreed: bool) -> None:
    """Write a file; another program's own only if the user agrees.

    Raises: RequestError if nobody can be asked, or the file cannot be added to.
    """
    if change.is_own:
        make_private_folder(change.path.parent)
        write_private(change.path, (change.text or "").encode())
        return
    if change.path.exists() and change.text == change.path.read_text():
        return
    note(f"{program.title} reads its models from {change.path}. This would be added:")
    note(change.addition)
    if change.text is None:
        raise RequestError(
            f"{change.path} has comments or is no plain list, so it is not changed",
            hint="add the lines above yourself",
        )
    if not is_agreed and not is_terminal(sys.stdin):
        raise RequestError("stdin is not a terminal, so nobody can agree", hint="--yes")
    if not is_agreed and not confirm("add it? [y/N] ", default=False):
        raise RequestError("nothing was changed", hint=f"--dry-run shows what {program.name} needs")
    change.path.parent.mkdir(parents=True, exist_ok=True)
    if change.path.exists():
        shutil.copy2(change.path, change.path.with_name(change.path.name + ".before-localllm"))
    change.path.write_text(change.text)


def _run(program: Program, executable: str, settings: Settings, arguments: "Sequence[str]") -> int:
    """Run the program to its end; of one that returns at once, until Ctrl-C."""
    command = [executable, *settings.command[1:], *arguments]
    process = subprocess.Popen(command, env={**os.environ, **settings.variables})
    # The program has the terminal, and decides what Ctrl-C means.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code = process.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    if program.returns and code == 0:
        note(f"{program.title} runs; Ctrl-C ends the server")
        signal.pause()
    return code if code >= 0 else 128 - code
