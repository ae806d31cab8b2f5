"""Requests as a server receives them: mixed lengths and random arrivals."""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A prompt, the number of tokens to generate, and the arrival in seconds from the start."""

    prompt: tuple[int, ...]
    num_new: int
    arrival_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Mix:
    """The distribution of a workload's requests.

    Lengths are exponentially distributed, roughly as those of chats are, and at most `longest`
    times their mean.
    """

    num_requests: int = 64
    mean_prompt: int = 128
    mean_new: int = 64
    longest: int = 4
    vocab_size: int = 256
    seed: int = 0

    @classmethod
    def within(cls, context_length: int, vocab_size: int, seed: int) -> "Mix":
        """The default mix, scaled down if the context cannot hold its longest request."""
        default = cls()
        scale = min(1.0, (context_length - 2) / default.max_tokens)
        return cls(
            mean_prompt=max(1, int(default.mean_prompt * scale)),
            mean_new=max(1, int(default.mean_new * scale)),
            vocab_size=vocab_size,
            seed=seed,
        )

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest possible request, prompt and answer together."""
        return self.longest * (self.mean_prompt + self.mean_new)

    def draw(self, rate: float | None = None) -> list[LoadRequest]:
        """The requests in order of arrival: Poisson at `rate` a second, or all at once if None."""
        rng = random.Random(self.seed)
        requests, clock = [], 0.0
        for _ in range(self.num_requests):
            num_prompt, num_new = (
                min(self.longest * mean, max(1, round(rng.expovariate(1 / mean))))
                for mean in (self.mean_prompt, self.mean_new)
            )
            prompt = tuple(rng.randrange(self.vocab_size) for _ in range(num_prompt))
            requests.append(LoadRequest(prompt, num_new, clock))
            # Always drawn, so that the requests are the same at every rate.
            gap = rng.expovariate(1.0)
            clock += gap / rate if rate is not None else 0.0
        return requests
