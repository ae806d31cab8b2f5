"""OLMo hybrid: a gated delta net in three of four layers, with norms before the blocks, and the
layer of OLMo 2 in the others, mostly without a rotation.
"""

from collections.abc import Mapping
from dataclasses import replace

from localllm.model.architecture import FINAL_NORM, Architecture
from localllm.model.blocks.delta_net import EACH, DeltaNetSpec
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import (
    FULL,
    post_norm_layer,
    pre_norm_layer,
    read_decoder,
    read_gated_mlp,
    read_kinds,
)
from localllm.model.families.olmo2 import read_olmo_attention
from localllm.model.families.qwen3_5 import read_delta_net
from localllm.model.norm import NormSpec
from localllm.model.rope_config import NO_ROPE

_LINEAR = "linear_attention"
# The norm of a delta net has one of its own, whatever the config says.
_NORM_EPS = 1e-5


def read_olmo_hybrid(fields: ConfigFields) -> Architecture:
    """Raises: CheckpointError."""
    attention, delta_net = read_olmo_attention(fields), _read_delta_net(fields)
    rope = fields.get("rope_parameters")
    if isinstance(rope, Mapping) and rope.get("rope_theta", 0) is None:
        attention = replace(attention, rope=NO_ROPE)
    mlp, norm = read_gated_mlp(fields), NormSpec(FINAL_NORM, fields.eps(), rounds_last=True)
    full = post_norm_layer(fields, attention, mlp, norm)
    linear = pre_norm_layer(fields, delta_net, mlp, norm=norm)
    # Attention every fourth layer, and at least once.
    every = min(4, fields.num_layers())
    kinds = read_kinds(fields, (FULL, _LINEAR), lambda i: _LINEAR if (i + 1) % every else FULL)
    layers = [linear if kind == _LINEAR else full for kind in kinds]
    return read_decoder(fields, layers, norm=norm)


def _read_delta_net(fields: ConfigFields) -> DeltaNetSpec:
    own, heads = fields, fields.integer("num_attention_heads", 1, 1 << 16)
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        if fields.get(name) is None:
            own = own.changed({name: heads})
    if own.get("linear_key_head_dim") is None:
        count = own.integer("linear_num_key_heads", 1, 4096)
        width = int(0.75 * fields.hidden_size() / count)
        own = own.changed({"linear_key_head_dim": width})
    if own.get("linear_value_head_dim") is None:
        width = 2 * own.integer("linear_key_head_dim", 1, 1024)
        own = own.changed({"linear_value_head_dim": width})
    if own.get("linear_conv_kernel_dim") is None:
        own = own.changed({"linear_conv_kernel_dim": 4})
    most = 2.0 if fields.flag("linear_allow_neg_eigval", default=True) else 1.0
    return replace(read_delta_net(own, _NORM_EPS), most=most, names=EACH)
