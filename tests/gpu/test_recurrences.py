"""The kernels of recurrences as they are compiled, at the sizes of real models."""

import pytest
import torch
from every_family import small_config

from localllm.model.families.table import architecture_of
from localllm.operators.case import Setting, Sizes
from localllm.operators.recurrence_cases import recurrences
from localllm_kernels.triton_ops import triton_ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU here"),
]
WIDE = {
    "Qwen3_5ForCausalLM": {
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "GraniteMoeHybridForCausalLM": {
        "hidden_size": 1536,
        "mamba_n_heads": 48,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
    },
    "Lfm2ForCausalLM": {"hidden_size": 2048},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", WIDE)
def test_recurrences(family: str, dtype: torch.dtype) -> None:
    architecture = architecture_of({**small_config(family), **WIDE[family]})
    sizes = Sizes(architecture, dtype, dtype, 16)
    cases = list(recurrences(Setting(sizes, torch.device("cuda"), triton_ops("cuda"))))
    assert cases
    for case in cases:
        assert case.distance() < 1, f"{case.name}, {case.rows} rows"
