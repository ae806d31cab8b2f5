"""Texts of several kinds, as prompt and answer, made from this package's own source."""

import ast
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from localllm import bench as own_package

ROOT = Path(own_package.__file__).parents[1]
EDITED, CODE = "schedule/scheduler.py", "model/packed/int4_schemes.py"
# In the edited file one name is replaced, and a line is added after every twelve.
_RENAMED = ("block", "page")
_LINES_TO_A_NEW_ONE = 12
# In a summary each sentence of its own is followed by this many quoted ones.
_QUOTED_SENTENCES = 3


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and a good answer to it."""

    name: str
    prompt: str
    answer: str


def copying_texts() -> list[Text]:
    """Texts that repeat themselves: an edited file, a summary with quotations, code."""
    source = (ROOT / EDITED).read_text(encoding="utf-8")
    code = (ROOT / CODE).read_text(encoding="utf-8")
    sentences = _sentences()
    quoted, own = sentences[: len(sentences) // 2], sentences[len(sentences) // 2 :]
    return [
        Text("edit this file", source[:3000], _edited(source[:3000])),
        Text("summarise with quotes", " ".join(quoted)[:3000], _summary(quoted, own)),
        Text("code with repeats", code[:3000], _tests(code)),
    ]


def prose() -> Text:
    """English prose, which repeats itself little."""
    sentences = _sentences()
    half = len(sentences) // 2
    return Text("prose", " ".join(sentences[:half])[:3000], " ".join(sentences[half:]))


def _edited(source: str) -> str:
    lines = []
    for number, line in enumerate(source.replace(*_RENAMED).splitlines(keepends=True), 1):
        lines.append(line)
        if number % _LINES_TO_A_NEW_ONE == 0:
            lines.append(f"# line {number} of the old file, which {number + 1} follows\n")
    return "".join(lines)


def _summary(quoted: list[str], own: list[str]) -> str:
    parts = []
    for i, sentence in enumerate(own):
        quotation = " ".join(quoted[i * _QUOTED_SENTENCES : (i + 1) * _QUOTED_SENTENCES])
        parts.append(f"{sentence} “{quotation}”")
    return " ".join(parts)


def _tests(code: str) -> str:
    """A skeleton of a test for each function, as a user might ask for it."""
    parts = ["import pytest\n\nfrom localllm.model.packed import int4_schemes\n"]
    functions = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef)]
    for function in functions:
        names = [argument.arg for argument in function.args.args if argument.arg != "self"]
        given = "".join(f"    {name} = make_{name}(seed=0)\n" for name in names)
        call = f"int4_schemes.{function.name}({', '.join(names)})"
        parts.append(
            f"\n\ndef test_{function.name.strip('_')}_returns_what_is_expected() -> None:\n{given}"
            f"    result = {call}\n"
            f"    assert result == expected_result(int4_schemes.{function.name})\n"
        )
    return "".join(parts)


def _sentences() -> list[str]:
    """The prose of this package: the docstrings of its modules."""
    found = []
    for path in sorted(ROOT.glob("**/*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        text = " ".join(docstring.split())
        ends = [0, *(i + 1 for i, c in enumerate(text) if c == "." and text[i + 1 : i + 2] == " ")]
        found += [text[a:b].strip() for a, b in pairwise([*ends, len(text)])]
    return [sentence for sentence in found if len(sentence) > 20]
