"""Drives an engine by commands from several processes at once, each with its own numbers.

The commands, and what is answered to each, are those of messages.py. Nobody who reads slowly holds
up the others: what is not taken is kept, to a limit.
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
from localllm.process.frames import Unpacker
from localllm.process.memory import resident_bytes
from localllm.process.messages import Failed
from localllm.process.shapes import MessageError
from localllm.text.grammar import MAX_GRAMMAR_QUEUE_SECONDS
from localllm.untrusted.messages import TextResult
from localllm.untrusted.text_jobs import run_text_job

if TYPE_CHECKING:
    from localllm.answer.grammar_compiler import CompiledForm

logger = logging.getLogger(__name__)

_CHUNK = 1 << 16
_MAX_UNSENT_BYTES = 16 << 20
# For what is owed when it is stopped, besides answers; and the longest that is waited.
_OWED_S, _LONGEST_S = 5.0, 1e8
# Until what could not be sent is tried again; and between two reports of a prompt's progress.
_RETRY_S, _PROGRESS_S = 0.02, 0.1


@dataclass(eq=False, slots=True)
class Peer:
    """A process that asks. `own` are the engine's numbers of its requests, by its own; `compiling`
    those whose grammar is being compiled, beside the others' steps.
    """

    channel: socket.socket
    own: dict[int, int] = field(default_factory=dict)
    has_asked: bool = False
    compiling: set[int] = field(default_factory=set)
    unsent: bytearray = field(default_factory=bytearray)
    lock: Lock = field(default_factory=Lock)
    is_gone: bool = False

    def send(self, message: Reply) -> None:
        """Send, or keep what cannot be sent now; who takes nothing for long is given up."""
        with self.lock:
            self.unsent += REPLIES.pack(message)
            self._flush()

    def flush(self) -> None:
        """Send what was kept, as far as it goes."""
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
    """Somebody is there."""


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A grammar is compiled, or refused."""

    asked: Submit
    form: "CompiledForm | RequestError"


# Another process's command, or what a thread of our own has done.
_Heard = Command | _Joined | _Compiled


class EngineLoop:
    """The thread that runs it is the engine's only one.

    `described` is what it says of itself. It ends when `owner`, who started it, is gone; or, where
    there is `keepalive_s`, so many seconds after the last one has left (below 0: never).
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
        # Since when it is at this round; None while it waits for a command.
        self._busy_since_s: float | None = None
        self._stops_by_s = 0.0

    def receive(self, peer: Peer | None, message: _Heard | None) -> None:
        """Take a command, from any thread; None: the peer is gone."""
        self._commands.put((peer, message))

    def listen(self, listener: socket.socket) -> None:
        """Let others join, in a thread of its own."""
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def run(self, unpacker: Unpacker[Command] | None = None) -> None:
        """Until there is nobody to answer, of whom the owner is told first that it is ready;
        `unpacker` holds what was read of the owner's already.

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
        """How long it waits for somebody else, once nobody is there; below 0: for ever."""
        self._keepalive_s = min(max(-1.0, seconds), _LONGEST_S)

    def _owes(self) -> bool:
        """Whether somebody waits for what is still to come."""
        return any(peer.compiling or peer.unsent for peer in self._peers)

    def _patience(self, *, has_idle_work: bool) -> float | None:
        """Seconds to wait for a command; None: for ever."""
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
        """Carry out what has come; whether anything had."""
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
        """What it is, how it is used, and how long it stays."""
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
            raise MessageError("a number that is in use")
        if self._is_stopping:
            error = RequestError("the engine is being stopped", hint="ask again in a moment")
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
        """Have a grammar compiled, in a thread of its own."""
        assert asked.params.grammar is not None
        form: CompiledForm | RequestError
        try:
            if time.monotonic() > asked_s + MAX_GRAMMAR_QUEUE_SECONDS:
                raise BusyError("other grammars are being compiled", param="grammar")
            form = self._engine.compile(asked.params.grammar, asked.prompt)
        except RequestError as refused:
            form = refused
        except Exception:
            logger.exception("in a grammar")
            form = RequestError("the grammar cannot be followed", param="grammar")
        self.receive(peer, _Compiled(asked, form))

    def _write(self, peer: Peer, asked: Write) -> None:
        """Do what concerns texts alone, in a thread of its own."""
        result: TextResult | Failed
        try:
            result = run_text_job(self._engine.tokenizer, asked.job)
        except LocalLLMError as error:
            result = Failed(error)
        except Exception:
            logger.debug("in a prompt", exc_info=True)
            result = Failed(RequestError("it cannot be read"))
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
        """What the engine's thread is at; from any thread, while it is."""
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
        """End what a peer has asked for."""
        if peer not in self._peers:
            return
        self._peers.remove(peer)
        peer.is_gone = True
        for own in peer.own.values():
            self._engine.forget(own)
        peer.own.clear()
        peer.compiling.clear()
        with suppress(OSError):
            peer.channel.shutdown(socket.SHUT_RDWR)  # whoever reads it in a thread stops
        peer.channel.close()
        if peer.has_asked:
            self._left_s = time.monotonic()
        if peer is self._owner and self._keepalive_s is None:
            self._is_over = True

    def _read(self, peer: Peer, unpacker: Unpacker[Command]) -> None:
        threading.Thread(target=self._read_all, args=(peer, unpacker), daemon=True).start()

    def _read_all(self, peer: Peer, unpacker: Unpacker[Command]) -> None:
        try:
            while data := peer.channel.recv(_CHUNK):
                for message in unpacker.feed(data):
                    self._hear(peer, message)
        except MessageError:
            _warn_of_nonsense()
        except Exception:
            logger.debug("a channel is broken", exc_info=True)
        finally:
            self.receive(peer, None)

    def _hear(self, peer: Peer, message: Command) -> None:
        """Take a command; what wants no step is answered at once, however long one takes."""
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
    logger.debug("in a command", exc_info=True)
    logger.warning("what somebody sent was no command; it is not heard any more")
