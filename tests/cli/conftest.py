"""Running the command line in this process."""

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from localllm.cli.main import run


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def localllm(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Outcome]:
    """A function that runs the command: `localllm("chat", "hi", stdin=b"piped")`."""

    def call(*arguments: str, stdin: bytes = b"") -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capfdbinary.readouterr()
        code = run(arguments)
        captured: Any = capfdbinary.readouterr()
        return Outcome(code, captured.out.decode("utf-8"), captured.err.decode("utf-8"))

    return call
