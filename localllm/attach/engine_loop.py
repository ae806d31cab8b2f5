"""Drives an engine by commands from several processes, each of which numbers its own requests.

messages.py defines the commands and their replies. A process that reads slowly does not hold up the
others: its replies are buffered, up to a limit.
"""

import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING

from localllm.answer.completion import TextEvent
from localllm.answer.text_engine import TextEngine
from localllm.attach.messages import (
    COMMANDS,
    REPLIES,
    Abort,
    Accepted,
    Command,
    EngineUse,
    Events,
    Hello,
    KeepAlive,
    ModelInfo,
    Open,
    Ping,
    Pong,
    Progress,
    Ready,
    Refused,
    Reply,
    Stats,
    Staying,
    Stop,
    Stopping,
    Submit,
    Write,
    Wrote,
)
from localllm.errors import BusyError, DeviceError, LocalLLMError, RequestError
from localllm.process.frames import Unpacker, received
from localllm.process.memory import resident_bytes
from localllm.process.messages import Failed
from localllm.process.shapes import MessageError
from localllm.text.grammar import MAX_GRAMMAR_QUEUE_SECONDS
from localllm.untrusted.messages import TextResult
from localllm.untrusted.text_jobs import run_text_job

if TYPE_CHECKING:
    from localllm.answer.grammar_compiler import CompiledForm

logger = logging.getLogger(__name__)

_MAX_UNSENT_BYTES = 16 << 20
# Seconds after a Stop for pending grammars and unsent bytes; and the longest keep-alive.
_OWED_S, _LONGEST_S = 5.0, 1e8
# Seconds until a failed send is tried again; and between two reports of a prompt's progress.
_RETRY_S, _PROGRESS_S = 0.02, 0.1


@dataclass(eq=False, slots=True)
class Peer:
    """A process that sends commands. `own` maps its numbers of its requests to the engine's;
    `compiling` holds those whose grammar is being compiled, in a thread beside the engine's steps.
    """

    channel: socket.socket
    own: dict[int, int] = field(default_factory=dict)
    has_asked: bool = False
    compiling: set[int] = field(default_factory=set)
    unsent: bytearray = field(default_factory=bytearray)
    lock: Lock = field(default_factory=Lock)
    is_gone: bool = False

    def send(self, message: Reply) -> None:
        """Send, or buffer what cannot be sent now; a peer that falls too far behind is dropped."""
        with self.lock:
            self.unsent += REPLIES.pack(message)
            self._flush()

    def flush(self) -> None:
        """Send as much of the buffer as possible."""
        if self.unsent:
            with self.lock:
                self._flush()

    def _flush(self) -> None:
        try:
            while self.unsent:
                count = self.channel.send(self.unsent, socket.MSG_DONTWAIT)
                del self.unsent[:count]
        except BlockingIOError:
            if len(self.unsent) > _MAX_UNSENT_BYTES:
                self.is_gone = True
        except OSError:
            self.is_gone = True


@dataclass(frozen=True, slots=True)
class _Joined:
    """A peer has connected."""


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A grammar has been compiled or refused."""

    asked: Submit
    form: "CompiledForm | RequestError"


# A command from another process, or news from one of our own threads.
_Heard = Command | _Joined | _Compiled


class EngineLoop:
    """Serves one engine to several processes; only the thread in `run` steps the engine.

    `described` is what Ready reports. Without `keepalive_s`, the loop ends when `owner`, the
    process that started it, is gone; with it, that many seconds after the last peer has left (below
    0: never).
    """

    def __init__(
        self,
        engine: TextEngine,
        owner: socket.socket,
        described: ModelInfo,
        keepalive_s: float | None = None,
    ) -> None:
        self._engine, self._described = engine, described
        self._keepalive_s = keepalive_s
        self._commands: SimpleQueue[tuple[Peer | None, _Heard | None]] = SimpleQueue()
        self._owner = Peer(owner)
        self._peers = [self._owner]
        self._compilers = ThreadPoolExecutor(2, "grammar")
        self._writers = ThreadPoolExecutor(2, "prompt")
        self._left_s = self._told_s = time.monotonic()
        self._is_stopping = self._is_over = False
        # When the current round began; None while waiting for a command.
        self._busy_since_s: float | None = None
        self._stops_by_s = 0.0

    def receive(self, peer: Peer | None, message: _Heard | None) -> None:
        """Queue a command, from any thread; None: the peer is gone."""
        self._commands.put((peer, message))

    def listen(self, listener: socket.socket) -> None:
        """Let other processes connect; a separate thread accepts them."""
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def run(self, unpacker: Unpacker[Command] | None = None) -> None:
        """Serve until there is nobody left to answer; the owner is told first that the engine is
        ready. `unpacker` holds the bytes that were already read from the owner.

        Raises: DeviceError.
        """
        self._owner.send(self._ready(self._owner))
        self._read(self._owner, unpacker or Unpacker(COMMANDS))
        has_idle_work = True
        while not self._is_over:
            patience = self._patience(has_idle_work=has_idle_work)
            if patience != 0.0:
                self._busy_since_s = None
            if self._take_commands(patience):
                has_idle_work = True
            self._busy_since_s = time.monotonic()
            for peer in list(self._peers):
                peer.flush()
                if peer.is_gone:
                    self._leave(peer)
            if self._is_over:
                return
            if self._engine.engine.has_unfinished():
                self._engine.step()
                self._send_events()
            elif self._is_stopping:
                if not self._owes() or time.monotonic() > self._stops_by_s:
                    return
                time.sleep(_RETRY_S)
            elif self._has_waited_enough():
                return
            elif has_idle_work:
                has_idle_work = self._engine.work_ahead()

    def keep_for(self, seconds: float) -> None:
        """Set how long to wait for another peer after the last one has left; below 0: forever."""
        self._keepalive_s = min(max(-1.0, seconds), _LONGEST_S)

    def _owes(self) -> bool:
        """Whether a peer still waits for a grammar or for unsent bytes."""
        return any(peer.compiling or peer.unsent for peer in self._peers)

    def _patience(self, *, has_idle_work: bool) -> float | None:
        """Seconds to wait for a command; None: forever."""
        if self._engine.engine.has_unfinished() or has_idle_work or self._is_stopping:
            return 0.0
        if any(peer.unsent for peer in self._peers):
            return _RETRY_S
        if self._peers or self._keepalive_s is None or self._keepalive_s < 0:
            return None
        return max(0.0, self._left_s + self._keepalive_s - time.monotonic())

    def _has_waited_enough(self) -> bool:
        if self._peers or self._keepalive_s is None or self._keepalive_s < 0:
            return False
        return time.monotonic() >= self._left_s + self._keepalive_s

    def _take_commands(self, patience: float | None) -> bool:
        """Carry out the queued commands; returns whether there were any."""
        any_came = False
        while not self._is_over:
            try:
                waits = not any_came and patience != 0.0
                peer, message = self._commands.get(waits, patience)
            except Empty:
                break
            any_came = True
            if message is None:
                if peer is not None:
                    self._leave(peer)
            else:
                self._carry_out(peer, message)
        return any_came

    def _carry_out(self, peer: Peer | None, message: _Heard) -> None:
        is_own = peer is None or self._keepalive_s is not None
        if isinstance(message, Stop) and is_own and not self._is_stopping:
            self._is_stopping, self._stops_by_s = True, time.monotonic() + _OWED_S
        if peer is None or peer.is_gone:
            return
        try:
            self._answer(peer, message)
        except DeviceError:
            raise
        except Exception:
            if peer is self._owner:
                raise
            _warn_of_nonsense()
            self._leave(peer)

    def _answer(self, peer: Peer, message: _Heard) -> None:
        match message:
            case _Joined():
                self._peers.append(peer)
            case Submit():
                self._submit(peer, message)
            case _Compiled(asked, form) if asked.id in peer.compiling:
                peer.compiling.discard(asked.id)
                if isinstance(form, RequestError):
                    peer.send(Refused(asked.id, form))
                else:
                    self._start(peer, asked, form)
            case Abort(request_id):
                peer.compiling.discard(request_id)
                own = peer.own.pop(request_id, None)
                if own is not None:
                    self._engine.forget(own)
            case KeepAlive(seconds) if self._keepalive_s is not None:
                self.keep_for(seconds)
            case Stop():
                peer.send(Stopping() if self._is_stopping else Staying())

    def _ready(self, asker: Peer) -> Ready:
        """The engine's model, its use, and how long it stays."""
        left_s = None
        if self._keepalive_s is not None and self._keepalive_s >= 0:
            left_s = max(0.0, self._left_s + self._keepalive_s - time.monotonic())
        use = EngineUse(
            requests=len(self._engine.engine.scheduler.unfinished()),
            is_used=any(peer not in (asker, self._owner) for peer in self._peers)
            or (self._owner in self._peers),
            left_s=left_s,
            memory_bytes=resident_bytes(),
        )
        return Ready(self._described, use)

    def _submit(self, peer: Peer, asked: Submit) -> None:
        peer.has_asked = True
        if asked.id in peer.own or asked.id in peer.compiling:
            raise MessageError("a request number that is in use")
        if self._is_stopping:
            error = RequestError("the engine is stopping", hint="ask again in a moment")
            peer.send(Refused(asked.id, error))
        elif asked.params.grammar is None:
            self._start(peer, asked)
        else:
            peer.compiling.add(asked.id)
            self._compilers.submit(self._compile, peer, asked, time.monotonic())

    def _start(self, peer: Peer, asked: Submit, form: "CompiledForm | None" = None) -> None:
        try:
            own = self._engine.submit(asked.prompt, asked.params, asked.salt, form)
        except RequestError as error:
            peer.send(Refused(asked.id, error))
        else:
            peer.own[asked.id] = own
            peer.send(Accepted(asked.id))

    def _compile(self, peer: Peer, asked: Submit, asked_s: float) -> None:
        """Compile a grammar; runs in a compiler thread."""
        assert asked.params.grammar is not None
        form: CompiledForm | RequestError
        try:
            if time.monotonic() > asked_s + MAX_GRAMMAR_QUEUE_SECONDS:
                raise BusyError("other grammars are being compiled", param="grammar")
            form = self._engine.compile(asked.params.grammar, asked.prompt)
        except RequestError as refused:
            form = refused
        except Exception:
            logger.exception("compiling a grammar failed")
            form = RequestError("the grammar cannot be used", param="grammar")
        self.receive(peer, _Compiled(asked, form))

    def _write(self, peer: Peer, asked: Write) -> None:
        """Run a job on texts, which needs no step; runs in a writer thread."""
        result: TextResult | Failed
        try:
            result = run_text_job(self._engine.tokenizer, asked.job)
        except LocalLLMError as error:
            result = Failed(error)
        except Exception:
            logger.debug("reading a prompt failed", exc_info=True)
            result = Failed(RequestError("the prompt cannot be read"))
        peer.send(Wrote(asked.id, result))

    def _send_events(self) -> None:
        now = time.monotonic()
        is_due = now >= self._told_s + _PROGRESS_S
        for peer in self._peers:
            events: list[tuple[int, TextEvent]] = []
            for request_id, own in list(peer.own.items()):
                while (event := self._engine.take(own)) is not None:
                    events.append((request_id, event))
                if not self._engine.is_open(own):
                    self._engine.forget(own)
                    del peer.own[request_id]
                elif is_due and peer is not self._owner:
                    progress = self._engine.prompt_progress(own)
                    peer.send(Progress(request_id, progress))
            if events:
                peer.send(Events(tuple(events)))
        if is_due:
            self._told_s = now

    def _pong(self, ping: Ping) -> Pong:
        """The engine's load and the age of its current step; from any thread, during the step."""
        since_s = self._busy_since_s
        busy_s = 0.0 if since_s is None else time.monotonic() - since_s
        return Pong(ping.id, self._stats(), busy_s, not self._engine.engine.is_warm)

    def _stats(self) -> Stats:
        scheduler = self._engine.engine.scheduler
        running = len(scheduler.running)
        return Stats(
            running=running,
            waiting=len(scheduler.unfinished()) - running,
            used_blocks=scheduler.num_usable_blocks - scheduler.num_free_blocks,
            blocks=scheduler.num_usable_blocks,
            preemptions=scheduler.num_preemptions,
        )

    def _leave(self, peer: Peer) -> None:
        """Drop a peer and end its requests."""
        if peer not in self._peers:
            return
        self._peers.remove(peer)
        peer.is_gone = True
        for own in peer.own.values():
            self._engine.forget(own)
        peer.own.clear()
        peer.compiling.clear()
        with suppress(OSError):
            peer.channel.shutdown(socket.SHUT_RDWR)  # stops the thread that reads from it
        peer.channel.close()
        if peer.has_asked:
            self._left_s = time.monotonic()
        if peer is self._owner and self._keepalive_s is None:
            self._is_over = True

    def _read(self, peer: Peer, unpacker: Unpacker[Command]) -> None:
        threading.Thread(target=self._read_all, args=(peer, unpacker), daemon=True).start()

    def _read_all(self, peer: Peer, unpacker: Unpacker[Command]) -> None:
        try:
            for message in received(peer.channel, unpacker):
                self._hear(peer, message)
        except MessageError:
            _warn_of_nonsense()
        except Exception:
            logger.debug("a channel is broken", exc_info=True)
        finally:
            self.receive(peer, None)

    def _hear(self, peer: Peer, message: Command) -> None:
        """Take a command; one that needs no step is answered at once, even during a long step."""
        match message:
            case Hello():
                peer.send(self._ready(peer))
            case Ping():
                peer.send(self._pong(message))
            case Write():
                self._writers.submit(self._write, peer, message)
            case Open():
                raise MessageError("a model is open already")
            case _:
                self.receive(peer, message)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                channel, _ = listener.accept()
            except OSError:
                return
            peer = Peer(channel)
            self.receive(peer, _Joined())
            self._read(peer, Unpacker(COMMANDS))


def _warn_of_nonsense() -> None:
    logger.debug("a command could not be carried out", exc_info=True)
    logger.warning("a program sent an invalid command and was disconnected")
