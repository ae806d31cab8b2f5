"""How likely a prompt's tokens are: as `eval` finds it, whatever else is computed."""

import shutil
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from engines import Limits, checked_step, load_tiny_model, make_engine
from guards import CAPTURING
from recording_device import RecordingDevice

from localllm.engine.engine import Engine
from localllm.engine.scoring import WindowScorer
from localllm.model.decoder import DecoderModel
from localllm.schedule.logprobs import TokenLogprobs, read_scores
from localllm.schedule.sampling_params import SamplingParams

SCORES = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=2, n=2)
ANSWERS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def prompt(length: int) -> list[int]:
    return [(7 * i) % 250 + 1 for i in range(length)]


def scored(engine: Engine, lengths: Sequence[int]) -> dict[int, list[TokenLogprobs | None]]:
    """The scores of prompts of these lengths, computed at once."""
    wanted = {engine.add_request(prompt(length), SCORES): length for length in lengths}
    found = {}
    while engine.has_unfinished():
        for event in checked_step(engine):
            assert event.error is None
            if event.prompt_scores is not None:
                length = wanted[event.request_id]
                assert event.sample == 0
                assert length not in found
                found[length] = read_scores(event.prompt_scores)
    assert found.keys() == set(lengths)
    return found


def expected(model: DecoderModel, length: int) -> list[TokenLogprobs]:
    """As `eval` computes them."""
    ids = prompt(length)
    rows = torch.cat(list(WindowScorer(model, 64).logits(ids[:-1]))).log_softmax(-1)
    tops = rows.topk(2)
    return [
        TokenLogprobs(row[token].item(), tuple(zip(i.tolist(), v.tolist(), strict=True)))
        for row, token, i, v in zip(rows, ids[1:], tops.indices, tops.values, strict=True)
    ]


@pytest.mark.parametrize(
    ("architecture", "window"),
    [("Qwen3ForCausalLM", None), ("Qwen2ForCausalLM", 20), ("Qwen3_5ForCausalLM", None)],
)
@pytest.mark.parametrize("overlaps", [False, True])
def test_they_are_those_of_eval_alone_in_chunks_and_beside_others(
    architecture: str, window: int | None, overlaps: bool
) -> None:
    model = load_tiny_model(architecture, window)
    alone = {n: scored(make_engine(model, Limits()), [n])[n] for n in (2, 17, 40)}
    for length, found in alone.items():
        first, *others = found
        assert first is None
        for own, exact in zip(others, expected(model, length), strict=True):
            assert own is not None
            assert own.logprob == pytest.approx(exact.logprob, abs=1e-5)
            assert [i for i, _ in own.top] == [i for i, _ in exact.top]
    limits = Limits(max_num_batched_tokens=11, enable_prefix_caching=True, overlaps=overlaps)
    engine = make_engine(model, limits)
    engine.add_request(prompt(30), ANSWERS)
    for _ in range(2):  # the second time, the prompts are in the cache
        assert scored(engine, [40, 17, 2]) == alone
    assert scored(engine, [1]) == {1: [None]}


def test_prompts_that_are_computed_again_have_the_same_scores() -> None:
    """An older request takes their blocks as its answer grows."""
    model = load_tiny_model("Qwen3ForCausalLM")
    alone = scored(make_engine(model, Limits()), [60])
    engine = make_engine(model, Limits(num_blocks=6, max_num_batched_tokens=3))
    engine.add_request(prompt(30), replace(ANSWERS, max_tokens=40))
    assert scored(engine, [60]) == alone
    assert engine.scheduler.num_preemptions


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_all_layers_in_one_call() -> None:
    model = load_tiny_model("Qwen3ForCausalLM", backend="auto")
    assert model.fused is not None
    [found] = scored(make_engine(model, Limits(max_num_batched_tokens=11)), [40]).values()
    for own, exact in zip(found[1:], expected(model, 40), strict=True):
        assert own is not None
        assert own.logprob == pytest.approx(exact.logprob, abs=1e-5)


@pytest.mark.parametrize("backend", CAPTURING)
def test_on_a_device_with_captured_graphs(backend: str) -> None:
    model = load_tiny_model("Qwen3ForCausalLM", None, torch.float32, backend=backend)
    device = RecordingDevice()
    engine = make_engine(model, Limits(device=device, max_num_batched_tokens=8))
    engine.add_request(prompt(3), ANSWERS)  # what is seen again is captured
    [found] = scored(engine, [9]).values()
    assert device.replayed
    for own, exact in zip(found[1:], expected(model, 9), strict=True):
        assert own is not None
        assert own.logprob == pytest.approx(exact.logprob, abs=1e-4)
