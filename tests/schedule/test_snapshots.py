"""Requests to a model with recurrences go on from snapshots of others that begin alike."""

import random
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from checkpoints import write_checkpoint
from engines import Answer, Limits, drain, load_folder, make_engine
from every_family import small_config

from localllm.drafting.speculation_config import SpeculationConfig
from localllm.engine.config import EngineConfig
from localllm.engine.engine import Engine
from localllm.engine.memory import slot_sizes
from localllm.model.decoder import DecoderModel
from localllm.model.dtypes import STATE_DTYPES, StateDType
from localllm.model.paged_kv_cache import PagedKVCache
from localllm.schedule.sampling_params import SamplingParams
from localllm.schedule.snapshots import ROLL, STRIDE, Snapshots, positions, spread

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
LONGEST = 4096
LIMITS = Limits(
    num_blocks=2000,
    max_num_batched_tokens=512,
    enable_prefix_caching=True,
    max_model_len=LONGEST,
)


def text(seed: int, count: int) -> list[int]:
    return [random.Random(f"{seed} {i}").randint(3, 258) for i in range(count)]


def ask(
    engine: Engine,
    prompt: list[int],
    borders: Sequence[int] = (),
    params: SamplingParams = GREEDY,
) -> Answer:
    """The answer of the last sample."""
    request_id = engine.add_request(prompt, params, borders=borders)
    answers = {(0, sample): Answer() for sample in range(params.n)}
    drain(engine, {request_id: 0}, answers)
    return answers[0, params.n - 1]


@cache
def model(name: str) -> DecoderModel:
    config = {**small_config(name), "max_position_embeddings": LONGEST}
    with tempfile.TemporaryDirectory() as root:
        folder = write_checkpoint(Path(root) / "model", config)
        return load_folder(folder, torch.float32, max_model_len=LONGEST)


@pytest.fixture(params=["Lfm2ForCausalLM", "Qwen3_5MoeForCausalLM", "NemotronHForCausalLM"])
def decoder(request: pytest.FixtureRequest) -> DecoderModel:
    return model(request.param)


def engine_of(decoder: DecoderModel, limits: Limits = LIMITS) -> Engine:
    return make_engine(decoder, limits)


def test_a_shared_system_prompt_is_reused_from_the_second_request_on(decoder: DecoderModel) -> None:
    engine, system = engine_of(decoder), text(0, 475)
    for seed in range(1, 5):
        found = ask(engine, system + text(seed, 60), [len(system)])
        if seed > 1:
            assert found.num_cached_tokens >= 0.9 * len(system)


def test_what_messages_share_is_reused_from_the_third_request_on(decoder: DecoderModel) -> None:
    engine, shared = engine_of(decoder), text(0, 480)
    counts = [ask(engine, shared + text(seed, 60)).num_cached_tokens for seed in range(1, 5)]
    assert counts[:2] == [0, 0]
    assert min(counts[2:]) >= 0.9 * len(shared)


def test_an_edited_last_message_computes_little_more_than_itself(decoder: DecoderModel) -> None:
    engine = engine_of(decoder)
    ends = [480, 520, 700, 717]
    before = text(0, ends[-1])
    ask(engine, before + text(1, 90), [*ends, len(before) + 90])
    edited = before + text(2, 50)
    found = ask(engine, edited, [*ends, len(edited)])
    assert len(edited) - found.num_cached_tokens <= 50 + 64
    # And the message before, below the 528 tokens that others need.
    edited = before[: ends[1]] + text(3, 30)
    assert len(edited) - ask(engine, edited).num_cached_tokens <= 30 + 64
    short = text(4, 40)
    ask(engine, short + text(5, 20), [40])
    assert ask(engine, short + text(6, 20), [40]).num_cached_tokens == 32


@pytest.mark.parametrize("max_tokens", [5, 64, 200])
def test_a_conversation_goes_on_behind_its_answer(decoder: DecoderModel, max_tokens: int) -> None:
    engine, prompt = engine_of(decoder), text(0, 90)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    answer = ask(engine, prompt, [90], params)
    longer = prompt + answer.token_ids + text(1, 20)
    assert len(longer) - ask(engine, longer).num_cached_tokens <= 20 + 64


def test_samples_share_the_prompt(decoder: DecoderModel) -> None:
    params = SamplingParams(temperature=1, seed=3, max_tokens=4, n=3, ignore_eos=True)
    assert ask(engine_of(decoder), text(0, 100), params=params).num_cached_tokens == 96


def test_a_long_prompt_can_be_gone_on_from_in_its_middle(decoder: DecoderModel) -> None:
    engine, prompt = engine_of(decoder), text(0, 3 * STRIDE)
    ask(engine, prompt)
    found = ask(engine, prompt[: 2 * STRIDE + 100] + text(1, 10))
    assert found.num_cached_tokens == 2 * STRIDE


def test_nothing_is_kept_without_a_prefix_cache(decoder: DecoderModel) -> None:
    engine = engine_of(decoder, Limits(max_num_batched_tokens=512))
    ask(engine, text(0, 100))
    assert ask(engine, text(0, 100)).num_cached_tokens == 0


def test_positions() -> None:
    # The end of a block before each border.
    assert positions(0, 100, [20, 47, 200], 16) == [(16, False), (32, False)]
    assert positions(32, 40, [47], 16) == []
    assert positions(STRIDE - 5, STRIDE + 8, [], 8) == [(STRIDE, False), (STRIDE + 8, True)]
    # The end of a step over a prompt, now and then.
    assert positions(300, 520, [], 16) == [(512, True)]
    assert positions(520, 776, [], 16) == []
    # Single tokens: now and then.
    found = [each for i in range(4 * ROLL) for each in positions(i, i + 1, [], 16)]
    assert found == [(ROLL * (i + 1), True) for i in range(4)]


def test_borders_that_stand_close() -> None:
    # The first and the newest, and of the others those that save more than they cost.
    assert sorted(spread(range(30, 1201, 30))) == [
        *range(30, 1200, 150),
        *(1110, 1140, 1170, 1200),
    ]
    assert spread([7]) == {7}
    assert spread([480, 500, 520]) == {480, 500, 520}


def test_a_quota_drops_the_oldest_and_rolling_ones_are_replaced() -> None:
    held, values = Snapshots(1000, 4), torch.zeros(400, dtype=torch.uint8)
    held.put(b"a", values, rolls=False)
    held.put(b"b", values, rolls=True)
    assert held.find(b"a") is values
    held.put(b"c", values, rolls=True)
    assert [held.has(key) for key in (b"a", b"b", b"c")] == [True, False, True]
    held.roll(b"a")  # stays
    held.roll(b"c")
    assert [held.has(b"a"), held.has(b"c"), held.num_bytes] == [True, False, 400]
    held.put(b"d", torch.zeros(1001, dtype=torch.uint8), rolls=False)
    assert not held.has(b"d")
    # One that a second request needs, stays.
    held.put(b"e", values, rolls=True)
    held.put(b"e", values, rolls=False)
    held.roll(b"e")
    assert held.has(b"e")


def test_pinned_snapshots_go_last_and_take_half_of_the_quota() -> None:
    held, values = Snapshots(1000, 4), torch.zeros(200, dtype=torch.uint8)
    for key in (b"a", b"b", b"c", b"d", b"e"):
        held.put(key, values, rolls=False)
    held.pin(b"b")
    held.pin(b"a")
    held.pin(b"unknown")
    held.put(b"f", values, rolls=False)
    held.put(b"g", values, rolls=False)
    held.put(b"h", values, rolls=False)
    assert [held.has(bytes([c])) for c in b"abcdefgh"] == [True, True, *[False] * 3, *[True] * 3]
    for key in (b"f", b"g"):  # more than half
        held.pin(key)
    held.put(b"i", values, rolls=False)
    assert [held.has(bytes([c])) for c in b"abfghi"] == [True, False, True, True, True, True]


@pytest.mark.parametrize("dtype", STATE_DTYPES)
def test_slots_take_the_bytes_that_the_plan_says(decoder: DecoderModel, dtype: StateDType) -> None:
    architecture = decoder.architecture.with_states(dtype)
    config = EngineConfig(max_num_seqs=3, speculation=SpeculationConfig("ngram", max_draft=5))
    slots = slot_sizes(architecture, config)
    cpu = torch.device("cpu")
    cache = PagedKVCache.allocate(architecture, [2], 16, torch.float32, cpu, slots)
    found = cache.recurrent.values()
    kept = sum(each.rows.nbytes for each in found)
    kept += sum(each.matrix.nbytes for each in found if each.matrix is not None)
    assert kept == slots.num_slots * architecture.slot_bytes(slots.max_draft)
    assert slots.num_slots > 3
    assert cache.read_state(0, 100).nbytes == cache.state_bytes == architecture.slot_bytes()
    matrices = [each.matrix for each in found if each.matrix is not None]
    assert all(each.dtype == getattr(torch, dtype) for each in matrices)
