"""A head drafts from the right hidden states and entries, however a text came about."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from drafting import KeptDrafts, eager
from eagles import random_eagle3
from engines import Limits, checked_step, load_tiny_model, make_engine
from guards import CAPTURING
from heads import FUSED_TAPS, CheckedHead, head_cache, head_drafter, random_head, reference
from in_turns import in_turns
from recording_device import RecordingDevice
from whole_text import whole_text

from localllm.drafting.speculator import Proposer
from localllm.engine.device_runner import DeviceRunner
from localllm.engine.engine import Engine
from localllm.engine.model_runner import ModelRunner
from localllm.engine.sampler import noise_key, sample_seed
from localllm.model.decoder import DecoderModel
from localllm.model.packed.int8 import Int8Weight
from localllm.model.paged_kv_cache import PagedKVCache
from localllm.quantize.recipe import Recipe
from localllm.schedule.request import Request
from localllm.schedule.runner import HeadRunner
from localllm.schedule.sampling_params import SamplingParams
from localllm.schedule.scheduler import SchedulerConfig
from localllm_kernels.sampling.gumbel_argmax import gumbel_argmax_reference

PROMPTS = [[7, 9, 11, 200, 5] * 8, [7, 9, 11, 200, 5] * 8 + [3, 1], list(range(20, 90)), [5]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
NUM_BLOCKS = 80
SEED = 7


def answers_of(
    model: DecoderModel, prompts: Sequence[list[int]]
) -> dict[tuple[int, ...], list[int]]:
    """What is said without drafts."""
    return dict(
        zip(map(tuple, prompts), texts_of(make_engine(model, Limits()), prompts), strict=True)
    )


def texts_of(engine: Engine, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Answers to prompts that are there at once."""
    said: dict[int, list[int]] = {engine.add_request(prompt, GREEDY): [] for prompt in prompts}
    while engine.has_unfinished():
        for event in checked_step(engine):
            if event.token_id is not None:
                said[event.request_id].append(event.token_id)
    return list(said.values())


def checked_engine(
    model: DecoderModel,
    answers: Mapping[tuple[int, ...], list[int]],
    error_rate: float,
    limits: Limits,
) -> tuple[Engine, CheckedHead]:
    """An engine for which a head drafts that checks what it is given."""
    head = random_head(model)
    assert head is not None

    def answer(request: Request) -> list[int]:
        return answers[tuple(request.token_ids[: request.num_prompt_tokens])]

    runner = CheckedHead(
        reference(model), answer, error_rate, limits.block_size, overlaps=limits.overlaps
    )
    drafter = head_drafter(
        runner, model, head, limits.num_blocks, limits.block_size, limits.max_num_batched_tokens
    )
    engine = make_engine(
        model,
        replace(limits, speculator=lambda: eager(drafter, 4)),
    )
    return engine, runner


@pytest.mark.parametrize(
    ("sizes", "overlaps", "error_rate"),
    in_turns(
        [(4096, 64, NUM_BLOCKS, 16), (11, 64, NUM_BLOCKS, 4), (24, 2, 30, 4)],
        [False, True],
        [0.4, 0.0],
    ),
)
def test_hidden_states_and_entries_are_those_of_the_text(
    sizes: tuple[int, int, int, int], overlaps: bool, error_rate: float
) -> None:
    """In chunks, from a warm cache, and where little memory preempts requests."""
    budget, num_seqs, num_blocks, block_size = sizes
    model = load_tiny_model("Qwen3ForCausalLM")
    answers = answers_of(model, PROMPTS)
    limits = Limits(
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=budget,
        enable_prefix_caching=True,
        overlaps=overlaps,
    )
    engine, runner = checked_engine(model, answers, error_rate, limits)
    for _ in range(2):
        assert texts_of(engine, PROMPTS) == list(answers.values())
    assert runner.num_entries > 100


def test_a_cached_prefix_needs_no_entry_again() -> None:
    model = load_tiny_model("Qwen3ForCausalLM")
    prompt = list(range(20, 90))
    answers = answers_of(model, [prompt])
    limits = Limits(num_blocks=NUM_BLOCKS, enable_prefix_caching=True)
    engine, runner = checked_engine(model, answers, 0.0, limits)
    texts_of(engine, [prompt])
    before = runner.num_entries
    texts_of(engine, [prompt])
    # 64 of 70 tokens are cached; the rest and the answer, with what is drafted twice.
    assert runner.num_entries - before <= 6 + 2 * GREEDY.max_tokens  # type: ignore[operator]
    assert runner.num_skipped == 0
    # A next turn goes on behind the answer.
    longer = [*prompt, *answers[tuple(prompt)], 33, 44]
    more = answers_of(model, [longer])
    answers.update(more)
    before = runner.num_entries
    texts_of(engine, [longer])
    assert runner.num_entries - before <= 16 + 2 * GREEDY.max_tokens  # type: ignore[operator]
    assert runner.num_skipped == 0


def test_a_head_goes_on_behind_what_it_has_not_seen() -> None:
    """A prefix that was computed without it: entries begin at the next block."""
    model = load_tiny_model("Qwen3ForCausalLM")
    prompt = list(range(20, 90))
    answers = answers_of(model, [prompt])
    limits = Limits(num_blocks=NUM_BLOCKS, enable_prefix_caching=True)
    engine, runner = checked_engine(model, answers, 0.0, limits)
    texts_of(engine.beside(), [prompt])
    assert texts_of(engine, [prompt]) == list(answers.values())
    assert runner.num_skipped > 0
    assert runner.num_entries > 0


def test_a_long_prompt_is_caught_up_with_soon() -> None:
    model = load_tiny_model("Qwen3ForCausalLM")
    prompt = list(range(20, 120))
    answers = answers_of(model, [prompt])
    for budget in (64, 66):
        limits = Limits(num_blocks=NUM_BLOCKS, max_num_batched_tokens=budget)
        engine, _ = checked_engine(model, answers, 0.0, limits)
        params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        engine.add_request(prompt, params)
        num_accepted = 0
        while engine.has_unfinished():
            num_accepted += sum(event.is_draft for event in checked_step(engine))
        assert num_accepted > 15


def chain(
    model: DecoderModel, head: DecoderModel, text: list[int], count: int, temperature: float
) -> list[int]:
    """The tokens that a head drafts after a text, computed at once for each of them."""
    seed = sample_seed(SEED, 0)
    assert head.join is not None
    fusion, own_tap = head.join.fusion, 1
    if fusion is None:
        hidden = reference(model)(tuple(text))[:-1]
    else:
        hidden, own_tap = fusion(reference(model, FUSED_TAPS)(tuple(text))[:-1], head.ops), 0
    drafted: list[int] = []
    with torch.inference_mode():
        for _ in range(count):
            batch, cache = whole_text(head, [*text, *drafted][1:], hidden)
            rows, [own] = head.forward_tapped(batch, cache, (own_tap,))
            last = len(text) + len(drafted) - 1
            logits = head.compute_logits(rows[last - 1 : last])[0]
            key = noise_key(seed, len(text) + len(drafted))
            drafted.append(gumbel_argmax_reference(logits, temperature or 1e-9, None, key))
            hidden = torch.cat((hidden, own[last - 1 : last]))
    return drafted


def run_with_head(
    model: DecoderModel,
    head: DecoderModel,
    runner: HeadRunner,
    cache: PagedKVCache,
    limits: Limits,
    prompts: Sequence[list[int]] = PROMPTS[:3],
    temperature: float = 0.0,
) -> dict[tuple[int, ...], list[int]]:
    drafter = head_drafter(
        runner, model, head, limits.num_blocks, 16, limits.max_num_batched_tokens, kv_cache=cache
    )
    speculator = KeptDrafts([Proposer("head", drafter)], 3)
    engine = make_engine(
        model,
        replace(limits, speculator=lambda: speculator),
    )
    params = SamplingParams(temperature=temperature, max_tokens=12, ignore_eos=True, seed=SEED)
    for prompt in prompts:
        engine.add_request(prompt, params)
    while engine.has_unfinished():
        checked_step(engine)
    return speculator.drafts


def check_drafts(
    model: DecoderModel,
    head: DecoderModel,
    drafts: Mapping[tuple[int, ...], list[int]],
    least: int = 16,
    temperature: float = 0.0,
) -> None:
    assert len(drafts) >= least
    for text, drafted in drafts.items():
        assert drafted == chain(model, head, list(text), len(drafted), temperature)


MODELS = ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3_5ForCausalLM"]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("architecture", MODELS)
def test_drafts_are_the_head_s_own(architecture: str, backend: str, temperature: float) -> None:
    """Of a dense, an expert and a hybrid model, block by block and all layers in one call."""
    if backend == "auto" and shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    model = load_tiny_model(architecture, backend=backend)
    head = random_head(model)
    assert head is not None
    cache = head_cache(head, NUM_BLOCKS, 16)
    runner = ModelRunner(head, cache, tables=[0] * len(cache.stacks), taps=(1,))
    limits = Limits(num_blocks=NUM_BLOCKS, max_num_batched_tokens=24)
    assert (head.fused_drafts is not None) == (backend == "auto")
    drafts = run_with_head(model, head, runner, cache, limits, temperature=temperature)
    check_drafts(model, head, drafts, temperature=temperature)


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.parametrize("embedding", ["keep", "int8"])
def test_drafts_behind_a_quantized_embedding_are_the_head_s_own(embedding: Any) -> None:
    recipe = Recipe("int8", embedding=embedding, head=embedding)
    model = load_tiny_model(MODELS[0], dtype=torch.bfloat16, recipe=recipe, backend="auto")
    assert isinstance(model.embedding.table, Int8Weight) == (embedding == "int8")
    head = random_head(model)
    assert head is not None
    assert head.fused_drafts is not None
    cache = head_cache(head, NUM_BLOCKS, 16)
    runner = ModelRunner(head, cache, tables=[0] * len(cache.stacks), taps=(1,))
    limits = Limits(num_blocks=NUM_BLOCKS, max_num_batched_tokens=24)
    check_drafts(model, head, run_with_head(model, head, runner, cache, limits))


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("architecture", MODELS)
def test_drafts_of_eagle3_are_its_own(architecture: str, backend: str) -> None:
    """They come from several hidden states of the model, and from one of the head's."""
    if backend == "auto" and shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    model = load_tiny_model(architecture, backend=backend)
    head = random_eagle3(model)
    cache = head_cache(head, NUM_BLOCKS, 16)
    runner = ModelRunner(head, cache, tables=[0], taps=(0,))
    limits = Limits(num_blocks=NUM_BLOCKS, max_num_batched_tokens=24)
    drafts = run_with_head(model, head, runner, cache, limits)
    check_drafts(model, head, drafts)


@pytest.mark.parametrize("backend", CAPTURING)
@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_drafts_from_captured_graphs_are_the_head_s_own(kind: str, backend: str) -> None:
    model = load_tiny_model("Qwen3ForCausalLM", backend=backend)
    head = random_eagle3(model) if kind == "eagle3" else random_head(model)
    assert head is not None
    cache, device = head_cache(head, NUM_BLOCKS, 16), RecordingDevice()
    scheduling = SchedulerConfig(16, 64, 24, False, b"")
    taps = (0,) if kind == "eagle3" else (1,)
    runner = DeviceRunner(head, cache, device, scheduling, 256, tables=[0], taps=taps)
    limits = Limits(num_blocks=NUM_BLOCKS, max_num_batched_tokens=24, device=device)
    drafts = run_with_head(model, head, runner, cache, limits, [PROMPTS[1][:28]])
    check_drafts(model, head, drafts, least=8)
    assert len(device.replayed) > len(device.captured) > 0
