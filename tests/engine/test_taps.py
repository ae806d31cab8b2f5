"""Who drafts sees the hidden rows of every position that is computed: block by block, in C, by
captured graphs, where steps overlap, in chunks and beside drafts that are wrong.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from drafting import Oracle, eager
from engines import Limits, checked_step, load_tiny_model, make_engine
from guards import CAPTURING, needs_interpreter
from recording_device import RecordingDevice
from torch import Tensor
from whole_text import whole_text

from localllm.drafting.speculator import Speculator
from localllm.model.decoder import DecoderModel
from localllm.quantize.recipe import Recipe
from localllm.schedule.request import Request
from localllm.schedule.sampling_params import SamplingParams
from localllm.schedule.scheduler import ScheduledBatch

# The residual stream behind the first layer, that behind the last, and what the last norm makes.
TAPS = (0, 1, 2)
INT4 = Recipe("rtn", group_size=32)
Seen = dict[tuple[int, int], tuple[int, tuple[Tensor, ...]]]


@dataclass
class Watcher(Oracle):
    """Keeps what it sees: of each request and position the token and its rows, the newest."""

    seen: Seen = field(default_factory=dict)

    @property
    def taps(self) -> Sequence[int]:
        return TAPS

    def see(self, batch: ScheduledBatch, hidden: Sequence[Tensor]) -> None:
        assert len(hidden) == len(TAPS)
        rows = sum(entry.num_scheduled_tokens for entry in batch.requests)
        assert all(len(tap) == rows for tap in hidden)
        row = 0
        for entry in batch.requests:
            for i in range(entry.num_scheduled_tokens):
                at = entry.request.request_id, entry.start + i
                self.seen[at] = (
                    entry.request.num_prompt_tokens,
                    tuple(tap[row + i].clone() for tap in hidden),
                )
            row += entry.num_scheduled_tokens


def reference(model: DecoderModel, token_ids: list[int]) -> tuple[Tensor, ...]:
    """The rows of a text computed at once, block by block."""
    batch, cache = whole_text(model, token_ids)
    with torch.inference_mode():
        return model.forward_tapped(batch, cache, TAPS)[1]


def answer(request: Request) -> list[int]:
    return [5, 7, 9, 11] * 8


def watch(model: DecoderModel, limits: Callable[..., Limits]) -> dict[int, list[int]]:
    """Run requests beside each other, and hold what was seen against the reference; the tokens."""
    watcher = Watcher(answer, 0.3)

    def speculator() -> Speculator:
        return eager(watcher, 3)

    engine = make_engine(model, limits(speculator=speculator))
    texts: dict[int, list[int]] = {}
    for length in (37, 3, 18):
        ids = [(7 * length + 5 * i) % 250 + 1 for i in range(length)]
        params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
        texts[engine.add_request(ids, params)] = ids
    while engine.has_unfinished():
        for event in checked_step(engine):
            if event.token_id is not None:
                texts[event.request_id].append(event.token_id)
    for number, ids in texts.items():
        rows = reference(model, ids)
        # The last token is not computed any more.
        for position in range(len(ids) - 1):
            _, found = watcher.seen[number, position]
            for own, exact in zip(found, rows, strict=True):
                torch.testing.assert_close(own, exact[position], rtol=0, atol=2e-4)
    return texts


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(
    ("architecture", "window"), [("Qwen3ForCausalLM", None), ("Qwen2ForCausalLM", 20)]
)
def test_block_by_block(architecture: str, window: int | None, overlaps: bool) -> None:
    model = load_tiny_model(architecture, window)
    watch(model, lambda **more: Limits(max_num_batched_tokens=11, overlaps=overlaps, **more))


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.parametrize(
    ("architecture", "window"), [("Qwen3ForCausalLM", None), ("Qwen2ForCausalLM", 20)]
)
def test_all_layers_in_one_call(architecture: str, window: int | None) -> None:
    model = load_tiny_model(architecture, window, backend="auto")
    assert model.fused is not None
    found = watch(model, lambda **more: Limits(max_num_batched_tokens=11, **more))
    plain = load_tiny_model(architecture, window)
    assert found == watch(plain, lambda **more: Limits(**more))


@pytest.mark.parametrize("backend", CAPTURING)
def test_from_captured_graphs(backend: str) -> None:
    watch_captured(None, backend)


@needs_interpreter
@pytest.mark.slow
def test_from_captured_graphs_of_six_launches_a_layer() -> None:
    watch_captured(INT4, "triton")


def watch_captured(recipe: Recipe | None, backend: str) -> None:
    model = load_tiny_model("Qwen3ForCausalLM", None, torch.float32, recipe, backend)
    assert (model.fused is not None) == (recipe is not None)
    device = RecordingDevice()
    watch(model, lambda **more: Limits(device=device, max_num_batched_tokens=24, **more))
    assert len(device.replayed) >= len(device.captured) > 0
