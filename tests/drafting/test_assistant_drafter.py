"""An assistant drafts the same from captured graphs, and with other requests beside it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from assistants import cache_seen, random_assistant
from drafting import KeptDrafts
from engines import Limits, checked_step, load_tiny_model, make_engine
from guards import CAPTURING
from recording_device import RecordingDevice

from localllm.drafting.assistant_drafter import AssistantDrafter
from localllm.drafting.speculator import Proposer, Speculator
from localllm.engine.device_runner import DeviceRunner
from localllm.engine.model_runner import ModelRunner
from localllm.model.decoder import DecoderModel
from localllm.model.paged_kv_cache import PagedKVCache
from localllm.schedule.runner import HeadRunner, Launched
from localllm.schedule.sampling_params import SamplingParams
from localllm.schedule.scheduler import ScheduledBatch, SchedulerConfig

PROMPTS = [[7, 9, 11, 200, 5] * 8, list(range(20, 90)), [5, 6]]
Drafts = dict[tuple[int, ...], list[int]]


def drafts_of(
    model: DecoderModel,
    new_runner: Callable[[DecoderModel, PagedKVCache], HeadRunner],
    limits: Limits,
    prompts: list[list[int]],
    temperature: float = 0.0,
    max_tokens: int = 12,
) -> Drafts:
    """What is drafted behind each text, with all prompts in one engine."""
    assistant, made = random_assistant(model), list[KeptDrafts]()

    def new(cache: PagedKVCache) -> Speculator:
        runner = new_runner(assistant, cache_seen(assistant, cache))
        drafter = AssistantDrafter(runner, (model.architecture.num_layers,), 256)
        made.append(KeptDrafts([Proposer("test", drafter)], 3))
        return made[0]

    engine = make_engine(model, replace(limits, reader=new))
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True, seed=7)
    for prompt in prompts:
        engine.add_request(prompt, params)
    while engine.has_unfinished():
        checked_step(engine)
    assert len(made[0].drafts) >= 8
    return made[0].drafts


def on_host(assistant: DecoderModel, cache: PagedKVCache) -> HeadRunner:
    return ModelRunner(assistant, cache, taps=(assistant.architecture.num_layers,))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_others_do_not_change_drafts(temperature: float) -> None:
    model = load_tiny_model("Gemma4ForCausalLM", 20)
    together = drafts_of(model, on_host, Limits(), PROMPTS, temperature)
    alone: Drafts = {}
    for prompt in PROMPTS:
        alone |= drafts_of(model, on_host, Limits(), [prompt], temperature)
    common = together.keys() & alone.keys()
    assert len(common) > 20
    assert {text: together[text] for text in common} == {text: alone[text] for text in common}


@pytest.mark.parametrize("backend", CAPTURING)
def test_drafts_from_captured_graphs_are_the_same(backend: str) -> None:
    model, device = load_tiny_model("Gemma4ForCausalLM", 20, backend=backend), RecordingDevice()
    prompts = [PROMPTS[0][:28], PROMPTS[2]]
    expected = drafts_of(model, on_host, Limits(), prompts, max_tokens=8)
    scheduling = SchedulerConfig(16, 64, 24, False, b"")

    def on_device(assistant: DecoderModel, cache: PagedKVCache) -> HeadRunner:
        taps = (assistant.architecture.num_layers,)
        return DeviceRunner(assistant, cache, device, scheduling, 256, taps=taps)

    limits = Limits(max_num_batched_tokens=24, device=device)
    found = drafts_of(model, on_device, limits, prompts, max_tokens=8)
    common = found.keys() & expected.keys()
    assert len(common) > 8
    assert {text: found[text] for text in common} == {text: expected[text] for text in common}
    assert len(device.replayed) > len(device.captured) > 0


class FailingRunner(ModelRunner):
    """Runs out of memory in its second launch."""

    num_launches = 0

    def launch(self, batch: ScheduledBatch, hidden: torch.Tensor | None = None) -> Launched:
        self.num_launches += 1
        if self.num_launches == 2:
            raise torch.OutOfMemoryError("no memory")
        return super().launch(batch, hidden)


def test_a_draft_that_fails_leaves_nothing_in_the_next_one() -> None:
    """Its first token was there already when memory ran out."""
    model = load_tiny_model("Gemma4ForCausalLM", 20)
    expected = drafts_of(model, on_host, Limits(), [PROMPTS[0]])
    found = drafts_of(model, failing, Limits(), [PROMPTS[0]])
    common = found.keys() & expected.keys()
    assert len(common) > 5
    assert {text: found[text] for text in common} == {text: expected[text] for text in common}


def failing(assistant: DecoderModel, cache: PagedKVCache) -> HeadRunner:
    return FailingRunner(assistant, cache, taps=(assistant.architecture.num_layers,))
