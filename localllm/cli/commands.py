"""The commands: what each says of itself in a line, and where it is.

A command is imported when it is looked up: the flags of all together take a tenth of a second.
"""

from collections import UserDict
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import typer

from localllm.cli.draw.examples import examples
from localllm.cli.flags.help import ALIASES, Command, Group

HELP_NAMES = {"help_option_names": ["-h", "--help"]}


@dataclass(frozen=True, slots=True)
class Place:
    """A function, or an app of several, in a module; `summary`: the first sentence of its help."""

    module: str
    name: str
    summary: str


PLACES = {
    "chat": Place("localllm.cli.chat.command", "chat", "Chat with a model, or get one answer."),
    "serve": Place(
        "localllm.cli.serve.command",
        "serve",
        "Serve a model over HTTP with OpenAI's API, to many clients at once.",
    ),
    "launch": Place(
        "localllm.cli.serve.launch", "launch", "Start an agent or editor that uses a model here."
    ),
    "ps": Place(
        "localllm.cli.serve.ps", "ps", "List the models that `serve` and `chat` keep loaded."
    ),
    "stop": Place(
        "localllm.cli.serve.ps",
        "stop",
        "Stop engines that wait for the next question, after their running answers.",
    ),
    "limits": Place(
        "localllm.cli.serve.limits",
        "limits",
        "Print the limits of `localllm serve` on what a client may request.",
    ),
    "quantize": Place(
        "localllm.cli.quantize.command",
        "quantize",
        "Quantize a checkpoint, measure the loss of quality, and write a report beside it.",
    ),
    "eval": Place(
        "localllm.cli.bench.eval",
        "evaluate_model",
        "Measure perplexity on a text, in sliding windows of --ctx tokens (2048 if unset).",
    ),
    "bench": Place(
        "localllm.cli.bench.command",
        "bench",
        "Measure speed, as a share of what this machine's memory and arithmetic allow.",
    ),
    "pull": Place(
        "localllm.cli.models.pull",
        "pull",
        "Download a model into the hub's cache, or bring it up to date.",
    ),
    "warm": Place(
        "localllm.cli.models.warm",
        "warm",
        "Check a GPU's kernels and compile all that a model needs, so that its first chat starts "
        "warm.",
    ),
    "ls": Place(
        "localllm.cli.models.ls",
        "ls",
        "List the models on this machine: the built-in ones, those in the hub's cache, and the "
        "GGUF files of Ollama, LM Studio and llama.cpp.",
    ),
    "show": Place(
        "localllm.cli.models.show",
        "show",
        "Describe a model: architecture, sizes, quantization, context, template.",
    ),
    "rm": Place(
        "localllm.cli.models.rm",
        "rm",
        "Delete models: downloaded ones, and those quantized here.",
    ),
    "plan": Place(
        "localllm.cli.models.plan",
        "plan",
        "Predict whether a model fits, its context length and its speed, without downloading it.",
    ),
    "doctor": Place(
        "localllm.cli.machine.doctor",
        "doctor",
        "Check versions, processor, GPU, memory, disk and caches, and let the built-in model "
        "answer.",
    ),
    "cache": Place(
        "localllm.cli.models.cache",
        "cache",
        "List and delete cached data: quantized models, prompts' keys and values, tunings, "
        "kernels.",
    ),
    "sessions": Place(
        "localllm.cli.chat.sessions",
        "sessions",
        "List, show, rename, export, import and delete saved conversations.",
    ),
    "config": Place(
        "localllm.cli.machine.config",
        "config",
        "Show and change settings, which apply unless a flag or a variable overrides them.",
    ),
}


class Commands(UserDict[str, Any]):
    """The commands by name, each of them built when it is looked up."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys((*PLACES, *ALIASES)))

    def __getitem__(self, name: str) -> Any:
        if self.data[name] is None:
            self.data[name] = _build(name)
        return self.data[name]


class Root(Group):
    """The group of all commands, whose summaries need none of them."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = Commands()

    def summaries(self, ctx: Any) -> dict[str, str]:
        """See Group."""
        return {name: place.summary for name, place in PLACES.items()}


def _build(name: str) -> Any:
    """The command of typer's that stands for a function or an app."""
    place = PLACES[ALIASES.get(name, name)]
    found = getattr(import_module(place.module), place.name)
    one = typer.Typer(rich_markup_mode=None, add_completion=False)
    one.callback()(lambda: None)  # with one, an app is a group, though it has a single command
    if isinstance(found, typer.Typer):
        one.add_typer(found, name=name, context_settings=HELP_NAMES)
    else:
        one.command(
            name,
            cls=Command,
            hidden=name in ALIASES,
            epilog=examples(ALIASES.get(name, name)),
            context_settings=HELP_NAMES,
        )(found)
    return typer.main.get_command(one).commands[name]  # type: ignore[attr-defined]
