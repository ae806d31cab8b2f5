"""Gemma 4's assistants draft as transformers' do, from the target's own keys and values."""

import json
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from assistants import KINDS, NUM_ACTIVE, NUM_CLUSTERS, found_in, write_assistant
from checkpoints import VOCAB_SIZE, tiny_config, write_checkpoint
from drafting import eager
from in_turns import in_turns
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4UnifiedAssistantForCausalLM,
    Gemma4UnifiedForCausalLM,
)

from localllm.drafting.assistant_drafter import AssistantDrafter
from localllm.drafting.speculation_config import SpeculationConfig
from localllm.engine.config import EngineConfig
from localllm.engine.engine import Engine
from localllm.engine.loading import load_engine
from localllm.errors import CheckpointError, RequestError, UnsupportedModelError
from localllm.model.families.table import read_architecture
from localllm.schedule.sampling_params import SamplingParams
from localllm.schedule.scheduler import ScheduledBatch

WINDOW, DEPTH, MOST = 24, 3, 2e-4
PROMPTS = [[7, 9, 11, 200, 5] * 8, list(range(20, 90)), [5, 6]]
TARGETS: dict[str, dict[str, Any]] = {
    "keys of its last layers (31B)": {},
    "shared keys, inputs of each layer (E2B)": {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "num_kv_shared_layers": 2,
    },
    "keys as values": {"attention_k_eq_v": True, "num_global_key_value_heads": 2},
    "unified (12B)": {"model_type": "gemma4_unified_text"},
}


def write_target(folder: Path, **changes: Any) -> None:
    sizes = {
        "model_type": "gemma4_text",
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": 4,
        "layer_types": KINDS * 2,
        "sliding_window": WINDOW,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 0,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        **changes,
    }
    prefix = "Gemma4Unified" if "unified" in sizes["model_type"] else "Gemma4"
    config = {
        name: value
        for name, value in tiny_config(f"{prefix}ForCausalLM", **sizes).items()
        if value is not None
    }
    write_checkpoint(folder, config)


def engine_in(folder: Path, drafter: str = "auto") -> Engine:
    architecture = read_architecture(folder / "target")
    config = EngineConfig(
        device="cpu",
        backend="torch",
        kv_cache_tokens=640,
        max_model_len=256,
        speculation=SpeculationConfig(drafter=drafter),
    )
    found = found_in(folder / "assistant", architecture)
    return load_engine(folder / "target", architecture, config, frozenset(), head=found)


def oracle_in(
    folder: Path, *, is_unified: bool
) -> Callable[[tuple[int, ...], int], tuple[Tensor, ...]]:
    """The logits of the tokens drafted behind some of a text's tokens, as the text has them."""
    of_target = Gemma4UnifiedForCausalLM if is_unified else Gemma4ForCausalLM
    of_own = Gemma4UnifiedAssistantForCausalLM if is_unified else Gemma4AssistantForCausalLM
    loading: dict[str, Any] = {"attn_implementation": "eager", "output_loading_info": True}
    target, _ = of_target.from_pretrained(folder / "target", **loading)
    assistant, info = of_own.from_pretrained(folder / "assistant", **loading)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]

    @lru_cache
    def of_text(text: tuple[int, ...]) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        asked = {"output_hidden_states": True, "return_shared_kv_states": True}
        with torch.no_grad():
            found = target(torch.tensor([text]), use_cache=False, **asked)
        keys = {kind: found.shared_kv_states[kind] for kind in KINDS}
        # Those that the next token sees besides itself.
        seen = {"sliding_attention": slice(1 - WINDOW, None), "full_attention": slice(None)}
        shared = {
            kind: (first[:, :, seen[kind]], second[:, :, seen[kind]])
            for kind, (first, second) in keys.items()
        }
        return found.hidden_states[-1][:, -1:], shared

    @torch.no_grad()
    def logits_of(text: tuple[int, ...], end: int) -> tuple[Tensor, ...]:
        hidden, shared = of_text(text[: end - 1])
        position, found = torch.tensor([[end - 1]]), []
        for token in text[end - 1 :]:
            embedded = target.get_input_embeddings()(torch.tensor([[token]]))
            out = assistant(
                inputs_embeds=torch.cat((embedded, hidden), -1),
                position_ids=position,
                shared_kv_states=shared,
            )
            hidden = out.last_hidden_state
            found.append(out.logits[0, 0])
        return tuple(found)

    return logits_of


@pytest.mark.parametrize(("name", "has_clusters"), in_turns(list(TARGETS), [False, True]))
def test_an_assistant_drafts_as_in_transformers(
    name: str, has_clusters: bool, tmp_path: Path
) -> None:
    """Three tokens deep, behind texts that are shorter and longer than the window, in one batch and
    over a cached prefix.
    """
    is_unified = "unified" in name
    write_target(tmp_path / "target", **TARGETS[name])
    write_assistant(tmp_path / "assistant", 48, has_clusters=has_clusters, is_unified=is_unified)
    engine, oracle = engine_in(tmp_path), oracle_in(tmp_path, is_unified=is_unified)
    assert engine.speculator is not None
    drafter = engine.speculator.proposers[-1].drafter
    assert isinstance(drafter, AssistantDrafter)
    seen = list[tuple[tuple[int, ...], int, Tensor]]()
    runner: Any = drafter._runner
    forward = runner.forward

    def recorded(batch: ScheduledBatch, hidden: Tensor | None = None) -> Tensor:
        logits: Tensor = forward(batch, hidden)
        for entry, row in zip(batch.requests, logits, strict=True):
            assert entry.num_seen is not None
            seen.append((tuple(entry.request.token_ids), entry.num_seen + 1, row))
        return logits

    runner.forward = recorded
    engine = engine.beside(speculator=eager(drafter, DEPTH))
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    for _ in range(2):
        for prompt in PROMPTS:
            engine.add_request(prompt, params)
        while engine.has_unfinished():
            engine.step()
    assert {len(text) - end for text, end, _ in seen} == set(range(DEPTH))
    assert len(seen) > 100
    for text, end, row in seen:
        expected = oracle(text, end)[-1]
        if has_clusters:
            finite = row.isfinite()
            assert int(finite.sum()) == NUM_ACTIVE * VOCAB_SIZE // NUM_CLUSTERS
            row, expected = row[finite], expected[finite]
        torch.testing.assert_close(row, expected, atol=MOST, rtol=MOST)


def test_an_assistant_of_another_model_is_refused(tmp_path: Path) -> None:
    target, folder = tmp_path / "target", tmp_path / "assistant"
    write_target(target)
    architecture = read_architecture(target)
    write_assistant(folder, 64)
    with pytest.raises(RequestError, match="it is for a model that is 64 wide, not 48"):
        found_in(folder, architecture)
    write_assistant(folder, 48, global_head_dim=16)
    with pytest.raises(RequestError, match=r"read 2 heads of 16 of keys.* have 2 heads of 32"):
        found_in(folder, architecture)
    write_assistant(folder, 48, vocab_size=300)
    with pytest.raises(RequestError, match="it has 300 tokens, the model 288"):
        found_in(folder, architecture)
    write_checkpoint(tmp_path / "dense", tiny_config("Qwen3ForCausalLM"))
    write_assistant(folder, 48)
    with pytest.raises(RequestError, match="the model has no windowed layers"):
        found_in(folder, read_architecture(tmp_path / "dense"))


def test_broken_assistants_are_refused(tmp_path: Path) -> None:
    target, folder = tmp_path / "target", tmp_path / "assistant"
    write_target(target)
    architecture = read_architecture(target)
    write_assistant(folder, 48, has_clusters=True)
    file, config = folder / "model.safetensors", folder / "config.json"
    tensors, raw = load_file(file), json.loads(config.read_text())
    order = "masked_embedding.token_ordering"
    save_file({**tensors, order: tensors[order] + 1}, file)
    with pytest.raises(CheckpointError, match=f"{order}.*not of the 288 tokens"):
        engine_in(tmp_path, drafter="head")
    for lacking in tensors:
        save_file({name: each for name, each in tensors.items() if name != lacking}, file)
        with pytest.raises(CheckpointError, match=re.escape(f"'{lacking}' is missing")):
            found_in(folder, architecture)
    save_file(tensors, file)
    config.write_text(json.dumps({**raw, "num_centroids": 25}))
    with pytest.raises(CheckpointError, match="num_centroids"):
        found_in(folder, architecture)
    config.write_text(json.dumps({**raw, "text_config": {"model_type": "llama"}}))
    with pytest.raises(CheckpointError, match=r"text_config\.model_type"):
        found_in(folder, architecture)


def test_an_assistant_is_not_opened_as_a_model(tmp_path: Path) -> None:
    write_assistant(tmp_path, 48)
    with pytest.raises(UnsupportedModelError, match="an assistant that drafts for one") as error:
        read_architecture(tmp_path)
    assert "--spec draft:NAME" in error.value.hint
