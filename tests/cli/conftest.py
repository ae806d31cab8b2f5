"""Running the command line in this process."""

import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fork_server import ROOT
from window import Open, Window

from localllm.cli.main import run

QWEN_LIKE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not "
    "enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


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


@pytest.fixture
def open_window(tmp_path: Path, make_checkpoint) -> Iterator[Open]:  # type: ignore[no-untyped-def]
    """Opens the conversation with a model that says what it is told to."""
    windows = []
    folder = make_checkpoint()
    (folder / "chat_template.jinja").write_text(QWEN_LIKE)

    def start(
        *answers: str,
        columns: int = 80,
        rows: int = 40,
        step_ms: float = 1,
        prefill_steps: int = 0,
        flags: tuple[str, ...] = (),
        tells_cursor: bool = False,
    ) -> Window:
        paths = []
        for i, answer in enumerate(answers):
            path = tmp_path / f"answer{i}.md"
            path.write_text(answer)
            paths.append(str(path))
        command = [
            str(ROOT / "tests/scripted.py"),
            str(folder),
            *paths,
            f"--step-ms={step_ms}",
            f"--prefill-steps={prefill_steps}",
            *flags,
        ]
        home = tmp_path / "data"
        window = Window(command, columns, rows, home, tells_cursor=tells_cursor)
        windows.append(window)
        window.wait_for(r"^> ?$|\n> ?(\n|$)")
        return window

    yield start
    for window in windows:
        window.close()
