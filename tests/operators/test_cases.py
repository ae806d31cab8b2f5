"""What the table says of its operators: their bytes and operations, by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from every_family import small_config
from torch import Tensor

import localllm.operators.product_cases as cases_of_products
from localllm.model.blocks.attention import AttentionSpec
from localllm.model.blocks.gated_mlp import GatedMLPSpec
from localllm.model.families.table import architecture_of
from localllm.model.random_weights import RandomWeights
from localllm.operators.attention_cases import attention, rotation
from localllm.operators.case import Cost, Setting, Sizes
from localllm.operators.pointwise_cases import gate, norms, route, sampling
from localllm.operators.product_cases import Product, drawn_product, product_cases
from localllm.operators.recurrence_cases import recurrences
from localllm_kernels import TORCH_OPS
from localllm_kernels.compiling.choice import Piece
from localllm_kernels.products.int4_weight import Around
from localllm_kernels.products.nvfp4_matmul import rounded_to_nvfp4
from localllm_kernels.triton_ops import triton_ops

CPU = torch.device("cpu")
ROWS = 3


def setting(family: str, kv_dtype: torch.dtype = torch.bfloat16, **more: Any) -> Setting:
    """In bfloat16, of two bytes."""
    architecture = architecture_of({**small_config(family), **more})
    return Setting(Sizes(architecture, torch.bfloat16, kv_dtype, 16), CPU, TORCH_OPS)


def attention_of(on: Setting) -> AttentionSpec:
    """4 heads, 2 of keys and values, of 16 numbers each."""
    [spec] = on.sizes.architecture.attentions()
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 2, 16)
    return spec


def test_rows_by_themselves() -> None:
    on = setting("Qwen3ForCausalLM")
    width = ROWS * on.sizes.architecture.hidden_size
    norm, norm_of_sum = norms(on, ROWS, is_wide=False)
    assert norm.cost == Cost(2 * width * 2, 4 * width)
    assert norm_of_sum.cost == Cost(4 * width * 2, 5 * width)
    assert gate(on, ROWS, 100, "silu").cost == Cost(3 * ROWS * 100 * 2, 5 * ROWS * 100)
    # It has one input, not two.
    assert gate(on, ROWS, 100, "relu2").cost.num_bytes == 2 * ROWS * 100 * 2
    vocab = on.sizes.architecture.vocab_size
    assert sampling(on).cost == Cost(8 * vocab * 4, 8 * vocab)


def test_attention_reads_what_its_window_shows() -> None:
    on = setting("LlamaForCausalLM", torch.int8)
    spec = attention_of(on)
    whole = attention(on, Piece.FEW_QUERIES, [(100, 1), (40, 2)], spec).cost
    row, rows = 2 * 2 * (16 + 4), 3 * 4 * 16 * 2
    assert whole.num_bytes == (100 + 40) * row + 2 * rows
    assert whole.operations == 4 * 4 * 16 * (100 + 39 + 40)
    assert whole.arithmetic == "bf16"
    near = attention(on, Piece.FEW_QUERIES, [(100, 1), (40, 2)], replace(spec, window=10)).cost
    assert near.num_bytes == (10 + 11) * row + 2 * rows
    assert near.operations == 4 * 4 * 16 * 3 * 10
    # Queries, keys and values are read; queries, and codes with scales, are written.
    qkv = ROWS * (4 + 2 + 2) * 16
    moved = (qkv + ROWS * 4 * 16) * 2 + 2 * ROWS * 2 * (16 + 4)
    assert rotation(on, ROWS, spec).cost == Cost(moved, 7 * qkv)


@pytest.mark.parametrize(
    ("kind", "stored"),
    [
        ("bf16", 2 * 96 * 256),
        ("int4", 96 * 256 // 2 + 2 * 96 * 2),  # a scale for 128 weights
        ("int8", 96 * 256 + 96 * 2),
        ("fp8", 96 * 256 + 96 * 4),
        ("mxfp4", 96 * 256 // 2 + 96 * 256 // 32),
        ("nvfp4", 96 * 256 // 2 + 96 * 256 // 16 + 96 * 4),
        ("trellis3", 96 * 256 // 8 * 3 + 96 * 4),
    ],
)
def test_products_read_their_weights_once(kind: str, stored: int) -> None:
    case = drawn_product(setting("LlamaForCausalLM"), kind, (96, 256)).case(
        setting("LlamaForCausalLM"), ROWS
    )
    moved = stored + ROWS * (96 + 256) * 2
    assert case.cost == Cost(moved, 2 * ROWS * 96 * 256, "bf16")
    assert case.distance() < 1


@pytest.mark.parametrize("piece", [Piece.FP8, Piece.NVFP4])
def test_inputs_that_a_checkpoint_wants_in_fewer_bits_are_compared_so(
    piece: Piece, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("rounds_inputs", "multiplies_nvfp4"):
        monkeypatch.setattr(cases_of_products, name, lambda device: True)
    on, weight, scale = setting("LlamaForCausalLM"), torch.randn(96, 256), torch.tensor(0.01)

    def rounded(x: Tensor) -> Tensor:
        if piece is Piece.NVFP4:
            return rounded_to_nvfp4(x.float(), scale)
        return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale

    def own(x: Tensor, around: Around) -> Tensor:
        return F.linear(rounded(x), weight).to(x.dtype)

    def exact(x: Tensor, around: Around) -> Tensor:
        return F.linear(x, weight)

    for input_scale, is_right in ((scale, True), (None, False)):
        product = Product(piece, "", "fp8", (96, 256), 1, own, own, exact, input_scale)
        assert (product.case(on, ROWS).distance() < 1) == is_right


def test_a_mixture_reads_the_experts_that_are_chosen() -> None:
    on = replace(setting("Glm4MoeForCausalLM"), own=triton_ops("cpu"))
    [(_, spec)] = dict.fromkeys(on.sizes.architecture.experts())
    source = RandomWeights(on.sizes.architecture, "bf16", CPU)
    cases = {
        case.rows: case for case in product_cases(on, on, source) if case.piece is Piece.EXPERTS
    }
    [one, many] = cases[1], cases[512]
    assert isinstance(spec.expert, GatedMLPSpec)
    weights = 3 * 64 * 64  # gate, up and down of an expert
    assert one.cost == Cost(2 * 2 * weights + 2 * 64 * 2, 2 * 2 * weights, "bf16")
    assert many.cost.num_bytes == 2 * 8 * weights + 2 * 512 * 64 * 2
    assert route(on, ROWS, spec.router).cost == Cost(ROWS * 12 * 2 + ROWS * 2 * 8, 2 * ROWS * 12)


def test_recurrences_read_and_write_their_state() -> None:
    on = setting("Qwen3_5ForCausalLM")
    one, _ = recurrences(on)
    # 4 matrices of 16 times 8 numbers; convolutions of 4 taps over 2 keys and queries of 16 each,
    # and 4 values of 8. Of a token: those, the gates of 32 values, and two factors a head.
    matrices, channels = 4 * 16 * 8, 2 * 2 * 16 + 4 * 8
    state = 4 * (matrices + 3 * (channels + 2 * 4))
    moved = (32 + channels + 2 * 4) * 2 + 32 * 2 + 2 * state
    assert one.cost == Cost(moved, 7 * matrices + 2 * 4 * channels)
    one, many = recurrences(setting("Lfm2ForCausalLM"))
    state = 4 * 2 * 64
    assert one.cost == Cost(4 * 64 * 2 + 2 * state, 64 * (2 * 3 + 2))
    assert many.cost == Cost(33 * 4 * 64 * 2 + 2 * state, 33 * 64 * (2 * 3 + 2))
