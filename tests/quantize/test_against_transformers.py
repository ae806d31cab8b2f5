"""What is written loads in transformers, through compressed-tensors, and computes the same.

Asymmetric `pack-quantized` is not among them: transformers 5.23 with compressed-tensors 0.20 makes
room for unpacked zero points and then refuses the packed ones, whoever wrote them. That layout is
held against compressed-tensors itself in `tests/model/test_formats.py`.
"""

from pathlib import Path

import pytest
import torch
from checkpoints import byte_tokenizer, tiny_config, write_checkpoint
from transformers import AutoModelForCausalLM

from localllm.engine.config import EngineConfig
from localllm.engine.loaded_decoder import load_decoder
from localllm.engine.scoring import WindowScorer
from localllm.model.families.table import read_architecture
from localllm.quantize.calibrate import CalibrationRequest
from localllm.quantize.recipe import Recipe
from localllm.quantize.run import QuantizeRequest, quantize_model

TEXT = "".join(f"The {i}th sentence says that {i * i} is the square of {i}. " for i in range(200))


@pytest.mark.parametrize(
    ("recipe", "is_tied", "tolerance"),
    [
        (Recipe("awq+gptq", 32, True), False, 0.02),
        (Recipe("int8"), False, 0.02),
        (Recipe("mxfp4"), False, 0.02),
        (Recipe("nvfp4"), False, 0.02),
        # transformers rounds the activations to fp8 as well.
        (Recipe("fp8"), False, 0.1),
        (Recipe("rtn", 32, embedding="int8", head="int8"), False, 0.02),
        (Recipe("rtn", 32, embedding="int8", head="int8"), True, 0.02),
        (Recipe("int8", embedding="int8", head="int4"), True, 0.02),
    ],
)
def test_transformers_loads_it(
    tmp_path: Path, recipe: Recipe, is_tied: bool, tolerance: float
) -> None:
    config = tiny_config(
        "Qwen3ForCausalLM",
        hidden_size=64,
        intermediate_size=96,
        torch_dtype="bfloat16",
        tie_word_embeddings=is_tied,
    )
    source = write_checkpoint(tmp_path / "source", config)
    out = tmp_path / "out"
    calibration = CalibrationRequest(text=TEXT, num_windows=16, length=64)
    request = QuantizeRequest(
        str(source), out, recipe, calibration, torch.device("cpu"), verify=False
    )
    quantize_model(request, lambda stage, done, total, remark: None)
    ids = byte_tokenizer().encode("A new sentence says that 1234 is no square.").ids
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].float()
    architecture = read_architecture(out)
    engine = EngineConfig(dtype="float32", max_num_seqs=1)
    model = load_decoder(out, architecture, engine).model
    found = torch.cat(list(WindowScorer(model, 64).logits(ids)))
    assert (found - expected).norm() < tolerance * expected.norm()
