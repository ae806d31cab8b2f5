"""A GGUF file is opened as a folder, and answers as the checkpoint that it was made from."""

import json
import os
from pathlib import Path

import pytest
from pocket_gguf import write_pocket

from localllm import LLM
from localllm.errors import CheckpointError
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
