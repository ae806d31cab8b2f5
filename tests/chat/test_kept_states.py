"""What `/why` says where a prompt goes on from a kept state."""

from pathlib import Path

import pytest
from checkpoints import write_checkpoint
from every_family import small_config

from localllm import LLM, SamplingParams
from localllm.chat.conversation import ChatSession
from localllm.cli.draw.figures import describe_cache

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture
def llm(tmp_path: Path) -> LLM:
    config = {**small_config("Qwen3_5ForCausalLM"), "max_position_embeddings": 2048}
    return LLM(str(write_checkpoint(tmp_path / "model", config)), max_num_seqs=1)


def test_the_state_that_a_prompt_goes_on_from_is_told(llm: LLM) -> None:
    said = ChatSession(llm.model, system="You know a lot about the sea and its animals. " * 4)

    def ask(question: str) -> list[str]:
        completion, events = said.reply(question, PARAMS)
        for _ in events:
            pass
        report = said.report_cache()
        assert report is not None
        return describe_cache(report, completion)

    first = ask("How deep do whales dive, and how long do they stay down there?")
    assert not any("state kept" in line for line in first)
    told = ask("And seals?")
    assert any("it went on from the state kept at token" in line for line in told)
