"""Steps of padding only that are computed in advance, so that no request waits for a compiler.

The kernels of a step depend on three things: how many rows its products have, how many queries its
longest request has, and what its sampling needs. One step of each kind is enough, in the order in
which a first conversation needs them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from localllm.engine.step_inputs import MAX_WINDOW, StepShape

# Tokens of prompts: one full tile of 64, one tile that is not full, several tiles with remainders
# of two sizes, and so many that weights are dequantized for them.
_PROMPTS = (64, 24, 65, 80, 256)


@dataclass(frozen=True, slots=True)
class WarmStep:
    """A step, and what its sampling needs besides the filters."""

    shape: StepShape
    has_drafts: bool = False
    has_penalties: bool = False
    has_biases: bool = False


def warm_steps(sizes: list[int], max_num_seqs: int, max_tokens: int) -> list[WarmStep]:
    """All steps, without duplicates; `sizes`: the buckets of rows."""
    return list(dict.fromkeys(_steps(sizes, max_num_seqs, max_tokens)))


def _steps(sizes: list[int], max_num_seqs: int, max_tokens: int) -> Iterator[WarmStep]:
    prompts = [StepShape(n, 1, n, 1) for n in dict.fromkeys(min(n, max_tokens) for n in _PROMPTS)]
    decode = StepShape(1, 1, 1, 1)
    yield WarmStep(prompts[0])
    yield WarmStep(decode)
    for shape in prompts[1:]:
        yield WarmStep(shape)
    for window in (2, 4, 8, MAX_WINDOW):
        # The last tokens of a prompt, or a draft.
        yield WarmStep(StepShape(window, 1, window, window), has_drafts=True)
    for size in sizes:
        if size <= next(each for each in sizes if each >= max_num_seqs):
            yield WarmStep(StepShape(size, size, 1, size))
    for num_seqs in (2, 4):
        if num_seqs <= max_num_seqs:
            rows = num_seqs * MAX_WINDOW
            yield WarmStep(StepShape(rows, num_seqs, MAX_WINDOW, rows))
    for has_penalties, has_biases, has_drafts in product((False, True), repeat=3):
        yield WarmStep(decode, has_drafts, has_penalties, has_biases)
