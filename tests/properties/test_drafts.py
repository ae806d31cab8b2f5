"""The exactness contract with drafts: whatever somebody proposes, a request gets its own tokens."""

from collections.abc import Callable, Collection
from dataclasses import replace

import torch
from assistants import assistant_speculator, random_assistant
from drafting import (
    eager,
    model_speculator,
    ngram_speculator,
    oracle_speculator,
    together,
)
from eagles import random_eagle3
from engines import Limits, checked_step, load_tiny_model, make_engine, run
from heads import CheckedHead, head_drafter, head_speculator, random_head, reference
from hypothesis import strategies as st
from properties.test_exactness import (
    ALL_MODELS,
    KV_DTYPES,
    Request,
    answers_alone,
    assert_nobody_is_disturbed,
    assert_same_as_alone,
    engine_of,
    enough_blocks,
    models,
    prompts,
    requests,
)
from seeds import drawn

from localllm.drafting.speculator import Speculator
from localllm.model.decoder import DecoderModel
from localllm.schedule.request import Request as EngineRequest
from localllm.schedule.request import TokenEvent
from localllm.schedule.sampling_params import SamplingParams
from localllm.schedule.scheduler import ScheduledBatch

# Models that draft: another one, and the very one for whose copies it drafts.
DRAFT_MODELS = {
    "another model": ("Qwen2ForCausalLM",),
    "the same model": ("Qwen3ForCausalLM",),
    "a hybrid": ("Qwen3_5MoeForCausalLM",),
}
# Models for which an assistant drafts, which reads their cache.
READ = ("gemma 4 with keys of other layers", "gemma 4 in 4 bits in C")
HEADS = ("a head", "an EAGLE head", "a head that nearly knows")
# Text that repeats itself: the end of the prompt stands in it before.
repeating = st.builds(
    lambda prompt, times: (prompt[:30] * times)[:90], prompts, st.integers(1, 4)
).filter(bool)
few = requests.map(lambda wanted: wanted[:3])
# A low temperature and penalties that reward: generated text that repeats itself too.
looping = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.05, 1.0]),
    frequency_penalty=st.sampled_from([0.0, -2.0]),
    seed=st.integers(0, 1 << 40),
    max_tokens=st.integers(2, 24),
    n=st.sampled_from([1, 1, 2]),
    ignore_eos=st.just(True),
)


def speculator_of(
    kind: str,
    model_name: str,
    wanted: list[Request],
    error_rate: float,
    max_draft: int,
    limits: Limits,
) -> Callable[[], Speculator]:
    """Of what was there before, of a smaller model, of a head, or of somebody who nearly knows; or
    all of these at once.
    """
    if kind == "all":
        each = [
            speculator_of(one, model_name, wanted, error_rate, max_draft, limits)
            for one in ("ngram", "a head that nearly knows", "another model")
        ]
        return lambda: together(*(new() for new in each))
    if kind == "ngram":
        return lambda: ngram_speculator(max_draft)
    blocks, tokens = (limits.num_blocks, limits.block_size), limits.max_num_batched_tokens
    groups = load_tiny_model(*ALL_MODELS[model_name]).architecture.cache_groups
    table = [*(group.state.window for group in groups), None].index(None)
    if kind in DRAFT_MODELS:
        draft = load_tiny_model(*DRAFT_MODELS[kind])
        return lambda: model_speculator(draft, *blocks, max_draft, tokens, table=table)
    model = load_tiny_model(*ALL_MODELS[model_name])
    head = random_eagle3(model) if kind == "an EAGLE head" else random_head(model)
    if kind in ("a head", "an EAGLE head") and head is not None:
        return lambda: head_speculator(model, head, *blocks, max_draft, tokens, table)
    known = [
        (prompt, answers_alone(model_name, (prompt, params)), params) for prompt, params in wanted
    ]

    def answer(request: EngineRequest) -> list[int]:
        prompt = request.token_ids[: request.num_prompt_tokens]
        return next(
            answers[request.sample].token_ids
            for own, answers, params in known
            if own == prompt and params == request.params
        )

    if kind == "a head that nearly knows" and head is not None:
        exact = None if KV_DTYPES.get(model_name) else reference(model)
        size, overlaps = limits.block_size, limits.overlaps
        runner = CheckedHead(exact, answer, error_rate, size, table, overlaps)
        drafter = head_drafter(runner, model, head, *blocks, tokens, table)
        return lambda: eager(drafter, max_draft)
    return lambda: oracle_speculator(answer, error_rate, max_draft)


@drawn(
    24,
    100,
    models,
    st.one_of(few, st.lists(st.tuples(repeating, looping), min_size=1, max_size=3)),
    st.sampled_from(["ngram", "oracle", "all", *HEADS, *DRAFT_MODELS]),
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
        **sizes,  # type: ignore[arg-type]
    )
    new = speculator_of(kind, model_name, wanted, error_rate, max_draft, limits)
    limits = replace(limits, speculator=new)
    engine = engine_of(model_name, limits)
    runs = [run(engine, wanted)]
    if kind == "ngram":  # again: prompts from the cache, and all of it said before
        runs.append(run(engine, wanted))
    assert_same_as_alone(model_name, wanted, *runs)


@drawn(
    8,
    40,
    st.sampled_from([name for name in READ if name in ALL_MODELS]),
    few,
    few,
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 7)), max_size=4),
    st.integers(30, 60),
    st.integers(1, 120),
    st.integers(1, 12),
    st.booleans(),
)
def test_drafts_of_an_assistant_change_no_token(
    model_name: str,
    first: list[Request],
    later: list[Request],
    aborts: list[tuple[int, int]],
    num_blocks: int,
    budget: int,
    max_draft: int,
    overlaps: bool,
) -> None:
    model = load_tiny_model(*ALL_MODELS[model_name])
    assistant = random_assistant(model)
    limits = Limits(
        block_size=4,
        num_blocks=enough_blocks(num_blocks, first + later),
        max_num_batched_tokens=budget,
        enable_prefix_caching=True,
        overlaps=overlaps,
        reader=lambda cache: assistant_speculator(model, assistant, cache, max_draft),
    )
    assert_nobody_is_disturbed(model_name, first, later, aborts, limits)


@drawn(
    12,
    50,
    models,
    few,
    few,
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 7)), max_size=4),
    st.integers(30, 60),
    st.booleans(),
    st.integers(1, 12),
    st.sampled_from(["oracle", "all", *HEADS, *DRAFT_MODELS]),
)
def test_arrivals_and_aborts_beside_drafts_disturb_nobody(
    model_name: str,
    first: list[Request],
    later: list[Request],
    aborts: list[tuple[int, int]],
    num_blocks: int,
    overlaps: bool,
    max_draft: int,
    kind: str,
) -> None:
    limits = Limits(
        block_size=4,
        num_blocks=enough_blocks(num_blocks, first + later),
        max_num_batched_tokens=48,
        enable_prefix_caching=True,
        overlaps=overlaps,
    )
    new = speculator_of(kind, model_name, first + later, 0.2, max_draft, limits)
    limits = replace(limits, speculator=new)
    assert_nobody_is_disturbed(model_name, first, later, aborts, limits)


def test_what_is_sampled_with_a_draft_model_has_the_distribution_of_the_model() -> None:
    model, draft = load_tiny_model("Qwen3ForCausalLM"), load_tiny_model("Qwen2ForCausalLM")
    # Few tokens are likely enough to be counted: all others are biased away.
    kept = list(range(40, 46))
    bias = {token: -100.0 for token in range(model.architecture.vocab_size) if token not in kept}
    prompt, num_draws, num_accepted = [7, 9, 11], 1500, 0
    counts: dict[tuple[int, ...], int] = {}
    engine = make_engine(
        model, Limits(num_blocks=400, speculator=lambda: model_speculator(draft, 400, 16, 3, 4096))
    )
    for first in range(0, num_draws, 50):
        tokens: dict[int, list[int]] = {}
        for seed in range(first, first + 50):
            params = SamplingParams(
                temperature=1.0, seed=seed, max_tokens=3, logit_bias=bias, ignore_eos=True
            )
            engine.add_request(prompt, params)
        while engine.has_unfinished():
            for event in checked_step(engine):
                assert event.token_id is not None
                tokens.setdefault(event.request_id, []).append(event.token_id)
                num_accepted += event.is_draft
        for said in tokens.values():
            counts[tuple(said[:2])] = counts.get(tuple(said[:2]), 0) + 1
    assert num_accepted > num_draws / 10
    # The second token, which may be a draft's, behind each first one.
    chi_square = 0.0
    for first in kept:
        chances = _next_chances(model, [*prompt, first], kept)
        drawn_first = sum(counts.get((first, token), 0) for token in kept)
        for token, chance in zip(kept, chances, strict=True):
            expected = drawn_first * chance
            chi_square += (counts.get((first, token), 0) - expected) ** 2 / max(expected, 1e-9)
    # Six times five degrees of freedom; more is seen once in ten thousand times.
    assert chi_square < 66.6, counts


def _next_chances(model: DecoderModel, tokens: list[int], kept: list[int]) -> list[float]:
    """The model's own probabilities behind `tokens`, among `kept`."""
    engine = make_engine(model, Limits())
    engine.add_request(tokens, SamplingParams(max_tokens=1))
    batch = engine.scheduler.schedule()
    [logits] = engine._runner.forward(batch)  # type: ignore[attr-defined]
    return torch.softmax(logits[kept].double(), dim=0).tolist()


def test_log_probabilities_come_with_every_token_of_a_draft() -> None:
    model = load_tiny_model("Qwen3ForCausalLM")
    params = SamplingParams(
        temperature=0.0, frequency_penalty=-2.0, logprobs=3, max_tokens=30, ignore_eos=True
    )
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


def test_accepted_tokens_behind_an_end_are_not_counted() -> None:
    model = load_tiny_model("Qwen3ForCausalLM")
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)

    def events_of(limits: Limits, ends: tuple[int, ...] = ()) -> list[TokenEvent]:
        engine = make_engine(model, limits)
        engine.add_request([5, 6, 7], replace(params, stop_token_ids=ends))
        events: list[TokenEvent] = []
        while engine.has_unfinished():
            events += checked_step(engine)
        return events

    said = [event.token_id or 0 for event in events_of(Limits())]
    limits = Limits(speculator=lambda: oracle_speculator(lambda _: said, 0.0, 8))
    lasts = [last for last in range(4, 16) if said[last] not in said[:last]]
    assert len(lasts) > 4
    for last in lasts:
        events = events_of(limits, (said[last],))
        assert [event.token_id for event in events] == said[: last + 1]
        [count] = events[-1].drafts
        assert count.num_accepted == sum(event.is_draft for event in events) > 0


def test_a_hybrid_drafts_what_it_says_itself_whatever_was_rejected() -> None:
    model, draft = load_tiny_model("Qwen3ForCausalLM"), load_tiny_model("Qwen3_5MoeForCausalLM")
    seen: list[tuple[list[int], list[int]]] = []

    def recording() -> Speculator:
        made = model_speculator(draft, 400, 16, 5, 4096)
        drafter = made._drafters[0]
        complete = drafter.complete

        def complete_recorded(batch: ScheduledBatch, own: Collection[EngineRequest]) -> None:
            complete(batch, own)
            seen.extend((list(each.request.token_ids), list(each.draft)) for each in batch.requests)

        drafter.complete = complete_recorded  # type: ignore[method-assign]
        return made

    engine = make_engine(model, Limits(num_blocks=400, speculator=recording))
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    for start in (5, 90):
        engine.add_request([start + i for i in range(20)], params)
    num_accepted = 0
    while engine.has_unfinished():
        num_accepted += sum(event.is_draft for event in checked_step(engine))
    drafted = [(tokens, said) for tokens, said in seen if said]
    # Most are rejected, since the models differ.
    assert num_accepted < sum(len(said) for _, said in drafted) / 2
    alone = make_engine(draft, Limits())
    for tokens, said in drafted:
        alone.add_request(tokens, replace(params, max_tokens=len(said)))
        own = []
        while alone.has_unfinished():
            own += [event.token_id for event in checked_step(alone)]
        assert own == said
