"""Writes docs/flags.md from the code: every command's flags, and limits.

python tools/reference.py          # writes it
python tools/reference.py --check  # exits with 1 if the file is out of date
"""

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import typer

from localllm.cli.input.user_input import MAX_INPUT_BYTES
from localllm.cli.main import app
from localllm.schedule import sampling_params

PAGE = Path(__file__).parents[1] / "docs" / "flags.md"
HEAD = """# Flags

Every command with its arguments and flags. `python tools/reference.py` makes this page from the
code, and `tests/test_reference.py` fails when it is out of date.

Most flags can also be set by a variable and by a setting of the same name: `--top-k` is
`LOCALLLM_TOP_K`, and `localllm config set top-k 40`. A flag wins over a variable, a variable over a
setting. `localllm --no-config ...` ignores settings and your own models. See also
[exit codes](exit-codes.md) and the [slash commands](chat.md#slash-commands) of a conversation.
"""
LIMITS = (
    ("stop strings", sampling_params.MAX_STOP_STRINGS),
    ("characters of a stop string", sampling_params.MAX_STOP_CHARS),
    ("stop token ids", sampling_params.MAX_STOP_TOKEN_IDS),
    ("entries of `--logit-bias`", sampling_params.MAX_LOGIT_BIAS_ENTRIES),
    ("`--logprobs`", sampling_params.MAX_LOGPROBS),
    ("samples of a request", sampling_params.MAX_NUM_SAMPLES),
    ("bytes of piped input, or of a file", MAX_INPUT_BYTES),
)


def page() -> str:
    """The whole page."""
    group = typer.main.get_command(app)
    parts = [HEAD, *_group("localllm", group), *_limits()]
    return "\n".join(parts).rstrip() + "\n"


def _group(path: str, group: Any) -> list[str]:
    parts = []
    for name, command in group.commands.items():
        if command.hidden:
            continue
        full = f"{path} {name}"
        if hasattr(command, "commands"):
            parts += _group(full, command)
        else:
            parts += _command(full, command)
    return parts


def _command(path: str, command: Any) -> list[str]:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    words = " ".join(f"[{p.name.upper()}]" if not p.required else p.name.upper() for p in arguments)
    text = inspect.cleandoc(command.help or "").replace("\f", "")
    rows = [f"| `{p.name.upper()}` | | {_text(p.help)} |" for p in arguments]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    rows += [f"| {_names(p)} | {_default(p)} | {_text(p.help)} |" for p in options]
    table = ["| | default | |", "|---|---|---|", *rows, ""] if rows else []
    return [f"## {path} {words}".rstrip(), "", text, "", *table]


def _names(parameter: Any) -> str:
    return " ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])


def _default(parameter: Any) -> str:
    value = parameter.default
    if value is None or value is False or callable(value) or value in ("", [], ()):
        return ""
    return f"`{value}`"


def _text(help_text: str | None) -> str:
    return re.sub(r"\s+", " ", help_text or "").replace("|", "\\|")


def _limits() -> list[str]:
    rows = [f"| {what} | {limit:,} |" for what, limit in LIMITS]
    return [
        "## Limits",
        "",
        "What one request may ask for. `localllm limits` prints the limits of a server.",
        "",
        "| of | at most |",
        "|---|---|",
        *rows,
        "",
    ]


def main() -> int:
    """Write the page, or check it."""
    if "--check" in sys.argv[1:]:
        is_same = PAGE.exists() and PAGE.read_text(encoding="utf-8") == page()
        sys.stdout.write("up to date\n" if is_same else "run python tools/reference.py\n")
        return 0 if is_same else 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
