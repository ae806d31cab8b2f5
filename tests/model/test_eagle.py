"""EAGLE heads, in the authors' layout and that of speculators, give what their oracles give."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from checkpoints import tiny_config, write_checkpoint
from eagles import (
    EAGLE3_LAYER,
    Layout,
    found_eagle,
    layer_config,
    load_eagle,
    write_eagle,
    write_eagle3,
)
from engines import load_folder
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from whole_text import whole_text

from localllm.errors import CheckpointError, RequestError, UnsupportedModelError
from localllm.model.decoder import DecoderModel
from localllm.model.families.table import read_architecture
from localllm.model.found_head import FoundHead

TOKENS = [11, 250, 7, 7, 93, 120, 5, 201, 33, 64, 9, 140, 71]
WIDTH, MOST = 48, 2e-4
LAYOUTS: tuple[Layout, ...] = ("authors", "speculators")


def target_in(folder: Path) -> DecoderModel:
    write_checkpoint(folder, tiny_config("Qwen3ForCausalLM", num_hidden_layers=7))
    return load_folder(folder, torch.float32)


def load(folder: Path, target: DecoderModel) -> tuple[FoundHead, DecoderModel]:
    found = found_eagle(folder / "head", folder / "target", target.architecture)
    return found, load_eagle(found, target)


def random_states(width: int) -> Tensor:
    return torch.randn(len(TOKENS), width, generator=torch.Generator().manual_seed(3))


def head_rows(
    head: DecoderModel, own_tap: int, tokens: list[int], hidden: Tensor
) -> tuple[Tensor, Tensor]:
    """The logits of a head for each token of a text, and its own states."""
    batch, cache = whole_text(head, tokens, hidden)
    with torch.inference_mode():
        rows, [own] = head.forward_tapped(batch, cache, (own_tap,))
        return head.compute_logits(rows)[: len(tokens)], own[: len(tokens)]


def causal(count: int) -> Tensor:
    return torch.full((count, count), float("-inf")).triu(1)[None, None]


def parts_of_transformers(
    tensors: dict[str, Tensor],
    layer: str,
    target: DecoderModel,
    states: Tensor,
    *,
    adds_normed: bool,
) -> tuple[Tensor, Tensor]:
    """EAGLE-3 as its paper has it, from transformers' parts: logits of the drafted tokens, and the
    states before the last norm.
    """
    config = LlamaConfig(**layer_config(WIDTH), attn_implementation="eager")
    attention, mlp = LlamaAttention(config, 0), LlamaMLP(config)
    for name in ("q_proj", "k_proj", "v_proj"):
        rows = len(tensors[f"{layer}.self_attn.{name}.weight"])
        setattr(attention, name, nn.Linear(2 * WIDTH, rows, bias=False))

    def of(prefix: str) -> dict[str, Tensor]:
        found = {name: each for name, each in tensors.items() if name.startswith(prefix)}
        return {name.removeprefix(prefix): each for name, each in found.items()}

    def norm(name: str, rows: Tensor) -> Tensor:
        made = LlamaRMSNorm(WIDTH, 1e-5)
        made.load_state_dict(of(f"{name}."))
        return made(rows)

    attention.load_state_dict(of(f"{layer}.self_attn."))
    mlp.load_state_dict(of(f"{layer}.mlp."))
    hidden = states @ tensors["fc.weight"].T
    embedded = target.embedding(torch.tensor(TOKENS))
    normed = norm(f"{layer}.hidden_norm", hidden)
    both = torch.cat((norm(f"{layer}.input_layernorm", embedded), normed), dim=-1)
    positions = torch.arange(len(TOKENS))[None]
    angles = LlamaRotaryEmbedding(config)(both[None], positions)
    attended = attention(both[None], angles, causal(len(TOKENS)))[0][0]
    stream = (normed if adds_normed else hidden) + attended
    stream = stream + mlp(norm(f"{layer}.post_attention_layernorm", stream))
    return norm("norm", stream) @ tensors["lm_head.weight"].T, stream


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("adds_normed", [False, True])
def test_eagle3_is_that_of_its_paper(layout: Layout, adds_normed: bool, tmp_path: Path) -> None:
    target = target_in(tmp_path / "target")
    fields = {"norm_before_residual": adds_normed}
    tensors = write_eagle3(tmp_path / "head", target.architecture, layout, **fields)
    found, head = load(tmp_path, target)
    # Before layers 2, 3 and 4 of 7.
    assert (found.taps, found.own_tap, found.states_width) == ((1, 2, 3), 0, 3 * WIDTH)
    states, layer = random_states(3 * WIDTH), EAGLE3_LAYER[layout]
    with torch.no_grad():
        expected, stream = parts_of_transformers(
            tensors, layer, target, states, adds_normed=adds_normed
        )
    assert head.join is not None
    assert head.join.fusion is not None
    hidden = head.join.fusion(states, head.ops)
    logits, own = head_rows(head, found.own_tap, TOKENS, hidden)
    drafted = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    torch.testing.assert_close(logits[:, drafted], expected, atol=MOST, rtol=MOST)
    torch.testing.assert_close(own, stream, atol=MOST, rtol=MOST)
    assert int(logits.isfinite().sum()) == len(TOKENS) * len(drafted)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_eagle_is_that_of_its_paper(layout: Layout, tmp_path: Path) -> None:
    target = target_in(tmp_path / "target")
    tensors = write_eagle(tmp_path / "head", target.architecture, layout)
    found, head = load(tmp_path, target)
    assert found.taps == (7,)
    fc, layer = ("fusion_fc", "transformer") if layout == "speculators" else ("fc", "layers.0")
    hidden, embedded = random_states(WIDTH), target.embedding(torch.tensor(TOKENS))
    config = LlamaConfig(**layer_config(WIDTH), attn_implementation="eager")
    block = LlamaDecoderLayer(config, 0)
    block.input_layernorm = nn.Identity()
    own_names = {name.removeprefix(f"{layer}."): each for name, each in tensors.items()}
    block.load_state_dict({name: own_names[name] for name in block.state_dict()})
    positions = torch.arange(len(TOKENS))[None]
    with torch.no_grad():
        joined = torch.cat((embedded, hidden), dim=-1) @ tensors[f"{fc}.weight"].T
        joined = joined + tensors[f"{fc}.bias"]
        angles = LlamaRotaryEmbedding(config)(joined[None], positions)
        mask = causal(len(TOKENS))
        expected = block(joined[None], attention_mask=mask, position_embeddings=angles)[0]
    logits, own = head_rows(head, found.own_tap, TOKENS, hidden)
    torch.testing.assert_close(own, expected, atol=MOST, rtol=MOST)
    torch.testing.assert_close(logits, target.compute_logits(expected), atol=MOST, rtol=MOST)


def test_eagle_may_have_norms(tmp_path: Path) -> None:
    target = target_in(tmp_path / "target")
    write_eagle(tmp_path / "head", target.architecture, "speculators", has_norms=True)
    found, head = load(tmp_path, target)
    hidden = random_states(WIDTH)
    logits, own = head_rows(head, found.own_tap, TOKENS, hidden)
    assert head.norm is not None
    last = target.compute_logits(head.norm(own, head.ops))
    torch.testing.assert_close(logits, last, atol=MOST, rtol=MOST)


ORACLE_CASES: list[dict[str, Any]] = [
    {},
    {"norm_before_residual": True, "norm_output": True},
    {"fc_norms": "one", "num_layers": 2},
    {"fc_norms": "each", "model_type": "qwen3"},
    {"num_drafted": 288},
    {"eagle_aux_hidden_state_layer_ids": [1, 4, 7]},
]


@pytest.mark.parametrize("case", ORACLE_CASES, ids=lambda case: "-".join(case) or "plain")
def test_eagle3_drafts_as_speculators_does(case: dict[str, Any], tmp_path: Path) -> None:
    """Three tokens deep, with each token given to both."""
    core = pytest.importorskip(
        "speculators.models.eagle3.core",
        reason="pip install --no-deps speculators==0.9.0; its other needs: its page on PyPI",
    )
    from speculators.models.eagle3 import Eagle3SpeculatorConfig

    target = target_in(tmp_path / "target")
    tensors = write_eagle3(tmp_path / "head", target.architecture, "speculators", **case)
    found, head = load(tmp_path, target)
    class_of = Qwen3Config if case.get("model_type") == "qwen3" else LlamaConfig
    layers = layer_config(WIDTH, num_hidden_layers=case.get("num_layers", 1))
    layers["model_type"] = case.get("model_type", "llama")
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=class_of(**layers, attn_implementation="eager"),
        draft_vocab_size=case.get("num_drafted", 40),
        norm_before_residual=case.get("norm_before_residual", False),
        norm_output=case.get("norm_output", False),
        norm_before_fc=case.get("fc_norms") == "one",
        fc_norm=case.get("fc_norms") == "each",
    )
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = core.Eagle3DraftModel(config).eval()
    table = {"embed_tokens.weight": target.embedding.table}
    lacking = theirs.load_state_dict({**tensors, **table}, strict=False)
    assert not lacking.unexpected_keys
    assert all(name.startswith("verifier") for name in lacking.missing_keys)
    seen = list[Tensor]()
    theirs.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    states = random_states(3 * WIDTH)
    with torch.no_grad():
        theirs(states[None], torch.tensor([TOKENS]), torch.zeros(1, len(TOKENS), dtype=torch.int64))
    drafted = torch.arange(case.get("num_drafted", 40)) + tensors.get("d2t", 0)
    assert head.join is not None
    assert head.join.fusion is not None
    hidden = head.join.fusion(states, head.ops)
    depth = 3
    for end in (5, len(TOKENS) - depth + 1):
        rows = hidden[:end]
        for step in range(depth):
            logits, own = head_rows(head, found.own_tap, TOKENS[: end + step], rows)
            expected = seen[step][end - 1]
            torch.testing.assert_close(logits[-1, drafted], expected, atol=MOST, rtol=MOST)
            rows = torch.cat((rows, own[-1:]))


def test_taken_layers_are_those_of_the_config(tmp_path: Path) -> None:
    target = target_in(tmp_path / "target")
    for fields in (
        {"eagle_aux_hidden_state_layer_ids": [1, 4, 7]},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 7]}},
    ):
        write_eagle3(tmp_path / "head", target.architecture, **fields)
        assert load(tmp_path, target)[0].taps == (0, 3, 6)
    for wrong in ([0, 1, 2], [1, 2, 8], "all", [1, 2]):
        write_eagle3(tmp_path / "head", target.architecture, eagle_aux_hidden_state_layer_ids=wrong)
        with pytest.raises((CheckpointError, RequestError)):
            load(tmp_path, target)


@pytest.mark.parametrize("kind", ["same", "other"])
def test_a_table_of_embeddings_is_read_where_it_is_another(
    kind: Literal["same", "other"], tmp_path: Path
) -> None:
    target = target_in(tmp_path / "target")
    write_eagle3(tmp_path / "head", target.architecture)
    file, table = tmp_path / "head" / "model.safetensors", target.embedding.table.clone()
    if kind == "other":
        table[-1] += 1
    save_file({**load_file(file), "embed_tokens.weight": table}, file)
    found, head = load(tmp_path, target)
    is_shared = head.embedding.table.data_ptr() == target.embedding.table.data_ptr()
    assert is_shared == (kind == "same")
    assert ("model.embed_tokens.weight" in found.weights.plain) == (kind == "other")


def test_a_head_of_another_model_is_refused(tmp_path: Path) -> None:
    target = target_in(tmp_path / "target")
    other = tmp_path / "other"
    write_checkpoint(other, tiny_config("LlamaForCausalLM", hidden_size=64, num_hidden_layers=7))
    for write in (write_eagle, write_eagle3):
        write(tmp_path / "head", read_architecture(other))
        with pytest.raises(RequestError, match=r"head cannot draft for target: it is 64 wide"):
            load(tmp_path, target)
    write_eagle3(tmp_path / "head", target.architecture)
    file = tmp_path / "head" / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "fc.weight": torch.zeros(WIDTH, 4 * WIDTH)}, file)
    with pytest.raises(RequestError, match=r"it takes 192 values of hidden states, not 144"):
        load(tmp_path, target)
    save_file({**tensors, "d2t": tensors["d2t"] + 200}, file)
    with pytest.raises(CheckpointError, match=r"'d2t'.*not of the 288 tokens"):
        load(tmp_path, target)


def test_broken_heads_and_other_folders_are_refused(tmp_path: Path) -> None:
    target = target_in(tmp_path / "target")
    with pytest.raises(CheckpointError, match="is no EAGLE head"):
        found_eagle(tmp_path / "target", tmp_path / "target", target.architecture)
    write_eagle3(tmp_path / "head", target.architecture, "speculators")
    file = tmp_path / "head" / "model.safetensors"
    tensors = load_file(file)
    save_file({name: each for name, each in tensors.items() if name != "norm.weight"}, file)
    with pytest.raises(CheckpointError, match="is missing"):
        load(tmp_path, target)
    save_file({**tensors, "markov.weight": torch.zeros(2)}, file)
    with pytest.raises(CheckpointError, match=r"'markov\.weight' is left over"):
        load(tmp_path, target)
    write_eagle3(tmp_path / "head", target.architecture, speculators_model_type="dflash")
    with pytest.raises(UnsupportedModelError, match="'dflash' are not supported"):
        load(tmp_path, target)
    write_checkpoint(tmp_path / "shallow", tiny_config("LlamaForCausalLM", num_hidden_layers=3))
    shallow = read_architecture(tmp_path / "shallow")
    write_eagle3(tmp_path / "head", shallow)
    with pytest.raises(CheckpointError, match="a model of 3 layers lacks the usual ones"):
        found_eagle(tmp_path / "head", tmp_path / "shallow", shallow)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("write", [write_eagle, write_eagle3])
def test_what_a_head_lacks_is_named_as_in_its_file(
    write: Callable[..., dict[str, Tensor]], layout: Layout, tmp_path: Path
) -> None:
    target = target_in(tmp_path / "target")
    tensors = write(tmp_path / "head", target.architecture, layout)
    needed = [name for name in tensors if "_proj." in name or "post_attention" in name]
    if write is write_eagle3:
        needed += ["norm.weight", f"{EAGLE3_LAYER[layout]}.input_layernorm.weight"]
    assert len(needed) >= 8
    for lacking in needed:
        others = {name: each for name, each in tensors.items() if name != lacking}
        save_file(others, tmp_path / "head" / "model.safetensors")
        with pytest.raises(CheckpointError, match=re.escape(f"'{lacking}' is missing")):
            load(tmp_path, target)


def test_a_head_is_not_opened_as_a_model(tmp_path: Path) -> None:
    target = target_in(tmp_path / "target")
    for layout in LAYOUTS:
        write_eagle3(tmp_path / "head", target.architecture, layout)
        with pytest.raises(UnsupportedModelError, match="a head that drafts for one") as error:
            read_architecture(tmp_path / "head")
        assert "--spec eagle:NAME" in error.value.hint
