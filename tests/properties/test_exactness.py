"""The exactness contract: a request's tokens depend on the request and on nothing else.

Random requests run together under random limits; each must get the tokens that it gets alone,
with the cache to itself, its prompt in one piece. Greedy and seeded, with and without filters.
Not only the tokens: the logits they were drawn from must have the same bits.
"""

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from engines import (
    WITH_SINKS,
    Answer,
    Limits,
    checked_step,
    load_tiny_model,
    make_engine,
    run,
    run_alone,
)
from hypothesis import strategies as st
from seeds import drawn

from localllm.engine.engine import Engine
from localllm.quantize.recipe import Recipe
from localllm.schedule.sampling_params import SamplingParams
from localllm_kernels.attention.four_bits import FOUR_BITS

INT4 = Recipe("rtn", group_size=32, symmetric=False)
INT8 = Recipe("int8", embedding="int8", head="int8")
MODELS: dict[str, tuple[Any, ...]] = {
    "qwen3": ("Qwen3ForCausalLM",),
    "mistral with a window of 20": ("MistralForCausalLM", 20),
    "qwen2": ("Qwen2ForCausalLM",),
    "qwen2 with a window of 20 in one layer": ("Qwen2ForCausalLM", 20),
    "qwen3 in 4 bits": ("Qwen3ForCausalLM", None, torch.float32, INT4),
    "gemma 4 with keys of other layers": ("Gemma4ForCausalLM", 20),
    "sinks and a window of 20": (WITH_SINKS, 20),
    "experts": ("Qwen3MoeForCausalLM", None),
    "lfm2": ("Lfm2ForCausalLM",),
    "lfm2 with experts": ("Lfm2MoeForCausalLM",),
    "qwen3.5 with experts": ("Qwen3_5MoeForCausalLM",),
    "latent attention": ("Glm4MoeLiteForCausalLM",),
}
if shutil.which("cc") is not None:
    # With the C library integer products are exact whatever the rest is stored in.
    MODELS["mistral in C"] = ("MistralForCausalLM", 20, torch.float32, None, "auto")
    MODELS["qwen2 in C, with a window in one layer"] = (
        *("Qwen2ForCausalLM", 20, torch.float32, None, "auto"),
    )
    MODELS["gemma 4 in 4 bits in C"] = ("Gemma4ForCausalLM", 20, torch.float32, INT4, "auto")
    MODELS["experts in C"] = ("Glm4MoeForCausalLM", None, torch.float32, None, "auto")
    MODELS["qwen3.5 in C"] = ("Qwen3_5ForCausalLM", None, torch.float32, None, "auto")
    MODELS["qwen3.5 in C, with states in half precision"] = (
        *("Qwen3_5ForCausalLM", None, torch.float32, None, "auto", False, "float16"),
    )
    MODELS["nemotron-h in C"] = ("NemotronHForCausalLM", None, torch.float32, None, "auto")
    MODELS["lfm2 in 4 bits in C"] = ("Lfm2ForCausalLM", None, torch.bfloat16, INT4, "auto")
    MODELS["sinks in C"] = (WITH_SINKS, 20, torch.float32, None, "auto")
    MODELS["qwen3 in 4 bits in C"] = ("Qwen3ForCausalLM", None, torch.bfloat16, INT4, "auto")
    MODELS["latent attention in C"] = (
        *("DeepseekV3ForCausalLM", None, torch.float32, None, "auto"),
    )
    MODELS["latent attention in C, rows in 8 bits"] = (
        *("DeepseekV2ForCausalLM", None, torch.float32, None, "auto"),
    )
    MODELS["qwen2 in C, keys in 8 bits"] = ("Qwen2ForCausalLM", None, torch.float32, None, "auto")
    MODELS["qwen2 in C, keys in 4 bits"] = MODELS["qwen2 in C, keys in 8 bits"]
    MODELS["mistral in C, keys in 4 bits"] = MODELS["mistral in C"]
    MODELS["latent attention in C, rows in 4 bits"] = MODELS["latent attention in C"]
MODELS["qwen3, keys in 8 bits"] = MODELS["qwen3, keys in 4 bits"] = MODELS["qwen3"]
KV_DTYPES = {
    "qwen3, keys in 4 bits": FOUR_BITS,
    "qwen2 in C, keys in 4 bits": FOUR_BITS,
    "mistral in C, keys in 4 bits": FOUR_BITS,
    "latent attention in C, rows in 4 bits": FOUR_BITS,
    "qwen3, keys in 8 bits": torch.int8,
    "qwen2 in C, keys in 8 bits": torch.float8_e4m3fn,
    "latent attention in C, rows in 8 bits": torch.int8,
}
BFLOAT16_MODELS: dict[str, tuple[Any, ...]] = {
    "qwen3": ("Qwen3ForCausalLM", None, torch.bfloat16),
    "qwen3 in 4 bits": ("Qwen3ForCausalLM", None, torch.bfloat16, INT4),
    "qwen3 in 8 bits": ("Qwen3ForCausalLM", None, torch.bfloat16, INT8),
}
Request = tuple[list[int], SamplingParams]

# Prompts that share beginnings, and some that share only what stands behind another beginning.
HEADS: list[list[int]] = [[], [], [7] * 16, [9] * 16]
STEMS = [[3 + (7 * i + 11 * s) % 250 for i in range(90)] for s in range(3)]
prompts = st.builds(
    lambda head, stem, length, tail: HEADS[head] + STEMS[stem][:length] + tail,
    st.integers(0, 3),
    st.integers(0, 2),
    st.integers(1, 90),
    st.lists(st.integers(3, 258), max_size=4),
)
greedy = st.builds(
    SamplingParams,
    temperature=st.just(0.0),
    max_tokens=st.integers(1, 20),
    ignore_eos=st.booleans(),
)
seeded = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 0.8, 1.5]),
    top_k=st.sampled_from([0, 5, 40]),
    top_p=st.sampled_from([1.0, 0.9, 0.5]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 1 << 40),
    max_tokens=st.integers(1, 20),
    n=st.sampled_from([1, 1, 1, 3]),
)
requests = st.lists(st.tuples(prompts, st.one_of(greedy, seeded)), min_size=1, max_size=8)
models = st.sampled_from(sorted(MODELS))
# One path, where torch's operators have one for few rows and one for many.
DETERMINISTIC = "qwen2 in bfloat16 and 4 bits, deterministic"
ALL_MODELS = MODELS | {
    DETERMINISTIC: ("Qwen2ForCausalLM", None, torch.bfloat16, INT4, "torch", True)
}


def answers_alone(model_name: str, request: Request) -> list[Answer]:
    model = load_tiny_model(*ALL_MODELS[model_name])
    return run_alone(model, *request, KV_DTYPES.get(model_name))


def engine_of(model_name: str, limits: Limits) -> Engine:
    model = load_tiny_model(*ALL_MODELS[model_name])
    return make_engine(model, limits, KV_DTYPES.get(model_name))


def assert_exact(model_name: str, wanted: list[Request], limits: Limits) -> None:
    assert_same_as_alone(model_name, wanted, run(engine_of(model_name, limits), wanted))


def assert_same_as_alone(
    model_name: str, wanted: list[Request], *runs: dict[tuple[int, int], Answer]
) -> None:
    for i, request in enumerate(wanted):
        for sample, alone in enumerate(answers_alone(model_name, request)):
            for answers in runs:
                together = answers[i, sample]
                assert together.token_ids == alone.token_ids
                assert together.finish_reason == alone.finish_reason
                assert together.logits == alone.logits, "the same tokens from other bits"


def plenty(wanted: list[Request], block_size: int) -> int:
    """Blocks for all requests at once; not more, since each step checks the books of all blocks."""
    return sum(
        params.n * (-(-(len(prompt) + (params.max_tokens or 0)) // block_size) + 1)
        for prompt, params in wanted
    )


@drawn(12, 60, models, requests, st.integers(1, 24))
def test_any_batch_gives_the_tokens_of_each_request_alone(
    model_name: str, wanted: list[Request], max_num_seqs: int
) -> None:
    assert_exact(model_name, wanted, Limits(max_num_seqs=max_num_seqs))


@drawn(12, 60, models, requests, st.integers(1, 40), st.sampled_from([1, 3, 16, 32]))
def test_any_chunks_and_any_block_size_give_the_tokens_of_the_whole_prompt(
    model_name: str, wanted: list[Request], budget: int, block_size: int
) -> None:
    limits = Limits(block_size, plenty(wanted, block_size), max_num_batched_tokens=budget)
    assert_exact(model_name, wanted, limits)


@drawn(
    6,
    30,
    models,
    requests,
    st.lists(st.integers(1, 3), min_size=1, max_size=7),
    st.integers(1, 40),
)
def test_any_number_of_threads_and_its_change_give_the_tokens_of_one_thread(
    model_name: str, wanted: list[Request], threads: list[int], budget: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        limits = Limits(max_num_batched_tokens=budget, threads=tuple(threads))
        engine = engine_of(model_name, limits)
        answers = run(engine, wanted)
        torch.set_num_threads(1)
        assert_same_as_alone(model_name, wanted, answers)
    finally:
        torch.set_num_threads(before)


@drawn(5, 15, requests, st.integers(1, 40))
def test_one_path_makes_bfloat16_as_exact(wanted: list[Request], budget: int) -> None:
    limits = Limits(max_num_batched_tokens=budget, enable_prefix_caching=True)
    assert_exact(DETERMINISTIC, wanted, limits)


@drawn(12, 60, models, requests, st.sampled_from([4, 16]), st.integers(5, 100))
def test_a_warm_prefix_cache_gives_the_tokens_of_a_cold_one(
    model_name: str, wanted: list[Request], block_size: int, budget: int
) -> None:
    limits = Limits(
        block_size,
        3200 // block_size,
        max_num_batched_tokens=budget,
        enable_prefix_caching=True,
    )
    engine = engine_of(model_name, limits)
    cold = run(engine, wanted)
    # Again, now that every prompt is in the cache.
    answers = run(engine, wanted)
    assert_same_as_alone(model_name, wanted, cold, answers)
    for i, request in enumerate(wanted):
        full_blocks = (len(request[0]) - 1) // block_size
        assert answers[i, 0].num_cached_tokens >= full_blocks * block_size


@drawn(12, 60, models, requests, st.sampled_from([4, 16]), st.integers(5, 100), st.booleans())
def test_prefixes_from_disk_give_the_tokens_of_computed_ones(
    model_name: str, wanted: list[Request], block_size: int, budget: int, overlaps: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        limits = Limits(
            block_size,
            3200 // block_size,
            max_num_batched_tokens=budget,
            enable_prefix_caching=True,
            prefix_folder=Path(folder),
        )
        engine = engine_of(model_name, limits)
        computed = run(engine, wanted)
        engine.finish()
        # Another engine, as of another day.
        engine = engine_of(model_name, replace(limits, overlaps=overlaps))
        answers = run(engine, wanted)
        assert_same_as_alone(model_name, wanted, computed, answers)
        for i, request in enumerate(wanted):
            full_blocks = (len(request[0]) - 1) // block_size
            assert answers[i, 0].num_cached_tokens >= full_blocks * block_size


@drawn(12, 60, models, requests, st.booleans(), st.integers(0, 20), st.integers(8, 200))
def test_preemption_gives_the_tokens_of_an_undisturbed_run(
    model_name: str, wanted: list[Request], caching: bool, spare_blocks: int, budget: int
) -> None:
    longest = max(len(prompt) + (params.max_tokens or 0) for prompt, params in wanted)
    limits = Limits(
        block_size=4,
        num_blocks=-(-longest // 4) + spare_blocks,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
    )
    assert_exact(model_name, wanted, limits)


@drawn(
    12,
    60,
    models,
    requests,
    st.booleans(),
    st.integers(0, 60),
    st.integers(1, 24),
    st.integers(3, 100),
    st.sampled_from([0, 2, 3]),
)
def test_steps_that_overlap_give_the_tokens_of_steps_that_do_not(
    model_name: str,
    wanted: list[Request],
    caching: bool,
    spare_blocks: int,
    max_num_seqs: int,
    budget: int,
    waiting_share: int,
) -> None:
    longest = max(len(prompt) + (params.max_tokens or 0) for prompt, params in wanted)
    limits = Limits(
        block_size=4,
        num_blocks=-(-longest // 4) + spare_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
        overlaps=True,
        needs_ids=lambda params: waiting_share > 0 and (params.seed or 0) % waiting_share == 0,
    )
    assert_exact(model_name, wanted, limits)


@drawn(
    12,
    60,
    models,
    requests,
    requests,
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 7)), max_size=4),
    st.integers(30, 60),
    st.booleans(),
)
def test_arrivals_and_aborts_in_the_middle_disturb_nobody(
    model_name: str,
    first: list[Request],
    later: list[Request],
    aborts: list[tuple[int, int]],
    num_blocks: int,
    overlaps: bool,
) -> None:
    limits = Limits(
        block_size=4,
        num_blocks=enough_blocks(num_blocks, first + later),
        max_num_batched_tokens=48,
        enable_prefix_caching=True,
        overlaps=overlaps,
    )
    assert_nobody_is_disturbed(model_name, first, later, aborts, limits)


def enough_blocks(num_blocks: int, wanted: list[Request]) -> int:
    """So many blocks of 4 tokens, or more: who is longer than the whole cache would be clipped."""
    longest = max(len(prompt) + (params.max_tokens or 0) for prompt, params in wanted)
    return max(num_blocks, -(-longest // 4))


def assert_nobody_is_disturbed(
    model_name: str,
    first: list[Request],
    later: list[Request],
    aborts: list[tuple[int, int]],
    limits: Limits,
) -> None:
    """Run `first`, and from the fourth step on `later`; `aborts`: at which step, and which."""
    engine = engine_of(model_name, limits)
    wanted = first + later
    ids = [engine.add_request(*request) for request in first]
    tokens: dict[tuple[int, int], list[int]] = {}
    aborted = set()
    step = 0
    while engine.has_unfinished() or len(ids) < len(wanted):
        step += 1
        if step == 4:
            ids += [engine.add_request(*request) for request in later]
        for at, index in aborts:
            if at == step and index < len(ids):
                aborted.add(index)
                engine.abort(ids[index])
                engine.scheduler.check_invariants()
        if engine.has_unfinished():
            for event in checked_step(engine):
                if event.token_id is not None:
                    key = (ids.index(event.request_id), event.sample)
                    assert key[0] not in aborted, "an event after abort"
                    tokens.setdefault(key, []).append(event.token_id)
    for i, request in enumerate(wanted):
        for sample, alone in enumerate(answers_alone(model_name, request)):
            got = tokens.get((i, sample), [])
            assert got == (alone.token_ids[: len(got)] if i in aborted else alone.token_ids)
    assert engine.scheduler.num_free_blocks == engine.scheduler.num_usable_blocks


@drawn(
    8,
    60,
    st.sampled_from(sorted(BFLOAT16_MODELS)),
    requests,
    st.integers(1, 60),
    st.sampled_from([4, 16]),
)
def test_bfloat16_tokens_differ_from_those_alone_only_at_near_ties(
    model_name: str, wanted: list[Request], budget: int, block_size: int
) -> None:
    model = load_tiny_model(*BFLOAT16_MODELS[model_name])
    limits = Limits(
        block_size,
        3200 // block_size,
        max_num_batched_tokens=budget,
        enable_prefix_caching=True,
    )
    # Plain greedy: with penalties it is not the recorded logits that decide.
    wanted = [
        (prompt, SamplingParams(temperature=0.0, max_tokens=params.max_tokens, n=params.n))
        for prompt, params in wanted
    ]
    answers = run(make_engine(model, limits), wanted)
    for i, (prompt, params) in enumerate(wanted):
        for sample, alone in enumerate(run_alone(model, prompt, params)):
            together = answers[i, sample]
            for step, (ours, theirs) in enumerate(
                zip(together.token_ids, alone.token_ids, strict=False)
            ):
                if ours != theirs:
                    logits = torch.frombuffer(bytearray(alone.logits[step]), dtype=torch.float32)
                    gap = (logits[theirs] - logits[ours]).item()
                    # Two roundings of a logit to bfloat16's eight bits, and what the two layers
                    # before it add; in 4 bits also the rounding of the weights themselves, which
                    # only the product of many rows has. The logits are of size eight.
                    units = 8 if "4 bits" in model_name else 4
                    assert 0 <= gap <= units * 2**-8 * logits.abs().max().item()
                    break
