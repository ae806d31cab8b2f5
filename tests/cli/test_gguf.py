"""GGUF files on the command line, by their path."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pocket_gguf import write_pocket

Localllm = Callable[..., Any]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pocket(tmp_path_factory.mktemp("gguf") / "pocket-Q8_0.gguf", "Q8_0")


def test_a_file_answers_and_is_described(file: Path, localllm: Localllm) -> None:
    words = ("What is the KV cache?", "-n", "12", "--keepalive", "0", "--temperature", "0")
    for command, expected in (
        (("chat", str(file), *words), "cache"),
        (("show", str(file)), "Q8_0"),
        (("plan", str(file)), "it fits"),
    ):
        found = localllm(*command)
        assert found.code == 0, found.err
        assert expected in found.out


def test_a_link_answers_and_the_card_names_the_file(
    file: Path, tmp_path: Path, localllm: Localllm
) -> None:
    link, folder = tmp_path / "own/my.gguf", tmp_path / "home/.lmstudio/models/pub/Own-GGUF"
    for each in (link.parent, folder):
        each.mkdir(parents=True)
    stored = Path(shutil.copy(file, folder / "Own-Q8_0.gguf"))
    link.symlink_to(stored)
    for name, quantization in ((str(link), "GGUF Q8_0"), ("own", "GGUF Q8_0")):
        card = json.loads(localllm("show", name, "--json").out)
        told = (card["file"], card["downloaded_by"], card["quantization"])
        assert told == (str(stored), "LM Studio", quantization)
    blob = Path(shutil.copy(file, tmp_path / "sha256-0f"))
    card = json.loads(localllm("show", str(blob), "--json").out)
    assert card["quantization"] == "GGUF, mostly Q8_0"
    assert "downloaded_by" not in card
    found = localllm("chat", str(link), "Hi.", "-n", "2", "--keepalive", "0", "--dtype", "float32")
    assert found.code == 0, found.err
    assert "no kernel multiplies with GGUF blocks here" in found.err
    assert "try: --dtype bfloat16" in found.err


def test_a_file_that_is_cut_short_says_so(file: Path, tmp_path: Path, localllm: Localllm) -> None:
    short = tmp_path / "short.gguf"
    short.write_bytes(file.read_bytes()[:-1000])
    found = localllm("chat", str(short), "Hi.", "--keepalive", "0")
    assert found.code == 7
    assert "cut short" in found.err
