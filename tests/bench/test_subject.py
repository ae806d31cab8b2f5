"""What is measured: random weights in a known shape, and what their bytes are counted as."""

import re
from dataclasses import fields, replace
from math import prod
from pathlib import Path

import pytest
import torch
from checkpoints import tiny_config, write_checkpoint
from pocket_gguf import write_pocket

from localllm.bench.subject import Subject, open_random, open_subject
from localllm.cost.planning import shape_of
from localllm.engine.config import EngineConfig
from localllm.errors import CatalogError
from localllm.hub.catalog import CatalogEntry, ModelSource, load_catalog
from localllm.hub.catalog_shape import catalog_shape
from localllm.model.families.table import architecture_of
from localllm.model.packed.table import PACKED_TYPES
from localllm.model.per_layer_inputs import TABLE
from localllm.model.random_weights import WEIGHT_KINDS, RandomWeights, WeightKind
from localllm.schedule.sampling_params import SamplingParams

CPU = torch.device("cpu")


def tiny_sizes(**changes: object) -> dict[str, object]:
    config = tiny_config("Qwen3ForCausalLM", hidden_size=64, intermediate_size=128, **changes)
    return {**config, "dtype": "bfloat16"}


def tiny_weights(kind: WeightKind, **changes: object) -> RandomWeights:
    return RandomWeights(architecture_of(tiny_sizes(**changes)), kind, CPU)


@pytest.fixture
def open_tiny(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    def open_one(kind: WeightKind, **changes: object) -> Subject:
        entry = CatalogEntry("tiny", "a/b", "mit", "Qwen3ForCausalLM")
        sizes = {k: v for k, v in tiny_sizes(**changes).items() if k != "architectures"}
        catalog = {"tiny": entry, "sized": replace(entry, alias="sized", sizes=sizes)}
        monkeypatch.setattr("localllm.hub.catalog_shape.load_catalog", lambda: catalog)
        return open_random("sized", kind, EngineConfig(max_num_seqs=2), 100, seed=0)

    return open_one


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
@pytest.mark.parametrize("tied", [True, False])
def test_a_drawn_model_runs_and_its_bytes_are_those_of_its_tensors(
    open_tiny,
    kind: WeightKind,
    tied: bool,  # type: ignore[no-untyped-def]
) -> None:
    subject = open_tiny(kind, tie_word_embeddings=tied)
    subject.engine.add_request([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=4))
    tokens = []
    while subject.engine.has_unfinished():
        tokens += [event.token_id for event in subject.engine.step()]
    assert len(tokens) == 4
    assert None not in tokens  # all finite
    source = subject.source
    assert isinstance(source, RandomWeights)
    for linear in ("model.layers.1.mlp.down_proj", "model.embed_tokens", "lm_head"):
        if source.has_quantized(linear):
            weight = source.quantized(linear, CPU)
            held = (getattr(weight, each.name) for each in fields(weight))
            stored = [each for each in held if isinstance(each, torch.Tensor)]
        elif source.has_plain(f"{linear}.weight"):
            stored = [source.plain(f"{linear}.weight")]
        else:
            assert tied
            assert source.linear_bytes(linear) == source.linear_bytes("model.embed_tokens")
            continue
        assert source.linear_bytes(linear) == sum(tensor.nbytes for tensor in stored)


def test_the_bytes_of_a_step_by_hand(open_tiny) -> None:  # type: ignore[no-untyped-def]
    subject = open_tiny("int4")
    # Linears of a layer: q 64x64, k and v 32x64, o 64x64, gate, up and down of 64x128 values.
    values = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128)
    # A scale of 2 bytes for 64 values, or for 128 in the down projections; an int8 head.
    scales = 2 * 2 * ((2 * 64 * 64 + 2 * 32 * 64 + 2 * 64 * 128) // 64 + 64 * 128 // 128)
    assert subject.work.weight_bytes(1) == values // 2 + scales + 288 * 64 + 2 * 288
    assert subject.work.num_weights == values


def test_a_draw_depends_on_seed_and_name_alone() -> None:
    first, again = tiny_weights("int4"), tiny_weights("int4")
    name = "model.layers.0.mlp.gate_proj"
    assert torch.equal(first.quantized(name, CPU).codes, again.quantized(name, CPU).codes)
    other = first.quantized("model.layers.1.mlp.gate_proj", CPU)
    assert not torch.equal(first.quantized(name, CPU).codes, other.codes)


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
def test_drawn_values_have_the_size_of_trained_ones(kind: WeightKind) -> None:
    source = tiny_weights(kind, vocab_size=4096)
    name = "model.layers.0.mlp.gate_proj"
    if source.has_quantized(name):
        values = source.quantized(name, CPU).dequantize(torch.float32)
    else:
        values = source.plain(f"{name}.weight").float()
    # So that a product keeps the size of its input. Three standard errors are 2 %.
    assert values.std().item() == pytest.approx(64**-0.5, rel=0.1)


def test_a_checkpoint_is_counted_from_its_files(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", tiny_config("Qwen3ForCausalLM"))
    subject = open_subject(str(folder), EngineConfig(max_num_seqs=2), 10_000)
    layer = 3072 + 2 * 1536 + 3072 + 3 * 3840
    assert subject.work.weight_bytes(1) == 4 * (2 * layer + 288 * 48)  # float32
    assert subject.arithmetic == "fp32"
    assert subject.engine.context_length == 512  # the model's own, which is less than was wished


def test_experts_alone_are_quantized_as_gpt_oss_is_published() -> None:
    architecture, _ = catalog_shape("gpt-oss-20b")
    drawn = RandomWeights(architecture, "mxfp4-experts", CPU)
    # The files of openai/gpt-oss-20b have 13.76 GB.
    assert drawn.resident_bytes(2) == pytest.approx(13.76e9, rel=0.005)
    layer = "model.layers.3"
    assert drawn.has_quantized(f"{layer}.mlp.experts.31.down_proj")
    assert drawn.has_plain(f"{layer}.self_attn.q_proj.weight")
    assert drawn.has_plain("lm_head.weight")
    layouts = drawn.layouts(drawn.architecture.quantized())
    assert {None if each is None else each.kind for each in layouts} == {None, "mxfp4"}


@pytest.mark.parametrize("kind", sorted(PACKED_TYPES))
def test_the_layouts_that_decide_kernels_are_those_of_the_weights(kind: WeightKind) -> None:
    drawn = tiny_weights(kind)
    linears = [*drawn.architecture.quantized(), "lm_head"]
    weights = (drawn.quantized(each, CPU) for each in linears)
    assert drawn.layouts(linears) == {each.layout for each in weights}
    assert drawn.layouts([*linears, "model.norm"]) == drawn.layouts(linears) | {None}


def test_a_shape_that_is_not_known_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CatalogError, match="has no 'nonesuch'") as unknown:
        open_random("nonesuch", "bf16", EngineConfig(), 100, 0)
    assert "qwen3-0.6b" in unknown.value.where
    catalog = {"tiny": CatalogEntry("tiny", "a/b", "mit", "Qwen3ForCausalLM")}
    monkeypatch.setattr("localllm.hub.catalog_shape.load_catalog", lambda: catalog)
    with pytest.raises(CatalogError, match="does not know the shape of tiny"):
        open_random("tiny", "bf16", EngineConfig(), 100, 0)


def test_the_shapes_of_the_catalogue_are_whole() -> None:
    sized = {alias: entry for alias, entry in load_catalog().items() if entry.sizes}
    assert {"qwen3-0.6b", "llama-3.2-1b", "qwen3-8b", "llama-3.1-8b"} <= sized.keys()
    billions = {"qwen3-0.6b": 0.44, "llama-3.2-1b": 0.97, "qwen3-8b": 6.95, "llama-3.1-8b": 6.98}
    for alias, entry in sized.items():
        architecture = architecture_of(entry.config_json())
        source = RandomWeights(architecture, "bf16", CPU)
        layers = source.resident_bytes(2) / 2 / 1e9
        embeddings = architecture.vocab_size * architecture.hidden_size / 1e9
        embeddings *= 1 if architecture.tie_word_embeddings else 2
        if alias in billions:
            # Parameters without embeddings, as the models' cards give them.
            assert layers - embeddings == pytest.approx(billions[alias], abs=0.011)
        if architecture.per_layer is not None:  # which the names "E2B" and "E4B" leave out
            layers -= prod(architecture.tensors()[TABLE]) / 1e9
        # And with them, roughly as the repositories are named; a second, smaller number is that of
        # the active ones.
        named = [
            float(count) / (1 if unit == "B" else 1000)
            for count, unit in re.findall(r"([0-9.]+)([BM])\b", entry.repo)
        ]
        if named and "-VL-" not in entry.repo:  # whose names count the tower too
            assert 0.9 < layers / max(named) < 1.26, alias


def test_a_tied_head_in_blocks_counts_as_the_table(tmp_path: Path) -> None:
    """As in GGUF files, whose tables are quantized."""
    file = write_pocket(tmp_path / "pocket-Q8_0.gguf", "Q8_0")
    subject = open_subject(str(file), EngineConfig(max_num_seqs=1), 64)
    architecture = subject.architecture
    assert architecture.tie_word_embeddings
    width_out, width_in = architecture.vocab_size, architecture.hidden_size
    linears = sum(prod(shape) for shape in architecture.linears().values())
    head = 0 if "lm_head" in architecture.linears() else width_out * width_in
    assert subject.work.weight_bytes(1) == (linears + head) // 32 * 34
    planned = shape_of(ModelSource(str(file), file=file), None)
    assert planned.linear_bytes("lm_head") == width_out * width_in // 32 * 34
