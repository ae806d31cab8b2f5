"""Decoding beside other work: how much speed is left when other processes keep cores busy."""

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from localllm.bench.results import Result, Suite, of_pairs
from localllm.bench.speed import run_decode
from localllm.bench.subject import Subject
from localllm.errors import RequestError

LOADS = (1, 2)
# A busy process ends by itself after this time, or when its parent has gone.
LOAD_LASTS_S = 600
_BUSY = """
import os, sys, time
end, owner = time.monotonic() + float(sys.argv[1]), os.getppid()
while time.monotonic() < end and os.getppid() == owner:
    for _ in range(100_000):
        pass
"""
_SETTLES_S = 0.2


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run `count` processes that compute without a pause.

    Raises: RequestError if one ends before the measurement beside it does.
    """
    command = [sys.executable, "-S", "-c", _BUSY, str(LOAD_LASTS_S)]
    started = [subprocess.Popen(command) for _ in range(count)]
    try:
        if started:
            time.sleep(_SETTLES_S)
        yield
        if any(process.poll() is not None for process in started):
            raise RequestError(
                f"a busy process ended, after {LOAD_LASTS_S:,} s or because it was killed, before "
                "the measurement did",
                hint="fewer tokens with -n",
            )
    finally:
        for process in started:
            process.kill()
            process.wait()


class ContendedSuite(Suite):
    """Decode of `num_tokens` tokens at batch 1, alternating: alone, and beside each of LOADS."""

    def __init__(self, subject: Subject, num_tokens: int, repeats: int, seed: int) -> None:
        self._subject, self._num_tokens, self._repeats = subject, num_tokens, repeats
        self._prompt = subject.random_tokens(random.Random(seed), 8)
        # Pairs of tokens a second: alone, and right afterwards beside that many processes.
        self._pairs: dict[int, list[tuple[float, float]]] = {count: [] for count in LOADS}

    def run(self, progress: Callable[[str], None]) -> None:
        self._decode(0)
        for _ in range(self._repeats):
            for count, pairs in self._pairs.items():
                progress("alone")
                alone = self._decode(0)
                progress(f"beside {count} busy")
                pairs.append((alone, self._decode(count)))

    def results(self) -> list[Result]:
        name = f"tg{self._num_tokens}"
        return [contended_row(name, count, pairs) for count, pairs in self._pairs.items() if pairs]

    def _decode(self, count: int) -> float:
        """Tokens a second beside `count` busy processes."""
        with busy_processes(count):
            steps = run_decode(self._subject.engine, [self._prompt], self._num_tokens)
        return 1 / statistics.mean(steps)


def contended_row(test: str, count: int, pairs: Sequence[tuple[float, float]]) -> Result:
    """The share of speed kept beside `count` busy processes; `pairs`: alone, and beside them."""
    turned = [(beside, alone) for alone, beside in pairs]
    found = of_pairs(turned, "tokens_per_s", "alone_tokens_per_s", "kept")
    conditions = {"busy": count, "pairs": len(pairs)}
    verdict = f"keeps {found['kept'].median:.2f} of its speed alone"
    return Result("contended", f"{test} beside {count} busy", conditions, found, verdict)
