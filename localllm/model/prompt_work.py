"""The operations of a prompt's tokens: later ones read more keys."""

from collections.abc import Callable

from localllm.model.architecture import HEAD, Architecture

# A token's cost bends only where a window is full, so that few contexts stand for all.
_SAMPLES = 64


def prompt_work(architecture: Architecture) -> Callable[[int], float]:
    """A function from a number of tokens at a prompt's start to their operations, about."""
    shapes, shares = architecture.linears(), architecture.shares()
    shapes.pop(HEAD, None)
    each = 2.0 * sum(shares.get(name, 1.0) * out * inner for name, (out, inner) in shapes.items())
    blocks = architecture.blocks()

    def operations(num_tokens: int) -> float:
        count = max(1, min(num_tokens, _SAMPLES))
        beside = 0
        for i in range(count):
            context = int((2 * i + 1) * num_tokens / (2 * count)) + 1
            for block, number in blocks.items():
                beside += number * block.work(context, lambda width: 0).operations
        return num_tokens * (each + beside / count)

    return operations
