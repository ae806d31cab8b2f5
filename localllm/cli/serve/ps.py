"""`localllm ps` and `localllm stop`: list and stop running engines."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.cli.draw.columns import aligned
from localllm.cli.draw.output import json_line, note, show_controls, write_stdout
from localllm.cli.draw.words import age, duration, size
from localllm.cli.flags.common import JsonLines
from localllm.errors import LocalLLMError, RequestError

if TYPE_CHECKING:
    from localllm.attach.messages import Ready  # `--help` needs none


def ps(
    json_output: JsonLines = False,
) -> None:
    """List the models that `serve` and `chat` keep loaded."""
    found = _engines()
    if json_output:
        for _, engine in found:
            write_stdout(json_line(asdict(engine.model) | asdict(engine.use)))
        return
    if not found:
        note("no model is loaded; localllm chat keeps one for the next question")
        return
    rows = [("MODEL", "PID", "MEMORY", "CONTEXT", "REQUESTS", "STARTED", "KEPT")]
    for _, engine in found:
        rows.append(
            (
                show_controls(engine.model.name),
                str(engine.model.pid),
                size(engine.use.memory_bytes) if engine.use.memory_bytes else "?",
                f"{engine.model.context_length:,}",
                str(engine.use.requests),
                age(time.time() - engine.model.started_s),
                _kept(engine),
            )
        )
    write_stdout("\n".join(aligned(rows)) + "\n")


def stop(
    model: Annotated[
        str | None,
        typer.Argument(help="Its name or process id; all if not given.", show_default=False),
    ] = None,
) -> None:
    """Stop engines that wait for the next question, after their running answers."""
    from localllm.attach.attached import ask_engine
    from localllm.attach.messages import Stop, Stopping

    found = [
        (address, engine.model)
        for address, engine in _engines()
        if model in (None, engine.model.name, str(engine.model.pid))
    ]
    if not found and model is not None:
        raise RequestError(
            f"no engine is running for {show_controls(repr(model))}", hint="localllm ps lists them"
        )
    if not found:
        note("no engine is running")
    for address, engine in found:
        name = show_controls(engine.name)
        if engine.owner_pid is not None:
            told = f"{name} is served by process {engine.owner_pid}"
            if model is not None:
                raise LocalLLMError(told, hint=f"kill {engine.owner_pid} to stop that server")
            note(f"{told}, and keeps running")
            continue
        ends = isinstance(ask_engine(address, Stop()), Stopping)
        note(f"{name}, process {engine.pid}, {'is stopping' if ends else 'does not answer'}")


def _engines() -> "list[tuple[Path, Ready]]":
    from localllm.attach.kept import running_engines

    return running_engines()


def _kept(engine: "Ready") -> str:
    if engine.model.owner_pid is not None:
        return f"by its server, process {engine.model.owner_pid}"
    if engine.use.is_used:
        return "in use"
    left_s = engine.use.left_s
    return "forever" if left_s is None else f"for {duration(left_s)}"
