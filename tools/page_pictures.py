"""Takes the pictures of the page in the README: `pip install playwright`, a Chromium on the path,
and `python tools/page_pictures.py`.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
QUESTIONS = ("What is the KV cache?", "How does prefix caching work?")


def main() -> None:
    """Start a server with a home of its own, ask, and take pictures."""
    with tempfile.TemporaryDirectory() as home:
        process = subprocess.Popen(
            [sys.executable, "-m", "localllm", "serve", "pocket", "--port", "0", "--open"],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "BROWSER": "true", "XDG_DATA_HOME": home},
        )
        assert process.stderr is not None
        path = next(
            found[1] for line in process.stderr if (found := re.search(r"file://(\S+)", line))
        )
        [url] = set(re.findall(r"http://[\w.:]+/#token=[\w-]+", Path(path).read_text()))
        try:
            _take(url)
        finally:
            process.terminate()
            process.wait()


def _take(url: str) -> None:
    with sync_playwright() as running:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        chromium = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for name, scheme, size in (
            ("light", "light", (1100, 760)),
            ("dark", "dark", (1100, 760)),
            ("phone", "light", (390, 760)),
        ):
            page = chromium.new_page(
                color_scheme=scheme,  # type: ignore[arg-type]
                viewport={"width": size[0], "height": size[1]},
                device_scale_factor=1,
            )
            page.goto(url)
            page.get_by_role("heading", name="pocket").wait_for()
            for question in QUESTIONS:
                _ask(page, question)
            page.screenshot(path=PICTURES / f"page-{name}.png")
            page.close()
        chromium.close()


def _ask(page: Page, question: str) -> None:
    page.get_by_label("Your question").fill(question)
    page.get_by_label("Your question").press("Enter")
    page.get_by_role("status").get_by_text(re.compile("complete|Error")).wait_for()


if __name__ == "__main__":
    main()
