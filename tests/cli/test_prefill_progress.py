"""The line of a long prompt: its time left is right from the second chunk on, however deep."""

from collections.abc import Callable

import pytest
from checkpoints import architecture_of, tiny_config

from localllm.cli.draw.prefill_progress import Reading
from localllm.cost.rates import ModelWork
from localllm.model.architecture import Architecture
from localllm.model.prompt_work import prompt_work
from localllm.schedule.prompt_progress import PromptProgress

CHUNK = 256


def architecture(window: int | None = None) -> Architecture:
    """Of Qwen2.5 0.5B's shape: behind 8,192 tokens attention does half of the work."""
    windows = {} if window is None else {"use_sliding_window": True, "sliding_window": window}
    config = tiny_config(
        "Qwen3ForCausalLM",
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=32768,
        **windows,
        **({} if window is None else {"max_window_layers": 12}),
    )
    return architecture_of(config)


@pytest.mark.parametrize("window", [None, 1024])
@pytest.mark.parametrize("num_tokens", [1, 63, 64, 1000, 5000])
def test_a_prompt_s_work_is_that_of_its_tokens(window: int | None, num_tokens: int) -> None:
    model = architecture(window)
    work = ModelWork.of(model, lambda linear: 0, lambda width: 0)
    head = 2 * model.vocab_size * model.hidden_size
    exact = work.prefill_operations(num_tokens) - head
    assert prompt_work(model)(num_tokens) == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize("cached", [0, 2048])
@pytest.mark.parametrize("of_attention", [0.8, 1.0, 1.25])
def test_the_time_left_is_right_from_the_second_chunk_on(cached: int, of_attention: float) -> None:
    """Of a machine on which attention is slower than products, or faster."""
    model, total = architecture(), 16384
    work, weights = prompt_work(model), ModelWork.of(model, lambda name: 0, lambda width: 0)

    def seconds(tokens: int) -> float:
        linear = 2 * weights.num_weights * tokens
        return (linear + of_attention * (work(tokens) - linear)) / 1e11

    clock = [0.0]
    at = [cached]
    reading = Reading(progress_of(at, total, work), lambda: clock[0])
    reading.describe()
    errors = []
    for number, end in enumerate(range(cached + CHUNK, total, CHUNK), 1):
        clock[0] += seconds(end) - seconds(at[0])
        at[0] = end
        text = reading.describe()
        assert text is not None
        if number >= 2:
            told = float(text.rpartition(", ")[2].removesuffix(" s left"))
            errors.append((told - (left := seconds(total) - seconds(end))) / max(left, 10.0))
    assert max(map(abs, errors)) < 0.15


def progress_of(
    at: list[int], total: int, work: Callable[[int], float]
) -> Callable[[], PromptProgress]:
    return lambda: PromptProgress(at[0], total, work(at[0]) / work(total))


def test_it_counts_down_between_two_chunks() -> None:
    clock, at = [0.0], [100]
    reading = Reading(progress_of(at, 1000, float), lambda: clock[0])
    assert reading.describe() == "reading 100 of 1,000 tokens (10%), 0 s"
    clock[0], at[0] = 10.0, 200
    assert reading.describe() == "reading 200 of 1,000 tokens (20%), 80 s left"
    clock[0] = 15.0
    assert reading.describe() == "reading 200 of 1,000 tokens (20%), 75 s left"
