"""Quantized hybrids load as they are published: within the class that has a tower, with its weights
and those of layers that predict further tokens beside them.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from every_family import small_config
from golden import FP8_BLOCKS, FP8_CONFIG, GOLDEN, logits_of, write_golden
from safetensors.torch import load_file, save_file

FORMATS: dict[str, Any] = {
    "gptq act-order": GOLDEN["gptq act-order"],
    "awq": GOLDEN["awq"],
    "packed asymmetric": GOLDEN["packed asymmetric"],
    "fp8 by blocks": (FP8_CONFIG, FP8_BLOCKS, {}),
}
AROUND = {
    "Qwen3_5ForCausalLM": "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeForConditionalGeneration",
}


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("family", AROUND)
def test_a_published_checkpoint_computes_what_its_weights_say(
    family: str, file_format: str, tmp_path: Path
) -> None:
    folders = tmp_path / "plain", tmp_path / "quantized"
    write_golden(folders, small_config(family), *FORMATS[file_format])
    publish(folders[1], family)
    expected, found = (logits_of(folder, "float32")[0] for folder in folders)
    torch.testing.assert_close(found, expected, atol=3e-4, rtol=3e-4)


def publish(folder: Path, family: str) -> None:
    """Put the text model beside a tower."""
    text = json.loads((folder / "config.json").read_text())
    own = {"quantization_config": text.pop("quantization_config"), "text_config": text}
    own |= {"architectures": [AROUND[family]], "vision_config": {"depth": 1}}
    (folder / "config.json").write_text(json.dumps(own))
    tensors = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: t
        for name, t in load_file(folder / "model.safetensors").items()
    }
    for name in ("model.visual.blocks.0.attn.qkv.weight", "mtp.fc.weight", "mtp.norm.weight"):
        tensors[name] = torch.zeros(4, 4)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
