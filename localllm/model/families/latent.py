"""The fields of latent attention, which DeepSeek V2, V3 and GLM-4.7 Flash name alike."""

from dataclasses import replace

from localllm.model.blocks.latent_attention import LatentAttentionSpec
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import check_pair_factors
from localllm.model.rope_config import read_rope


def read_latent_attention(fields: ConfigFields, *, is_interleaved: bool) -> LatentAttentionSpec:
    """The attention; `is_interleaved`: see RopeConfig.

    Raises: CheckpointError; UnsupportedModelError for a bias beside queries that have none, and
    for rotated parts that turn in part.
    """
    query_rank = fields.optional_integer("q_lora_rank", 1, 1 << 20)
    has_bias = fields.flag("attention_bias")
    if has_bias and query_rank is None:
        fields.refuse("latent attention with a bias but without q_lora_rank is")
    # Together no wider than a row that kernels can store.
    rope_dim = fields.integer("qk_rope_head_dim", 2, 256)
    latent_rank = fields.integer("kv_lora_rank", 2, 768)
    for name, width in (("qk_rope_head_dim", rope_dim), ("kv_lora_rank", latent_rank)):
        if width % 2:
            fields.fail(name, "even")
    rope = replace(read_rope(fields, fields.max_positions()), is_interleaved=is_interleaved)
    if rope.partial != 1:
        fields.refuse("latent attention whose rotated part turns in part is")
    check_pair_factors(fields, rope, rope_dim)
    key_dim = fields.integer("qk_nope_head_dim", 1, 1024)
    scale = (key_dim + rope_dim) ** -0.5
    if rope.kind != "default" and rope.mscale_all_dim is not None:
        scale *= rope.temperature(rope.mscale_all_dim) ** 2
    return LatentAttentionSpec(
        fields.hidden_size(),
        fields.integer("num_attention_heads", 1, 4096),
        query_rank,
        latent_rank,
        key_dim,
        rope_dim,
        fields.integer("v_head_dim", 1, 1024),
        rope,
        scale,
        has_bias,
        is_split=fields.flag("kv_b_is_split"),
    )
