"""How well a model predicts a text, alone and against another model.

Source: the sliding-window perplexity of the transformers documentation ("Perplexity of
fixed-length models"): each window is read whole, and only the tokens that no earlier window has
scored count, so that every token but those of the first window has at least
`window - stride` tokens before it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from localllm.engine.config import EngineConfig
from localllm.engine.loaded_decoder import load_decoder
from localllm.engine.scoring import WindowScorer
from localllm.errors import CheckpointError, RequestError
from localllm.hub.checkpoint import Checkpoint, open_checkpoint

DEFAULT_WINDOW = 2048
MAX_MEAN_NATS = 700.0  # the exponential of more overflows


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens `start` to `end` of the text; those from `first_scored` on are scored."""

    start: int
    end: int
    first_scored: int


def plan_windows(num_tokens: int, length: int, stride: int) -> list[Window]:
    """Windows over `num_tokens` tokens; the first token has nothing before it, so it is not scored.

    Raises: RequestError for a length or stride that leaves a token out, or a text too short.
    """
    if num_tokens < 2:
        raise RequestError(
            "the text has fewer than two tokens, so nothing can be predicted", param="text"
        )
    if length < 2 or not 1 <= stride < length:
        raise RequestError(
            f"a window of {length} tokens with stride {stride} cannot slide",
            param="stride",
            hint="a stride from 1 to one less than the window",
        )
    windows = [Window(0, min(length, num_tokens), 1)]
    while windows[-1].end < num_tokens:
        scored = windows[-1].end
        end = min(scored + stride, num_tokens)
        windows.append(Window(end - length, end, scored))
    return windows


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far a model's distributions are from those of a reference, token by token.

    KL divergences (nats) are of the model from the reference; `same_top1` is the share of positions
    where both find the same token most likely.
    """

    model: str
    perplexity: float
    kl_mean: float
    kl_p99: float
    same_top1: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A model's perplexity over `num_tokens` tokens of a text."""

    model: str
    num_tokens: int
    perplexity: float
    against: Comparison | None = None


class LoadedScorer:
    """A checkpoint loaded for measuring: its decoder, and a cache of one window."""

    def __init__(self, checkpoint: Checkpoint, window: int) -> None:
        self.name = checkpoint.name
        loaded = load_decoder(
            checkpoint.folder,
            checkpoint.architecture,
            checkpoint.engine_config,
        )
        if window > loaded.plan.max_model_len:
            raise RequestError(
                f"a window of {window:,} tokens does not fit the context of {self.name}, "
                f"{loaded.plan.max_model_len:,} tokens",
                param="ctx",
                hint="a smaller --ctx",
            )
        self._scorer = WindowScorer(loaded.model, window, loaded.kv_dtype, loaded.codings)

    def logits(self, token_ids: Sequence[int], window: Window) -> Iterator[Tensor]:
        """Logits before each scored token of `window`, some rows at a time."""
        inputs = token_ids[window.start : window.end - 1]
        return self._scorer.logits(inputs, window.first_scored - window.start - 1)


def evaluate(
    text: str,
    models: Sequence[str | None],
    config: EngineConfig,
    *,
    stride: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Perplexity of `text` for the first of `models`, against the second if there is one, whose
    cache has the dtype of its model.

    The window is the context of `config`, else 2,048 tokens or, if smaller, the models' own limit.
    Both models run side by side, so that distributions are kept for a few rows only. `progress` is
    given the tokens scored so far, and their total.

    Raises: what opening a model raises; RequestError for a text that is too short, or models that
    do not share a vocabulary.
    """
    # What another dtype of the cache loses counts against the model alone.
    configs = [config, *(replace(config, kv_cache_dtype="auto") for _ in models[1:])]
    checkpoints = [open_checkpoint(*each) for each in zip(models, configs, strict=True)]
    token_ids = checkpoints[0].tokenizer.encode(text, add_special_tokens=True)
    for other in checkpoints[1:]:
        if other.tokenizer.encode(text, add_special_tokens=True) != token_ids:
            raise RequestError(
                f"{checkpoints[0].name} and {other.name} tokenize the text differently",
                hint="compare models with the same tokenizer",
            )
    longest = min(c.architecture.max_position_embeddings for c in checkpoints)
    length = config.max_model_len or min(DEFAULT_WINDOW, longest)
    windows = plan_windows(
        len(token_ids), length, max(1, length // 2) if stride is None else stride
    )
    scorers = [
        LoadedScorer(c, min(length, max(window.end - window.start for window in windows)))
        for c in checkpoints
    ]
    tally = Tally(len(scorers))
    for window in windows:
        targets = torch.tensor(token_ids[window.first_scored : window.end])
        done = 0
        for rows in zip(*(s.logits(token_ids, window) for s in scorers), strict=True):
            logits = [each.float().cpu() for each in rows]
            tally.add(logits, targets[done : done + len(logits[0])])
            done += len(logits[0])
            progress(tally.num_tokens, len(token_ids) - 1)
    return tally.result([scorer.name for scorer in scorers])


class Tally:
    """Sums over the scored tokens; per token, only the divergence is kept: four bytes."""

    def __init__(self, num_models: int) -> None:
        self.num_tokens = 0
        self._nats = [0.0] * num_models
        self._divergences: list[Tensor] = []
        self._num_same = 0

    def add(self, logits: Sequence[Tensor], targets: Tensor) -> None:
        """`logits`: [rows, vocab_size] of each model; `targets`: [rows], the true next tokens."""
        self.num_tokens += len(targets)
        for i, each in enumerate(logits):
            loss = torch.nn.functional.cross_entropy(each, targets, reduction="none")
            self._nats[i] += loss.double().sum().item()
        if len(logits) == 2:
            # A head may be padded; both heads have the tokens of the shared tokenizer.
            vocab_size = min(each.shape[1] for each in logits)
            model, reference = (each[:, :vocab_size].log_softmax(-1) for each in logits)
            divergence = (reference.exp() * (reference - model)).sum(-1)
            self._divergences.append(divergence.clamp(min=0))
            self._num_same += int((model.argmax(-1) == reference.argmax(-1)).sum())

    def result(self, names: Sequence[str]) -> Evaluation:
        """The figures so far, for models called `names`. Raises: CheckpointError for NaN logits."""
        means = [nats / self.num_tokens for nats in self._nats]
        for name, mean in zip(names, means, strict=True):
            if not math.isfinite(mean):
                raise CheckpointError(
                    f"the logits of {name} are not finite", hint="check the weights, or --dtype"
                )
        perplexities = [math.exp(min(mean, MAX_MEAN_NATS)) for mean in means]
        against = None
        if len(names) == 2:
            divergences = torch.cat(self._divergences)
            against = Comparison(
                model=names[1],
                perplexity=perplexities[1],
                kl_mean=divergences.double().mean().item(),
                kl_p99=_percentile(divergences, 0.99),
                same_top1=self._num_same / self.num_tokens,
            )
        return Evaluation(names[0], self.num_tokens, perplexities[0], against)


def _percentile(values: Tensor, share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed."""
    place = max(0, math.ceil(share * len(values)) - 1)
    return float(values.sort().values[place])
