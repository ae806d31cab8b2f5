"""A server as a user starts it, and OpenAI's own client to talk to it."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from openai import OpenAI

ROOT = Path(__file__).parents[2]


@dataclass
class Server:
    """A process of `localllm serve`."""

    process: "subprocess.Popen[bytes]"
    url: str
    log: Path

    def client(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)


def start_server(
    home: Path, *flags: str, model: str = "pocket", within: Sequence[str] = ()
) -> Server:
    """`within`: a command that starts it, with limits say."""
    # A file, not a pipe: a pipe that nobody reads stops who writes.
    log = home / f"log{time.monotonic_ns()}"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*within, sys.executable, "-m", "localllm", "serve", model, "--port", "0", *flags],
            stderr=file,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels"))),
                "HOME": str(home),
                "XDG_CACHE_HOME": str(home),
                "XDG_RUNTIME_DIR": str(home / "run"),
                "OMP_NUM_THREADS": "1",
                "BROWSER": "true",  # what --open starts
            },
        )
    return Server(process, _told(process, log, r"answers at (http://\S+)/v1"), log)


def page_token(server: Server) -> str:
    """The token of the page that `--open` shows, which the file that it opens has."""
    path = _told(server.process, server.log, r"file://(\S+)\n")
    [token] = set(re.findall(r"/#token=([\w-]+)", Path(path).read_text()))
    return token


def _told(process: "subprocess.Popen[bytes]", log: Path, pattern: str) -> str:
    """The pattern's group, as soon as the process writes it into its log."""
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        found = re.search(pattern, log.read_text())
        if found:
            return found[1]
        time.sleep(0.05)
    process.kill()
    raise AssertionError(log.read_text())


def end(server: Server) -> int:
    """Its exit code; nothing that it wrote is a traceback, or the last word of a crash."""
    server.process.terminate()
    code = server.process.wait(timeout=60)
    log = server.log.read_text()
    assert "Traceback" not in log
    assert "terminate called" not in log
    return code


@pytest.fixture(scope="session")
def server_home(compiled_kernels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home whose C library is compiled once for all servers."""
    home = tmp_path_factory.mktemp("server")
    (home / "localllm").mkdir()
    (home / "localllm" / "kernels").symlink_to(compiled_kernels)
    return home


@pytest.fixture(scope="module")
def server(server_home: Path) -> Iterator[Server]:
    """One for all tests of a file."""
    server = start_server(server_home)
    yield server
    assert end(server) == 143  # as a program that was terminated


@pytest.fixture
def client(server: Server) -> OpenAI:
    return server.client()


@pytest.fixture
def serve(server_home: Path) -> Iterator[Callable[..., Server]]:
    """Starts a server with flags, for one test."""
    started = []

    def start(*flags: str, model: str = "pocket") -> Server:
        started.append(start_server(server_home, *flags, model=model))
        return started[-1]

    yield start
    for server in started:
        end(server)


@pytest.fixture(scope="module")
def opened(server_home: Path) -> Iterator[tuple[Server, str]]:
    """A server with `--open`, and the token of its page."""
    server = start_server(server_home, "--open")
    yield server, page_token(server)
    end(server)


@pytest.fixture(scope="session")
def tool_server(server_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The built-in model, which calls tools as Hermes does."""
    from server.tool_calling import tool_calling_server

    with tool_calling_server("hermes", server_home, tmp_path_factory.mktemp("model")) as server:
        yield server
