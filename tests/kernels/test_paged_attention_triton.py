"""Both attention kernels under Triton's interpreter against the reference."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from guards import GuardedMemory, needs_interpreter
from in_turns import in_turns
from paged_batch import MIXED, Batch

from localllm.operators.case import distance, unit_of
from localllm_kernels import triton_ops as table
from localllm_kernels.attention.decode import paged_attention_decode, takes_fragments
from localllm_kernels.attention.four_bits import FOUR_BITS
from localllm_kernels.attention.kv_cache import KVCache
from localllm_kernels.attention.prefill import paged_attention_prefill
from localllm_kernels.compiling.choice import Choice, Piece
from localllm_kernels.compiling.launch import Workspace
from localllm_kernels.primitives.code_pairs_8 import _asm_constants, code_pairs_8
from localllm_kernels.triton_ops import triton_ops

pytestmark = needs_interpreter

KV_DTYPES = [torch.float32, torch.float16, torch.int8, torch.float8_e4m3fn, FOUR_BITS]
CPU = torch.device("cpu")
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# New tokens of one, or of a draft window; a request without any is one that has just ended.
WINDOWS = [(1, 1), (130, 1), (300, 4), (16, 0), (16, 1), (257, 2), (64, 1), (1025, 3)]


def guard_cache(memory: GuardedMemory, cache: KVCache) -> KVCache:
    names = ["key", "key_scales"]
    if not cache.values_are_keys:
        names += ["value", "value_scales"]
    parts = {name: getattr(cache, name) for name in names}
    guarded = {name: memory.guarded(part) for name, part in parts.items() if part is not None}
    if cache.values_are_keys:
        guarded |= {name.replace("key", "value"): part for name, part in guarded.items()}
    return replace(cache, **guarded)


def decoded(
    batch: Batch,
    window: int | None,
    num_splits: int,
    workspace: Workspace,
    num_hidden: int = 0,
) -> torch.Tensor:
    """What the kernel gives, which has left guards and counters as they were."""
    with GuardedMemory() as memory:
        found = paged_attention_decode(
            memory.guarded(batch.query),
            guard_cache(memory, batch.cache),
            workspace,
            block_tables=memory.guarded(batch.block_tables),
            cu_seqlens_q=memory.guarded(batch.cu_seqlens_q),
            seq_lens=memory.guarded(batch.seq_lens),
            max_query_len=int(batch.cu_seqlens_q.diff().max()),
            scale=0.3,
            window=window,
            num_hidden=num_hidden,
            value_dim=batch.value_dim,
            uncoded_tables=batch.uncoded_tables,
            num_splits=num_splits,
        )
    memory.check()
    assert not workspace.counters(1).any()
    return found


def check_decode(
    batch: Batch, window: int | None, num_splits: int, workspace: Workspace | None = None
) -> None:
    found = decoded(batch, window, num_splits, workspace or Workspace(CPU))
    torch.testing.assert_close(found, batch.attend(window), atol=2e-5, rtol=2e-5)


HEADS, DECODE_WINDOWS, SPLITS = [(4, 4), (6, 2), (5, 1)], [None, 1, 40], [1, 3, 7]


def every_pair() -> list[Any]:
    """Every pair of two of heads, window and splits; all three in every way are slow."""
    return [
        pytest.param(*heads, window, splits, marks=[] if (i + j + k) % 3 == 0 else pytest.mark.slow)
        for i, heads in enumerate(HEADS)
        for j, window in enumerate(DECODE_WINDOWS)
        for k, splits in enumerate(SPLITS)
    ]


@pytest.mark.parametrize(("heads", "kv_heads", "window", "num_splits"), every_pair())
def test_decode(heads: int, kv_heads: int, window: int | None, num_splits: int) -> None:
    check_decode(Batch(WINDOWS, heads, kv_heads), window, num_splits)


def test_only_as_many_programs_as_a_request_s_own_length_needs_have_a_part() -> None:
    """The others would write and count for nothing; a context of 100 tokens has one part."""

    class CountedWorkspace(Workspace):
        def __init__(self) -> None:
            super().__init__(CPU)
            self.given = torch.empty(0)

        def parts(self, count: int) -> torch.Tensor:
            self.given = torch.full((count,), torch.nan)
            return self.given

    num_splits = 8
    for length, num_parts in ((100, 0), (256, 0), (257, 2), (600, 3), (3000, 8)):
        workspace = CountedWorkspace()
        check_decode(Batch([(length, 1)], 4, 4), None, num_splits, workspace)
        written = ~workspace.given.view(4, num_splits, -1).isnan().all(dim=2)
        assert written.sum(dim=1).tolist() == [num_parts] * 4
    # Where a window hides the beginning, of what is left.
    workspace = CountedWorkspace()
    check_decode(Batch([(3000, 1)], 4, 4), 40, num_splits, workspace)
    assert workspace.given.isnan().all()


@pytest.mark.parametrize(("head_dim", "kv_dtype"), in_turns([16, 24, 64], KV_DTYPES))
def test_decode_over_values_in_fewer_bits(head_dim: int, kv_dtype: torch.dtype) -> None:
    check_decode(Batch(WINDOWS[:4], 6, 2, head_dim, kv_dtype), None, 2)


def with_own(batch: Batch) -> Batch:
    batch.has_own = True
    return batch


OWN_LENGTHS = [(1, 1), (130, 1), (64, 0), (40, 2), (257, 3), (130, 4), (321, 2)]


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "window", "num_splits"),
    [(24, None, None, 1), (64, None, 100, 3), (40, 24, None, 2), (16, None, 20, 1)],
)
def test_queries_meet_their_own_keys_as_they_are(
    head_dim: int, value_dim: int | None, window: int | None, num_splits: int
) -> None:
    heads = (5, 1) if value_dim else (6, 2)
    sizes = (*heads, head_dim, FOUR_BITS, value_dim)
    batch = with_own(Batch(OWN_LENGTHS, *sizes))
    check_decode(batch, window, num_splits)
    codes = Batch(OWN_LENGTHS, *sizes).attend(window)
    assert not torch.allclose(batch.attend(window), codes, atol=0.01)
    torch.testing.assert_close(batch.attend(window), batch.expected(0.3, window).float())
    check_prefill(with_own(Batch([(200, 200), (130, 70), (65, 1), (7, 3)], *sizes)), window)


def check_fragments(
    batch: Batch, dtype: torch.dtype, window: int | None, num_splits: int, num_hidden: int = 0
) -> None:
    batch.to("cpu", dtype)
    group = batch.query.shape[1] // batch.cache.key.shape[1]
    rows = int(batch.cu_seqlens_q.diff().max()) * group
    assert takes_fragments(batch.query, batch.cache, rows)
    found = decoded(batch, window, num_splits, Workspace(CPU, key_fragments=True), num_hidden)
    # Weights and results are rounded; Triton's interpreter cuts bfloat16 off, and queries are
    # rounded once more where they are turned.
    expected = batch.expected(0.3, window, num_hidden=num_hidden)
    most = 1 if dtype == torch.bfloat16 or batch.kv_dtype == FOUR_BITS else 0.5
    assert distance(found, expected, unit_of(dtype)) < most


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "num_splits", "kv_dtype", "dtype"),
    [
        pytest.param(4, 2, 64, None, 3, torch.int8, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(
            4, 1, 128, None, 2, torch.float8_e4m3fn, torch.float16, marks=pytest.mark.slow
        ),
        (5, 1, 64, 40, 1, torch.int8, torch.float16),
        (1, 1, 128, 1, 2, torch.float8_e4m3fn, torch.bfloat16),
        (5, 1, 64, None, 2, FOUR_BITS, torch.float16),
        pytest.param(4, 2, 128, 40, 1, FOUR_BITS, torch.float16, marks=pytest.mark.slow),
        pytest.param(3, 3, 64, 40, 3, FOUR_BITS, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_decode_by_fragments(
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    num_splits: int,
    kv_dtype: torch.dtype,
    dtype: torch.dtype,
) -> None:
    lengths = [(1, 1), (130, 1), (16, 0), (40, 2), (257, 2)]
    check_fragments(Batch(lengths, heads, kv_heads, head_dim, kv_dtype), dtype, window, num_splits)


@pytest.mark.parametrize(("heads", "head_dim", "window"), [((4, 2), 64, None), ((3, 1), 128, 90)])
def test_fragments_beside_own_keys(
    heads: tuple[int, int], head_dim: int, window: int | None
) -> None:
    batch = with_own(Batch(OWN_LENGTHS, *heads, head_dim, FOUR_BITS))
    check_fragments(batch, torch.float16, window, 2)


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_8_bit_code_becomes_its_own_value(kv_dtype: torch.dtype, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(kv_dtype).float()
    # The code of NaN is never written.
    values[127::128] = torch.where(values[127::128].isnan(), 480.0, values[127::128])
    if kv_dtype == torch.float8_e4m3fn:
        values[255] = -480.0
    first, second = torch.empty(2, 64, dtype=torch.int32)
    _pairs_kernel[(1,)](
        codes.view(torch.int32),
        first,
        second,
        torch.empty(1, dtype=dtype),
        kv_dtype == torch.int8,
        64,
    )
    fours = values.view(64, 4)
    assert torch.equal(first.view(dtype).view(64, 2).float(), fours[:, [0, 2]])
    assert torch.equal(second.view(dtype).view(64, 2).float(), fours[:, [1, 3]])


def of_ptx(code: str, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """What straight code in PTX leaves in its outputs, $0 and $1; registers are int64 [words]."""
    registers = {f"${2 + i}": value for i, value in enumerate(inputs)}

    def read(name: str) -> torch.Tensor:
        if name in registers:
            return registers[name]
        return torch.full_like(inputs[0], int(name, 0))

    def halves(name: str, dtype: torch.dtype) -> torch.Tensor:
        bits = read(name)
        signed = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).int()
        return signed.view(dtype).view(-1, 2).double()

    for line in code.strip("{} ").split(";"):
        opcode, _, operands = line.strip().partition(" ")
        names = [each.strip() for each in operands.split(",")]
        if opcode.startswith(("shl", "shr")):
            moved = read(names[1])
            count = int(names[2])
            moved = moved << count if opcode.startswith("shl") else moved >> count
            registers[names[0]] = moved & 0xFFFFFFFF
        elif opcode.startswith("and"):
            registers[names[0]] = read(names[1]) & read(names[2])
        elif opcode.startswith("lop3"):
            a, b, c, table = (*map(read, names[1:4]), int(names[4], 0))
            assert table in (0xEA, 0x6A)  # (a & b) | c, (a & b) ^ c
            registers[names[0]] = (a & b) | c if table == 0xEA else (a & b) ^ c
        elif opcode.startswith(("fma", "add")):
            dtype = torch.bfloat16 if "bf16" in opcode else torch.float16
            first, *more = (halves(name, dtype) for name in names[1:])
            total = first * more[0] + more[1] if opcode.startswith("fma") else first + more[0]
            packed = total.to(dtype).view(torch.int32).flatten().long()
            registers[names[0]] = packed & 0xFFFFFFFF
        else:
            assert opcode in ("", ".reg"), opcode
    return [registers["$0"], registers["$1"]]


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_machine_s_code_gives_the_same(kv_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """The interpreter runs the other branch, so this one is worked through by itself."""
    name = {torch.int8: "INT8", torch.float8_e4m3fn: "FP8"}[kv_dtype]
    kind = {torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    code = getattr(sys.modules["localllm_kernels.primitives.code_pairs_8"], f"_{name}_{kind}").value
    constants = _asm_constants.fn(kv_dtype == torch.int8, TYPES[dtype])
    words = torch.randint(0, 1 << 32, (1 << 14,), generator=torch.Generator().manual_seed(0))
    inputs = [words, *(torch.full_like(words, value & 0xFFFFFFFF) for value in constants)]
    found = [each.int() for each in of_ptx(code, inputs)]
    expected = torch.empty(2, len(words), dtype=torch.int32)
    _pairs_kernel[(1,)](
        words.int(), *expected, torch.empty(1, dtype=dtype), kv_dtype == torch.int8, len(words)
    )
    assert torch.equal(torch.stack(found), expected)


@triton.jit
def _pairs_kernel(  # type: ignore[no-untyped-def]
    word_ptr, first_ptr, second_ptr, like_ptr, is_int8: tl.constexpr, count: tl.constexpr
):
    at = tl.arange(0, count)
    pairs = code_pairs_8(tl.load(word_ptr + at), is_int8, like_ptr.dtype.element_ty, False)
    tl.store(first_ptr + at, pairs[0])
    tl.store(second_ptr + at, pairs[1])


def check_prefill(
    batch: Batch,
    window: int | None,
    num_splits: int | None = None,
    expected: torch.Tensor | None = None,
) -> None:
    workspace = Workspace(CPU)
    expected = batch.attend(window) if expected is None else expected
    with GuardedMemory() as memory:
        found = paged_attention_prefill(
            memory.guarded(batch.query),
            guard_cache(memory, batch.cache),
            workspace,
            block_tables=memory.guarded(batch.block_tables),
            cu_seqlens_q=memory.guarded(batch.cu_seqlens_q),
            seq_lens=memory.guarded(batch.seq_lens),
            max_query_len=int(batch.cu_seqlens_q.diff().max()),
            scale=0.3,
            window=window,
            value_dim=batch.value_dim,
            uncoded_tables=batch.uncoded_tables,
            num_splits=num_splits,
        )
    memory.check()
    assert distance(found, expected, unit_of(found.dtype)) < 1
    assert not workspace.counters(1).any()


@pytest.mark.parametrize(("num_splits", "window"), in_turns([2, 5], [None, 600]))
def test_keys_of_a_prompt_split_among_programs(num_splits: int, window: int | None) -> None:
    # A turn of a few tokens behind a long conversation, beside what has less than a part.
    lengths = [(1400, 12), (40, 30), (1025, 3), (513, 1), (512, 20)]
    batch = Batch(lengths, 6, 2).to("cpu", torch.float16)
    check_prefill(batch, window, num_splits, batch.expected(0.3, window))


def test_what_is_deterministic_splits_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lone request has one task where one head has all keys: that is no reason to split them."""
    grids: list[tuple[int, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return lambda *arguments, **more: None

    module = sys.modules["localllm_kernels.attention.prefill"]
    monkeypatch.setattr(module, "_prefill_kernel", Kernel())
    ops = triton_ops("cpu", deterministic=True)
    for lengths in ([(700, 1)], [(700, 1), (600, 1)]):
        batch = Batch(lengths, 8, 1)
        ops.paged_attention(
            batch.query,
            batch.cache,
            block_tables=batch.block_tables,
            cu_seqlens_q=batch.cu_seqlens_q,
            seq_lens=batch.seq_lens,
            max_query_len=1,
            scale=0.3,
            window=None,
        )
    assert [grid[2] for grid in grids] == [1, 1]


@pytest.mark.parametrize("choice", [Choice(), Choice(frozenset([Piece.FEW_QUERIES]))])
def test_a_prompt_beside_answers_takes_both_kernels(
    choice: Choice, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Batch([(300, 70), (257, 1), (30, 20), (16, 0), (64, 2), (5, 3)], 16, 2)
    counts = batch.cu_seqlens_q.diff()
    ops, launched = triton_ops("cpu", choice=choice), []
    for name in ("paged_attention_decode", "paged_attention_prefill"):
        kernel = getattr(table, name)

        def noted(*arguments: Any, kernel: Any = kernel, name: str = name, **more: Any) -> Any:
            launched.append(name)
            return kernel(*arguments, **more)

        monkeypatch.setattr(table, name, noted)
    found = ops.paged_attention(
        batch.query,
        batch.cache,
        block_tables=batch.block_tables,
        cu_seqlens_q=batch.cu_seqlens_q,
        seq_lens=batch.seq_lens,
        max_query_len=int(counts.max()),
        scale=0.3,
        window=None,
    )
    torch.testing.assert_close(found, batch.attend(None), atol=2e-5, rtol=2e-5)
    assert len(launched) == (1 if choice.to_torch else 2)


@pytest.mark.parametrize(
    ("window", "heads"), in_turns([None, 1, 40, 128], [(6, 2), (5, 1), (4, 4)])
)
def test_prefill(window: int | None, heads: tuple[int, int]) -> None:
    check_prefill(Batch([*MIXED[:3], (20, 0), *MIXED[3:]], *heads), window)


@pytest.mark.parametrize(("head_dim", "kv_dtype"), in_turns([16, 24, 64], KV_DTYPES))
def test_prefill_over_values_in_fewer_bits(head_dim: int, kv_dtype: torch.dtype) -> None:
    check_prefill(Batch([(70, 70), (65, 1), (7, 3)], 6, 2, head_dim, kv_dtype), None)


@pytest.mark.parametrize(("kv_dtype", "sizes"), in_turns(KV_DTYPES, [(5, 40, 24), (20, 80, 64)]))
def test_values_that_are_the_first_numbers_of_keys(
    kv_dtype: torch.dtype, sizes: tuple[int, int, int]
) -> None:
    heads, head_dim, value_dim = sizes
    for num_splits in (1, 3):
        batch = Batch([(1, 1), (300, 1), (70, 1)], heads, 1, head_dim, kv_dtype, value_dim)
        check_decode(batch, None, num_splits)
    check_prefill(Batch([(70, 70), (65, 1), (7, 3)], heads, 1, head_dim, kv_dtype, value_dim), None)


def test_values_of_their_own_of_which_the_first_numbers_are_wanted() -> None:
    batch = Batch([(1, 1), (130, 2), (70, 1)], 6, 2, 40)
    found = triton_ops("cpu").paged_attention(
        batch.query,
        batch.cache,
        block_tables=batch.block_tables,
        cu_seqlens_q=batch.cu_seqlens_q,
        seq_lens=batch.seq_lens,
        max_query_len=2,
        scale=0.3,
        window=None,
        value_dim=24,
    )
    torch.testing.assert_close(found, batch.attend(None)[..., :24], atol=2e-5, rtol=2e-5)


def test_more_heads_share_wide_keys_than_fit_in_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, seen = ("paged_attention_decode", "paged_attention_prefill"), []
    for name in kernels:
        kernel = getattr(table, name)

        def noted(query: torch.Tensor, *arguments: Any, kernel: Any = kernel, **more: Any) -> Any:
            seen.append(query.shape[1])
            return kernel(query, *arguments, **more)

        monkeypatch.setattr(table, name, noted)
    batch = Batch([(40, 1), (20, 2)], 40, 1, 288, value_dim=272)
    found = batch.attend(None, triton_ops("cpu").paged_attention)
    torch.testing.assert_close(found, batch.attend(None), atol=2e-5, rtol=2e-5)
    assert set(seen) == {16, 8}


def test_fragments_with_hidden_keys() -> None:
    batch = Batch([(1, 1), (300, 2), (70, 1)], 4, 2, 64, torch.int8)
    check_fragments(batch, torch.float16, None, 2, num_hidden=1)


def check_splits(
    kernel: Callable[..., torch.Tensor], batch: Batch, expected: torch.Tensor, **extra: Any
) -> None:
    """In one and in several parts."""
    for num_splits in (1, 3):
        found = kernel(
            batch.query,
            batch.cache,
            Workspace(CPU),
            block_tables=batch.block_tables,
            cu_seqlens_q=batch.cu_seqlens_q,
            seq_lens=batch.seq_lens,
            max_query_len=int(batch.cu_seqlens_q.diff().max()),
            num_splits=num_splits,
            **extra,
        )
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("num_hidden", "window", "kv_dtype"),
    [
        (70, None, torch.float32),
        (20, 40, torch.int8),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [
                (1, None, torch.int8),
                (1, None, torch.float32),
                (70, None, torch.int8),
                (20, 40, torch.float32),
            ]
        ),
    ],
)
def test_hidden_keys(kv_dtype: torch.dtype, num_hidden: int, window: int | None) -> None:
    """In one and in several parts; some requests have no other keys."""
    kernels = [(paged_attention_decode, [(1, 1), *WINDOWS]), (paged_attention_prefill, MIXED)]
    for kernel, lengths in kernels:
        batch = Batch(lengths, 6, 2, 24, kv_dtype)
        expected = batch.expected(0.3, window, num_hidden=num_hidden).float()
        assert not expected[0].any()
        assert (expected - batch.expected(0.3, window).float()).abs().max() > 0.05
        check_splits(kernel, batch, expected, scale=0.3, window=window, num_hidden=num_hidden)


@pytest.mark.parametrize(
    ("cap", "has_sinks", "window", "kv_dtype"),
    [
        (1.5, True, None, torch.float32),
        (None, True, 40, torch.int8),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [
                (1.5, False, None, torch.int8),
                (1.5, False, None, torch.float32),
                (1.5, True, None, torch.int8),
                (None, True, 40, torch.float32),
            ]
        ),
    ],
)
def test_capped_scores_and_sinks(
    kv_dtype: torch.dtype, cap: float | None, has_sinks: bool, window: int | None
) -> None:
    """In one and in several parts, of which one counts the sink."""
    sinks = torch.linspace(-2, 3, 6) if has_sinks else None
    extra: dict[str, Any] = {"scale": 0.3, "window": window, "cap": cap, "sinks": sinks}
    kernels = [(paged_attention_decode, WINDOWS), (paged_attention_prefill, MIXED)]
    for kernel, lengths in kernels:
        batch = Batch(lengths, 6, 2, 24, kv_dtype)
        expected = batch.expected(0.3, window, cap, sinks).float()
        assert (expected - batch.expected(0.3, window).float()).abs().max() > 0.05
        check_splits(kernel, batch, expected, **extra)
