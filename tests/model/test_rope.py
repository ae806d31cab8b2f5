"""Rotary tables that the comparison with transformers does not reach."""

from pathlib import Path

import torch
from checkpoints import tiny_config, write_checkpoint

from localllm import LLM
from localllm.model.rope import RopeTable, RopeTables
from localllm.model.rope_config import NO_ROPE, RopeConfig
from localllm_kernels.attention.rotary import apply_rotary_reference


def test_without_rotary_embedding_heads_keep_their_bits() -> None:
    table = RopeTable.build(NO_ROPE, 16, 100, torch.device("cpu"))
    heads = torch.randn(100, 3, 16) * 1e3
    assert torch.equal(apply_rotary_reference(heads, table.cos, table.sin), heads)


def test_a_table_without_a_rotation_takes_one_row_for_any_context() -> None:
    tables = RopeTables(1 << 40, torch.device("cpu"))
    table = tables.table(NO_ROPE, 576)
    assert table.cos.shape == table.sin.shape == (1 << 40, 288)
    rotation = tables.rotations(torch.tensor([0, 7, (1 << 40) - 1]))[table]
    for found, value in ((rotation.cos, 1.0), (rotation.sin, 0.0)):
        assert found.is_contiguous()
        assert torch.equal(found, torch.full((3, 288), value))


def test_the_configured_context_chooses_the_factors_of_longrope(tmp_path: Path) -> None:
    """At every position, also the first ones; and keys of the other are not gone on with."""
    rope = RopeConfig(
        kind="longrope",
        original_max_position_embeddings=64,
        short_factors=(1.0,) * 8,
        long_factors=(2.0,) * 8,
    )
    short, long = (RopeTable.build(rope, 16, most, torch.device("cpu")) for most in (64, 65))
    assert torch.equal(short.cos[:32], long.cos[:64:2])
    config = tiny_config(
        "Phi3ForCausalLM",
        pad_token_id=0,
        hidden_size=64,
        original_max_position_embeddings=64,
        rope_scaling={"type": "su", "short_factor": [1] * 8, "long_factor": [2] * 8},
    )
    folder = str(write_checkpoint(tmp_path / "model", config))
    roots = []
    for context in (48, 64, 65, 128):
        llm = LLM(folder, max_model_len=context, max_num_seqs=1, dtype="float32")
        roots.append(llm.model.text_engine.engine.scheduler.config.cache_root)
        llm.close()
    assert roots[0] == roots[1] != roots[2] == roots[3]
