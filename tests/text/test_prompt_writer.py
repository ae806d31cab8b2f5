"""Prompts that are far too long are refused before they are encoded whole."""

from typing import Any

import pytest

from localllm.errors import ContextLengthError
from localllm.hub.checkpoint import open_checkpoint
from localllm.text.context import Context
from localllm.text.prompt import Conversation
from localllm.text.prompt_writer import PromptWriter

LONG = "word " * 20_000


@pytest.mark.parametrize("arguments", [LONG, {"text": LONG}], ids=["text", "object"])
def test_arguments_of_calls_count(arguments: Any) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    writer = PromptWriter(open_checkpoint().tokenizer, Context(64, "another model"))
    with pytest.raises(ContextLengthError, match="has over"):
        writer.write(Conversation([{"role": "user", "content": "hi"}, said]))
