"""The page that leads a newcomer through the code goes where a question goes."""

import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "follow-one-token.md").read_text()
# A link to a file, and behind it the function that is read there.
ENTERED = re.findall(r"\]\(\.\./([\w/.]+)\)\s`([\w.]+)`: ", PAGE)


def test_no_file_is_entered_more_than_twice() -> None:
    entries = Counter(re.findall(r"\]\(\.\./([\w/.]+)\)", PAGE))
    assert [file for file, count in entries.items() if count > 2] == []
    assert len(ENTERED) == len(re.findall(r"^\d+\. ", PAGE, re.MULTILINE)) > 40


def test_the_files_stand_in_the_order_in_which_a_question_passes_through_them(
    localllm: Callable[..., Any],
) -> None:
    called: dict[tuple[str, str], None] = {}
    wanted = {(str(ROOT / file), function): (file, function) for file, function in ENTERED}

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and (code.co_filename, code.co_qualname) in wanted:
            called.setdefault(wanted[code.co_filename, code.co_qualname])

    sys.setprofile(note)
    try:
        outcome = localllm(
            *("chat", "pocket", "What is the KV cache?", "-n", "1", "--keepalive", "0", "--no-save")
        )
    finally:
        sys.setprofile(None)
    assert outcome.code == 0, outcome.err
    assert list(called) == ENTERED
