"""Checks once whether the operators work on this GPU, before a model uses them.

They run in a separate process, since a device fault ends the process, and a kernel that hangs can
only be killed with it. From then on, torch replaces each operator that is wrong, crashes, hangs or
is slower than torch's.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe

from localllm.operators.check import CheckRequest, Event
from localllm.operators.verdict import Outcome, State

# -P: do not import modules from the current folder.
COMMAND = (sys.executable, "-P", "-m", "localllm.operators.check")
_END_S = 5.0  # how long a killed process may take to end

# Called with the name of each case that is being checked.
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds to wait for a case to begin, for its kernels to be compiled, and for it to run."""

    begin: float = 120.0
    compile: float = 240.0
    run: float = 30.0


PATIENCE = Patience()


class CheckError(Exception):
    """The checks could not be run."""


def check_operators(
    request: CheckRequest,
    tell: Tell,
    command: Sequence[str] = COMMAND,
    patience: Patience = PATIENCE,
    num_compilers: int = 0,
) -> tuple[Outcome, ...]:
    """Check every case and return the outcomes; `tell` gets each case before it begins.

    `num_compilers`: processes that first compile in parallel; each takes a few GB on the GPU.

    Raises: CheckError if the process cannot check anything at all.
    """
    if num_compilers > 1:
        _compile_at_once(request, num_compilers, tell, command, patience)
    outcomes: list[Outcome] = []
    while True:
        with _Checker(request, command, patience) as checker:
            is_over = checker.run(outcomes, tell)
        if is_over:
            return tuple(outcomes)
        # The last case ended the process; other cases of its piece probably would too.
        request = replace(
            request,
            settled=request.settled | {outcomes[-1].piece},
            done=frozenset((each.piece, each.name, each.rows) for each in outcomes),
        )


def _compile_at_once(
    request: CheckRequest, count: int, tell: Tell, command: Sequence[str], patience: Patience
) -> None:
    """Compile in several processes, to a cache on disk; the checks will meet the errors again."""

    def compile_share(index: int) -> None:
        part = replace(request, share=(index, count))
        with suppress(CheckError), _Checker(part, command, patience) as checker:
            checker.run([], tell)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(compile_share, range(count)))


class _Checker:
    def __init__(self, request: CheckRequest, command: Sequence[str], patience: Patience) -> None:
        self._request, self._command, self._patience = request, command, patience

    def __enter__(self) -> "_Checker":
        self._log = tempfile.TemporaryFile()
        self._events, theirs = Pipe()
        try:
            self._process = subprocess.Popen(
                self._command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=self._log
            )
        except OSError as error:
            self._events.close()
            self._log.close()
            raise CheckError(f"cannot start the checking process: {error}") from error
        finally:
            theirs.close()
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._events.close()
        with suppress(subprocess.TimeoutExpired):  # a hanging kernel may delay its end
            self._process.wait(_END_S)
        self._log.close()

    def run(self, outcomes: list[Outcome], tell: Tell) -> bool:
        """Append the outcome of each case to `outcomes`; returns whether all cases are done.

        Otherwise the last case has ended the process, or hangs and must be killed with it.
        """
        with suppress(OSError):  # why it has ended is found below
            self._events.send(self._request)
        while True:
            begun = self._next(self._patience.begin)
            if not isinstance(begun, Outcome):
                if begun is None:
                    raise CheckError(f"the checking process {self._why()}")
                return begun == "over"
            tell(f"{begun.piece}: {begun.name}")
            found = self._next(self._patience.compile)
            if found == "compiled":
                found = self._next(self._patience.run)
            if isinstance(found, Outcome):
                outcomes.append(found)
                continue
            state: State = "hung" if self._process.poll() is None else "crashed"
            outcomes.append(replace(begun, state=state, why=self._why()))
            return False

    def _next(self, seconds: float) -> Event | None:
        """The next event; None if none comes in time, or the process has ended."""
        try:
            if self._events.poll(seconds):
                event: Event = self._events.recv()
                return event
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
        return None

    def _why(self) -> str:
        """Why the process gives no events: its exit status and the last line of its stderr."""
        code = self._process.poll()
        if code is None:
            return "does not answer"
        self._log.seek(0)
        lines = self._log.read()[-4000:].decode(errors="replace").strip().splitlines()
        said = f": {lines[-1]:.200}" if lines else ""
        return (f"killed by signal {-code}" if code < 0 else f"exited with status {code}") + said
