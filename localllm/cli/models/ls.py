"""`localllm ls`: the models on this machine."""

import time
from dataclasses import asdict

from localllm.cli.draw.columns import aligned
from localllm.cli.draw.output import json_line, note, show_controls, write_stdout
from localllm.cli.draw.words import age, size
from localllm.cli.flags.common import JsonLines


def ls(
    json_output: JsonLines = False,
) -> None:
    """List the models on this machine: the built-in ones, those in the hub's cache, and the GGUF
    files of Ollama, LM Studio and llama.cpp.
    """
    from localllm.hub.local_models import find_local_models

    found = find_local_models()
    for warning in found.warnings:
        note(f"warning: {show_controls(warning)}")
    if json_output:
        for model in found.models:
            write_stdout(json_line(asdict(model)))
        return
    rows = [
        (
            model.name,
            size(model.num_bytes),
            model.format,
            "built in" if model.last_used_s is None else age(time.time() - model.last_used_s),
            (model.problem or "ready") + (f", from {model.program}" if model.program else ""),
        )
        for model in found.models
    ]
    header = ("MODEL", "SIZE", "FORMAT", "USED", "STATE")
    write_stdout(show_controls("\n".join(aligned([header, *rows], right={1}))) + "\n")
