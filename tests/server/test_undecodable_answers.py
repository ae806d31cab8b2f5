"""A decoder that panics on some tokens costs the requests that have them a refusal."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from checkpoints import tiny_config, write_checkpoint
from server.conftest import Server

BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
# It panics on a text that is nothing but such letters.
STRIP = {"type": "Strip", "content": "a", "start": 0, "stop": 3}


def test_such_a_request_is_refused_and_the_next_is_answered(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "model", tiny_config("Qwen3ForCausalLM"))
    path = folder / "tokenizer.json"
    state = json.loads(path.read_text())
    state["decoder"] = {"type": "Sequence", "decoders": [BYTES, {"type": "Fuse"}, STRIP]}
    path.write_text(json.dumps(state))
    server = serve("--any-model-name", model=str(folder))

    def ask(where: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{server.url}{where}", json={"model": "x", **body}, timeout=60)

    def answer(letter: str) -> httpx.Response:
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0}
        bias = {str(state["model"]["vocab"][letter]): 100}
        return ask("/v1/chat/completions", **chat, logit_bias=bias)

    for refused in (answer("a"), ask("/detokenize", tokens=[state["model"]["vocab"]["a"]])):
        assert refused.status_code == 400
        assert "the text of these tokens cannot be told" in refused.json()["error"]["message"]
    assert answer("b").json()["choices"][0]["message"]["content"] == "bbb"
