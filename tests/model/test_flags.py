"""Each flag and factor of a family matters: read wrongly, the model's logits would be others, which
the comparison with transformers (test_against_transformers.py) would find.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint
from every_family import by_kind, small_config
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from localllm.engine.scoring import WindowScorer
from localllm.errors import CheckpointError
from localllm.model.architecture import Architecture
from localllm.model.blocks.attention import AttentionSpec
from localllm.model.families.table import read_architecture
from localllm.model.norm import NormSpec
from localllm.model.rope_config import RopeConfig
from localllm.model.weight_check import check_weights
from localllm.model.weight_files import find_weight_files
from localllm.model.weights import load_model, open_source
from localllm_kernels import TORCH_OPS

# Sizes and names, without which weights cannot be read; what a file has whatever the config says
# (biases, a head); and what is not computed with.
NOT_FLAGS = {
    *("name", "vocab_size", "hidden_size", "max_position_embeddings", "dtype", "eos_token_ids"),
    *("num_heads", "num_kv_heads", "head_dim", "inner_size", "query", "key", "width"),
    *("qkv_bias", "o_bias", "has_bias", "tie_word_embeddings", "quantization", "has_tower"),
    # A model that was saved without its head has the same rows; tests/model/test_headless.py.
    "writes_text",
    *("rounds_last", "eps"),  # see below
    "num_experts",
    "own_keys",  # how the engine keeps keys
}
MAX_LOGPROB_DIFFERENCE = 1e-4  # as in test_against_transformers.py
# Without effect where a rotation is of another kind, or turns nothing.
OF_SOME_ROPES = {
    "factor": ("linear", "llama3"),
    "low_freq_factor": ("llama3",),
    "high_freq_factor": ("llama3",),
    "beta_fast": ("yarn",),
    "beta_slow": ("yarn",),
    "original_max_position_embeddings": ("yarn", "llama3"),
    "attention_factor": (),
    "mscale": (),
    "mscale_all_dim": (),
    "truncate": (),
    "short_factors": (),
    "long_factors": (),
}


def is_idle(attention: AttentionSpec, name: str) -> bool:
    """Whether a flag of `attention` or its norms has no effect: before no rotation is after it, and
    keys of another layer are not computed.
    """
    is_still = attention.rope.kind == "none"
    has_none = attention.reads is not None
    return (is_still and name == "is_late") or (has_none and name in ("has_value", "has_values"))


def others(value: Any) -> list[Any]:
    """What could stand in place of a value."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, float):
        return [4 * value + 1]
    if isinstance(value, int):
        return [value // 2 if value > 1 else 1 - value]
    return []


def mutants(
    value: Any, path: str, attention: AttentionSpec | None = None
) -> Iterator[tuple[str, Any]]:
    """Every object that differs from a dataclass in one flag or factor, with its path."""
    attention = value if isinstance(value, AttentionSpec) else attention
    for field in fields(value):
        own, name = getattr(value, field.name), f"{path}.{field.name}"
        if field.name in NOT_FLAGS or (attention is not None and is_idle(attention, field.name)):
            continue
        if isinstance(value, RopeConfig):
            kinds = OF_SOME_ROPES.get(field.name, ("default", "linear", "llama3", "yarn"))
            if value.kind not in kinds:
                continue
        if isinstance(own, tuple) and own and is_dataclass(own[0]):
            for i, each in enumerate(own):
                for where, mutant in mutants(each, f"{name}[{i}]", attention):
                    yield where, replace(value, **{field.name: (*own[:i], mutant, *own[i + 1 :])})
        elif is_dataclass(own) and not isinstance(own, type):
            for where, mutant in mutants(own, name, attention):
                yield where, replace(value, **{field.name: mutant})
        else:
            for other in others(own):
                yield name, replace(value, **{field.name: other})


def logits_as(architecture: Architecture, folder: Path) -> torch.Tensor:
    """The logits of a checkpoint that is read as `architecture`."""
    with open_source(check_weights(find_weight_files(folder), architecture)) as source:
        model = load_model(
            source,
            architecture,
            max_model_len=128,
            dtype=torch.float32,
            device=torch.device("cpu"),
            ops=TORCH_OPS,
        )
    return torch.cat(list(WindowScorer(model, 128).logits([(7 * i + 3) % 200 for i in range(70)])))


def with_eps(value: Any, eps: float) -> Any:
    """`value` with another epsilon in all its norms: in some it has no effect alone, since the rows
    are normed again.
    """
    if isinstance(value, tuple):
        return tuple(with_eps(each, eps) for each in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    own = {field.name: with_eps(getattr(value, field.name), eps) for field in fields(value)}
    return replace(value, **(own | {"eps": eps} if "eps" in own else own))


@pytest.mark.parametrize("family", by_kind())
def test_no_flag_can_be_read_wrongly_unseen(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", small_config(family))
    architecture = read_architecture(folder)
    expected = torch.log_softmax(logits_as(architecture, folder), -1)
    count, unseen = 0, []
    for where, mutant in [*mutants(architecture, ""), ("eps", with_eps(architecture, 1e-2))]:
        count += 1
        try:
            found = torch.log_softmax(logits_as(mutant, folder), -1)
        except (CheckpointError, RuntimeError, AssertionError, KeyError, IndexError):
            continue  # it could not have been loaded
        if not (found - expected).abs().max() > MAX_LOGPROB_DIFFERENCE:
            unseen.append(where)
    assert count > 20
    assert unseen == []


@pytest.mark.parametrize(
    ("norm", "oracle"),
    [
        (NormSpec("n", 1e-6), LlamaRMSNorm),
        (NormSpec("n", 1e-6, offset=1.0), Gemma3RMSNorm),
        (NormSpec("n", 1e-6, rounds_last=True), Gemma4RMSNorm),
    ],
)
def test_rows_in_16_bits_are_rounded_where_transformers_rounds_them(
    norm: NormSpec, oracle: Any
) -> None:
    module, x = oracle(64, eps=1e-6).bfloat16(), torch.randn(500, 64).bfloat16()
    stored = (torch.randn(64) / 3).bfloat16()
    module.weight.data.copy_(stored)
    own = norm.with_weight(stored)
    found, expected = own(x, TORCH_OPS), module(x)
    # Squares are added in another order, so that a value in thousands is rounded the other way.
    assert (found != expected).float().mean() < 0.002
    other = replace(norm, rounds_last=not norm.rounds_last and norm.offset == 0)
    if norm.offset == 0:
        assert (other.with_weight(stored)(x, TORCH_OPS) != expected).float().mean() > 0.1
