"""The next tokens of a batch on a GPU, see `sample.py`.

Many programs scan a row once (`scan.py`), and one picks the token (`pick.py`).
"""

from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from localllm_kernels.compiling.aot import AotSpec, Work
from localllm_kernels.sampling.pick import _book_kernel, _pick_kernel
from localllm_kernels.sampling.sample import Biases, Drafts, Penalties, SamplingRows
from localllm_kernels.sampling.scan import _scan_kernel

# The scan: values per block, of which the greatest is kept, and blocks per program.
WIDTH, BLOCKS = 32, 64
KEPT = 128  # blocks that candidates come from
BLOCK = 2048  # values at a time in a pass over a whole row


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Token ids, int64 [rows], from `logits`: float32 [rows, vocab]; -1 for a row that is not
    finite, or not sampled.

    `logits` are changed if there are penalties or biases. Tokens are recorded in `newest` and in
    the counts; of a draft, those that were drawn as drafted, and the first one drawn instead.
    """
    assert logits.is_contiguous()
    penalties, biases, drafts = rows.penalties, rows.biases, rows.drafts
    num_rows, vocab = logits.shape
    counts = rows.slots if penalties is None else penalties.counts
    depths, tokens = (rows.slots,) * 2 if drafts is None else (drafts.depths, drafts.tokens)
    bias_pointers = (rows.slots, rows.slots, logits)
    if biases is not None:
        bias_pointers = (biases.starts, biases.tokens, biases.values)
    ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return ids
    num_blocks = triton.cdiv(vocab, WIDTH)
    num_chunks = triton.cdiv(num_blocks, BLOCKS)
    maxima, masses, winners = _side_by_side(
        logits, torch.float32, *(num_rows * n for n in (num_blocks, num_blocks, num_chunks))
    )
    blocks, places = _side_by_side(logits, torch.int32, num_rows * KEPT, num_rows * num_chunks)
    filters = (rows.temperatures, rows.top_k, rows.top_p, rows.min_p, rows.keys)
    _scan_kernel[(num_chunks, num_rows)](
        logits,
        rows.slots,
        counts,
        logits if penalties is None else penalties.factors,
        *bias_pointers,
        *filters,
        depths,
        tokens,
        maxima,
        masses,
        winners,
        places,
        vocab,
        num_blocks,
        HAS_PENALTIES=penalties is not None,
        HAS_BIASES=biases is not None,
        HAS_DRAFTS=drafts is not None,
        WIDTH=WIDTH,
        BLOCKS=BLOCKS,
        num_warps=4,
    )
    _pick_kernel[(num_rows,)](
        logits,
        rows.slots,
        rows.newest,
        counts,
        *filters,
        maxima,
        masses,
        winners,
        places,
        blocks,
        ids,
        vocab,
        num_blocks,
        num_chunks,
        HAS_PENALTIES=penalties is not None,
        HAS_DRAFTS=drafts is not None,
        WIDTH=WIDTH,
        BLOCKS=triton.next_power_of_2(num_blocks),
        CHUNKS=triton.next_power_of_2(num_chunks),
        KEPT=KEPT,
        BLOCK=BLOCK,
        num_warps=16,
    )
    if drafts is not None:
        _book(ids, rows, drafts, counts, vocab)
    return ids


def _book(ids: Tensor, rows: SamplingRows, drafts: Drafts, counts: Tensor, vocab: int) -> None:
    """Record the tokens of drafts once all of them are known."""
    _book_kernel[(len(ids),)](
        ids,
        rows.slots,
        rows.newest,
        counts,
        drafts.depths,
        drafts.tokens,
        vocab,
        HAS_PENALTIES=rows.penalties is not None,
        num_warps=1,
    )


def _side_by_side(like: Tensor, dtype: torch.dtype, *counts: int) -> tuple[Tensor, ...]:
    """Uninitialised tensors of `counts` values, in one allocation. Each begins at a multiple of 16
    bytes: for a pointer that does not, Triton compiles the kernel again.
    """
    padded = [-(-count // 4) * 4 for count in counts]
    whole = torch.empty(sum(padded), dtype=dtype, device=like.device)
    return tuple(torch.split(whole, padded))


def _example(*, has_all: bool) -> None:
    logits, ones, slots = torch.empty(1, 151_936), torch.ones(1), torch.zeros(1).int()
    numbers = slots.long()
    rows = SamplingRows(slots, numbers, ones, slots, ones, ones, numbers)
    if has_all:
        penalties = Penalties(logits.int(), torch.ones(1, 3))
        biases, drafts = Biases(slots, slots, ones), Drafts(slots, slots)
        rows = replace(rows, penalties=penalties, biases=biases, drafts=drafts)
    sample(logits, rows)


def _spec(kernel: Any, *, has_all: bool, work: Work | None = None) -> AotSpec:
    return AotSpec(
        kernel,
        "penalties, biases and drafts" if has_all else "any filters",
        lambda _: _example(has_all=has_all),
        # Candidates and the maxima of their blocks fill the registers of sixteen warps.
        max_stack=64 if kernel is _pick_kernel else 0,
        work=work,
    )


AOT_SPECS = [
    _spec(_scan_kernel, has_all=False, work=Work("logit", WIDTH * BLOCKS, 4)),
    _spec(_scan_kernel, has_all=True),
    _spec(_pick_kernel, has_all=False),
    _spec(_pick_kernel, has_all=True),
    _spec(_book_kernel, has_all=True),
]
