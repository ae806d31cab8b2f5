"""The engines that run, and those that give way to the next model: nobody waits for them."""

import time
from collections.abc import Callable
from pathlib import Path

from localllm.attach.addresses import addresses, connect
from localllm.attach.attached import ask_engine
from localllm.attach.messages import Hello, Ready, Stop, Stopping

# Seconds to wait for an engine's end, and between looks.
_ENDS_S, _LOOK_S = 3.0, 0.02


def running_engines() -> list[tuple[Path, Ready]]:
    """The engines that respond, and their sockets; oldest first."""
    asked = [(address, ask_engine(address, Hello())) for address in addresses()]
    found = [(address, answer) for address, answer in asked if isinstance(answer, Ready)]
    return sorted(found, key=lambda each: each[1].model.started_s)


def make_way(needed_bytes: int, free_bytes: Callable[[], int]) -> list[str]:
    """End idle engines, oldest first, until `needed_bytes` are free; returns the models' names."""
    ended = []
    for address, name in _idle_engines():
        if free_bytes() >= needed_bytes:
            break
        if _end(address):
            ended.append(name)
    return ended


def end_others(name: str, address: Path) -> None:
    """End idle engines of the model `name` with other settings than the one at `address`."""
    for each, model in _idle_engines():
        if model == name and each != address:
            _end(each)


def _idle_engines() -> list[tuple[Path, str]]:
    """Those that wait for the next question of nobody in particular, with their models' names."""
    return [
        (address, engine.model.name)
        for address, engine in running_engines()
        if engine.model.owner_pid is None and not engine.use.is_used and not engine.use.requests
    ]


def _end(address: Path) -> bool:
    """End an engine, and wait for that; returns whether it ends."""
    if not isinstance(ask_engine(address, Stop()), Stopping):
        return False
    _wait_for_end(address)
    return True


def _wait_for_end(address: Path) -> None:
    deadline = time.monotonic() + _ENDS_S
    while time.monotonic() < deadline:
        channel = connect(address)
        if channel is None:
            return
        channel.close()
        time.sleep(_LOOK_S)
