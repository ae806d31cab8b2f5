"""The text that quantization looks at, and the text held back to measure the result."""

import hashlib
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.config import SamplingParams
from localllm.errors import RequestError
from localllm.prompt import Prompt
from localllm.session import LoadedModel
from localllm.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """Windows of token ids, int64 [num_windows, length]; `source` says where they come from."""

    source: str
    windows: Tensor
    held_back: Tensor

    @property
    def sha256(self) -> str:
        """Of the token ids that calibrate."""
        return hashlib.sha256(self.windows.numpy().tobytes()).hexdigest()


@dataclass(frozen=True, slots=True)
class WindowCounts:
    """How many windows calibrate, how many are held back, and the tokens in each."""

    calibrating: int
    held_back: int
    length: int

    @property
    def total(self) -> int:
        """Windows in all."""
        return self.calibrating + self.held_back


def cut_text(source: str, text: str, tokenizer: Tokenizer, counts: WindowCounts) -> CalibrationText:
    """Windows spread evenly over `text`; fewer where it is short.

    Raises: RequestError for a text with fewer than four windows.
    """
    length = counts.length
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    available = len(token_ids) // length
    if available < 4:
        raise RequestError(
            f"the calibration text has {len(token_ids):,} tokens, it takes at least {4 * length:,}",
            param="calib_text",
            hint="a longer text, or a smaller --calib-seqlen",
        )
    count = min(counts.total, available)
    starts = [i * available // count * length for i in range(count)]
    windows = torch.tensor([token_ids[start : start + length] for start in starts])
    num_held_back = max(1, counts.held_back * count // counts.total)
    return _hold_back(source, windows, num_held_back)


def write_text(
    model: LoadedModel,
    counts: WindowCounts,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> CalibrationText:
    """Text that the model writes itself, sampled without filters from its start token.

    Where there is no start token each window begins with some ordinary token. So nothing has to
    be downloaded, and the text is of the kind that the model knows (Liu et al. 2023, "LLM-QAT",
    makes its data so).
    """
    rng = random.Random(seed)
    start = model.tokenizer.encode("", add_special_tokens=True)
    ordinary = [] if start else model.tokenizer.ordinary_token_ids
    rows = [start or [rng.choice(ordinary)] for _ in range(counts.total)]
    completions, streams = [], []
    for row in rows:
        params = SamplingParams(
            temperature=1.0,
            max_tokens=counts.length - len(row),
            ignore_eos=True,
            seed=rng.getrandbits(32),
        )
        completion, events = model.stream(Prompt(row, num_context=len(row)), params)
        completions.append(completion)
        streams.append(events)
    for done, events in enumerate(streams):
        deque(events, maxlen=0)
        progress(done + 1, counts.total)
    written = [
        [*row, *(token.token_id for token in completion.samples[0].tokens)]
        for row, completion in zip(rows, completions, strict=True)
    ]
    source = f"written by the model, seed {seed}"
    return _hold_back(source, torch.tensor(written), counts.held_back)


def _hold_back(source: str, windows: Tensor, num_held_back: int) -> CalibrationText:
    """Hold back windows spread evenly over all."""
    is_held = torch.zeros(len(windows), dtype=torch.bool)
    for i in range(num_held_back):
        is_held[(2 * i + 1) * len(windows) // (2 * num_held_back)] = True
    return CalibrationText(source, windows[~is_held], windows[is_held])
