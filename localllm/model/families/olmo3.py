"""OLMo 3: as OLMo 2, with windows in three of four layers, whose rotation is not stretched."""

from dataclasses import replace

from localllm.model.architecture import Architecture
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import FULL, SLIDING, read_windowed_layers
from localllm.model.families.olmo2 import read_olmo, read_olmo_attention
from localllm.model.rope_config import read_rope


def read_olmo3(fields: ConfigFields) -> Architecture:
    """Raises: CheckpointError."""
    positions = fields.max_positions()
    # The old spelling stretches the full layers alone.
    unstretched = fields.changed({"rope_scaling": None})
    full = replace(read_olmo_attention(fields), rope=read_rope(fields, positions, FULL))
    windowed = replace(
        full, rope=read_rope(unstretched, positions, SLIDING), window=fields.window()
    )
    kinds = read_windowed_layers(fields, every=4)
    return read_olmo(fields, [windowed if is_windowed else full for is_windowed in kinds])
