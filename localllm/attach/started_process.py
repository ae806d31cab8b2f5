"""The process of an engine as the program that starts it sees it."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from socket import socket, socketpair

from localllm.attach.addresses import is_own
from localllm.user.places import runtime_folder


def command_of(channel: socket) -> list[str]:
    """The command of an engine's process, whose messages arrive on `channel`."""
    # -P: import nothing from the current folder.
    module = "localllm.attach.engine_process"
    return [sys.executable, "-P", "-m", module, str(channel.fileno())]


class StartedProcess:
    """A process that imports what an engine needs, and then waits for a message on `channel`. It
    ends with a `with` block, unless it `is_engine` by then.
    """

    def __init__(self) -> None:
        """Start it, with a log beside the engines' sockets. Raises: OSError."""
        folder = runtime_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Until it is known which engine it will be.
        self._own_log = folder / f"{os.getpid()}.log" if is_own(folder) else None
        log = self._own_log or Path(os.devnull)
        self.channel, theirs = socketpair()
        self.is_engine, self.began_s = False, time.monotonic()
        try:
            with theirs, log.open("wb") as output:
                self._process = subprocess.Popen(
                    command_of(theirs),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=output,
                    start_new_session=True,  # the engine outlives this program and its terminal
                )
        except OSError:
            self.channel.close()
            raise

    def __enter__(self) -> "StartedProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if not self.is_engine:
            self.end()

    def end(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        self.channel.close()
        if self._own_log is not None:
            self._own_log.unlink(missing_ok=True)

    def log_for(self, address: Path) -> None:
        """Name its log after the engine that it will be."""
        if self._own_log is not None:
            with suppress(OSError):
                self._own_log.replace(address.with_suffix(".log"))
            self._own_log = None
