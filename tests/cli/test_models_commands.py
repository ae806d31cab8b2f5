"""`show`, `ls` and `eval`, as a user sees them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tiny_config, write_checkpoint
from every_family import small_config
from safetensors.torch import load_file, save_file

from localllm.errors import ExitCode
from localllm.hub.card import describe_format
from localllm.quantize.calibrate import CalibrationRequest
from localllm.quantize.recipe import Recipe
from localllm.quantize.run import QuantizeRequest, quantize_model

Run = Callable[..., Any]


def test_a_card_says_what_a_checkpoint_is(localllm: Run, make_checkpoint) -> None:  # type: ignore[no-untyped-def]
    folder = make_checkpoint("LlamaForCausalLM")
    outcome = localllm("show", str(folder), "--json")
    card = json.loads(outcome.out)
    assert outcome.code == 0
    assert card["architecture"] == "LlamaForCausalLM"
    assert card["context"] == 512
    assert card["dtypes"] == {"F32": card["parameters"] * 4}
    assert card["kv_bytes_per_1k_tokens"] == 2 * 2 * 2 * 2 * 16 * 1024
    assert card["quantization"] == "none"
    assert "problems" not in card
    text = localllm("show", str(folder)).out
    assert "LlamaForCausalLM" in text
    assert f"{card['parameters']:,}" in text


def test_a_card_names_what_is_wrong_and_shows_the_rest(
    localllm: Run, make_checkpoint, edit_json
) -> None:  # type: ignore[no-untyped-def]
    folder = make_checkpoint()
    edit_json(folder / "config.json", architectures=["StrangeForCausalLM"])
    (folder / "tokenizer.json").unlink()
    card = json.loads(localllm("show", str(folder), "--json").out)
    assert card["architecture"] == "StrangeForCausalLM"
    assert any("StrangeForCausalLM" in problem for problem in card["problems"])
    assert any("tokenizer.json" in problem for problem in card["problems"])
    assert card["parameters"] > 0


def test_a_card_names_a_tensor_that_does_not_fit(localllm: Run, make_checkpoint, edit_json) -> None:  # type: ignore[no-untyped-def]
    folder = make_checkpoint("LlamaForCausalLM")
    edit_json(folder / "config.json", intermediate_size=96)
    card = json.loads(localllm("show", str(folder), "--json").out)
    assert any("mlp" in problem and "96" in problem for problem in card["problems"])


def test_a_card_has_what_recurrent_layers_keep(localllm: Run, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", small_config("Qwen3_5ForCausalLM"))
    card = json.loads(localllm("show", str(folder), "--json").out)
    # Two of three layers: 3 rows of queries, keys, values and two factors; 4 heads of 16 by 8.
    rows, matrix = 3 * (2 * 2 * 16 + 4 * 8 + 2 * 4), 4 * 16 * 8
    assert card["state_bytes_per_request"] == 2 * 4 * (rows + matrix)


def test_a_card_has_the_sizes_of_the_text_model_beside_a_tower(
    localllm: Run, make_checkpoint, edit_json
) -> None:  # type: ignore[no-untyped-def]
    folder = make_checkpoint("Qwen3ForCausalLM")
    alone = json.loads(localllm("show", str(folder), "--json").out)
    text = {**json.loads((folder / "config.json").read_text()), "model_type": "qwen3_vl_text"}
    around = {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(around))
    tensors = load_file(folder / "model.safetensors")
    renamed = {
        name.replace("model.", "model.language_model.", 1): each for name, each in tensors.items()
    }
    renamed["model.visual.merger.weight"] = next(iter(tensors.values())).clone()
    save_file(renamed, folder / "model.safetensors")
    card = json.loads(localllm("show", str(folder), "--json").out)
    assert card.pop("images") == "not read"
    assert "problems" not in card
    for name in ("parameters", "dtypes", "layers", "heads", "head_dim", "vocabulary", "context"):
        assert card[name] == alone[name]


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": 5},
        {"architectures": "Llama"},
        {"num_attention_heads": float("inf")},
        {"num_key_value_heads": 10**4000, "head_dim": 10**4000},
        {"sliding_window": {"a": {"b": {}}}},
        {"hidden_size": "x" * 10_000},
    ],
)
def test_odd_values_in_a_config_break_no_card(
    localllm: Run, make_checkpoint, edit_json, changes
) -> None:  # type: ignore[no-untyped-def]
    folder = make_checkpoint()
    edit_json(folder / "config.json", **changes)
    outcome = localllm("show", str(folder))
    assert outcome.code in (0, ExitCode.CHECKPOINT)
    assert "internal error" not in outcome.err
    assert len(outcome.out) < 5000


def test_an_unreadable_tokenizer_is_named_where_its_template_is_wanted(
    localllm: Run, make_checkpoint
) -> None:  # type: ignore[no-untyped-def]
    folder = make_checkpoint()
    (folder / "tokenizer.json").write_text("{}")
    outcome = localllm("show", str(folder), "--template")
    assert outcome.code == ExitCode.CHECKPOINT
    assert "tokenizer" in outcome.err


@pytest.mark.parametrize(
    "recipe", [Recipe("trellis"), Recipe("nvfp4"), Recipe("int8", head="int4")]
)
def test_quantized_copies_have_the_parameters_of_their_source(
    recipe: Recipe, localllm: Run, tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "source", tiny_config("Qwen3ForCausalLM", hidden_size=64))
    text = CalibrationRequest(text="The square of 12 is 144. " * 80, num_windows=4, length=64)
    cpu = torch.device("cpu")
    made = QuantizeRequest(str(source), tmp_path / "copy", recipe, text, cpu, verify=False)
    quantize_model(made, lambda *args: None)
    cards = [json.loads(localllm("show", str(each), "--json").out) for each in (source, made.out)]
    assert cards[0]["parameters"] == cards[1]["parameters"]


def test_an_int4_checkpoint_counts_its_weights_and_not_its_bytes(
    localllm: Run, make_checkpoint, edit_json
) -> None:  # type: ignore[no-untyped-def]
    import torch
    from safetensors.torch import save_file

    folder = make_checkpoint()
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 128}
    edit_json(folder / "config.json", quantization_config=quantization)
    tensors = {
        "model.layers.0.mlp.up_proj.qweight": torch.zeros(256, 64, dtype=torch.int32),
        "model.layers.0.mlp.up_proj.qzeros": torch.zeros(2, 64, dtype=torch.int32),
        "model.layers.0.mlp.up_proj.scales": torch.zeros(2, 512, dtype=torch.float16),
        "model.norm.weight": torch.zeros(256, dtype=torch.float16),
    }
    save_file(tensors, folder / "model.safetensors")
    card = json.loads(localllm("show", str(folder), "--json").out)
    assert card["parameters"] == 256 * 512 + 256
    assert card["quantization"] == "awq, 4 bits, 128 per group"


def test_the_template_is_rendered_with_an_example(localllm: Run, make_checkpoint) -> None:  # type: ignore[no-untyped-def]
    outcome = localllm("show", str(make_checkpoint()), "--template")
    assert outcome.out.startswith("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n")
    assert outcome.out.endswith("<|im_start|>assistant\n")


def test_a_base_model_has_no_template_to_render(localllm: Run, make_checkpoint, edit_json) -> None:  # type: ignore[no-untyped-def]
    folder = make_checkpoint()
    edit_json(folder / "tokenizer_config.json", chat_template=None)
    outcome = localllm("show", str(folder), "--template")
    assert outcome.code == ExitCode.CHECKPOINT
    assert "base model" in outcome.err


def test_ls_lists_built_in_and_cached_models(
    localllm: Run, tmp_path: Path, make_checkpoint, monkeypatch
) -> None:  # type: ignore[no-untyped-def]
    hub = tmp_path / "hub"
    for repo, source in (("Qwen--Qwen3-0.6B", make_checkpoint()), ("org--empty", None)):
        snapshot = hub / f"models--{repo}" / "snapshots" / "abc123"
        snapshot.mkdir(parents=True)
        if source is not None:
            for path in source.iterdir():
                (snapshot / path.name).write_bytes(path.read_bytes())
        else:
            (snapshot / "notes.txt").write_text("nothing")
        (hub / f"models--{repo}" / "refs").mkdir()
        (hub / f"models--{repo}" / "refs" / "main").write_text("abc123")
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(hub))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    outcome = localllm("ls", "--json")
    models = {m["name"]: m for m in map(json.loads, outcome.out.splitlines())}
    assert outcome.code == 0
    assert models["pocket"]["problem"] is None
    assert models["pocket-draft"]["problem"] is None
    assert models["qwen3-0.6b"]["repo"] == "Qwen/Qwen3-0.6B"
    assert models["qwen3-0.6b"]["problem"] is None
    assert models["qwen3-0.6b"]["format"] == "fp32"
    assert models["org/empty"]["format"] == "unknown"
    assert "config.json" in models["org/empty"]["problem"]
    table = localllm("ls").out.splitlines()
    assert table[0].split() == ["MODEL", "SIZE", "FORMAT", "USED", "STATE"]
    assert any(line.startswith("pocket ") and line.endswith("ready") for line in table)


def test_ls_without_a_cache_lists_what_is_built_in(localllm: Run, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", "/nowhere/at/all")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/nowhere/at/all")
    outcome = localllm("ls")
    assert outcome.code == 0
    assert len(outcome.out.splitlines()) == 3


def test_eval_prints_the_object_of_the_contract(
    localllm: Run, make_checkpoint, tmp_path: Path
) -> None:  # type: ignore[no-untyped-def]
    folder, text = str(make_checkpoint()), tmp_path / "text.txt"
    text.write_text("A short text, measured. " * 20)
    outcome = localllm("eval", folder, "--text", str(text), "--json", "-c", "64")
    measured = json.loads(outcome.out)
    assert set(measured) == {"model", "tokens", "perplexity", "against"}
    assert measured["against"] is None
    both = localllm("eval", folder, "--against", folder, "--json", stdin=text.read_bytes())
    against = json.loads(both.out)["against"]
    assert set(against) == {"model", "perplexity", "kl_mean", "kl_p99", "same_top1"}
    plain = localllm("eval", folder, "--text", str(text), "--against", folder)
    assert "perplexity" in plain.out
    assert "100.00%" in plain.out


def test_eval_of_a_file_leaves_stdin_alone(localllm: Run, make_checkpoint, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder, text = str(make_checkpoint()), tmp_path / "text.txt"
    text.write_text("\n\nA short text.\n")
    arguments = ("eval", folder, "--text", str(text), "--json")
    alone, beside = localllm(*arguments), localllm(*arguments, stdin=b"something else")
    assert alone.out == beside.out
    assert json.loads(alone.out)["tokens"] == len("\n\nA short text.\n") - 1


def test_eval_ends_with_10_over_a_threshold(localllm: Run, make_checkpoint, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder, text = str(make_checkpoint()), b"some text to measure"
    missed = localllm("eval", folder, "--max-ppl", "1.5", stdin=text)
    assert missed.code == ExitCode.QUALITY
    assert "error: the perplexity" in missed.err
    assert "try: a copy in more bits" in missed.err
    assert localllm("eval", folder, "--max-ppl", "1e30", stdin=text).code == 0
    against = ("--against", folder, "--max-kl")
    assert localllm("eval", folder, *against, "0.001", stdin=text).code == 0
    assert localllm("eval", folder, *against, "-1", stdin=text).code == ExitCode.QUALITY


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ((), ExitCode.USAGE),
        (("--max-kl", "1"), ExitCode.USAGE),
        (("--stride", "0"), ExitCode.USAGE),
        (("--text", "/no/such/file"), ExitCode.USAGE),
    ],
)
def test_eval_refuses_what_makes_no_sense(localllm: Run, arguments, code) -> None:  # type: ignore[no-untyped-def]
    stdin = b"" if not arguments else b"some text here"
    assert localllm("eval", "pocket", *arguments, stdin=stdin).code == code


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"torch_dtype": "bfloat16"}, "bf16"),
        ({"dtype": "float16"}, "fp16"),
        ({}, "unknown"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "awq int4"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        (
            {
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "config_groups": {"group_0": {"weights": {"num_bits": 8}}},
                }
            },
            "compressed-tensors int8",
        ),
        ({"torch_dtype": "x" * 1000}, "x" * 30),
    ],
)
def test_a_format_is_told_in_a_word_or_two(config: dict[str, Any], words: str) -> None:
    assert describe_format(config) == words
