"""A server as a user starts it, and OpenAI's own client to talk to it."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from openai import OpenAI

ROOT = Path(__file__).parents[2]


@dataclass
class Server:
    """A process of `localllm serve`."""

    process: "subprocess.Popen[str]"
    url: str

    def client(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)


def start_server(home: Path, *flags: str) -> Server:
    process = subprocess.Popen(
        [sys.executable, "-m", "localllm", "serve", "pocket", "--port", "0", *flags],
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels"))),
            "HOME": str(home),
            "XDG_CACHE_HOME": str(home),
            "OMP_NUM_THREADS": "1",
        },
    )
    assert process.stderr is not None
    told = ""
    for line in process.stderr:
        told += line
        found = re.search(r"answers at (http://\S+)/v1", line)
        if found:
            return Server(process, found[1])
    raise AssertionError(told)


def end(server: Server) -> int:
    server.process.terminate()
    return server.process.wait(timeout=60)


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

    def start(*flags: str) -> Server:
        started.append(start_server(server_home, *flags))
        return started[-1]

    yield start
    for server in started:
        end(server)
