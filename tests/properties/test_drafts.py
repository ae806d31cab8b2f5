"""The exactness contract with drafts: whatever somebody proposes, a request gets its own tokens."""

from collections.abc import Callable

from drafting import ngram_speculator, oracle_speculator
from engines import Limits, checked_step, load_tiny_model, make_engine, run
from hypothesis import given, settings
from hypothesis import strategies as st
from properties.test_exactness import (
    Request,
    answers_alone,
    assert_nobody_is_disturbed,
    assert_same_as_alone,
    engine_of,
    exact,
    models,
    prompts,
    requests,
)

from localllm.config import SamplingParams
from localllm.engine.request import Request as EngineRequest
from localllm.engine.request import TokenEvent
from localllm.engine.speculation import Speculator

# Text that repeats itself: the end of the prompt stands in it before.
repeating = st.builds(
    lambda prompt, times: (prompt[:30] * times)[:90], prompts, st.integers(1, 4)
).filter(bool)
# A low temperature and penalties that reward: generated text that repeats itself too.
looping = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.05, 1.0]),
    frequency_penalty=st.sampled_from([0.0, -2.0]),
    seed=st.integers(0, 1 << 40),
    max_tokens=st.integers(2, 40),
    n=st.sampled_from([1, 1, 2]),
    ignore_eos=st.just(True),
)


def speculator_of(
    kind: str, model_name: str, wanted: list[Request], error_rate: float, max_draft: int
) -> Callable[[], Speculator]:
    """Of what was there before, or of somebody who nearly knows."""
    if kind == "ngram":
        return lambda: ngram_speculator(max_draft)
    known = [
        (prompt, answers_alone(model_name, (prompt, params)), params) for prompt, params in wanted
    ]

    def answer(request: EngineRequest) -> list[int]:
        prompt = request.token_ids[: request.num_prompt_tokens]
        return next(
            answers[request.sample].token_ids
            for own, answers, params in known
            if own == prompt and params is request.params
        )

    return lambda: oracle_speculator(answer, error_rate, max_draft)


@settings(exact, max_examples=150)
@given(
    models,
    st.one_of(requests, st.lists(st.tuples(repeating, looping), min_size=1, max_size=8)),
    st.sampled_from(["ngram", "oracle", "oracle"]),
    st.sampled_from([0.0, 0.1, 0.5]),
    st.integers(1, 20),
    st.fixed_dictionaries(
        {
            "block_size": st.sampled_from([1, 4, 16]),
            "max_num_seqs": st.integers(1, 24),
            "max_num_batched_tokens": st.integers(1, 120),
            "enable_prefix_caching": st.booleans(),
            "overlaps": st.booleans(),
        }
    ),
    st.integers(0, 60),
)
def test_drafts_change_no_token(
    model_name: str,
    wanted: list[Request],
    kind: str,
    error_rate: float,
    max_draft: int,
    sizes: dict[str, int],
    spare_blocks: int,
) -> None:
    longest = max(len(prompt) + (params.max_tokens or 0) for prompt, params in wanted)
    limits = Limits(
        num_blocks=-(-longest // sizes["block_size"]) + spare_blocks,
        speculator=speculator_of(kind, model_name, wanted, error_rate, max_draft),
        **sizes,  # type: ignore[arg-type]
    )
    engine = engine_of(model_name, limits)
    assert_same_as_alone(model_name, wanted, run(engine, wanted))
    # Again: prompts from the cache, and all of it said before.
    assert_same_as_alone(model_name, wanted, run(engine, wanted))


@settings(exact, max_examples=60)
@given(
    models,
    requests,
    requests,
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 7)), max_size=4),
    st.integers(30, 60),
    st.booleans(),
    st.integers(1, 12),
)
def test_arrivals_and_aborts_beside_drafts_disturb_nobody(
    model_name: str,
    first: list[Request],
    later: list[Request],
    aborts: list[tuple[int, int]],
    num_blocks: int,
    overlaps: bool,
    max_draft: int,
) -> None:
    wanted = first + later
    limits = Limits(
        block_size=4,
        num_blocks=num_blocks,
        max_num_batched_tokens=48,
        enable_prefix_caching=True,
        overlaps=overlaps,
        speculator=speculator_of("oracle", model_name, wanted, 0.2, max_draft),
    )
    assert_nobody_is_disturbed(model_name, first, later, aborts, limits)


def test_log_probabilities_come_with_every_token_of_a_draft() -> None:
    model = load_tiny_model("Qwen3ForCausalLM")
    params = SamplingParams(temperature=0.0, logprobs=3, max_tokens=30, ignore_eos=True)
    found: list[list[TokenEvent]] = []
    for speculator in (None, lambda: ngram_speculator(8)):
        engine = make_engine(model, Limits(speculator=speculator))
        engine.add_request([5, 6, 7, 8] * 4, params)
        found.append([])
        while engine.has_unfinished():
            found[-1] += checked_step(engine)
    plain, drafted = found
    assert [(e.token_id, e.logprobs) for e in plain] == [(e.token_id, e.logprobs) for e in drafted]
    assert any(event.is_draft for event in drafted), "the text must repeat"
    assert not any(event.is_draft for event in plain)
    num_accepted = sum(event.is_draft for event in drafted)
    assert drafted[-1].num_drafted_tokens >= num_accepted
