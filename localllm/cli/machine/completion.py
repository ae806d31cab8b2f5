"""`--show-completion SHELL` and `--install-completion SHELL`; typer itself finds the shell."""

from collections.abc import Sequence

from localllm.cli.draw.output import note, write_stdout
from localllm.errors import RequestError

PROGRAM = "localllm"
_SHELLS = ("bash", "zsh", "fish", "pwsh", "powershell")
_FLAGS = ("--show-completion", "--install-completion")


def names_shell(words: Sequence[str]) -> bool:
    """Whether a flag for completion is followed by the name of a shell."""
    return len(words) == 2 and words[0] in _FLAGS and not words[1].startswith("-")


def complete_in(flag: str, shell: str) -> None:
    """Print or install the completion for a shell. Raises: RequestError for one it has none for."""
    if shell not in _SHELLS:
        raise RequestError(
            f"there is no completion for {shell!r:.40}", hint=f"one of {', '.join(_SHELLS[:4])}"
        )
    # The module does not list what it re-exports.
    from typer.completion import get_completion_script, install  # type: ignore[attr-defined]

    if flag == "--show-completion":
        variable = f"_{PROGRAM.upper()}_COMPLETE"
        script = get_completion_script(prog_name=PROGRAM, complete_var=variable, shell=shell)
        write_stdout(script + "\n")
        return
    _, path = install(shell=shell, prog_name=PROGRAM)
    note(f"installed in {path}; new terminals complete with it")
