"""The server that a program asks: one that runs already, or a new one that ends with it."""

import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from localllm.errors import ExitCode, LocalLLMError, RequestError
from localllm.launch.settings import Endpoint

_LOOKS_FOR_S, _ENDS_S, _PAUSE_S = 2.0, 40.0, 0.05


def find_server(url: str, key: str) -> Endpoint | None:
    """The server of ours at `url`; None if there is none. Raises: RequestError for a wrong key."""
    try:
        health = _get(f"{url}/health", key)
        if "load" not in health:
            return None
        [model] = _get(f"{url}/v1/models", key)["data"]
        return Endpoint(url, model["id"], int(model["max_model_len"]), key)
    except urllib.error.HTTPError as error:
        if error.code == 401:
            raise RequestError(
                f"the server at {url} needs {'another' if key else 'a'} key",
                param="api_key",
                hint="set LOCALLLM_API_KEY, or choose another --port",
            ) from error
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _get(url: str, key: str) -> Any:
    request = urllib.request.Request(url)
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=_LOOKS_FOR_S) as response:
        return json.loads(response.read(1 << 20))


@contextmanager
def started_server(
    model: str, port: int, flags: Sequence[str], tell: Callable[[str], None]
) -> Iterator[Endpoint]:
    """A server for `model`, with a key of its own, that ends with the block. `tell` gets what it
    says until it is ready.

    Raises: LocalLLMError if it ends before that.
    """
    key = secrets.token_hex(16)
    command = [sys.executable, "-m", "localllm", "serve", model, "--port", str(port), *flags]
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
            url = _wait_until_ready(process, log.fileno(), tell)
            found = find_server(url, key)
            if found is None:
                raise LocalLLMError(f"the server at {url} does not answer")
            yield found
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
    """The address, once the server has told it. Raises: LocalLLMError."""
    told = place = 0
    text = ""
    while True:
        has_ended = process.poll() is not None
        piece = os.pread(log, 1 << 16, place)
        place += len(piece)
        text += piece.decode(errors="replace")
        *lines, _ = re.split(r"[\r\n]+", text)
        for line in lines[told:]:
            if found := re.search(r"answers at (http://\S+)/v1", line):
                return found[1]
            tell(line)
        told = max(told, len(lines))
        if has_ended and not piece:
            code = process.returncode
            raise LocalLLMError(
                "the server ended before it was ready; what it said stands above",
                exit_code=ExitCode(code) if code in set(ExitCode) else None,
            )
        time.sleep(_PAUSE_S)
