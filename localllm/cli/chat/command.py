"""`localllm chat`: one answer, or a conversation on a terminal."""

from typing import TYPE_CHECKING, Annotated

import typer

from localllm.cli.chat.flags import ChatFlags
from localllm.cli.draw.output import COLOURS, choose_colour
from localllm.cli.flags import suggestions
from localllm.cli.flags.groups import takes_flags
from localllm.cli.flags.values import parse_choice

if TYPE_CHECKING:
    from localllm.cli.chat.request import ChatRequest


@takes_flags
def chat(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] [PROMPT]",
            help="A model (alias, org/name or folder) and a prompt; both optional.",
            show_default=False,
            autocompletion=suggestions.models,
        ),
    ] = None,
    *,
    flags: ChatFlags,
) -> int:
    """Chat with a model, or get one answer.

    With a prompt, --file or piped input, print one answer on stdout; with --each-line, one for
    each line of the input. Otherwise, on a terminal,
    open a conversation. The model defaults to $LOCALLLM_MODEL, then to `default_model` in your
    settings, then to the small built-in one.
    """
    from localllm.cli.chat.ask_once import ask_once
    from localllm.cli.chat.request import read_request

    choose_colour(parse_choice("color", flags.answer.color, COLOURS))
    request = read_request(words or [], flags)
    if flags.lines.each_line:
        from localllm.cli.chat.each_line import answer_lines

        return answer_lines(request)
    return converse(request) if request.text is None else ask_once(request, request.text)


def converse(request: "ChatRequest") -> int:
    """Hold a conversation on this terminal until the user leaves; return the exit code."""
    from localllm.cli.draw.render import Shown
    from localllm.cli.repl.repl import Repl
    from localllm.cli.repl.slash_commands import COMMANDS
    from localllm.cli.repl.slash_turns import recall

    answer = request.flags.answer
    shown = Shown(request.render, "hide" if answer.hide_thinking else "fold", shows_why=answer.why)
    session = request.open_session()
    repl = Repl(session, request.engine, request.sampling, shown, request.recorder)
    if request.saved is not None:
        recall(repl, request.saved.transcript)
    return repl.run(COMMANDS)
