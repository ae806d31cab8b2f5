"""Checkpoints with a head that drafts, with random weights, for tests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import torch
from checkpoints import random_values, stacked, write_checkpoint
from drafting import eager
from safetensors.torch import load_file, save_file
from torch import Tensor
from whole_text import whole_text

from localllm.drafting.head_drafter import HeadDrafter
from localllm.drafting.speculator import Speculator
from localllm.engine.model_runner import ModelRunner
from localllm.model.architecture import Architecture
from localllm.model.decoder import DecoderModel
from localllm.model.families.table import architecture_of
from localllm.model.mtp import find_mtp, mtp_architecture
from localllm.model.packed.weight import PackedWeight
from localllm.model.paged_kv_cache import PagedKVCache
from localllm.model.weight_files import find_weight_files
from localllm.model.weights import WeightSource, load_head, open_source
from localllm.schedule.request import Request
from localllm.schedule.runner import Computed, HeadDraft, HeadRunner
from localllm.schedule.sampling_params import SamplingParams
from localllm.schedule.scheduler import SampledToken, ScheduledBatch

# Float32 sums in another order, of tiny models.
MOST = 2e-4
# The hidden states that heads of several take in these tests.
FUSED_TAPS = (0, 1, 1)
# Beginnings of names: the loader's, and those of files where the head stands apart.
APART = {
    "model.join_embedding_norm.": "mtp.pre_fc_norm_embedding.",
    "model.join_hidden_norm.": "mtp.pre_fc_norm_hidden.",
    "model.join.": "mtp.fc.",
    "model.norm.": "mtp.norm.",
    "model.layers.0.": "mtp.layers.0.",
    "model.drafted": "mtp.token_ids",
    "lm_head.": "mtp.lm_head.",
}


def behind(number: int) -> dict[str, str]:
    """The same where it is a further layer of the model."""
    layer = f"model.layers.{number}."
    return {
        "model.join_embedding_norm.": f"{layer}enorm.",
        "model.join_hidden_norm.": f"{layer}hnorm.",
        "model.join.": f"{layer}eh_proj.",
        "model.norm.": f"{layer}shared_head.norm.",
        "model.layers.0.": layer,
    }


def head_architecture(config: dict[str, Any]) -> Architecture:
    """That of a head that shares its target's output head."""
    architecture = mtp_architecture(architecture_of(config), {})
    assert architecture is not None
    return architecture


def write_with_head(
    folder: Path, config: dict[str, Any], names: dict[str, str] = APART, seed: int = 0
) -> dict[str, Tensor]:
    """A checkpoint whose files hold a head too; returns the head's tensors by the loader's names,
    before those of experts are stacked.
    """
    write_checkpoint(folder, config, seed=seed)
    return add_head(folder, head_architecture(config), names, seed + 1)


def add_head(
    folder: Path, architecture: Architecture, names: dict[str, str], seed: int
) -> dict[str, Tensor]:
    """Write a random head into a checkpoint's file; returns what `write_with_head` does."""
    tensors = random_tensors(architecture, seed)
    found = load_file(folder / "model.safetensors")
    for name, values in stacked(tensors, architecture).items():
        for own, stored in names.items():
            if name.startswith(own):
                found[stored + name.removeprefix(own)] = values.contiguous()
                break
        else:
            raise AssertionError(name)
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def load_beside(
    source: WeightSource, architecture: Architecture, target: DecoderModel
) -> DecoderModel:
    """A head with its weights, beside its target."""
    return load_head(
        source,
        architecture,
        max_model_len=target.ropes.num_positions,
        dtype=target.embedding.dtype,
        device=target.embedding.device,
        ops=target.ops,
    ).beside(target)


def load_own_head(folder: Path, target: DecoderModel) -> DecoderModel:
    """The head in a checkpoint's own files."""
    found = find_mtp(find_weight_files(folder), target.architecture)
    assert found is not None
    with open_source(found.weights) as source:
        return load_beside(source, found.architecture, target)


@dataclass(frozen=True)
class GivenWeights:
    """Plain tensors by name; see WeightSource."""

    tensors: dict[str, Tensor]
    keeps_floats: bool = False

    def has_plain(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def plain(self, name: str) -> Tensor:
        return self.tensors[name]

    def release(self) -> None:
        return

    def place(self, name: str) -> tuple[str, str]:
        return name, "test"

    def has_quantized(self, linear: str) -> bool:
        return False

    def quantized(self, linear: str, device: torch.device) -> PackedWeight:
        raise NotImplementedError


def random_head(target: DecoderModel, seed: int = 5) -> DecoderModel | None:
    """A head with random weights; None where the target has no full attention."""
    architecture = mtp_architecture(target.architecture, {})
    if architecture is None:
        return None
    weights = GivenWeights(random_tensors(architecture, seed))
    return load_beside(weights, architecture, target)


def random_tensors(architecture: Architecture, seed: int) -> dict[str, Tensor]:
    """The tensors of a head, by the loader's names."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: random_values(name, shape, generator)
        for name, shape in architecture.tensors().items()
    }


def reference(
    model: DecoderModel, taps: tuple[int, ...] | None = None
) -> Callable[[tuple[int, ...]], Tensor]:
    """The hidden states of a text, computed at once; those after the final norm without `taps`,
    else several side by side.
    """
    asked = (model.architecture.num_layers,) if taps is None else taps

    @lru_cache(maxsize=4096)
    def hidden_of(text: tuple[int, ...]) -> Tensor:
        batch, cache = whole_text(model, list(text))
        with torch.inference_mode():
            _, found = model.forward_tapped(batch, cache, asked)
        return torch.cat(found, dim=-1)[: len(text)]

    return hidden_of


@dataclass
class CheckedHead:
    """A head runner that looks at what it is given: with each token the hidden state before it, and
    in all slots that it sees, entries of this very text. Its tokens are those of `answer`, with
    errors.
    """

    hidden_of: Callable[[tuple[int, ...]], Tensor] | None
    answer: Callable[[Request], Sequence[int]]
    error_rate: float
    block_size: int
    table: int = 0
    overlaps: bool = False
    random: Random = field(default_factory=lambda: Random(0))
    # By slot, the text whose last token's entry is there.
    written: dict[int, tuple[int, ...]] = field(default_factory=dict)
    num_entries: int = 0
    num_skipped: int = 0

    is_warm = True
    hidden: tuple[Tensor, ...] = ()

    def __post_init__(self) -> None:
        self._newest: dict[Request, int] = {}
        # What it returned in place of a hidden state, of each request the newest.
        self._own: dict[Request, float] = {}
        self._marks = count(1000)

    def needs_ids(self, params: SamplingParams) -> bool:
        return False

    def work_ahead(self) -> bool:
        return False

    def release_memory(self) -> None:
        pass

    def draft(self, drafts: Sequence[HeadDraft], hidden: Tensor) -> None:
        """Not at once."""

    def launch(self, batch: ScheduledBatch, hidden: Tensor | None = None) -> Computed:
        assert hidden is not None
        rows = iter(hidden)
        marks, sampled = list[float](), list[list[SampledToken]]()
        for entry in batch.requests:
            own, text = entry.request, tuple(entry.request.token_ids)
            if entry.known_end > len(text):
                assert self.overlaps
                text = (*text, self._newest[own])
            first = entry.num_skipped * self.block_size + 1
            for position in range(first, entry.start):
                found = self.written[self._slot(own, position)]
                assert found == text[: position + 1], "an entry of another text"
            for position in range(entry.start, entry.known_end):
                self._check(own, text[:position], next(rows))
                self.written[self._slot(own, position)] = text[: position + 1]
                marks.append(float(next(self._marks)))
            self._own[own] = marks[-1]
            self.num_entries += entry.num_scheduled_tokens
            self.num_skipped += entry.num_skipped
            if entry.catches_up:
                self._newest[own] = self._next(own, len(text))
                sampled.append([SampledToken(self._newest[own])])
        assert next(rows, None) is None
        return Computed(sampled, (torch.tensor(marks)[:, None].expand(-1, hidden.shape[1]),))

    def _slot(self, request: Request, position: int) -> int:
        block = request.tables[self.table][position // self.block_size]
        return block * self.block_size + position % self.block_size

    def _check(self, request: Request, before: tuple[int, ...], row: Tensor) -> None:
        if float(row[0]) >= 1000:
            assert float(row[0]) == self._own[request], "what another request or step gave"
            return
        if self.hidden_of is not None:
            torch.testing.assert_close(
                row, self.hidden_of(before)[-1].to(row.dtype), rtol=0, atol=MOST
            )

    def _next(self, own: Request, length: int) -> int:
        said = self.answer(own)
        place = length - own.num_prompt_tokens
        if place >= len(said) or self.random.random() < self.error_rate:
            return self.random.randrange(259)
        return said[place]


def head_drafter(
    runner: HeadRunner,
    target: DecoderModel,
    head: DecoderModel,
    num_blocks: int,
    block_size: int,
    max_tokens: int,
    table: int = 0,
    kv_cache: PagedKVCache | None = None,
) -> HeadDrafter:
    """A drafter over a cache of `num_blocks` blocks without the null block."""
    own = kv_cache or head_cache(head, num_blocks, block_size)
    layers, fuse = target.architecture, None
    taps, width = (layers.num_layers,), layers.hidden_size
    if head.join is not None and head.join.fusion is not None:
        assert head.architecture.join is not None
        assert head.architecture.join.fusion is not None
        taps, width = FUSED_TAPS, head.architecture.join.fusion.width_in
        fuse = partial(head.join.fusion, ops=head.ops)
    return HeadDrafter(runner, own, taps, width, 256, max_tokens, table, fuse)


def head_cache(head: DecoderModel, num_blocks: int, block_size: int) -> PagedKVCache:
    """The cache of a head."""
    counts = [num_blocks + 1] * len(head.architecture.cache_groups)
    dtype = head.embedding.dtype
    return PagedKVCache.allocate(head.architecture, counts, block_size, dtype, torch.device("cpu"))


def head_speculator(
    target: DecoderModel,
    head: DecoderModel,
    num_blocks: int,
    block_size: int,
    max_draft: int,
    max_tokens: int,
    table: int = 0,
) -> Speculator:
    """A head drafts whatever becomes of it."""
    cache = head_cache(head, num_blocks, block_size)
    own_tap = 0 if head.join is not None and head.join.fusion is not None else 1
    runner = ModelRunner(head, cache, tables=[table] * len(cache.stacks), taps=(own_tap,))
    drafter = head_drafter(runner, target, head, num_blocks, block_size, max_tokens, table, cache)
    return eager(drafter, max_draft)
