"""The layout of `--help`: a command's flags in sections by topic, and a whole sentence for each
command.
"""

from typing import Any

from typer.core import TyperCommand, TyperGroup

from localllm.cli.flags.foreign import translated
from localllm.cli.flags.foreign_commands import instead_of
from localllm.cli.flags.origins import origin_of
from localllm.errors import RequestError

# Names that other tools use for a command; each is accepted, and listed beside it.
ALIASES = {"run": "chat", "list": "ls"}
# Fewer flags than this are easier to read in one list.
_FEW = 24
# Of a command that starts another program: the arguments for that.
_BEHIND = "arguments"
# The section of flags that have none of their own; it comes last.
_REST = "Options"


class Command(TyperCommand):
    """A command whose help groups its flags into sections if there are many, and whose errors say
    where a value comes from that was not typed.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Flags of other programs are read as ours. What stands behind -- fills the parameter
        `_BEHIND` alone, whichever arguments are left out before it.
        """
        params = self.get_params(ctx)
        if "--" not in args or all(param.name != _BEHIND for param in self.params):
            return super().parse_args(ctx, translated(args, params))
        place = args.index("--")
        behind = args[place + 1 :]
        rest = super().parse_args(ctx, translated(args[:place], params))
        ctx.params[_BEHIND] = behind
        return rest

    def invoke(self, ctx: Any) -> Any:
        """See typer."""
        try:
            return super().invoke(ctx)
        except RequestError as error:
            error.where = error.where or origin_of(error.param, ctx)
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """See typer."""
        params = self.get_params(ctx)
        is_long = sum(param.param_type_name == "option" for param in self.params) >= _FEW
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for param in params:
            row = param.get_help_record(ctx)
            if row is not None:
                sections.setdefault(_section(param, is_long), []).append(row)
        sections[_REST] = sections.pop(_REST, [])
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def _section(param: Any, is_long: bool) -> str:
    if param.param_type_name == "argument":
        return "Arguments"
    return param.rich_help_panel or _REST if is_long else _REST


class Group(TyperGroup):
    """Commands, each listed with its other name and the whole first sentence of its help."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """See click. Raises: RequestError for a word of another program, with ours."""
        hint = instead_of(args[0]) if self.get_command(ctx, args[0]) is None else None
        if hint is not None:
            raise RequestError(f"there is no command {args[0]!r}", hint=hint)
        return super().resolve_command(ctx, args)

    def summaries(self, ctx: Any) -> dict[str, str]:
        """The first sentence of each command's help; none of hidden ones."""
        found = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        return {
            name: first_sentence(command.help or "")
            for name, command in found.items()
            if command is not None and not command.hidden
        }

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """See click."""
        others = {name: alias for alias, name in ALIASES.items()}
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (f"{name}, {others[name]}" if name in others else name, summary)
                    for name, summary in self.summaries(ctx).items()
                ]
            )


def first_sentence(text: str) -> str:
    """Of a help text, in one line."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    end = paragraph.find(". ")
    return paragraph if end < 0 else paragraph[: end + 1]
