"""What works for Qwen3 works for every family: quantized weights, caches, drafts, company."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import byte_tokenizer, write_checkpoint
from every_family import EVERY_FAMILY, by_kind, class_of, firsts_of_their_kind, small_config
from golden import (
    FP8_BLOCKS,
    FP8_CONFIG,
    GOLDEN,
    MODELOPT_CONFIG,
    MXFP4_CONFIG,
    logits_of,
    write_golden,
)
from torch import Tensor

from localllm import LLM, SamplingParams
from localllm.drafting.speculation_config import SpeculationConfig
from localllm.engine.config import EngineConfig
from localllm.engine.loaded_decoder import build_decoder
from localllm.engine.scoring import WindowScorer
from localllm.model.families.table import FAMILIES, architecture_of
from localllm.model.packed.mxfp4_schemes import PackedMxfp4
from localllm.model.packed.nvfp4_schemes import ModelOptNvfp4
from localllm.model.packed.scheme import Scheme
from localllm.model.random_weights import RandomWeights, WeightKind
from localllm.quantize.calibrate import CalibrationRequest
from localllm.quantize.proof import compare
from localllm.quantize.recipe import Recipe
from localllm.quantize.run import QuantizeRequest, quantize_model
from localllm.quantize.source import CheckedFolder
from localllm_kernels import TORCH_OPS

CPU = torch.device("cpu")
TEXT = " ".join(f"The square of {n} is {n * n}." for n in range(200))
FORMATS: dict[str, tuple[dict[str, Any], Scheme, dict[str, bool]]] = {
    "awq": GOLDEN["awq"],
    "gptq act-order": GOLDEN["gptq act-order"],
    "packed asymmetric": GOLDEN["packed asymmetric"],
    "fp8 by blocks": (FP8_CONFIG, FP8_BLOCKS, {}),
    "mxfp4": (MXFP4_CONFIG, PackedMxfp4(), {}),
    "nvfp4": (MODELOPT_CONFIG, ModelOptNvfp4(), {}),
}
CACHES = ("auto", "int8", "fp8", "int4")
FIRSTS = firsts_of_their_kind()
SLOW = pytest.mark.slow


def families_in_turn(*choices: str) -> list[Any]:
    """Every family with one of the choices in turn, and those with blocks of a new kind with all of
    them; each with each in the slow suite.
    """
    return [
        pytest.param(family, each, marks=[] if family in FIRSTS or i % len(choices) == j else SLOW)
        for i, family in enumerate(EVERY_FAMILY)
        for j, each in enumerate(choices)
    ]


def test_none_is_missing() -> None:
    assert set(map(class_of, EVERY_FAMILY)) == FAMILIES.keys()


def mean_loss(logits: Tensor, ids: Tensor) -> float:
    losses = torch.log_softmax(logits[:-1].float(), -1).gather(1, ids[1:, None])
    return -float(losses.mean())


@pytest.mark.parametrize("family", by_kind())
def test_quantizing_sees_what_the_engine_computes(family: str, tmp_path: Path) -> None:
    """Its own measure of both models, layer by layer from their files, is that of the engine; and
    with the inputs of each layer it loses less than without.
    """
    source = write_checkpoint(tmp_path / "source", small_config(family))
    ids = byte_tokenizer().encode("The square of 1234 is 1522756. The square").ids
    # With less text an expert may see too little: one choice of a router is most of the error.
    calibration = CalibrationRequest(text=TEXT, text_name="squares", length=64)
    whole, errors = logits_of(source, "float32", ids)[0], []
    for method in ("awq+gptq", "rtn"):
        recipe, out = Recipe(method, group_size=32), tmp_path / method
        made = QuantizeRequest(str(source), out, recipe, calibration, CPU, verify=False)
        quantize_model(made, lambda *args: None)
        own, _ = logits_of(out, "float32", ids)
        errors.append(float((own - whole).norm() / whole.norm()))
        folders = [CheckedFolder.open(each) for each in (out, source)]
        windows = torch.tensor([ids])
        found = compare(*folders, windows, dtype=torch.float32, device=CPU, ops=TORCH_OPS)
        assert found.against is not None
        for logits, measured in ((own, found), (whole, found.against)):
            loss = mean_loss(logits, windows[0])
            assert math.log(measured.perplexity) == pytest.approx(loss, abs=1e-3)
    # The norms of a delta rule's heads make more of an error.
    assert 0 < errors[0] < 0.6 * errors[1] < 0.45


@pytest.mark.parametrize(("family", "file_format"), families_in_turn(*FORMATS))
def test_published_formats_compute_what_their_weights_say(
    family: str, file_format: str, tmp_path: Path
) -> None:
    folders = tmp_path / "plain", tmp_path / "quantized"
    write_golden(folders, small_config(family), *FORMATS[file_format])
    expected, found = (logits_of(folder, "float32")[0] for folder in folders)
    torch.testing.assert_close(found, expected, atol=3e-4, rtol=3e-4)


@pytest.mark.parametrize("kind", ["bf16", "int4"])
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_drawn_weights_have_ordinary_logits(family: str, kind: WeightKind) -> None:
    """For `bench --random-weights`."""
    architecture = architecture_of(small_config(family))
    source = RandomWeights(architecture, kind, CPU)
    config = EngineConfig(max_num_seqs=1, max_model_len=64)
    loaded = build_decoder(source, source.resident_bytes, architecture, config)
    logits = torch.cat(list(WindowScorer(loaded.model, 64).logits(list(range(40)))))
    assert 0.1 < logits.std() < 10


@pytest.mark.parametrize(("family", "cache"), families_in_turn(*CACHES))
def test_caches_drafts_and_company_change_no_token(family: str, cache: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", small_config(family))
    # Long enough that blocks are kept, and a window has moved on; the tail repeats, for drafts.
    head = [(7 * i + 3) % 200 for i in range(70)]
    prompts = [[*head, *([11, 12, 13] * k)] for k in (1, 4, 9)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)

    def answers(**changes: Any) -> list[list[list[int]]]:
        """Of two rounds, of which the second may go on with what the first has left."""
        drafts = SpeculationConfig(changes.pop("drafts", "off"))
        llm = LLM(str(folder), dtype="float32", speculation=drafts, **changes)
        rounds = [
            [[token.token_id for token in each.samples[0].tokens] for each in found]
            for found in (llm.generate(prompts, params) for _ in range(2))
        ]
        llm.close()
        return rounds

    alone = answers(max_num_seqs=1, enable_prefix_caching=False, kv_cache_dtype=cache)
    together = answers(max_num_batched_tokens=24, drafts="ngram", kv_cache_dtype=cache)
    assert alone[0] == alone[1] == together[0] == together[1]
