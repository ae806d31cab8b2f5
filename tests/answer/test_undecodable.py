"""A decoder that fails on some tokens costs the requests that have them, and no other."""

from collections import deque
from pathlib import Path
from typing import Any

import pytest
from checkpoints import tiny_config, write_checkpoint

from localllm import LLM
from localllm.errors import RequestError
from localllm.schedule.request import FinishReason
from localllm.schedule.sampling_params import SamplingParams
from localllm.text.prompt import Conversation, Text

# It panics on a text that is nothing but such letters.
STRIP = {"type": "Strip", "content": "a", "start": 0, "stop": 3}
BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


@pytest.fixture
def stripping(tmp_path: Path, edit_json: Any) -> LLM:
    folder = write_checkpoint(tmp_path / "model", tiny_config("Qwen3ForCausalLM"))
    decoders = [BYTES, {"type": "Fuse"}, STRIP]
    edit_json(folder / "tokenizer.json", decoder={"type": "Sequence", "decoders": decoders})
    return LLM(str(folder), max_num_seqs=2)


def test_only_the_request_with_such_tokens_fails(stripping: LLM) -> None:
    model = stripping.model
    a, b = (model.tokenizer.vocabulary()[letter] for letter in "ab")
    asked = []
    for token_id in (a, b):
        params = SamplingParams(logit_bias={token_id: 100.0}, temperature=0, max_tokens=4)
        asked.append(model.ask(Conversation([{"role": "user", "content": "hi"}]), params))
    for _, events in asked:
        deque(events, maxlen=0)
    failed, whole = (completion for completion, _ in asked)
    assert failed.finish_reason is FinishReason.ERROR
    assert "the text of these tokens cannot be told" in str(failed.error)
    assert (whole.text, whole.error) == ("bbbb", None)
    with pytest.raises(RequestError, match="cannot be told"):
        model.ask(Text("a"), SamplingParams(max_tokens=2))
    [again] = stripping.generate("hi", logit_bias={b: 100.0}, temperature=0, max_tokens=2)
    assert again.text == "bb"
