"""The server that a program asks: one that runs already, or a new one that ends with it."""

import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from localllm.answer.overflow import UNKNOWN_CONTEXT
from localllm.attach.remote import open_remote
from localllm.attach.server_records import own_servers
from localllm.errors import ExitCode, LocalLLMError
from localllm.files.private_files import make_private_folder
from localllm.launch.settings import Endpoint
from localllm.user.places import runtime_folder

_ENDS_S, _PAUSE_S = 40.0, 0.05
_MOST_NAME_CHARS = 300
# Of a server that does not tell its context.
USUAL_CONTEXT = 32768


def find_server(port: int, key: str) -> Endpoint | None:
    """This user's server on `port`; None if none of theirs listens there, and then nothing is sent
    to whatever does.

    Raises: LocalLLMError for a wrong key.
    """
    url = next((server.url for server in own_servers() if server.port == port), None)
    return None if url is None else ask_server(url, None, key)


def ask_server(url: str, model: str | None, key: str) -> Endpoint:
    """The server at `url`, which is trusted with the key, and `model` or its first model.

    Raises: LocalLLMError.
    """
    found = open_remote(url, model, key or None)
    name, length = found.name, found.context.length
    # It becomes a word of a command line, a variable, and a line on the terminal.
    if not name.isprintable() or name.startswith("-") or len(name) > _MOST_NAME_CHARS:
        raise LocalLLMError(
            f"the model at {url} has a name that no program can be given: {name!r:.60}",
            hint="localllm serve --served-model-name NAME",
        )
    return Endpoint(url, name, USUAL_CONTEXT if length == UNKNOWN_CONTEXT else length, key)


@contextmanager
def started_server(
    model: str, port: int, flags: Sequence[str], tell: Callable[[str], None]
) -> Iterator[Endpoint]:
    """A server for `model`, with a key of its own, that ends with the block. `tell` gets what it
    says until it is ready.

    Raises: LocalLLMError if it ends before that; OSError if there is no private folder for it.
    """
    key = secrets.token_hex(16)
    command = [sys.executable, "-m", "localllm", "serve", model, "--port", str(port), *flags]
    command += ["--quiet"]
    make_private_folder(runtime_folder())  # in which the server records itself
    with tempfile.TemporaryFile("w+b") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stderr=log,
            # By a variable: the command is for all users to see.
            env={**os.environ, "LOCALLLM_API_KEY": key},
            start_new_session=True,  # Ctrl-C is for the program
        )
        try:
            yield ask_server(_wait_until_ready(process, log.fileno(), tell), None, key)
        finally:
            process.terminate()
            try:
                process.wait(_ENDS_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(
    process: "subprocess.Popen[bytes]", log: int, tell: Callable[[str], None]
) -> str:
    """The address, once the server has recorded it: what it says may come from a model's files.

    Raises: LocalLLMError.
    """
    told = place = 0
    text = ""
    while True:
        has_ended = process.poll() is not None
        for server in own_servers():
            if server.pid == process.pid:
                return server.url
        piece = os.pread(log, 1 << 16, place)
        place += len(piece)
        text += piece.decode(errors="replace")
        *lines, _ = re.split(r"[\r\n]+", text)
        for line in lines[told:]:
            tell(line)
        told = max(told, len(lines))
        if has_ended and not piece:
            code = process.returncode
            raise LocalLLMError(
                "the server ended before it was ready; what it said stands above",
                exit_code=ExitCode(code) if code in set(ExitCode) else None,
            )
        time.sleep(_PAUSE_S)
