"""Finds running engines: each listens on a Unix socket named after its model and settings.

The sockets are in a folder that only the user can access, so no other user can attach.
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

from localllm.engine.config import EngineConfig
from localllm.user.places import runtime_folder
from localllm.user.version import __version__

logger = logging.getLogger(__name__)
_ENDING = ".engine"
# Two copies of one version, as clones are, may be of different commits.
_INSTALLED = Path(__file__).resolve().parents[1]
# Settings that do not change any answer.
_FREE = ("max_num_seqs",)
_CONNECT_S = 2.0


def address_of(folder: Path, engine_config: EngineConfig) -> Path:
    """The socket path of an engine for the model in `folder` with these settings."""
    config = asdict(engine_config)
    for name in _FREE:
        del config[name]
    # A model whose files are replaced gets another address.
    stamps = sorted(
        (path.name, path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.iterdir()
        if path.is_file()
    )
    told = [__version__, str(_INSTALLED), str(folder.resolve()), stamps, config]
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    return runtime_folder() / f"{digest[:16]}{_ENDING}"


def addresses() -> list[Path]:
    """The paths of all engine sockets; their engines may have died."""
    folder = runtime_folder()
    return sorted(folder.glob(f"*{_ENDING}")) if is_own(folder) else []


def is_any_running() -> bool:
    """Whether any engine listens."""
    return any(_is_alive(address) for address in addresses())


def is_own(folder: Path) -> bool:
    """Whether a folder exists and only the user can access it."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    own = found.st_uid == os.getuid() and stat.S_ISDIR(found.st_mode)
    return own and not found.st_mode & 0o077


def connect(address: Path) -> socket.socket | None:
    """Connect to the engine at `address`; None if that fails."""
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
    """A socket that listens at `address`; None if another engine does, or if listening fails."""
    folder = address.parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_own(folder):
            logger.warning("other users can access %s; no program can attach to the engine", folder)
            return None
        with _locked(address):
            if _is_alive(address):
                return None
            address.unlink(missing_ok=True)  # left by an engine that was killed
            listener = socket.socket(socket.AF_UNIX)
            previous = os.umask(0o177)
            try:
                listener.bind(str(address))
            finally:
                os.umask(previous)
            listener.listen(64)
    except OSError as error:
        logger.warning("no program can attach to the engine: %s", error)
        return None
    return listener


def leave(address: Path, listener: socket.socket) -> None:
    """Stop listening, and remove the socket file."""
    with suppress(OSError), _locked(address):
        # close() alone is not enough while another thread waits in accept().
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        if not _is_alive(address):  # else another engine listens there by now
            address.unlink(missing_ok=True)


def _is_alive(address: Path) -> bool:
    """Whether an engine listens at `address`, even one too busy to accept connections."""
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
    """Let only one engine at a time add or remove its socket."""
    with (address.parent / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
