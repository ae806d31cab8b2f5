"""Whole quantizations of small checkpoints: what is written, what is refused, what is resumed."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import byte_tokenizer, tiny_config, write_checkpoint
from safetensors.torch import load_file, save_file

from localllm.answer.evaluation import Comparison, Evaluation
from localllm.engine.config import EngineConfig
from localllm.engine.loaded_decoder import load_decoder
from localllm.engine.scoring import WindowScorer
from localllm.errors import CheckpointError, DiskError, ExitCode, LocalLLMError, RequestError
from localllm.model.families.table import read_architecture
from localllm.model.packed.int4_schemes import PackedInt4
from localllm.model.rope import RopeTables
from localllm.quantize.calibrate import CalibrationRequest
from localllm.quantize.layer import LayerQuantizer, TensorParts
from localllm.quantize.recipe import Recipe
from localllm.quantize.report import Outcome, finer_flags, large_loss
from localllm.quantize.run import QuantizeRequest, quantize_model
from localllm.quantize.source import Ends, open_unquantized, result_bytes
from localllm.quantize.stream import CalibrationStream
from localllm_kernels import TORCH_OPS

TEXT = "".join(f"The {i}th sentence says that {i * i} is the square of {i}. " for i in range(400))
CALIBRATION = CalibrationRequest(text=TEXT, text_name="squares", num_windows=16, length=64)
CPU = torch.device("cpu")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_source(tmp_path / "source")


def make_source(folder: Path, **changes: Any) -> Path:
    config = tiny_config(
        "Qwen3ForCausalLM",
        **{
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "torch_dtype": "bfloat16",
            "attention_bias": True,
            **changes,
        },
    )
    return write_checkpoint(folder, config)


def request(source: Path, out: Path, recipe: Recipe, **changes: Any) -> QuantizeRequest:
    made = QuantizeRequest(str(source), out, recipe, CALIBRATION, CPU, verify=False)
    return replace(made, **changes)


def ignore(stage: str, done: int, total: int, remark: str) -> None:
    """Nobody watches."""


def logits(folder: Path) -> torch.Tensor:
    architecture = read_architecture(folder)
    engine = EngineConfig(dtype="float32", max_num_seqs=1)
    model = load_decoder(folder, architecture, engine).model
    text = "A new sentence says that 1234 is no square, and that 10000 is the square of 100."
    ids = byte_tokenizer().encode(text).ids
    return torch.cat(list(WindowScorer(model, 96).logits(ids)))


def digest(folder: Path) -> dict[str, str]:
    """Of every file but the reports, which hold times."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.name not in ("localllm_quant.json", "README.md")
    }


RECIPES = [
    Recipe("rtn", 32, True),
    Recipe("awq", 32, False),
    Recipe("gptq", 32, True),
    Recipe("awq+gptq", 32, False),
    Recipe("awq+gptq", 32, False, file_format="awq"),
    Recipe("gptq", 32, True, "gptq"),
    Recipe("gptq", 32, False, "gptq"),
    Recipe("int8"),
    Recipe("fp8"),
    Recipe("mxfp4"),
    Recipe("nvfp4", embedding="int8", head="int8"),
    Recipe("trellis", embedding="int8", head="int8"),
    Recipe("fp8", file_format="fp8"),
    Recipe("rtn", 32, head="int8"),
    Recipe("gptq", 32, embedding="int8", head="int4"),
    Recipe("fp8", embedding="int8", head="int8"),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.method}-{r.file_format}-{r.head}")
def test_every_method_and_format_gives_a_model_like_its_source(
    source: Path, tmp_path: Path, recipe: Recipe
) -> None:
    out = tmp_path / "out"
    outcome = quantize_model(request(source, out, recipe), ignore)
    expected, found = logits(source), logits(out)
    error = float((found - expected).norm() / expected.norm())
    # Random weights are harder than trained ones.
    assert 0 < error < {"int8": 0.04, "fp8": 0.12}.get(recipe.method, 0.4)
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md",
        "config.json",
        "localllm_quant.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert not out.with_name("out.unfinished").exists()
    _, checked = open_unquantized(str(source), recipe)
    stored = sum(tensor.nbytes for tensor in load_file(out / "model.safetensors").values())
    assert stored == result_bytes(checked, recipe)
    report = json.loads((out / "localllm_quant.json").read_text())
    assert report["recipe"]["method"] == recipe.method
    assert len(report["layer_errors"]) == 21
    assert outcome.result_bytes == (out / "model.safetensors").stat().st_size


@pytest.mark.parametrize(("head", "is_tied"), [("int8", True), ("int4", False)])
def test_a_tied_head_of_the_embedding_s_type_is_stored_once(
    tmp_path: Path, head: Any, is_tied: bool
) -> None:
    source = make_source(tmp_path / "source", tie_word_embeddings=True)
    out, recipe = tmp_path / "out", Recipe("int8", embedding="int8", head=head)
    quantize_model(request(source, out, recipe), ignore)
    stored = load_file(out / "model.safetensors")
    assert stored["model.embed_tokens.weight"].dtype == torch.int8
    assert ("lm_head.weight_packed" in stored) != is_tied
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] == is_tied
    _, checked = open_unquantized(str(source), recipe)
    assert sum(tensor.nbytes for tensor in stored.values()) == result_bytes(checked, recipe)
    expected, found = logits(source), logits(out)
    assert 0 < (found - expected).norm() < (0.04 if is_tied else 0.1) * expected.norm()


def test_a_head_in_4_bits_loses_less_for_the_inputs_it_has(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source")
    expected, errors = logits(source), {}
    for method in ("rtn", "gptq"):
        out = tmp_path / method
        quantize_model(request(source, out, Recipe(method, 32, head="int4")), ignore)
        # The head alone: with the layers of the source.
        head = {
            name: tensor
            for name, tensor in load_file(out / "model.safetensors").items()
            if name.startswith("lm_head")
        }
        weight = PackedInt4(32, symmetric=True).read(
            {name.removeprefix("lm_head."): tensor for name, tensor in head.items()}
        )
        mixed = tmp_path / f"{method}-head"
        shutil.copytree(source, mixed)
        tensors = load_file(mixed / "model.safetensors")
        tensors["lm_head.weight"] = weight.dequantize(torch.bfloat16)
        save_file(tensors, mixed / "model.safetensors", metadata={"format": "pt"})
        errors[method] = float((logits(mixed) - expected).norm())
    assert errors["gptq"] < 0.9 * errors["rtn"]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
@pytest.mark.parametrize("method", ["awq", "awq+gptq"])
def test_better_methods_are_better(tmp_path: Path, architecture: str, method: Any) -> None:
    config = tiny_config(architecture, hidden_size=64, intermediate_size=96, sliding_window=24)
    source = write_checkpoint(tmp_path / "source", config)
    expected = logits(source)
    errors = []
    for name in ("rtn", method):
        out = tmp_path / name
        quantize_model(request(source, out, Recipe(name, 32)), ignore)
        errors.append(float((logits(out) - expected).norm()))
    assert errors[1] < errors[0]


def test_the_weights_may_be_read_by_whom_the_config_may(source: Path, tmp_path: Path) -> None:
    out = quantize_model(
        request(source, tmp_path / "out", Recipe("rtn", group_size=32)), ignore
    ).out
    modes = {path.stat().st_mode for path in out.iterdir()}
    assert len(modes) == 1


def test_scales_are_undone_exactly_in_the_operation_before(source: Path) -> None:
    """After a layer is quantized, its parts and the stream within it agree."""
    plan = read_architecture(source).layers[0]
    stored = load_file(source / "model.safetensors")
    prefix = "model.layers.0."
    tensors = {n.removeprefix(prefix): t.float() for n, t in stored.items() if prefix in n}
    ropes = RopeTables(64, CPU)
    ids = torch.randint(3, 250, (8, 64))

    def stream() -> CalibrationStream:
        return CalibrationStream(stored["model.embed_tokens.weight"][ids].float(), ropes, TORCH_OPS)

    within, again = stream(), stream()
    quantizer = LayerQuantizer(tensors, plan, Recipe("awq", 32), torch.float32, (within, stream()))
    result = quantizer.run()
    values = {f"{n}.weight": w.dequantize(torch.float32) for n, w in result.weights.items()}
    layer = plan.build(TensorParts({**result.plain, **values}, ropes))
    again.add(layer.sublayers[0])
    for a, b in zip(within.rows(), again.rows(), strict=True):
        # The value projection's scales were rounded once more when they took up the division.
        assert (a - b).norm() < 2e-3 * b.norm()
    assert max(result.errors.values()) < 0.03


class StoppedError(Exception):
    """Stands for a kill."""


@pytest.mark.parametrize("recipe", [Recipe("awq+gptq", 32), Recipe("rtn", 32)])
@pytest.mark.parametrize("stop_at", [("layers", 1), ("layers", 2), ("writing", 0)])
def test_a_resumed_run_gives_the_same_bytes(
    source: Path, tmp_path: Path, recipe: Recipe, stop_at: tuple[str, int]
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    quantize_model(request(source, whole, recipe), ignore)

    def stop(stage: str, done: int, total: int, remark: str) -> None:
        if (stage, done) == stop_at:
            raise StoppedError

    with pytest.raises(StoppedError):
        quantize_model(request(source, out, recipe), stop)
    assert not out.exists()
    resumed: list[int] = []
    quantize_model(
        request(source, out, recipe, resume=True),
        lambda stage, done, total, remark: resumed.append(done),
    )
    assert digest(out) == digest(whole)


def test_a_run_is_resumed_only_as_it_was_begun(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(RequestError, match="nothing to resume"):
        quantize_model(request(source, out, Recipe("rtn", 32), resume=True), ignore)

    def stop(stage: str, done: int, total: int, remark: str) -> None:
        raise StoppedError

    with pytest.raises(StoppedError):
        quantize_model(request(source, out, Recipe("rtn", 32)), stop)
    with pytest.raises(RequestError, match="begun with a different recipe"):
        quantize_model(request(source, out, Recipe("rtn", 32, False), resume=True), ignore)
    # Without --resume it starts anew.
    quantize_model(request(source, out, Recipe("rtn", 32, False)), ignore)
    assert json.loads((out / "localllm_quant.json").read_text())["recipe"]["symmetric"] is False


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("state.json", "state.json"),
        ("layer-00000.safetensors", "layer-0"),
        ("lock", "not the folder of"),
    ],
)
def test_an_unfinished_run_is_gone_on_with_only_from_files(
    source: Path, tmp_path: Path, name: str, reason: str
) -> None:
    out = tmp_path / "out"

    def stop(stage: str, done: int, total: int, remark: str) -> None:
        if done:  # the first layer is written
            raise StoppedError

    with pytest.raises(StoppedError):
        quantize_model(request(source, out, Recipe("rtn", 32)), stop)
    place = out.with_name("out.unfinished") / name
    place.unlink()
    os.mkfifo(place)
    with pytest.raises(LocalLLMError, match=reason):
        quantize_model(request(source, out, Recipe("rtn", 32), resume=True), ignore)


def test_a_link_in_the_place_of_the_work_folder_is_not_followed(
    source: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "letter").write_text("to keep")
    (tmp_path / "out.unfinished").symlink_to(mine)
    with pytest.raises(RequestError, match="not the folder of an unfinished quantization"):
        quantize_model(request(source, tmp_path / "out", Recipe("rtn", 32)), ignore)
    assert (mine / "letter").exists()


def test_what_a_link_out_of_the_model_s_folder_leads_to_is_not_copied(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "secret").write_text("a key")
    (source / "LICENSE").symlink_to(tmp_path / "secret")
    os.mkfifo(source / "NOTICE")
    (source / "README.txt").write_text("words")
    out = tmp_path / "out"
    quantize_model(request(source, out, Recipe("rtn", 32)), ignore)
    names = {path.name for path in out.iterdir()}
    assert "README.txt" in names
    assert not names & {"LICENSE", "NOTICE"}
    assert "LICENSE is a link out" in caplog.text


def refusal(made: QuantizeRequest) -> LocalLLMError:
    with pytest.raises(LocalLLMError) as caught:
        quantize_model(made, ignore)
    assert not made.out.exists()
    return caught.value


def test_what_is_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    error = refusal(request(source, out, Recipe("rtn", 128)))
    assert error.exit_code == ExitCode.USAGE
    assert "q_proj" in error.message
    assert error.hint == "--group-size 32"  # 64 divides its width, but not that of every linear
    short = replace(CALIBRATION, text="Too short.")
    error = refusal(request(source, out, Recipe("gptq", 32), calibration=short))
    assert "tokens" in error.message
    quantize_model(request(source, tmp_path / "done", Recipe("rtn", 32)), ignore)
    error = refusal(request(tmp_path / "done", out, Recipe("rtn", 32)))
    assert error.exit_code == ExitCode.CHECKPOINT
    assert "quantized already" in error.message
    with pytest.raises(RequestError, match="already exists"):
        quantize_model(request(source, tmp_path / "done", Recipe("rtn", 32)), ignore)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    error = refusal(request(source, out, Recipe("rtn", 32)))
    assert error.exit_code == ExitCode.DISK
    assert "not enough room" in error.message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(source: Path, tmp_path: Path, value: float) -> None:
    path = source / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 4] = value
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        quantize_model(request(source, tmp_path / "out", Recipe("rtn", 32)), ignore)
    assert not (tmp_path / "out").exists()


def test_two_at_once_on_one_output(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    inner: list[LocalLLMError] = []

    def second(stage: str, done: int, total: int, remark: str) -> None:
        if not inner:
            with pytest.raises(DiskError) as caught:
                quantize_model(request(source, out, Recipe("rtn", 32)), ignore)
            inner.append(caught.value)

    quantize_model(request(source, out, Recipe("rtn", 32)), second)
    assert "process" in inner[0].where
    assert (out / "config.json").exists()


def test_the_proof_measures_both(source: Path, tmp_path: Path) -> None:
    made: Callable[..., Any] = lambda recipe: quantize_model(  # noqa: E731
        request(source, tmp_path / recipe.method, recipe, verify=True), ignore
    )
    coarse, fine = made(Recipe("rtn", 32)).quality, made(Recipe("int8")).quality
    assert coarse.against.kl_mean > 20 * fine.against.kl_mean > 0
    assert coarse.against.perplexity == fine.against.perplexity
    assert fine.against.same_top1 > coarse.against.same_top1
    text = (tmp_path / "rtn" / "README.md").read_text()
    assert ("much worse than its source" in text) == (
        coarse.perplexity > 1.15 * coarse.against.perplexity or coarse.against.kl_mean > 0.14
    )
    assert f"{coarse.against.kl_mean:.5f}" in text


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "int3"},
        {"group_size": 48},
        {"file_format": "gguf"},
        {"file_format": "awq", "symmetric": True},
        {"file_format": "gptq", "method": "int8"},
        {"file_format": "fp8", "method": "awq"},
        {"file_format": "awq", "symmetric": False, "head": "int8"},
    ],
)
def test_parts_that_do_not_go_together(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        Recipe(**fields)


@pytest.mark.parametrize(
    ("recipe", "windows", "hint"),
    [
        (Recipe("rtn"), 0, "--method gptq"),
        (Recipe("nvfp4"), 1000, "--method gptq"),
        (Recipe("trellis"), 1000, "--bits 4 --group-size 32"),
        (Recipe("gptq"), 4, "more --calib-samples (256 tokens are few)"),
        (Recipe("gptq"), 1000, "--group-size 32"),
        (Recipe("awq", 32), 1000, "--method int8"),
        (Recipe("int8"), 0, "the source as it is"),
    ],
)
def test_a_ruined_result_is_called_that_with_a_next_step(
    recipe: Recipe, windows: int, hint: str
) -> None:
    calibration = {"windows": windows, "length": 64} if recipe.uses_inputs else None
    outcome = outcome_with(recipe, calibration, perplexity=65.0, kl_mean=0.5)
    assert "perplexity 36 became 65" in large_loss(outcome)
    assert finer_flags(outcome).startswith(hint)


@pytest.mark.parametrize(
    ("perplexity", "kl_mean", "is_large"), [(37.0, 0.03, False), (30.0, 0.3, True), (42, 0.1, True)]
)
def test_little_loss_is_not_called_ruin(perplexity: float, kl_mean: float, is_large: bool) -> None:
    """On text of others a result may even seem better: the divergence counts too."""
    outcome = outcome_with(Recipe(), None, perplexity=perplexity, kl_mean=kl_mean)
    assert bool(large_loss(outcome)) == is_large


def outcome_with(
    recipe: Recipe, calibration: dict[str, Any] | None, *, perplexity: float, kl_mean: float
) -> Outcome:
    against = Comparison("source", 36.0, kl_mean, 1.0, 0.6)
    return Outcome(
        out=Path("out"),
        recipe=recipe,
        source="source",
        source_bytes=4,
        result_bytes=1,
        ends=Ends(0, "bfloat16", None, "compressed-tensors"),
        widest=576,
        calibration=calibration,
        layer_errors={},
        expert_rows={},
        quality=Evaluation("out", 100, perplexity, against),
        decode_tokens_per_s=None,
        seconds=1.0,
        peak_bytes=1,
    )
