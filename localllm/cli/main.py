"""The `localllm` command: subcommands, global options, and the boundary where errors become exit
codes.

Importing this module imports neither torch nor the engine; a command imports them when it runs.
"""

import errno
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Annotated, cast

import typer

from localllm.cli.commands import HELP_NAMES, PLACES, Root
from localllm.cli.draw.output import StdoutClosedError, print_error
from localllm.cli.flags.help import ALIASES
from localllm.cli.flags.origins import origin
from localllm.cli.flags.settings import flag_defaults
from localllm.cli.machine.completion import PROGRAM, complete_in, names_shell
from localllm.engine.threads import let_torch_sleep
from localllm.errors import ExitCode, LocalLLMError
from localllm.process.ending import end_in_time
from localllm.user.places import lost_places
from localllm.user.settings import read_settings
from localllm.user.version import __version__

# The common base of typer's usage errors, whose module differs between versions of typer.
_USAGE_ERROR = cast(type[Exception], typer.BadParameter.__bases__[0])

# Global options that are also accepted after the command.
_ANYWHERE = ("--debug", "--verbose", "--no-config")
_GLOBAL = (*_ANYWHERE, "-v")
# Flags in the place of a command.
_BEFORE_ALL = ("-h", "--help", "--version", "--install-completion", "--show-completion")

app = typer.Typer(
    name="localllm",
    cls=Root,
    help="Run a language model on your own machine. Start with: localllm chat",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=HELP_NAMES,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"localllm {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log decisions on stderr.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Log more, and show tracebacks.")] = False,
    no_config: Annotated[
        bool, typer.Option("--no-config", help="Ignore your settings and your own models.")
    ] = False,
) -> None:
    level = logging.DEBUG if debug else logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s: %(message)s", force=True)
    for library in ("urllib3", "httpx", "httpcore", "httpx2", "httpcore2", "filelock", "asyncio"):
        logging.getLogger(library).setLevel(max(level, logging.WARNING))
    lost = lost_places()
    if lost:
        logging.getLogger(__name__).warning(
            "no home folder (HOME is not set): set %s to keep settings, conversations and caches",
            ", ".join(lost),
        )
    # Problems it warns of during a download are retried, or reported by localllm.
    logging.getLogger("huggingface_hub").setLevel(
        logging.ERROR if level == logging.WARNING else logging.WARNING
    )
    if no_config and "LOCALLLM_NO_CONFIG" not in os.environ:
        os.environ["LOCALLLM_NO_CONFIG"] = "1"
        context.call_on_close(lambda: os.environ.pop("LOCALLLM_NO_CONFIG", None))
    context.default_map = flag_defaults(context.command, read_settings())


def run(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code. Only SystemExit (from SIGTERM) escapes."""
    signal.signal(signal.SIGTERM, _exit_on_sigterm)
    show_traceback = "--debug" in arguments
    try:
        words = sorted(arguments, key=lambda word: word not in _ANYWHERE) or ["--help"]
        if words[0] == "help":
            words = [*words[1:], "--help"]
        elif words[0] == "version":
            words = ["--version"]
        words = _with_command(words)
        if names_shell(words):
            complete_in(*words)
            return ExitCode.OK
        # Named like that however it was started: completion finds it by its name.
        code = app(args=words, prog_name=PROGRAM, standalone_mode=False)
        if sys.stdout is None:
            raise StdoutClosedError
        sys.stdout.flush()
        return int(code or ExitCode.OK)
    except LocalLLMError as error:
        if show_traceback:
            traceback.print_exc()
        print_error(error.message, error.where, error.hint)
        return error.exit_code
    except _USAGE_ERROR as error:
        context: typer.Context | None = getattr(error, "ctx", None)
        word = next((word for word in arguments if word in PLACES or word in ALIASES), "")
        command = context.command_path if context is not None else f"localllm {word}".rstrip()
        message = str(getattr(error, "format_message", error.__str__)())
        where = origin(getattr(error, "param", None), context)
        print_error(message[:1].lower() + message[1:], where, f"{command} --help")
        return ExitCode.USAGE
    except (KeyboardInterrupt, typer.Abort):
        return ExitCode.SIGINT
    except (StdoutClosedError, BrokenPipeError):
        _drop_stdout()
        return ExitCode.CLOSED_PIPE
    except OSError as error:
        if show_traceback:
            traceback.print_exc()
        _drop_stdout()
        on_disk = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)
        print_error(error.strerror or str(error), str(error.filename or ""), "")
        return ExitCode.DISK if on_disk else ExitCode.FAILURE
    except Exception as error:  # a bug in localllm: still no traceback unless asked for
        if show_traceback:
            traceback.print_exc()
        name = type(error).__name__
        if name == "OutOfMemoryError" or isinstance(error, MemoryError):
            print_error("out of memory", f"{error!s:.200}", "a smaller --ctx or a smaller model")
            return ExitCode.MEMORY
        print_error(
            f"internal error ({name}): {error!s:.300}",
            "this is a bug in localllm, not in your input",
            "--debug (before the command) to see where, and please report it",
        )
        return ExitCode.FAILURE


def _with_command(words: Sequence[str]) -> list[str]:
    """`words` with `chat` before the first one, if that is a flag of it: other programs have no
    commands, as in `llama-cli -m MODEL -p PROMPT`.
    """
    place = next((i for i, word in enumerate(words) if word not in _GLOBAL), len(words))
    begins = place < len(words) and words[place].startswith("-")
    is_own = begins and words[place].partition("=")[0] in _BEFORE_ALL
    return [*words[:place], *(["chat"] if begins and not is_own else []), *words[place:]]


def main() -> None:
    """Run the command. Ctrl-C ends it at once (see __main__.py), except while an answer streams,
    when `DeferredInterrupt` takes over.
    """
    let_torch_sleep()
    end_in_time({signal.SIGINT: ExitCode.SIGINT, signal.SIGTERM: ExitCode.SIGTERM})
    sys.exit(run(sys.argv[1:]))


def _exit_on_sigterm(signum: int, frame: FrameType | None) -> None:
    sys.exit(ExitCode.SIGTERM)


def _drop_stdout() -> None:
    """Send stdout, which nobody reads any more, to /dev/null, so that the flush at exit works."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
