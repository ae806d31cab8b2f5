"""Calibration text, and the text held back to measure the result."""

import hashlib
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from localllm.answer.loaded_model import LoadedModel
from localllm.errors import RequestError, TemplateError
from localllm.quantize.dataset import fetch_dataset_text
from localllm.schedule.sampling_params import SamplingParams
from localllm.text.prompt import Prompt
from localllm.text.tokenizer import Tokenizer

# For every so many windows requested, one more is taken and held back.
HELD_BACK_SHARE = 8
MIN_WINDOW = 16
# Text that is only used to measure is generated in more and shorter windows: generation takes as
# many steps as a window has tokens.
SHORT_WINDOW = 128
# Windows that are generated at once.
NUM_WRITERS = 64


@dataclass(frozen=True, slots=True)
class CalibrationRequest:
    """The source of the calibration text: a file, a data set on the hub, else the model itself."""

    text: str | None = None
    text_name: str | None = None
    dataset: str | None = None
    num_windows: int = 40
    length: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, low in (
            ("calib-samples", self.num_windows, 1),
            ("calib-seqlen", self.length, MIN_WINDOW),
        ):
            if value < low:
                raise RequestError(f"--{name} must be at least {low}, found {value}", param=name)

    @property
    def is_written(self) -> bool:
        """Whether the model writes the text itself."""
        return self.text is None and self.dataset is None

    def counts(self, *, calibrates: bool) -> "WindowCounts":
        """The windows to take, including those that are only used to measure."""
        held_back = max(2, self.num_windows // HELD_BACK_SHARE)
        if calibrates:
            return WindowCounts(self.num_windows, held_back, self.length)
        if not self.is_written:
            return WindowCounts(0, held_back, self.length)
        length = min(self.length, SHORT_WINDOW)
        return WindowCounts(0, held_back * self.length // length, length)

    def described(self) -> dict[str, Any]:
        """The fields that two requests must share to give the same text."""
        described = asdict(self)
        if self.text is not None:
            described["text"] = hashlib.sha256(self.text.encode()).hexdigest()
        return described


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """Windows of token ids, int64 [num_windows, length]; `source` says where they come from."""

    source: str
    windows: Tensor
    held_back: Tensor

    @property
    def sha256(self) -> str:
        """Digest of the token ids that calibrate."""
        return hashlib.sha256(self.windows.numpy().tobytes()).hexdigest()


@dataclass(frozen=True, slots=True)
class WindowCounts:
    """How many windows calibrate, how many are held back, and the tokens in each."""

    calibrating: int
    held_back: int
    length: int

    @property
    def total(self) -> int:
        """All windows."""
        return self.calibrating + self.held_back


def make_text(
    asked: CalibrationRequest,
    counts: WindowCounts,
    tokenizer: Tokenizer,
    open_writer: Callable[[], LoadedModel],
    progress: Callable[[int, int], None],
) -> CalibrationText:
    """The text for a request; `open_writer` loads the model if it has to generate the text.

    Raises: as `cut_text` and `fetch_dataset_text`.
    """
    if asked.text is not None:
        return cut_text(asked.text_name or "text", asked.text, tokenizer, counts)
    if asked.dataset is not None:
        return cut_text(asked.dataset, fetch_dataset_text(asked.dataset), tokenizer, counts)
    return write_text(open_writer(), counts, asked.seed, progress)


def cut_text(source: str, text: str, tokenizer: Tokenizer, counts: WindowCounts) -> CalibrationText:
    """Windows spread evenly over `text`; fewer if it is short.

    Raises: RequestError for a text with fewer than four windows.
    """
    length = counts.length
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    available = len(token_ids) // length
    if available < 4:
        raise RequestError(
            f"the calibration text has {len(token_ids):,} tokens; it needs at least {4 * length:,}",
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
    """Text generated by the model itself, sampled without filters. Nothing has to be downloaded,
    and the text is of the kind that the model knows.

    A window begins with the model's start token, or without one, with a random ordinary token (Liu
    et al. 2023, "LLM-QAT"). Of a model that chats every other one begins with its template's user
    turn: it asks itself something and answers (Xu et al. 2024, "Magpie", arXiv 2406.08464).
    """
    rng = random.Random(seed)
    tokenizer = model.tokenizer
    start, chat = tokenizer.encode("", add_special_tokens=True), _chat_start(tokenizer)
    ordinary = [] if start else tokenizer.ordinary_token_ids
    written: list[list[int]] = []
    # Batches of equal size: a small last one would take nearly as long as the others.
    num_batches = -(-counts.total // NUM_WRITERS)
    while len(written) < counts.total:
        count = min(-(-counts.total // num_batches), counts.total - len(written))
        rows = [
            (chat if i % 2 else []) or start or [rng.choice(ordinary)]
            for i in range(len(written), len(written) + count)
        ]
        seeds = [rng.getrandbits(32) for _ in rows]

        def report(num_tokens: int, before: int = len(written), count: int = count) -> None:
            progress(before * counts.length + count * num_tokens, counts.total * counts.length)

        written += _write_together(model, rows, seeds, counts.length, report)
    source = f"written by the model, seed {seed}"
    return _hold_back(source, torch.tensor(written), counts.held_back)


def _chat_start(tokenizer: Tokenizer) -> list[int]:
    """What comes before a user's first text; nothing for a model that does not chat."""
    if not tokenizer.has_chat_template:
        return []
    try:
        return tokenizer.encode_before_user()
    except TemplateError:  # one that wants more than a user's text; it need not chat here
        return []


def _write_together(
    model: LoadedModel,
    rows: Sequence[list[int]],
    seeds: Sequence[int],
    length: int,
    progress: Callable[[int], None],
) -> list[list[int]]:
    """`rows` continued to `length` tokens in one batch; progress is in tokens per row."""
    completions, streams = [], []
    for row, seed in zip(rows, seeds, strict=True):
        num_new = length - len(row)
        params = SamplingParams(temperature=1.0, max_tokens=num_new, ignore_eos=True, seed=seed)
        completion, events = model.ask(Prompt(row, num_context=len(row)), params)
        completions.append(completion)
        streams.append(events)
    # The other streams keep pace with the first.
    for num_new, _ in enumerate(streams[0], 1):
        progress(num_new)
    for events in streams[1:]:
        deque(events, maxlen=0)
    progress(length)
    return [
        [*row, *(token.token_id for token in completion.samples[0].tokens)]
        for row, completion in zip(rows, completions, strict=True)
    ]


def _hold_back(source: str, windows: Tensor, num_held_back: int) -> CalibrationText:
    """Hold back windows spread evenly over all."""
    is_held = torch.zeros(len(windows), dtype=torch.bool)
    for i in range(num_held_back):
        is_held[(2 * i + 1) * len(windows) // (2 * num_held_back)] = True
    return CalibrationText(source, windows[~is_held], windows[is_held])
