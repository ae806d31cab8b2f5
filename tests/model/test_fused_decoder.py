"""All layers in one call give the bits that the operators give one by one."""

import shutil
from dataclasses import replace

import pytest
import torch
from engines import Limits, load_tiny_model, make_engine
from in_turns import in_turns

from localllm.model.decoder import DecoderModel
from localllm.quantize.recipe import Recipe
from localllm.schedule.request import TokenEvent
from localllm.schedule.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")

INT4 = Recipe("rtn", group_size=32)
INT4_ASYMMETRIC = Recipe("rtn", group_size=32, symmetric=False)


def generate(model: DecoderModel) -> list[TokenEvent]:
    """Prompts in chunks beside decoding ones; the log-probabilities show every bit."""
    limits = Limits(block_size=8, max_num_batched_tokens=24, enable_prefix_caching=True)
    engine = make_engine(model, limits)
    for i in range(5):
        params = SamplingParams(temperature=0.0, max_tokens=9, logprobs=3)
        engine.add_request([(7 * i + j) % 250 + 1 for j in range(1 + 11 * i)], params)
    events = []
    while engine.has_unfinished():
        events += engine.step()
    return events


FORMS = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "int4": (torch.bfloat16, INT4),
    "int4 asymmetric": (torch.bfloat16, INT4_ASYMMETRIC),
    "int8": (torch.bfloat16, Recipe("int8")),
    "mxfp4": (torch.bfloat16, Recipe("mxfp4")),
    "nvfp4": (torch.bfloat16, Recipe("nvfp4")),
    "trellis": (torch.bfloat16, Recipe("trellis")),
    "fp8": (torch.bfloat16, Recipe("fp8")),
}
FAMILIES = {
    "Qwen3ForCausalLM": None,
    "Qwen2ForCausalLM": None,
    "MistralForCausalLM": 12,
    "Gemma2ForCausalLM": 12,
    "Gemma3ForCausalLM": 12,
    "GraniteForCausalLM": None,
    "Exaone4ForCausalLM": 12,
    "GraniteMoeHybridForCausalLM": None,
    "HunYuanDenseV1ForCausalLM": None,
    "Ministral3ForCausalLM": None,
    "Olmo2ForCausalLM": None,
    "Olmo3ForCausalLM": 12,
    "OlmoHybridForCausalLM": None,
    "Qwen3_5ForCausalLM": None,
    "MixtralForCausalLM": 12,
    "Qwen3MoeForCausalLM": None,
    "OlmoeForCausalLM": None,
    "GptOssForCausalLM": 12,
    "GraniteMoeForCausalLM": None,
}


@pytest.mark.parametrize(("architecture", "form"), in_turns(list(FAMILIES), list(FORMS)))
def test_it_gives_the_same_bits(architecture: str, form: str) -> None:
    window, (dtype, recipe) = FAMILIES[architecture], FORMS[form]
    model = load_tiny_model(architecture, window, dtype, recipe, backend="auto")
    assert model.fused is not None
    assert generate(model) == generate(replace(model, fused=None))
