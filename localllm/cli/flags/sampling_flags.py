"""The sampling flags."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from localllm.cli.flags.groups import Flags, setting
from localllm.cli.flags.values import parse_logit_bias
from localllm.errors import RequestError

# As llama.cpp, Ollama and vLLM write that there is no seed, no limit.
_UNLIMITED = -1


# What `/set` and settings name like the flags: the field of SamplingParams, and how to read it.
SETTINGS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "temp": ("temperature", float),
    "top-k": ("top_k", int),
    "top-p": ("top_p", float),
    "min-p": ("min_p", float),
    "repeat-penalty": ("repetition_penalty", float),
    "presence-penalty": ("presence_penalty", float),
    "frequency-penalty": ("frequency_penalty", float),
    "seed": ("seed", int),
    "max-tokens": ("max_tokens", int),
    "stop": ("stop", lambda text: (text,)),
}


@dataclass(frozen=True, slots=True)
class SamplingFlags(Flags):
    """How the next token is chosen; None for a flag that was not given."""

    section = "Sampling"
    exclusive = (("greedy", "temp"),)

    temp: float | None = setting(
        None, "--temp", "--temperature", help="Sampling temperature; 0 is greedy."
    )
    top_k: int | None = setting(help="Keep the K most likely tokens; 0: all.")
    top_p: float | None = setting(
        help="Keep the most likely tokens, up to a total probability of P."
    )
    min_p: float | None = setting(help="Drop tokens below P times the highest probability.")
    repeat_penalty: float | None = setting(
        help="Divide the logits of tokens that occurred; 1: off."
    )
    presence_penalty: float | None = setting(help="Subtract from the logits of generated tokens.")
    frequency_penalty: float | None = setting(
        help="Subtract from a token's logit for each time it was generated."
    )
    logit_bias: list[str] | None = setting(
        help="Add BIAS to a token's logit; repeatable.", metavar="ID=BIAS"
    )
    seed: int | None = setting(help="The same seed gives the same text.")
    stop: list[str] | None = setting(help="Stop before this text; repeatable.")
    ignore_eos: bool = setting(False, help="Continue past the model's end token.")
    max_tokens: int | None = setting(None, "-n", help="Maximum length of the answer, in tokens.")
    greedy: bool = setting(False, help="Temperature 0.")

    def given(self) -> dict[str, Any]:
        """The SamplingParams fields that a flag set. Raises: RequestError."""
        if self.greedy and self.temp:
            raise RequestError("--greedy and --temp cannot be combined", param="temperature")
        fields = {
            "temperature": 0.0 if self.greedy else self.temp,
            "top_k": 0 if self.top_k == _UNLIMITED else self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repeat_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": parse_logit_bias(self.logit_bias) if self.logit_bias else None,
            "seed": None if self.seed == _UNLIMITED else self.seed,
            "stop": tuple(self.stop) if self.stop else None,
            "ignore_eos": self.ignore_eos or None,
            "max_tokens": None if self.max_tokens == _UNLIMITED else self.max_tokens,
        }
        return {name: value for name, value in fields.items() if value is not None}
