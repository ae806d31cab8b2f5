"""Requests as they come to a server: mixed lengths, and arrivals that keep no time."""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A prompt of tokens, the tokens it wants, and when it arrives, in seconds from the start."""

    prompt: tuple[int, ...]
    num_new: int
    arrival_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Mix:
    """What the requests of a workload are drawn from.

    Lengths are exponential around their means, as those of chats roughly are, and at most
    `longest` times that.
    """

    num_requests: int = 64
    mean_prompt: int = 128
    mean_new: int = 64
    longest: int = 4
    vocab_size: int = 256
    seed: int = 0

    @classmethod
    def within(cls, context_length: int, vocab_size: int, seed: int) -> "Mix":
        """The default mix, shorter where the context does not hold its longest."""
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
        """The longest request, prompt and answer together."""
        return self.longest * (self.mean_prompt + self.mean_new)

    def draw(self, rate: float | None = None) -> list[LoadRequest]:
        """The requests in order of arrival: Poisson with `rate` a second, all at once if None."""
        rng = random.Random(self.seed)
        requests, clock = [], 0.0
        for _ in range(self.num_requests):
            num_prompt, num_new = (
                min(self.longest * mean, max(1, round(rng.expovariate(1 / mean))))
                for mean in (self.mean_prompt, self.mean_new)
            )
            prompt = tuple(rng.randrange(self.vocab_size) for _ in range(num_prompt))
            requests.append(LoadRequest(prompt, num_new, clock))
            # Drawn in any case, so that the requests are the same at every rate.
            gap = rng.expovariate(1.0)
            clock += gap / rate if rate is not None else 0.0
        return requests
