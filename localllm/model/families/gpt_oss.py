"""gpt-oss: windows in every second layer, sinks, and experts with biases and a clamped gate."""

from dataclasses import replace

from localllm.model.architecture import FINAL_NORM, Architecture
from localllm.model.blocks.attention import Scores
from localllm.model.blocks.experts import ExpertsSpec, StackedNames
from localllm.model.blocks.gated_mlp import GatedMLPSpec
from localllm.model.blocks.router import RouterSpec
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import (
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_windowed_layers,
)
from localllm.model.families.qwen_moe import EXPERT_NAMES
from localllm.model.norm import NormSpec
from localllm.model.rope_config import with_default_rope

# What the gate is built with.
_SLOPE, _LIMIT = 1.702, 7.0
# Where config.json names no rotation, as its class has it.
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}


def read_gpt_oss(fields: ConfigFields) -> Architecture:
    """Raises: CheckpointError."""
    fields = with_default_rope(fields, _ROPE)
    for name, built in (("swiglu_alpha", _SLOPE), ("swiglu_limit", _LIMIT)):
        fields.only(name, built)
    has_bias = fields.flag("attention_bias", default=True)
    full = replace(read_attention(fields, has_bias=has_bias), scores=Scores(has_sinks=True))
    windowed = replace(full, window=fields.window())
    expert = GatedMLPSpec(
        fields.hidden_size(),
        fields.integer("intermediate_size", 1, 1 << 22),
        has_bias=True,
        names=EXPERT_NAMES,
        gate="clamped",
    )
    router = RouterSpec(
        *fields.num_experts("num_local_experts"),
        linear="mlp.router",
        has_bias=True,
        renormalises=True,
    )
    experts = ExpertsSpec(
        expert,
        router,
        stacked=StackedNames(
            "mlp.experts.gate_up_proj",
            "mlp.experts.down_proj",
            is_interleaved=True,
            is_transposed=True,
        ),
    )

    norm = NormSpec(FINAL_NORM, fields.eps(), rounds_last=True)
    layers = [
        pre_norm_layer(fields, windowed if is_windowed else full, experts, norm=norm)
        for is_windowed in read_windowed_layers(fields, every=2)
    ]
    return read_decoder(fields, layers, norm=norm)
