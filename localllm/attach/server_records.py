"""Which servers of this user listen where: each keeps a file locked for as long as it runs.

Any user of the machine can listen on a port. These files are in a folder that only this user can
write to, and the system releases a lock when its process ends, so a locked file says that the
server on its port is the user's own, and that a key may be sent there.
"""

import fcntl
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from localllm.attach.addresses import is_own
from localllm.files.private_files import make_private_folder, private_descriptor
from localllm.user.places import runtime_folder

logger = logging.getLogger(__name__)
_ENDING = ".server"
_MAX_BYTES = 4096


@dataclass(frozen=True, slots=True)
class OwnServer:
    """A server of this user. `url`: as programs on this machine reach it, without `/v1`."""

    url: str
    port: int
    pid: int


@contextmanager
def recorded(server: OwnServer) -> Iterator[None]:
    """Record a server for as long as the block runs."""
    path = runtime_folder() / f"{server.port}{_ENDING}"
    try:
        make_private_folder(path.parent)
        descriptor = private_descriptor(path, os.O_RDWR)
    except OSError as error:
        logger.warning("localllm launch will not find this server: %s", error)
        yield
        return
    try:
        if not _lock(descriptor, fcntl.LOCK_EX):  # another one has this port, on another address
            yield
            return
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(asdict(server)).encode(), 0)
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def own_servers() -> list[OwnServer]:
    """The servers of this user that run now, by port."""
    folder = runtime_folder()
    paths = folder.glob(f"*{_ENDING}") if is_own(folder) else ()
    found = filter(None, map(_read, paths))
    return sorted(found, key=lambda server: server.port)


def _read(path: Path) -> OwnServer | None:
    """The server that holds a file locked; None if it has ended."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if _lock(descriptor, fcntl.LOCK_SH):
            return None
        return OwnServer(**json.loads(os.pread(descriptor, _MAX_BYTES, 0)))
    except (OSError, ValueError, TypeError):
        return None
    finally:
        os.close(descriptor)


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
