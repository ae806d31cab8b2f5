"""A process for work on untrusted templates, tokenizers and grammars, whose cost is unknown.

Neither a deadline nor Ctrl-C can stop code in C from within its process. This process has limits on
memory and time, can be killed at any moment, and is then restarted.
"""

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress

from localllm.process.frames import Unpacker
from localllm.process.messages import Failed
from localllm.process.shapes import MessageError
from localllm.untrusted.messages import (
    FROM_WORKER,
    TO_WORKER,
    FromWorker,
    Job,
    Opened,
    Opening,
    Result,
    Stopped,
    ToWorker,
    Work,
)

_CHUNK = 1 << 18
# Replies are token ids and rendered prompts; messages are as large as texts that are encoded.
_MAX_REPLY_BYTES = 1 << 30
# For the process to start and to read its vocabulary: a large one takes a second.
OPEN_S = 60.0
_NONSENSE = "its process sent an unexpected reply"
# One wait for a reply, short enough to notice Ctrl-C.
_LOOK_S = 0.1


class StoppedError(Exception):
    """The work was stopped, or its process has died; the message says why."""


class WaitedError(StoppedError):
    """The work was not started: other work took its time."""


class Worker:
    """One process, which does one job at a time. Only one thread at a time may use it."""

    def __init__(self, opening: Opening) -> None:
        """`opening` says what the jobs will be about."""
        self._opening = opening
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._unpacker = Unpacker(FROM_WORKER, _MAX_REPLY_BYTES)
        self._is_open = False

    def warm(self) -> None:
        """Start the process, without waiting for it."""
        if self._process is None:
            self._spawn()

    def open(self) -> None:
        """Wait until the process is ready for jobs.

        Raises: the LocalLLMError that the process reports; StoppedError.
        """
        if self._process is not None and self._process.poll() is not None:
            self._kill()
        self.warm()
        if not self._is_open:
            self._receive(time.monotonic() + OPEN_S, OPEN_S)
            self._is_open = True

    def ask(self, work: Work, seconds: float) -> Result:
        """Run a job. The process is killed after `seconds`, not counting its start.

        Raises: the LocalLLMError that the job reports; StoppedError.
        """
        self.open()
        deadline = time.monotonic() + seconds
        try:
            self._send(Job(seconds, work), deadline)
        except OSError as error:
            self._kill()
            raise StoppedError("its process has ended") from error
        reply = self._receive(deadline, seconds)
        if isinstance(reply, Opened):
            self._kill()
            raise StoppedError(_NONSENSE)
        return reply

    def close(self) -> None:
        """End the process."""
        self._kill()

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        # -P: import nothing from the current folder.
        command = [sys.executable, "-P", "-m", "localllm.untrusted.worker_process"]
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [*command, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    # One text at a time needs no threads, which would count as its memory.
                    env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
                    start_new_session=True,  # Ctrl-C is for the process that asks
                )
            except OSError as error:
                ours.close()
                raise StoppedError(f"its process cannot be started: {error}") from error
        ours.settimeout(_LOOK_S)
        self._channel, self._is_open = ours, False
        self._unpacker = Unpacker(FROM_WORKER, _MAX_REPLY_BYTES)
        with suppress(OSError):  # it has died; waiting for its reply reports that
            self._send(self._opening, time.monotonic() + OPEN_S)

    def _send(self, message: ToWorker, deadline: float) -> None:
        assert self._channel is not None
        rest = memoryview(TO_WORKER.pack(message))
        while rest:
            try:
                rest = rest[self._channel.send(rest) :]
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise

    def _receive(self, deadline: float, seconds: float) -> Opened | Result:
        """Wait for the reply. Anything else that ends the wait, Ctrl-C too, kills the process."""
        try:
            reply = self._next_message(deadline, seconds)
        except BaseException:
            self._kill()
            raise
        match reply:
            case Failed(error):
                raise error
            case Stopped(reason):
                self._kill()
                raise StoppedError(reason)
        return reply

    def _next_message(self, deadline: float, seconds: float) -> FromWorker:
        assert self._channel is not None
        while True:
            try:
                data = self._channel.recv(_CHUNK)
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise StoppedError(f"it took longer than {seconds:.3g} s") from None
                continue
            except OSError:
                data = b""
            if not data:
                raise StoppedError("its process has ended, perhaps for taking too much memory")
            try:
                for message in self._unpacker.feed(data):
                    return message
            except MessageError as error:
                raise StoppedError(_NONSENSE) from error
            if time.monotonic() > deadline:
                raise StoppedError(f"it took longer than {seconds:.3g} s")

    def _kill(self) -> None:
        process, channel = self._process, self._channel
        self._process, self._channel, self._is_open = None, None, False
        if channel is not None:
            channel.close()
        if process is not None:
            process.kill()
            process.wait()
