"""The process of a Worker: `python -m localllm.untrusted.worker_process FD`; see messages.py.

It can neither write files nor take more memory than a job may. A system timer ends it if a job
exceeds its time and nobody is left to kill it.
"""

import resource
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial

from localllm.errors import LocalLLMError
from localllm.process.frames import Unpacker, received
from localllm.process.memory import address_bytes, return_large_blocks
from localllm.process.messages import Failed
from localllm.untrusted.messages import (
    FROM_WORKER,
    TO_WORKER,
    FromWorker,
    Job,
    Jobs,
    Opened,
    OpenGrammars,
    Opening,
    OpenTexts,
    Stopped,
)

_MAX_MESSAGE_BYTES = 1 << 30
# Memory beyond what the process has when a job begins, plus this for each byte of the job's input:
# an encoded text takes some hundred bytes a token.
JOB_BYTES, JOB_BYTES_PER_BYTE = 512 << 20, 128
# A vocabulary takes some ten times the size of its file.
OPEN_BYTES, OPEN_BYTES_PER_BYTE = 1 << 30, 16
_OPEN_S, _SPARE_S = 60.0, 2.0


def open_jobs(opening: Opening) -> Jobs:
    """The function that does the jobs for `opening`. Raises: LocalLLMError."""
    match opening:
        case OpenTexts():
            from localllm.untrusted.text_jobs import open_text_jobs

            return open_text_jobs(opening)
        case OpenGrammars():
            from localllm.untrusted.grammar_jobs import open_grammar_jobs

            return open_grammar_jobs(opening)


def _limit(num_bytes: int) -> None:
    """Limit the process to `num_bytes` more than it has now."""
    taken = address_bytes()
    if taken == 0:
        return  # the system does not report it; only time is limited then
    soft = taken + num_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _answer(work: Callable[[], FromWorker], seconds: float, num_bytes: int) -> FromWorker:
    _limit(num_bytes)
    signal.setitimer(signal.ITIMER_REAL, seconds + _SPARE_S)  # SIGALRM ends a process
    try:
        return work()
    except LocalLLMError as error:
        return Failed(error)
    except MemoryError:
        return Stopped(f"it took over {num_bytes >> 20:,} MB of memory")
    except BaseException as error:  # panics of Rust code are not Exceptions
        return Stopped(f"{type(error).__name__}: {error!s:.200}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> int:
    """Run the process; returns its exit code."""
    return_large_blocks()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    channel = socket.socket(fileno=int(sys.argv[1]))
    messages = received(channel, Unpacker(TO_WORKER, _MAX_MESSAGE_BYTES))
    opening = next(messages, None)
    if opening is None or isinstance(opening, Job):
        return 0
    do: Jobs | None = None

    def open_() -> Opened:
        nonlocal do
        do = open_jobs(opening)
        return Opened()

    room = OPEN_BYTES + OPEN_BYTES_PER_BYTE * opening.num_bytes
    channel.sendall(FROM_WORKER.pack(_answer(open_, _OPEN_S, room)))
    if do is None:
        return 1
    for message in messages:
        if not isinstance(message, Job):
            return 1
        room = JOB_BYTES + JOB_BYTES_PER_BYTE * message.work.num_bytes
        reply = _answer(partial(do, message.work), message.seconds, room)
        channel.sendall(FROM_WORKER.pack(reply))
    return 0


if __name__ == "__main__":
    sys.exit(main())
