"""A fork server: starting a program takes milliseconds instead of 1 to 4 s of imports.

`ForkingPopen` is a `subprocess.Popen` that asks a process which has imported torch and the rest to
fork itself for each program of localllm. All else is as after fork and exec: the program is a child
of who asks, with streams, folder, variables, arguments, session, signals and exit code of its own.
What it starts in turn is forked too, by a fork server of its own.
"""

import atexit
import ctypes
import fcntl
import gc
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from localllm.cli.commands import PLACES

ROOT = Path(__file__).parents[1]
PATHS = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "tests")))
# What programs import, but for those themselves. Not huggingface_hub, which reads the environment.
MODULES = (
    "torch",
    "localllm.cli.main",
    *(place.module for place in PLACES.values()),
    "localllm.cli.chat.ask_once",
    "localllm.cli.repl.repl",
    "localllm.cli.repl.slash_commands",
    "localllm.answer.opening",
    "localllm.answer.drafters",
    "localllm.attach.attached",
    "localllm.attach.engine_loop",
    "localllm.attach.remote",
    "localllm.quantize.run",
    "localllm.server.run",
    "localllm.untrusted.grammar_jobs",
    "localllm.untrusted.text_jobs",
)
SCRIPTS = (str(ROOT / "tests/scripted.py"),)
RUN = "from localllm.cli.main import main"  # of code that is given as an argument
# Variables that the interpreter or a library has read by now: no program can be given others.
READ_AT_START = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC_", "OMP_", "MKL_", "TRITON_", "TORCH_")
_ADOPT = 36  # PR_SET_CHILD_SUBREAPER
# Whatever tells a program to end or to pause is not for its fork server.
_TOLD = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP}
_SAFE_PATH = "-P"


def take_terminal() -> None:
    """As a `preexec_fn`: make the terminal on stdin that of the new session."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@dataclass(frozen=True)
class Program:
    """What `exec` and what comes before it get. `places`: the numbers of its descriptors."""

    words: list[str]
    folder: str
    environment: dict[str, str]
    is_session: bool
    takes_terminal: bool
    places: list[int]


class ForkServer:
    """Who asks a fork server for programs; the server itself is started when it is needed."""

    def __init__(self, environment: Mapping[str, str], channel: socket.socket | None) -> None:
        """`environment`: what it was started in. `channel`: to one that runs."""
        self._environment = dict(environment)
        self._channel = channel
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def can_start(self, program: Program) -> bool:
        """Whether the program is one of localllm, whose environment a running process can have."""
        if program.words[0] != sys.executable:
            return False
        if _read_at_start(program.environment) != _read_at_start(self._environment):
            return False
        words = _own_words(program)
        is_module = words[0] == "-m" and words[1].partition(".")[0] == "localllm"
        return is_module or words[0] in SCRIPTS or (words[0] == "-c" and RUN in words[1])

    def start(self, program: Program, descriptors: list[int]) -> int:
        """Start the program; returns its process id."""
        message = json.dumps(asdict(program)).encode()
        with self._lock, _adopting():
            if self._channel is None:
                self._channel = self._run()
            head = len(message).to_bytes(4, "big")
            socket.send_fds(self._channel, [head], descriptors)
            self._channel.sendall(message)
            return int.from_bytes(_receive(self._channel, 4), "big")

    def close(self) -> None:
        """End the server, if this object has started it."""
        if self._process is not None and self._channel is not None:
            self._channel.close()
            self._process.wait()

    def _run(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        room = " " * 4096  # for the arguments of programs
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, _SAFE_PATH, __file__, str(theirs.fileno()), room],
                env=self._environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        return ours


class ForkingPopen(subprocess.Popen[Any]):
    """As `subprocess.Popen`, but programs of localllm are forked."""

    server: ForkServer

    def _execute_child(self, *given: Any) -> None:
        call = _CALL.bind(self, *given).arguments
        words = call["args"]
        words = [words] if isinstance(words, str | bytes | os.PathLike) else words
        before = call["preexec_fn"]
        program = Program(
            words=[os.fsdecode(word) for word in words],
            folder=os.fspath(call["cwd"] or os.getcwd()),
            environment=dict(os.environ if call["env"] is None else call["env"]),
            is_session=call["start_new_session"],
            takes_terminal=before is take_terminal,
            places=[0, 1, 2, *call["pass_fds"]],
        )
        is_plain = before in (None, take_terminal) and not call["shell"] and call["close_fds"]
        if not is_plain or not self.server.can_start(program):
            super()._execute_child(*given)  # type: ignore[misc]
            return
        streams = [call[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = [place if stream < 0 else stream for place, stream in enumerate(streams)]
        self.pid = self.server.start(program, [*streams, *call["pass_fds"]])
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(call[name] for name in ends))  # type: ignore[attr-defined]


_CALL = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]


@contextmanager
def forking_processes() -> Iterator[None]:
    """Within it, `subprocess.Popen` forks programs of localllm, where the system lets it."""
    if sys.platform != "linux":
        yield
        return
    environment = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
    ForkingPopen.server = ForkServer(environment, None)
    whole, subprocess.Popen = subprocess.Popen, ForkingPopen  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = whole  # type: ignore[misc]
        ForkingPopen.server.close()


def _own_words(program: Program) -> list[str]:
    return program.words[2:] if program.words[1] == _SAFE_PATH else program.words[1:]


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_AT_START) and name != "PYTHONPATH"
    }


@contextmanager
def _adopting() -> Iterator[None]:
    """A process whose parent ends meanwhile becomes a child of this one."""
    libc = ctypes.CDLL(None)
    libc.prctl(_ADOPT, 1, 0, 0, 0)
    yield
    libc.prctl(_ADOPT, 0, 0, 0, 0)


def _receive(channel: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = channel.recv(size - len(data))
        if not piece:
            raise EOFError("the fork server has ended")
        data += piece
    return data


def _next_program(channel: socket.socket) -> tuple[Program, list[int]] | None:
    """In a fork of this process: the program that it shall become, and its descriptors. In this
    process: None, when nobody can ask for one any more.
    """
    while True:
        head, descriptors, _, _ = socket.recv_fds(channel, 4, 64)
        if not head:
            return None
        message = _receive(channel, int.from_bytes(head, "big"))
        reads, writes = os.pipe()
        between = os.fork()
        if not between:
            between = os.getpid()
            pid = os.fork()
            if pid:
                os.write(writes, pid.to_bytes(4, "big"))
                os._exit(0)
            while os.getppid() == between:  # until who asks has adopted this process
                os.sched_yield()
            return Program(**json.loads(message)), descriptors
        os.waitpid(between, 0)
        channel.sendall(os.read(reads, 4))
        for descriptor in (*descriptors, reads, writes):
            os.close(descriptor)


def _become(program: Program, descriptors: list[int]) -> None:
    """All that `exec` and what comes before it do."""
    if program.is_session:
        os.setsid()
    above = max(program.places) + 1
    for each, place in zip(
        [fcntl.fcntl(each, fcntl.F_DUPFD, above) for each in descriptors],
        program.places,
        strict=True,
    ):
        os.dup2(each, place)
    _close_all_but(program.places)
    if program.takes_terminal:
        take_terminal()
    os.chdir(program.folder)
    os.environ.clear()
    os.environ.update(program.environment)
    _open_streams()
    _show_words(program.words)


def _close_all_but(kept: list[int]) -> None:
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in kept:
            with suppress(OSError):  # the one by which they were listed
                os.close(descriptor)


def _open_streams() -> None:
    """Python's, as when the interpreter starts."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        before = getattr(sys, f"__{name}__")
        mode, how = "w" if number else "r", {"encoding": before.encoding, "errors": before.errors}
        stream = open(number, mode, closefd=False, **how)  # noqa: SIM115
        stream.reconfigure(line_buffering=number == 2 or stream.isatty())
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _show_words(words: list[str]) -> None:
    """Write the arguments to where the system lists them, for which this process has room."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    line = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - begin]
    ctypes.memmove(begin, line.ljust(end - begin, b"\0"), end - begin)


def _run(program: Program) -> None:
    words = _own_words(program)
    paths = program.environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(words[1], {"__name__": "__main__"})
        return
    if words[0] != "-m":
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")
        return
    sys.argv = words[1:]
    if program.words[1] != _SAFE_PATH:
        sys.path.insert(0, program.folder)
    runpy.run_module(words[1], run_name="__main__", alter_sys=True)


def _end(run: Callable[[Program], None], program: Program) -> None:
    """Run it and end as the interpreter does, but for freeing every object: that takes a quarter of
    a second here, since each page has to be copied first. Other exceptions go on.
    """
    code = 0
    try:
        run(program)
    except SystemExit as ended:
        if ended.code is not None and type(ended.code) is not int:
            raise
        code = ended.code or 0
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = 120  # as the interpreter's own
    os._exit(code & 0xFF)


def main() -> None:
    """Be a fork server, until this process has become a program."""
    from localllm.engine.threads import let_torch_sleep

    at_start = dict(os.environ)
    let_torch_sleep()
    for name in MODULES:
        importlib.import_module(name)
    assert "huggingface_hub" not in sys.modules
    gc.collect()
    gc.freeze()
    signal.pthread_sigmask(signal.SIG_BLOCK, _TOLD)
    channel = socket.socket(fileno=int(sys.argv[1]))
    while (asked := _next_program(channel)) is not None:
        program, descriptors = asked
        channel.detach()  # closed with all others
        _become(program, descriptors)
        ours, theirs = socket.socketpair()
        if os.fork():
            theirs.close()
            ForkingPopen.server = ForkServer(at_start, ours)
            subprocess.Popen = ForkingPopen  # type: ignore[misc]
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _TOLD)
            _end(_run, program)
        ours.close()
        channel = theirs
        nowhere = os.open(os.devnull, os.O_RDWR)
        for place in range(3):
            os.dup2(nowhere, place)
        _close_all_but([0, 1, 2, theirs.fileno()])


if __name__ == "__main__":
    main()
