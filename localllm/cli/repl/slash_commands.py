"""The commands of a conversation: `/help` and the commands it lists."""

import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from localllm.answer.overflow import UNKNOWN_CONTEXT
from localllm.cli.draw.figures import describe_drafts, describe_prompt
from localllm.cli.draw.files import user_path
from localllm.cli.draw.output import note, print_error, show_controls
from localllm.cli.draw.thoughts import THOUGHTS_MODES
from localllm.cli.flags.sampling_flags import SETTINGS
from localllm.cli.flags.values import parse_think
from localllm.cli.input.text_files import find_files, is_several, joined
from localllm.cli.repl import slash_turns as turns
from localllm.cli.repl.line_editor import CommandCompleter
from localllm.cli.repl.repl import Commands, Repl
from localllm.errors import RequestError
from localllm.hub.catalog import BUILT_IN_MODEL, is_file, load_catalog
from localllm.schedule.sampling_params import SamplingParams
from localllm.text.prompt import THINK_LEVELS


@dataclass(frozen=True, slots=True)
class SlashCommand:
    """A command: its usage, what it does, and the function that does it; `names`: what may stand in
    the place of a word in capitals.
    """

    usage: str
    meaning: str
    run: Callable[[Repl, str], None]
    names: Callable[[], Sequence[str]] = tuple

    def completions(self) -> Sequence[str] | None:
        """The words that may follow; None if a file's path may."""
        _, _, argument = self.usage.partition(" ")
        return None if "PATH" in argument else (*self.names(), *re.findall("[a-z]+", argument))


_KEYS = (
    ("Enter", "send; Alt-Enter, or \\ at the end of a line, adds a line"),
    ("Tab", "complete a command, a model or a path"),
    ("Ctrl-C", "stop the answer and keep its text; twice at an empty prompt: leave"),
    ("Ctrl-D", "leave"),
    ("Ctrl-O", "show or hide thinking"),
    ("Ctrl-R", "search the history; Ctrl-X Ctrl-E opens your editor"),
    ("//text", "send a message that begins with /"),
    ('"""', "begin a message of several lines, and end it"),
)


def _help(repl: Repl, argument: str) -> None:
    commands = [(command.usage, command.meaning) for command in SLASH_COMMANDS.values()]
    size = shutil.get_terminal_size()
    if argument == "keys":
        _show_table(_KEYS, size.columns)
        return
    # Nothing may scroll off the screen: if it is too small, `/help keys` lists the keys.
    is_short = size.lines < len(commands) + len(_KEYS) + 4
    _show_table(commands, size.columns, is_brief=is_short)
    if is_short:
        note("/help keys lists the keys", dim=True)
    else:
        note("")
        _show_table(_KEYS, size.columns)


def _show_table(rows: Sequence[tuple[str, str]], columns: int, *, is_brief: bool = False) -> None:
    """Print names and meanings; without arguments if it `is_brief` or the terminal is narrow."""
    width = max(len(name) for name, _ in rows) + 2
    if is_brief or columns < 2 * width:
        rows = [(name.split()[0], meaning) for name, meaning in rows]
        width = max(len(name) for name, _ in rows) + 2
    for name, meaning in rows:
        line = f"  {name:{width}}{meaning}"
        if is_brief and len(line) > columns:
            line = line[: columns - 1].rsplit(" ", 1)[0] + "…"
        note(line, indent=width + 2)


def _model(repl: Repl, argument: str) -> None:
    if argument:
        repl.load_model(argument)
        note(f"{argument} answers from now on; the conversation stays")
        return
    window = repl.session.model.context.length
    told = "unknown" if window == UNKNOWN_CONTEXT else f"{window:,} tokens"
    note(f"{repl.session.model.name}, context {told}")
    note(f"/model NAME switches to another: {', '.join(model_names())}", dim=True)


def _system(repl: Repl, argument: str) -> None:
    session = repl.session
    if argument:
        if session.completes_text:
            raise RequestError("this model completes text and takes no system prompt")
        session.system = None if argument in ("off", "none") else argument
        note("the system prompt is " + ("off" if session.system is None else "set"))
    elif session.system is None:
        note("no system prompt; /system TEXT sets one")
    else:
        note(show_controls(session.system))
        note("/system off removes it", dim=True)


def _set(repl: Repl, argument: str) -> None:
    name, _, value = argument.partition(" ")
    name, value = name.lstrip("-").replace("_", "-"), value.strip()
    if not name:
        params = repl.params()
        for shown, (field, _convert) in SETTINGS.items():
            own = " (set here)" if field in repl.given else ""
            note(f"  {shown:18} {_describe(getattr(params, field))}{own}")
        note("/set NAME VALUE changes one, /set NAME default resets it", dim=True)
        return
    if name not in SETTINGS:
        raise RequestError(
            f"there is no setting {name!r:.40}", hint=f"one of {', '.join(SETTINGS)}"
        )
    field, convert = SETTINGS[name]
    if not value:
        note(f"{name} is {_describe(getattr(repl.params(), field))}")
        return
    given = {key: old for key, old in repl.given.items() if key != field}
    if value != "default":
        try:
            given[field] = convert(value)
        except ValueError as error:
            raise RequestError(f"{name} must be a number, found {value!r:.40}") from error
    SamplingParams(**given)  # rejects values out of range
    repl.given = given
    note(f"{name} is {_describe(getattr(repl.params(), field))}")


def _describe(value: Any) -> str:
    return "none" if value is None or value == () else repr(value).strip("(),")


def _stats(repl: Repl, argument: str) -> None:
    if argument in ("on", "off"):
        repl.shown.shows_stats = argument == "on"
        note(f"the statistics under each answer are {argument}")
        return
    if argument == "tint":
        repl.shown.tints_drafts = not repl.shown.tints_drafts
        if repl.shown.tints_drafts:
            note("answers are shown as plain text with accepted drafts highlighted; again: off")
        else:
            note("accepted drafts are no longer highlighted")
        return
    if argument:
        raise RequestError(f"/stats takes on, off or tint, found {argument!r:.40}")
    completion = repl.last_completion
    if completion is None:
        note("no answer yet")
        return
    finish = completion.finish_reason
    prompt, decoded = completion.num_prompt_tokens, completion.decode_tokens_per_s
    unknown = "only the server knows" if completion.is_remote else ""
    for name, value in (
        (
            "prompt tokens",
            f"{prompt:,}" if prompt else "not reported",
        ),
        ("cached tokens", f"{completion.num_cached_tokens:,}"),
        ("answer tokens", f"{completion.num_generated_tokens:,}"),
        ("first token", f"{completion.ttft_s:.3f} s"),
        ("prefill", f"{completion.prefill_tokens_per_s:,.0f} tok/s"),
        ("decode", f"{decoded:,.1f} tok/s" if decoded else unknown or "0 tok/s"),
        ("accepted drafts", unknown or describe_drafts(completion)),
        ("ended by", str(finish) if finish else "Ctrl-C"),
        ("turns", str(repl.session.num_turns)),
    ):
        note(f"  {name:16} {value}")


def _think(repl: Repl, argument: str) -> None:
    mode = next((each for each in THOUGHTS_MODES if each == argument), None)
    if mode is not None:
        repl.shown.thoughts = mode
    elif argument:
        repl.session.think = parse_think(argument)
        model = repl.session.model
        if repl.session.completes_text or not model.can_think:
            note(f"{model.name} does not support thinking; this has no effect", dim=True)
    level = repl.session.think or "the model's default"
    shown = {"fold": "folded", "show": "shown", "hide": "hidden"}[repl.shown.thoughts]
    note(f"thinking: {level}, {shown}")


def _file(repl: Repl, argument: str) -> None:
    name, text = _split_path(argument)
    if not name:
        names = ", ".join(file.name for file in repl.attachments)
        note(f"with the next message: {show_controls(names) or 'no file'}")
        note("/file PATH adds one, /file off removes all", dim=True)
        return
    if argument == "off":
        repl.attachments.clear()
        note("no file will be sent with the next message")
        return
    others = text.split()
    if others and all(map(is_file, others)):
        for each in (name, *others):
            _file(repl, shlex.quote(each))
        return
    found = find_files(name)
    content = joined(found.texts, is_named=is_several(name))
    repl.attach(name, content)
    told = found.describe() if is_several(name) else f"{len(content):,} characters"
    if text:
        if is_several(name):
            note(show_controls(f"{name}: {told}"))
        repl.ask(text)
    else:
        note(show_controls(f"{told} of {name} will be sent with the next message"))


def _split_path(argument: str) -> tuple[str, str]:
    """The path, in quotes if it has spaces, and the text after it."""
    if argument[:1] in ('"', "'") and argument.find(argument[0], 1) > 0:
        end = argument.find(argument[0], 1)
        return argument[1:end], argument[end + 1 :].strip()
    name, _, text = argument.partition(" ")
    if not name:
        return "", ""
    try:  # a path with spaces, if the first word alone is not a path
        if not user_path(name).exists() and user_path(argument).is_file():
            return argument, ""
    except (OSError, ValueError):  # too long for a path
        pass
    return name, text.strip()


def _multi(repl: Repl, argument: str) -> None:
    repl.editor.is_multi = not repl.editor.is_multi
    if repl.editor.is_multi:
        note("Enter adds a line and Alt-Enter sends; /multi and Alt-Enter switch back")
    else:
        note("Enter sends")


def _why(repl: Repl, argument: str) -> None:
    if argument in ("on", "off"):
        repl.shown.shows_why = argument == "on"
        note(f"the cache report after each answer is {argument}")
        return
    report, completion = repl.session.report_cache(), repl.last_completion
    if completion is None:
        note("nothing has been asked yet")
        return
    for line in describe_prompt(report, completion):
        note(line)


def _exit(repl: Repl, argument: str) -> None:
    repl.is_over = True


def model_names() -> list[str]:
    """The short names that `/model` accepts."""
    return [BUILT_IN_MODEL, *load_catalog()]


SLASH_COMMANDS = {
    command.usage.split()[0]: command
    for command in (
        SlashCommand("/help [keys]", "show this", _help),
        SlashCommand("/model [NAME]", "show or change the model", _model, model_names),
        SlashCommand("/system [TEXT|off]", "show or change the system prompt", _system),
        SlashCommand(
            "/set [NAME VALUE]", "show or change sampling settings", _set, lambda: tuple(SETTINGS)
        ),
        SlashCommand(
            "/stats [on|off|tint]",
            "statistics of the last answer; turn their line on or off; tint drafts",
            _stats,
        ),
        SlashCommand("/why [on|off]", "how much of the prompt was cached, and why", _why),
        SlashCommand(
            "/think [LEVEL|fold|show|hide]",
            "how much to think, and whether to show it",
            _think,
            lambda: THINK_LEVELS,
        ),
        SlashCommand(
            "/file [PATH [TEXT]|off]",
            "put files before the next message: a path, a folder, *.py",
            _file,
        ),
        SlashCommand("/multi", "messages of several lines: Enter adds a line", _multi),
        SlashCommand("/edit", "change the last question and ask it again", turns.edit),
        SlashCommand("/regen", "answer the last question again", turns.regenerate),
        SlashCommand("/retry", "ask again after an error or an interruption", turns.retry),
        SlashCommand("/continue", "continue an answer that was cut or stopped", turns.resume),
        SlashCommand("/undo", "take back the last question and its answer", turns.undo),
        SlashCommand("/compact", "summarise the older turns to make room", turns.compact),
        SlashCommand("/clear", "begin a new conversation", turns.clear),
        SlashCommand("/save [NAME]", "name the conversation; it is saved anyway", turns.save),
        SlashCommand(
            "/load NAME", "continue a saved conversation, or an exported .json file", turns.load
        ),
        SlashCommand("/sessions", "list the saved conversations", turns.list_sessions),
        SlashCommand("/export PATH", "write the conversation to a .md or .json file", turns.export),
        SlashCommand("/exit", "leave (also /bye, Ctrl-D)", _exit),
    )
}
# Words that users of other tools type.
ALIASES = {
    "/?": "/help",
    "/attach": "/file",
    "/bye": "/exit",
    "/history": "/sessions",
    "/models": "/model",
    "/new": "/clear",
    "/quit": "/exit",
    "/read": "/file",
    "/redo": "/regen",
    "/regenerate": "/regen",
    "/rename": "/save",
    "/reset": "/clear",
    "/resume": "/load",
}


def find_command(word: str) -> SlashCommand | None:
    """The command that `word` names."""
    return SLASH_COMMANDS.get(ALIASES.get(word, word))


def suggest_command(word: str, argument: str) -> str:
    """A hint for a user who typed an unknown command."""
    setting = word.lstrip("/").replace("_", "-")
    fields = {field: name for name, (field, _) in SETTINGS.items()}
    name = setting if setting in SETTINGS else fields.get(setting.replace("-", "_"))
    if name is not None:
        return f"/set {name} {argument}".rstrip()
    near = get_close_matches(word, [*SLASH_COMMANDS, *ALIASES], n=2)
    meant = f"{' or '.join(near)}; " if near else ""
    return f"{meant}/help lists all commands; // sends a message that begins with /"


def complete_argument(word: str) -> Sequence[str] | None:
    """The words that may follow the command that `word` names; None if a file's path may."""
    command = find_command(word)
    return () if command is None else command.completions()


def run_command(repl: Repl, word: str, argument: str) -> None:
    """Run the command that `word` names, or say that there is none."""
    command = find_command(word)
    if command is None:
        print_error(f"unknown command {word!r:.40}", hint=suggest_command(word, argument))
    else:
        command.run(repl, argument.strip())


COMMANDS = Commands(CommandCompleter(SLASH_COMMANDS, complete_argument), run_command)
