"""Choose which copy of a catalogue model to open: one on this machine, or one the user picks."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from localllm.cli.draw.output import is_terminal, note, show_controls, write_stderr
from localllm.cli.draw.status_line import StatusLine
from localllm.cli.draw.words import duration, size
from localllm.cli.models.pull import gguf_beside
from localllm.engine.config import EngineConfig
from localllm.errors import ExitCode, LocalLLMError
from localllm.hub.catalog import (
    CatalogEntry,
    ModelSource,
    is_model_name,
    load_catalog,
    plain_name,
    resolve_model,
)
from localllm.hub.download import is_offline
from localllm.hub.stored_model import StoredModel
from localllm.hub.stores import find_by_name

# Assumed speed of a download in bytes per second: 80 Mbit/s.
_ASSUMED_RATE = 10e6
_SHOWN_S = 0.5


@dataclass(frozen=True, slots=True)
class _Choice:
    """One way to get the model: the name to open, whether it is quantized first, whether it fits in
    memory, and about how long that takes.
    """

    name: str
    text: str
    seconds: float
    fits: bool
    is_quantized_here: bool = False


def choose_variant(name: str | None, engine: EngineConfig) -> str | None:
    """The name to open for `name`: itself, or a quantized copy of it that is here or chosen.

    Only an alias whose own files are not on this machine has a choice. On a terminal the user
    chooses; elsewhere the alias means its repository. Raises: LocalLLMError if the user declines.
    """
    name = name and plain_name(name)
    stored = None if name is None else _of_another_program(name)
    if stored is not None:
        note(show_controls(f"using {stored.program}'s copy: {stored.file}"), dim=True)
    entry = load_catalog().get(name or "")
    if name is None or entry is None or _is_here(entry.repo, entry.revision):
        return name
    found = _quantized_here(entry)
    if found is not None:
        note(f"using the quantized copy of {name}: {found}", dim=True)
        return found
    if not (is_terminal(sys.stdin) and is_terminal(sys.stderr)) or entry.sizes is None:
        return name
    if is_offline():  # nothing can be fetched, and the error says so
        return name
    with StatusLine(lambda: f"estimating what {name} needs", _SHOWN_S):
        choices = _choices(entry, engine)
        other = gguf_beside(ModelSource(entry.alias, repo=entry.repo, revision=entry.revision))
    note(f"{name} is not on this machine ({entry.repo}, licence {entry.licence})")
    for number, choice in enumerate(choices, 1):
        misfit = "" if choice.fits else "; it does not fit in memory"
        note(f"  {number}  {choice.text}, about {duration(choice.seconds)}{misfit}")
    if other is not None:
        note(show_controls(f"  ({other})"), dim=True)
    note(f"  (times assume {size(_ASSUMED_RATE)}/s from the hub)", dim=True)
    return _carry_out(choices[_ask(len(choices))], entry)


def _is_here(repo: str, revision: str | None) -> bool:
    from localllm.hub.download import find_snapshot

    folder = find_snapshot(repo, revision)
    return folder is not None and any(folder.glob("*.safetensors"))


def _quantized_here(entry: CatalogEntry) -> str | None:
    """The publisher's 4-bit repository, or a folder that `quantize` made from the alias."""
    from localllm.hub.local_models import find_quantized

    if entry.int4 is not None and _is_here(entry.int4, None):
        return entry.int4
    folder = find_quantized(entry.alias)
    return None if folder is None else str(folder)


def _of_another_program(name: str) -> StoredModel | None:
    """The model of another program that this name means, which no alias, folder or file has."""
    file = resolve_model(name).file if is_model_name(name) else None
    stored = None if file is None else find_by_name(name)
    return stored if stored is not None and stored.file == file else None


def _choices(entry: CatalogEntry, engine: EngineConfig) -> list[_Choice]:
    """The choices in order: those that fit first, and among them the quickest to an answer."""
    from localllm.cost.planning import plan_model, shape_of, this_machine

    source = ModelSource(entry.alias, repo=entry.repo)
    machine = this_machine(engine, measures=False)
    whole, small = (
        plan_model(shape_of(source, kind), machine, engine) for kind in ("bf16", "int4")
    )
    whole_bytes, small_bytes = (plan.memory.weights_bytes for plan in (whole, small))
    whole_s = whole_bytes / _ASSUMED_RATE
    choices = [
        _Choice(entry.alias, f"fetch it as it is: {size(whole_bytes)}", whole_s, whole.fits),
        _Choice(
            entry.alias,
            f"fetch it and quantize it here to 4 bits: {size(whole_bytes)}, {size(small_bytes)} "
            "afterwards",
            whole_s + _quantize_seconds(entry, engine),
            small.fits,
            is_quantized_here=True,
        ),
    ]
    if entry.int4 is not None:
        published_bytes = small.shape.published_bytes
        text = f"fetch {entry.int4}, in 4 bits from its publisher: {size(published_bytes)}"
        seconds = published_bytes / _ASSUMED_RATE
        choices.append(_Choice(entry.int4, text, seconds, small.fits))
    return sorted(choices, key=lambda choice: (not choice.fits, choice.seconds))


def _quantize_seconds(entry: CatalogEntry, engine: EngineConfig) -> float:
    from localllm.engine.chosen_device import select_device
    from localllm.hub.catalog_shape import catalog_shape
    from localllm.quantize.calibrate import CalibrationRequest
    from localllm.quantize.estimate import Rates, stage_seconds
    from localllm.quantize.recipe import Recipe

    architecture, _ = catalog_shape(entry.alias)
    rates = Rates.measured(select_device(engine))
    return stage_seconds(architecture, Recipe(), CalibrationRequest(), rates, verify=True).total


def _ask(count: int) -> int:
    while True:
        write_stderr(f"which? [1 to {count}, Enter: 1, q: none] ")
        answer = sys.stdin.readline()
        word = answer.strip().lower()
        if not answer or word in ("q", "n", "no"):
            raise LocalLLMError("nothing was fetched", hint="localllm ls shows what is here")
        if word == "":
            return 0
        if word.isdigit() and 1 <= int(word) <= count:
            return int(word) - 1


def _carry_out(choice: _Choice, entry: CatalogEntry) -> str:
    from localllm.cli.models.pull import fetch_shown
    from localllm.hub.local_models import find_quantized

    if not choice.is_quantized_here:
        return choice.name
    fetch_shown(resolve_model(choice.name))
    # In its own process, so that its memory is free again before the model is loaded.
    command = [sys.executable, "-m", "localllm", "quantize", choice.name]
    code = subprocess.run(command, stdout=sys.stderr, check=False).returncode
    folder: Path | None = find_quantized(entry.alias)
    if code or folder is None:
        raise LocalLLMError(
            f"{choice.name} could not be quantized",
            hint=f"localllm quantize {choice.name} --resume",
            exit_code=ExitCode(code) if code in list(ExitCode) else ExitCode.FAILURE,
        )
    return str(folder)
