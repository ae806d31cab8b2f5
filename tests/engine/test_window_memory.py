"""What a model with windows takes for its keys and values, as planned and as written."""

from pathlib import Path

import pytest
import torch
from checkpoints import tiny_config, write_checkpoint

from localllm import LLM, SamplingParams
from localllm.model.paged_kv_cache import PagedKVCache

WINDOW, LAYERS = 512, 6


def written_bytes(cache: PagedKVCache) -> int:
    """Bytes of the blocks that hold keys."""
    total = 0
    for stack in cache.stacks:
        is_written = stack.key.ne(0).flatten(2).any(2).any(0)
        total += int(is_written.sum()) * (stack.key[:, 0].nbytes + stack.value[:, 0].nbytes)
    return total


@pytest.mark.parametrize("num_tokens", [1000, 8000])
def test_a_request_takes_what_was_planned_for_it(num_tokens: int, tmp_path: Path) -> None:
    config = tiny_config(
        "Gemma3ForCausalLM",
        hidden_act="gelu_pytorch_tanh",
        sliding_window=WINDOW,
        num_hidden_layers=LAYERS,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        max_position_embeddings=8192,
    )
    llm = LLM(
        str(write_checkpoint(tmp_path / "model", config)),
        max_model_len=num_tokens,
        max_num_seqs=1,
        max_num_batched_tokens=256,
        enable_prefix_caching=False,
        dtype="float32",
    )
    prompt = [(7 * i + 3) % 200 for i in range(num_tokens - 4)]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    [answer] = llm.generate([prompt], params)
    assert answer.error is None
    cache = llm.model.text_engine.engine._runner._kv_cache  # type: ignore[attr-defined]
    planned = sum(stack.key.nbytes + stack.value.nbytes for stack in cache.stacks)
    written = written_bytes(cache)
    assert written == pytest.approx(planned, rel=0.05)
    # A full model would keep every layer's keys and values of every token: two heads of 16.
    of_a_layer = 2 * 2 * 16 * torch.float32.itemsize
    windows = 5 * min(num_tokens, WINDOW + 256 + 16) * of_a_layer
    assert written == pytest.approx(windows + num_tokens * of_a_layer, rel=0.05)
    llm.close()
