"""How the tokens of one request are sampled, with checks of the values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from localllm.errors import RequestError, brief
from localllm.text.grammar import Grammar

MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_LOGPROBS = 20
MAX_NUM_SAMPLES = 8


@dataclass(frozen=True, slots=True)
class Pooling:
    """What is wanted of a prompt's last token in the place of an answer: its hidden state after the
    last norm, what a head for scores makes of that, or the logits of `token_ids`.
    """

    kind: Literal["embedding", "labels", "logits"]
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters by which the tokens of one request are chosen.

    Order of the filters: penalties, `logit_bias`, temperature, top-k, top-p, min-p. Temperature 0
    is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch those filters off. The penalties are those
    of OpenAI (presence, frequency: over generated tokens) and CTRL (repetition: over prompt and
    generated tokens). `logprobs` N reports the chosen token and the N likeliest, from the
    distribution before any filter; `prompt_logprobs` the same for the prompt's tokens, from the
    second on, none of which then comes from the cache. `seed` None or -1 draws a random seed.
    `grammar`: the grammar that the answer must follow; tokens that it forbids are removed before
    anything else. `pooling`: wanted of the prompt, and the answer is one token of no meaning.
    `given` names the fields that the user set: a remote model sends only these, since its server
    has its own defaults.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    seed: int | None = None
    grammar: Grammar | None = None
    pooling: Pooling | None = None
    given: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, low, high in (
            ("temperature", 0.0, 100.0),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("repetition_penalty", 0.01, 100.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
        ):
            _check_number(name, getattr(self, name), low, high)
        if self.top_p == 0:
            raise RequestError("top_p must be greater than 0, found 0", param="top_p")
        _check_integer("top_k", self.top_k, 0, 1 << 31)
        _check_integer("n", self.n, 1, MAX_NUM_SAMPLES)
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 1, 1 << 31)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.seed is not None:
            _check_integer("seed", self.seed, -(1 << 63), (1 << 64) - 1)
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        self._check_stops()
        self._check_logit_bias()

    def _check_stops(self) -> None:
        # Many users pass a single string first.
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        for name, value in (("stop", stop), ("stop_token_ids", self.stop_token_ids)):
            if not isinstance(value, (list, tuple, set, frozenset)):
                raise RequestError(f"{name} must be a list, found {brief(value)}", param=name)
            object.__setattr__(self, name, tuple(value))
        if len(self.stop) > MAX_STOP_STRINGS or not all(
            isinstance(text, str) and 0 < len(text) <= MAX_STOP_CHARS for text in self.stop
        ):
            raise RequestError(
                f"stop takes at most {MAX_STOP_STRINGS} strings "
                f"of 1 to {MAX_STOP_CHARS} characters",
                param="stop",
            )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(
                f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids", param="stop_token_ids"
            )
        for token_id in self.stop_token_ids:
            _check_integer("stop_token_ids", token_id, 0, 1 << 31)

    def _check_logit_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(
                f"logit_bias must map token ids to numbers, found {brief(self.logit_bias)}",
                param="logit_bias",
            )
        if len(self.logit_bias) > MAX_LOGIT_BIAS_ENTRIES:
            raise RequestError(
                f"logit_bias takes at most {MAX_LOGIT_BIAS_ENTRIES} entries", param="logit_bias"
            )
        for token_id, bias in self.logit_bias.items():
            _check_integer("logit_bias", token_id, 0, 1 << 31)
            _check_number("logit_bias", bias, -100.0, 100.0)


def _check_number(name: str, value: object, low: float, high: float) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:  # type: ignore[operator]
        raise RequestError(
            f"{name} must be a number from {low:g} to {high:g}, found {brief(value)}", param=name
        )


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise RequestError(
            f"{name} must be a whole number from {low} to {high}, found {brief(value)}", param=name
        )
