"""Makes pictures for the README: what a terminal shows, as SVG under docs/pictures.

    PYTHONPATH=.:kernels:tests python tools/screenshots.py [NAME...]

Each scene runs in a pseudo-terminal, whose screen is drawn cell by cell. The model of the
conversation outputs a given text; the rest is what a user sees. No scene shows times measured here,
or what is on this machine: its picture would change with every run.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyte
from checkpoints import tiny_config, write_checkpoint
from rich.console import Console
from rich.style import Style
from rich.text import Text
from window import Window

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
COLUMNS = 92
ANSWER = """\
A generator keeps its place between calls, so the list never has to be in memory:

```python
def primes(limit: int) -> Iterator[int]:
    found: list[int] = []
    for n in range(2, limit):
        if all(n % p for p in found):
            found.append(n)
            yield n
```

| | list | generator |
|---|--:|--:|
| memory | all of it | one element |
| first element | at the end | **at once** |
"""


def draw(window: Window, name: str, title: str) -> None:
    """Draw the screen of a window as a picture, without the empty rows at its end."""
    rows = [_row(window.screen, y) for y in range(window.screen.lines)]
    while rows and not rows[-1].plain.strip():
        rows.pop()
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=window.screen.columns, file=nowhere)
        for row in rows:
            console.print(row, no_wrap=True, overflow="crop")
    PICTURES.mkdir(exist_ok=True)
    path = PICTURES / f"{name}.svg"
    # A fixed name for the styles, so that the same picture gives the same file.
    path.write_text(console.export_svg(title=title, unique_id=name), encoding="utf-8")


def _row(screen: pyte.Screen, y: int) -> Text:
    row = Text()
    for x in range(screen.columns):
        cell = screen.buffer[y][x]
        row.append(cell.data, _style(cell))
    row.rstrip()
    return row


def _style(cell: pyte.screens.Char) -> Style:
    def colour(name: str) -> str | None:
        if name == "default":
            return None
        if len(name) == 6 and all(c in "0123456789abcdef" for c in name):
            return f"#{name}"
        return name.replace("brown", "yellow").replace("bright", "bright_")

    return Style(
        color=colour(cell.fg),
        bgcolor=colour(cell.bg),
        bold=cell.bold,
        italic=cell.italics,
        underline=cell.underscore,
        reverse=cell.reverse,
    )


def _command(home: Path, *arguments: str, rows: int = 40, **variables: str) -> Window:
    os.environ.update({"HOME": str(home), **variables})
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "HF_ENDPOINT"):
        if name not in variables:
            os.environ.pop(name, None)
    window = Window(["-m", "localllm", *arguments], COLUMNS, rows, home / "data")
    window.screen.reset()
    return window


def _finished(window: Window) -> Window:
    while window.process.poll() is None:
        window.pump()
    window.settle()
    return window


def chat(home: Path) -> None:
    """An answer with code and a table, while it is being generated."""
    folder = write_checkpoint(home / "model", tiny_config("Qwen3ForCausalLM"))
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    answer = home / "answer.md"
    answer.write_text(ANSWER)
    os.environ["HOME"] = str(home)
    script = str(ROOT / "tests" / "scripted.py")
    command = [script, str(folder), str(answer), "--step-ms=2"]
    window = Window(command, COLUMNS, 21, home / "data", tells_cursor=True)
    window.wait_for(r"> ?")
    window.settle()
    window.say("Why should I write this as a generator?")
    window.wait_for("at once")
    window.wait_for(r"session 1 · context")  # the line below the prompt
    draw(window, "chat", "localllm chat")
    window.process.kill()


def plan(home: Path) -> None:
    """One model, one GPU."""
    window = _command(home, "plan", "qwen3-8b", "--gpu", "rtx-4060")
    draw(_finished(window), "plan", "localllm plan qwen3-8b --gpu rtx-4060")


SCENES: dict[str, Callable[[Path], None]] = {scene.__name__: scene for scene in (chat, plan)}


def main() -> None:
    """Draw the named scenes, or all of them."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        for name in sys.argv[1:] or SCENES:
            began = time.monotonic()
            SCENES[name](home)
            sys.stderr.write(f"{name} {time.monotonic() - began:.0f} s\n")


if __name__ == "__main__":
    main()
