"""Who is answered waits for a long prompt no longer than twice the time of a token."""

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean

import pytest
from checkpoints import tiny_config, write_checkpoint
from engines import Limits, add, checked_step, load_tiny_model, make_engine, run_alone

from localllm import LLM
from localllm.drafting.speculation_config import SpeculationConfig
from localllm.engine.engine import Engine
from localllm.schedule.pacing import MIN_PART, Pacer, PartCost
from localllm.schedule.sampling_params import SamplingParams
from localllm.text.prompt import Text


def simulate(
    step_s: Callable[[int, int], float], num_prompt: int, budget: int = 256
) -> tuple[list[float], list[int]]:
    """Steps of somebody who is answered while a prompt is read; `step_s`: by its tokens in the step
    and those before.
    """
    pacer, done = Pacer(), 0
    times, parts = [], []
    while done < num_prompt:
        part = min(pacer.part(budget), num_prompt - done)
        times.append(step_s(part, done))
        parts.append(part)
        pacer.book(part, times[-1])
        done += part
    return times, parts


@pytest.mark.parametrize(
    ("name", "token_s"),
    [
        ("cheap tokens, as on a GPU", lambda before: 1e-5),
        ("a CPU", lambda before: 1e-3),
        ("a CPU, deep", lambda before: 2e-4 + 1e-7 * before),
        ("dearer than a step", lambda before: 5e-3),
        ("cheaper at last", lambda before: 2e-3 if before < 4000 else 2e-5),
    ],
)
def test_the_time_per_token_at_most_doubles(name: str, token_s: Callable[[int], float]) -> None:
    plain = 0.01
    times, parts = simulate(lambda part, before: plain + part * token_s(before), 16000)
    assert mean(times) <= 2 * plain
    if len(times) > 100:  # not only in the end, but over any hundred tokens
        each = [mean(times[i : i + 100]) for i in range(0, len(times) - 100, 50)]
        assert max(each[1:]) <= 2.1 * plain
    # And the prompt gets its share: a third of all the time at least, if it needs it.
    read_s = sum(times) - plain * len(times)
    assert read_s >= 0.33 * sum(times) or max(parts) == 256


# Of a step without prompts, of one with, and of each token of a prompt; seconds.
GPUS = {
    "8B int4, H100": (0.003, 0.010, 2.5e-5),
    "8B bf16, H100": (0.006, 0.010, 2.5e-5),
    "0.6B int4, H100": (0.0008, 0.012, 3e-6),
    "8B int4, RTX 4090": (0.006, 0.008, 6e-5),
    "8B bf16, RTX 4090": (0.018, 0.008, 6e-5),
}


@pytest.mark.parametrize("gpu", GPUS)
def test_where_steps_with_prompts_have_a_fixed_cost_parts_are_large(gpu: str) -> None:
    """Assumed times: a step with more than 16 tokens of a request is launched kernel by kernel."""
    plain_s, fixed_s, token_s = GPUS[gpu]

    def step_s(part: int) -> float:
        launches_s = fixed_s if part > 16 else 0.0
        return plain_s + (launches_s + token_s * part if part else 0.0)

    pacer, budget, num_prompt = Pacer(), 2048, 2000
    ratios = []
    for _ in range(3):
        for _ in range(50):
            pacer.book(pacer.part(0), step_s(0))
        done, first_token_s = 0, 0.0
        while done < num_prompt:
            part = min(pacer.part(budget), num_prompt - done)
            pacer.book(part, step_s(part))
            done, first_token_s = done + part, first_token_s + step_s(part)
        ratios.append(first_token_s / step_s(num_prompt))
    assert ratios[0] <= 8  # what steps cost is found out
    assert max(ratios[1:]) <= 2


def test_both_costs_are_found_from_parts_of_several_sizes() -> None:
    cost = PartCost()
    cost.add(16, 0.0001)  # a captured graph
    for num_tokens in (24, 48, 200, 24, 48, 200):
        cost.add(num_tokens, 0.01 + 1e-4 * num_tokens)
    assert cost.fixed_s == pytest.approx(0.01)
    assert cost.token_s == pytest.approx(1e-4)
    for _ in range(50):  # of one size both are kept
        cost.add(200, 0.03)
    assert cost.seconds(200) == pytest.approx(0.03)
    assert cost.tokens(0.02) == pytest.approx(100, rel=0.01)


def test_tokens_that_cost_nothing_are_read_in_whole_steps() -> None:
    _, parts = simulate(lambda part, before: 0.01, 4000)
    assert max(parts) == 256


def test_a_step_that_was_slow_by_chance_is_made_up_for() -> None:
    slow = iter([0.01] * 10 + [1.0])
    times, _ = simulate(lambda part, before: next(slow, 0.01) + 1e-4 * part, 4000)
    assert mean(times) <= 0.03
    assert max(times[20:]) < 0.03


def test_one_slow_part_shuts_nobody_out() -> None:
    pacer = Pacer()
    for _ in range(5):
        pacer.book(0, 0.03)
    pacer.book(MIN_PART, 60.0)  # kernels were compiled, or the machine slept
    steps = 0
    while pacer.part(256) == 0:
        pacer.book(0, 0.03)
        steps += 1
    assert steps < 60


def paced(engine: Engine) -> Engine:
    engine._pacer = Pacer()
    return engine


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_prompt_is_read_in_parts_beside_answers_and_at_once_without(overlaps: bool) -> None:
    model = load_tiny_model("Qwen3ForCausalLM")
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    chat, long = [5, 6, 7], [3 + i % 200 for i in range(150)]
    engine = paced(make_engine(model, Limits(overlaps=overlaps)))
    first = add(engine, chat, params)
    for _ in range(4):
        checked_step(engine)
    second = add(engine, long, replace(params, max_tokens=5))
    said: dict[int, list[int]] = {first: [], second: []}
    largest = 0
    while engine.has_unfinished():
        before = {r.request_id: r.num_computed_tokens for r in engine.scheduler.unfinished()}
        for event in engine.step():
            if event.token_id is not None:
                said[event.request_id].append(event.token_id)
        for request in engine.scheduler.unfinished():
            if request.request_id == second and request.num_generated_tokens == 0:
                grown = request.num_computed_tokens - before.get(second, 0)
                largest = max(largest, grown)
    for request_id, wanted in ((first, (chat, params)), (second, (long, params))):
        [alone] = run_alone(model, *wanted)
        own = said[request_id]
        assert own == alone.token_ids[-len(own) :] if request_id == first else own
    assert said[second] == run_alone(model, long, replace(params, max_tokens=5))[0].token_ids
    assert largest >= MIN_PART
    # Nobody else: whole steps.
    add(engine, long, replace(params, max_tokens=2))
    engine.step()
    [request] = engine.scheduler.unfinished()
    assert request.num_computed_tokens >= len(long)


@pytest.mark.slow
def test_a_running_chat_beside_a_prompt_of_16k_tokens(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 24000,
    }
    folder = write_checkpoint(tmp_path / "model", tiny_config("Qwen3ForCausalLM", **sizes))
    llm = LLM(folder, max_num_seqs=4, kv_cache_tokens=44000, speculation=SpeculationConfig("off"))
    prompt = [3 + (7 * i) % 200 for i in range(16000)]
    free = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=20000)
    # Deep enough that the chat's own length changes little meanwhile.
    _, chat = llm.model.ask(Text(prompt[:3000]), free)

    def steps(until: Callable[[int], bool]) -> list[float]:
        times = [time.perf_counter()]
        while not until(len(times)):
            next(chat)
            times.append(time.perf_counter())
        return [b - a for a, b in pairwise(times[5:])]

    before = steps(lambda count: count > 300)
    reading, events = llm.model.ask(
        Text(prompt), SamplingParams(ignore_eos=True, max_tokens=1, seed=1)
    )
    engine = llm.model.text_engine
    beside = steps(lambda _: not engine.is_open(1))
    after = steps(lambda count: count > 300)
    for _ in events:
        pass
    assert reading.num_generated_tokens == 1
    chat.close()
    alone = (mean(before) + mean(after)) / 2
    ratio = mean(beside) / alone
    note = f"{1e3 * alone:.2f} ms alone, {1e3 * mean(beside):.2f} ms beside: {ratio:.2f} times"
    print(note)  # noqa: T201
    assert ratio <= 2.0, note
