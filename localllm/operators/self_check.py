"""Checks once whether the operators work on this GPU, before a model uses them.

They run in a separate process, since a device fault ends the process, and a kernel that hangs can
only be killed with it. From then on, torch replaces each operator that is wrong, crashes, hangs or
is slower than torch's.
"""

import json
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from localllm.operators.check import CheckRequest
from localllm.operators.verdict import Outcome, State
from localllm_kernels.compiling.choice import Piece

# -P: do not import modules from the current folder.
COMMAND = (sys.executable, "-P", "-m", "localllm.operators.check")
_END_S = 5.0  # how long a killed process may take to end

# Called with the name of each case that is being checked.
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds to wait for the process to begin a case, for the case's kernels to be compiled, and
    for it to run.
    """

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
    """Compile the kernels in several processes, into a cache on disk. Errors are ignored here,
    since the checks will meet them again.
    """

    def compile_share(index: int) -> None:
        part = replace(request, share=(index, count))
        with suppress(CheckError), _Checker(part, command, patience) as checker:
            checker.run([], tell)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(compile_share, range(count)))


class _Checker:
    """One process, from its start to its end."""

    def __init__(self, request: CheckRequest, command: Sequence[str], patience: Patience) -> None:
        self._request, self._command, self._patience = request, command, patience

    def __enter__(self) -> "_Checker":
        self._log = tempfile.TemporaryFile()
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log
            )
        except OSError as error:
            self._log.close()
            raise CheckError(f"cannot start the checking process: {error}") from error
        self._lines: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):  # a hanging kernel may delay its end
            self._process.wait(_END_S)
        self._log.close()

    def run(self, outcomes: list[Outcome], tell: Tell) -> bool:
        """Append the outcome of each case to `outcomes`; returns whether all cases are done.

        Otherwise the last case has ended the process, or hangs and must be killed with it.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            pickle.dump(self._request, self._process.stdin)
            self._process.stdin.flush()
        while True:
            begun = self._next(self._patience.begin)
            if begun is None or begun["event"] == "over":
                if begun is None:
                    raise CheckError(f"the checking process {self._why()}")
                return True
            tell(f"{begun['piece']}: {begun['name']}")
            outcome, goes_on = self._outcome(
                Outcome(Piece(begun["piece"]), begun["name"], begun["rows"], "good")
            )
            outcomes.append(outcome)
            if not goes_on:
                return False

    def _outcome(self, case: Outcome) -> tuple[Outcome, bool]:
        """The outcome of a case that has begun, and whether the process goes on."""
        came = self._next(self._patience.compile)
        if came is not None and came["event"] == "compiled":
            came = self._next(self._patience.run)
        if came is None:
            state: State = "hung" if self._process.poll() is None else "crashed"
            return replace(case, state=state, why=self._why()), False
        if came["event"] == "failed":
            state = "unchecked" if came["is_memory"] else "crashed"
            return replace(case, state=state, why=came["why"]), not came["is_fatal"]
        state, why = "good", ""
        if came["distance"] > 1:
            state, why = "wrong", f"{came['distance']:.3g} times as far off as rounding explains"
        times = {name: came[name] for name in ("own_s", "plain_s")}
        return replace(case, state=state, why=why, **times), True

    def _next(self, seconds: float) -> dict[str, Any] | None:
        """The next event; None if none comes in time, or the process has ended."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return None
            if not line:
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_END_S)
                return None
            with suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict) and "event" in event:
                    return event

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            for line in stdout:
                self._lines.put(line)
        self._lines.put(b"")

    def _why(self) -> str:
        """Why the process gives no events: its exit status and the last line of its stderr."""
        code = self._process.poll()
        if code is None:
            return "does not answer"
        self._log.seek(0)
        lines = self._log.read()[-4000:].decode(errors="replace").strip().splitlines()
        said = f": {lines[-1]:.200}" if lines else ""
        return (f"killed by signal {-code}" if code < 0 else f"exited with status {code}") + said
