"""Where running engines are found: a socket each, named by its model and settings.

In a folder of the user's alone. Who may open a file there may ask; nobody else.
"""

import fcntl
import hashlib
import json
import logging
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from localllm import __version__
from localllm.engine.config import EngineConfig
from localllm.user.places import runtime_folder

logger = logging.getLogger(__name__)
_ENDING = ".engine"
# Of the settings these change nothing that an answer depends on.
_FREE = ("max_num_seqs",)
_CONNECT_S = 2.0


def address_of(folder: Path, engine_config: EngineConfig) -> Path:
    """Where an engine of the model in `folder` with these settings listens."""
    config = asdict(engine_config)
    for name in _FREE:
        del config[name]
    # A model that is exchanged under the same name is another one.
    stamps = sorted(
        (path.name, path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.iterdir()
        if path.is_file()
    )
    told = [__version__, str(folder.resolve()), stamps, config]
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    return runtime_folder() / f"{digest[:16]}{_ENDING}"


def addresses() -> list[Path]:
    """Where engines may listen."""
    folder = runtime_folder()
    return sorted(folder.glob(f"*{_ENDING}")) if is_own(folder) else []


def is_own(folder: Path) -> bool:
    """Whether a folder is there, and nobody else's."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    own = found.st_uid == os.getuid() and stat.S_ISDIR(found.st_mode)
    return own and not found.st_mode & 0o077


def connect(address: Path) -> socket.socket | None:
    """A connection to the engine there; None where there is none."""
    if not is_own(address.parent):
        return None
    channel = socket.socket(socket.AF_UNIX)
    channel.settimeout(_CONNECT_S)
    try:
        channel.connect(str(address))
    except OSError:
        channel.close()
        return None
    channel.settimeout(None)
    return channel


def listen_at(address: Path) -> socket.socket | None:
    """A socket that listens there; None where another engine does, or where it cannot be."""
    folder = address.parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_own(folder):
            logger.warning("%s is not this user's alone: nobody is let in there", folder)
            return None
        with _locked(address):
            if _is_alive(address):
                return None
            address.unlink(missing_ok=True)  # of one that was killed
            listener = socket.socket(socket.AF_UNIX)
            previous = os.umask(0o177)
            try:
                listener.bind(str(address))
            finally:
                os.umask(previous)
            listener.listen(64)
    except OSError as error:
        logger.warning("nobody can attach to this engine: %s", error)
        return None
    return listener


def leave(address: Path, listener: socket.socket) -> None:
    """Listen no more, and leave nothing behind."""
    with suppress(OSError), _locked(address):
        # Closing it is not enough while another thread waits for who comes.
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        if not _is_alive(address):  # else it is another one's by now
            address.unlink(missing_ok=True)


def _is_alive(address: Path) -> bool:
    """Whether somebody listens there, though he may be too busy to let anybody in."""
    channel = socket.socket(socket.AF_UNIX)
    channel.settimeout(_CONNECT_S)
    with channel:
        try:
            channel.connect(str(address))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True


@contextmanager
def _locked(address: Path) -> Iterator[None]:
    """No two engines come or go at once."""
    with (address.parent / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
