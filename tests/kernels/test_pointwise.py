"""Norm, rotation, gate and store against plain formulas; and what exactness rests on here."""

import pytest
import torch
import torch.nn.functional as F

from localllm_kernels import TORCH_OPS, select_ops
from localllm_kernels.attention.kv_cache import KVCache
from localllm_kernels.attention.rotary import apply_rotary_reference
from localllm_kernels.attention.store_kv import store_kv_reference
from localllm_kernels.pointwise.gate import GATE_KINDS, gate_reference
from localllm_kernels.pointwise.rms_norm import add_rms_norm_reference, rms_norm_reference

ROWS = 64


def test_rms_norm_by_hand() -> None:
    x = torch.tensor([[3.0, 4.0]])  # mean square 12.5
    result = rms_norm_reference(x, torch.tensor([1.0, 2.0]), 0.0)
    torch.testing.assert_close(result, torch.tensor([[3.0, 8.0]]) / 12.5**0.5)


def test_add_rms_norm_norms_the_sum_and_hands_it_on() -> None:
    x, residual, weight = torch.randn(5, 8), torch.randn(5, 8), torch.randn(8)
    normed, total = add_rms_norm_reference(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm_reference(x + residual, weight, 1e-6))


def test_rotation_turns_pairs_and_keeps_their_length() -> None:
    x = torch.tensor([[[1.0, 5.0, 0.0, 0.0]]])  # pairs (1, 0) and (5, 0)
    cos, sin = torch.tensor([[0.0, 0.6]]), torch.tensor([[1.0, 0.8]])
    result = apply_rotary_reference(x, cos, sin)
    torch.testing.assert_close(result, torch.tensor([[[0.0, 3.0, 1.0, 4.0]]]))


def test_the_gate_is_silu_of_the_gate_times_up() -> None:
    gate_up = torch.randn(7, 20) * 5
    expected = F.silu(gate_up[:, :10].double()) * gate_up[:, 10:].double()
    torch.testing.assert_close(
        gate_reference(gate_up, "silu").double(), expected, atol=1e-5, rtol=1e-5
    )


def test_the_gate_of_large_inputs_stays_finite() -> None:
    gate_up = torch.tensor([[1e4, -1e4, 1.0, 1.0]])
    assert gate_reference(gate_up, "silu").tolist() == [[1e4, -0.0]]


def test_store_kv_writes_its_slots_and_nothing_else() -> None:
    key, value = torch.randn(2, 4, 2, 5)  # the second token and the fourth are padding
    key_cache, value_cache = torch.zeros(2, 3, 2, 4, 5)  # 3 blocks, 2 heads, 4 slots
    expected = torch.zeros(2, 3, 2, 4, 5)
    expected[:, 1, :, 1] = torch.stack((key[0], value[0]))
    expected[:, 2, :, 3] = torch.stack((key[2], value[2]))
    store_kv_reference(key, value, KVCache(key_cache, value_cache), torch.tensor([5, -1, 11]))
    assert torch.equal(torch.stack((key_cache, value_cache)), expected)


def test_unknown_and_missing_backends_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_ops("cpu", "torch", torch.float32) is TORCH_OPS
    assert select_ops("cpu", "auto", torch.float16) is TORCH_OPS
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    for name in ("triton", "cuda"):
        with pytest.raises(ValueError, match=name):
            select_ops("cpu", name, torch.float32)


@pytest.mark.parametrize("width", [17, 48, 80, 256, 1000, 4096])
@pytest.mark.parametrize("count", [1, 2, 7, 8, 17])
def test_pointwise_operators_give_a_row_the_same_bits_in_any_batch(width: int, count: int) -> None:
    generator = torch.Generator().manual_seed(width)
    x = 3 * torch.randn(ROWS, 2 * width, generator=generator)
    weight = torch.randn(2 * width, generator=generator)
    for start in (0, 3, 8):
        part = slice(start, start + count)
        for kind in GATE_KINDS:
            assert torch.equal(gate_reference(x[part], kind), gate_reference(x, kind)[part])
        normed = rms_norm_reference(x, weight, 1e-6)
        assert torch.equal(rms_norm_reference(x[part], weight, 1e-6), normed[part])


@pytest.mark.parametrize(("width_in", "width_out"), [(48, 96), (256, 512), (768, 256), (256, 6144)])
@pytest.mark.parametrize("threads", [1, 2])
def test_float32_products_of_padded_rows_do_not_depend_on_the_row_count(
    width_in: int, width_out: int, threads: int
) -> None:
    # What `engine/model_runner.py` pads for: the library of another machine could differ.
    generator = torch.Generator().manual_seed(width_out)
    x = torch.randn(512, width_in, generator=generator)
    weight = torch.randn(width_out, width_in, generator=generator)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = F.linear(x, weight)
        for start, count in [(0, 8), (8, 16), (40, 24), (64, 200), (0, 256)]:
            assert torch.equal(F.linear(x[start : start + count], weight), whole[start:][:count])
    finally:
        torch.set_num_threads(before)
