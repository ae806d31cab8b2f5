"""A GGUF file is opened as a folder, and answers as the checkpoint that it was made from."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pocket_gguf import write_pocket

from localllm import LLM
from localllm.errors import CheckpointError, ExitCode
from localllm.hub.gguf_folder import folder_of
from localllm.model.weight_files import find_weight_files
from localllm.schedule.sampling_params import SamplingParams
from localllm.user.places import cache_folder

PROMPTS = ["What is the KV cache?", "Tell me a story.", "Once upon a time there was"]
GREEDY = SamplingParams(max_tokens=24, temperature=0)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pocket(tmp_path_factory.mktemp("gguf") / "pocket-Q8_0.gguf", "Q8_0")


def test_a_folder_is_made_once_and_again_for_another_file(file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model.gguf"
    copy.write_bytes(file.read_bytes())
    first = folder_of(copy)
    made = (first / "config.json").stat().st_mtime_ns
    assert folder_of(copy) == first
    assert (first / "config.json").stat().st_mtime_ns == made
    assert find_weight_files(first) == [copy]
    defaults = json.loads((first / "generation_config.json").read_text())
    assert defaults == {"temperature": 0.5, "top_k": 20, "eos_token_id": [0, 2]}
    os.utime(copy, ns=(1, 1))
    second = folder_of(copy)
    assert second != first
    copy.unlink()
    folder_of(file)  # makes room: that of a file that is gone is removed
    assert not second.exists()


def test_what_is_unused_for_a_month_is_removed(file: Path, tmp_path: Path) -> None:
    copies = [Path(shutil.copy(file, tmp_path / f"{i}.gguf")) for i in range(3)]
    old, used = (folder_of(each) for each in copies[:2])
    left_over = old.with_name("new-x")
    left_over.mkdir()
    month_ago = time.time() - 31 * 24 * 3600
    for path in (old / "config.json", used / "config.json", left_over):
        os.utime(path, (month_ago, month_ago))
    folder_of(copies[1])
    folder_of(copies[2])
    assert (old.exists(), left_over.exists(), used.exists()) == (False, False, True)


def test_a_file_that_is_replaced_behind_its_folder_is_not_read(file: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(file, tmp_path / "model.gguf"))
    folder = folder_of(copy)
    with copy.open("ab") as data:
        data.write(b"x")
    with pytest.raises(CheckpointError, match="was replaced"):
        find_weight_files(folder)
    shutil.copy(file, copy)
    os.utime(copy, ns=(1, 1))
    with pytest.raises(CheckpointError, match="was replaced"):
        find_weight_files(folder)
    assert find_weight_files(folder_of(copy)) == [copy]


def test_without_a_cache_the_folder_is_kept_for_the_session(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = tmp_path / "taken"
    taken.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(taken / "cache"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    folder = folder_of(file)
    assert folder.is_relative_to(tmp_path / "run")
    assert find_weight_files(folder) == [file]
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(taken / "run"))
    with pytest.raises(CheckpointError, match="no place") as caught:
        folder_of(file)
    assert caught.value.exit_code == ExitCode.DISK
    assert "XDG_CACHE_HOME" in caught.value.hint


def test_two_links_to_a_file_do_not_depend_on_each_other(file: Path, tmp_path: Path) -> None:
    """As two revisions in the hub's cache have one blob, and one of them may be removed."""
    repository = tmp_path / "models--org--name"
    blob = repository / "blobs" / "aa"
    blob.parent.mkdir(parents=True)
    blob.write_bytes(file.read_bytes())
    links = [repository / "snapshots" / each / "model.gguf" for each in ("1", "2")]
    for link in links:
        link.parent.mkdir(parents=True)
        link.symlink_to(blob)
        assert find_weight_files(folder_of(link)) == [link]
    links[0].unlink()
    assert find_weight_files(folder_of(links[1])) == [links[1]]


def test_the_place_is_that_of_the_file_and_not_of_a_link_to_its_folder(
    file: Path, tmp_path: Path
) -> None:
    """Such a link may lead elsewhere later, and the folder would stand for another file."""
    model = tmp_path / "1" / "model.gguf"
    model.parent.mkdir()
    model.write_bytes(file.read_bytes())
    (tmp_path / "newest").symlink_to("1")
    assert find_weight_files(folder_of(tmp_path / "newest" / "model.gguf")) == [model]


@pytest.mark.parametrize("name", [b"\xc3\xb6.gguf", b"\xff.gguf"])
def test_neither_a_locale_nor_bytes_of_a_name_matter(
    file: Path, tmp_path: Path, name: bytes
) -> None:
    path = Path(os.fsdecode(bytes(tmp_path) + b"/" + name))
    path.write_bytes(file.read_bytes())
    code = (
        "import sys; from pathlib import Path; from localllm.hub.gguf_folder import folder_of;"
        "from localllm.model.weight_files import find_weight_files;"
        "assert find_weight_files(folder_of(Path(sys.argv[1]))) == [Path(sys.argv[1])]"
    )
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    subprocess.run([sys.executable, "-c", code, path], env=os.environ | ascii_only, check=True)
    assert not [*cache_folder("gguf").parent.glob("gguf-*")]


def test_only_folders_of_our_own_stand_for_other_files(file: Path, tmp_path: Path) -> None:
    made = folder_of(file)
    assert made.parent == cache_folder("gguf")
    foreign = tmp_path / "model"
    foreign.mkdir()
    (foreign / "gguf.json").write_bytes((made / "gguf.json").read_bytes())
    with pytest.raises(CheckpointError, match="no weights here"):
        find_weight_files(foreign)


def test_exact_weights_give_the_text_of_the_checkpoint(tmp_path: Path) -> None:
    whole = write_pocket(tmp_path / "pocket.gguf")
    expected = LLM("pocket", dtype="float32").generate(PROMPTS, GREEDY)
    found = LLM(str(whole), dtype="float32").generate(PROMPTS, GREEDY)
    assert [each.text for each in found] == [each.text for each in expected]


def test_text_does_not_depend_on_company(file: Path) -> None:
    llm = LLM(str(file))
    sampled = SamplingParams(max_tokens=24, temperature=0.8, seed=7)
    together = [each.text for each in llm.generate(PROMPTS, sampled)]
    assert [llm.generate([each], sampled)[0].text for each in PROMPTS] == together
    assert len(set(together)) == 3
