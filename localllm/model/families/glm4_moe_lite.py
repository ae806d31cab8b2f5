"""GLM-4.7 Flash: GLM-4's experts with latent attention; a list says which layers have experts."""

from localllm.model.architecture import Architecture
from localllm.model.config_fields import ConfigFields
from localllm.model.families.latent import read_latent_attention
from localllm.model.families.sigmoid_experts import read_mixed_decoder, read_sigmoid_router

_SPARSE, _DENSE = "sparse", "dense"


def read_glm4_moe_lite(fields: ConfigFields) -> Architecture:
    """Raises: CheckpointError; UnsupportedModelError, see `read_latent_attention`."""
    num_layers = fields.num_layers()
    kinds = fields.choices("mlp_layer_types", (_DENSE, _SPARSE), num_layers)
    kinds = kinds or (_DENSE, *[_SPARSE] * (num_layers - 1))
    is_interleaved = fields.flag("rope_interleave", default=True)
    attention = read_latent_attention(fields, is_interleaved=is_interleaved)
    has_experts = [each == _SPARSE for each in kinds]
    return read_mixed_decoder(fields, attention, read_sigmoid_router(fields), has_experts)
