"""How many threads compute a step: as many as make steps shortest, as measured while they run.

Beside other work more threads are slower, not faster: they compute in step, so all wait for one
that has no core. So other numbers are tried for a few steps at a time: soon where steps have become
slower than they were, and seldom where they have not, so that trying costs an idle machine under
one step in a hundred. Only times are compared; no result depends on the number of threads.
"""

from dataclasses import dataclass, field
from math import log2

# Steps of a trial; it ends sooner where it cannot win any more.
_TRIAL = 4
# What a trial has to take, of the time at the present number, to be adopted; what its first two
# steps may not both take; and what none of them may.
_GAIN, _LOSS, _TOO_MUCH = 0.9, 1.2, 2.0
# Steps have become slow where they take so many times as long as they did.
_SLOW = 1.5
# Steps between two trials of more threads, and of fewer: the first and the longest pause, and how
# much longer each is than the one before. More threads are tried often: what made them slow passes.
_UP, _DOWN = (8, 64, 2), (4, 4096, 8)
# How much of an average is the newest value, and how fast the best one is forgotten.
_NEWEST, _FORGET = 0.35, 1.002
# The first steps of a size find nothing in the processor's caches.
_COLD = 2


@dataclass(slots=True)
class _Times:
    """Seconds of steps of one size at one number of threads."""

    mean: float = 0.0
    best: float = 0.0
    num_steps: int = 0

    def add(self, seconds: float) -> None:
        self.num_steps += 1
        if self.num_steps <= _COLD + 1:
            self.mean = self.best = seconds
        self.mean += _NEWEST * (seconds - self.mean)
        self.best = min(self.best * _FORGET, self.mean)

    @property
    def is_slow(self) -> bool:
        return self.mean > _SLOW * self.best


@dataclass(slots=True)
class _Pause:
    """Steps until the next trial in one direction, and how that grows."""

    first: int
    longest: int
    factor: int
    length: int = 0
    left: int = 0

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.length = self.left = self.first

    def grow(self) -> None:
        self.length = self.left = min(self.length * self.factor, self.longest)


@dataclass(slots=True)
class _Trial:
    """A number that is tried, and what its steps took, of those at the present number."""

    at: int
    ratios: list[float] = field(default_factory=list)
    num_steps: int = 0


class ThreadCount:
    """Books what steps take, and says how many threads the next one gets: at most `most`, or always
    so many.
    """

    def __init__(self, most: int, *, is_fixed: bool = False) -> None:
        self._numbers = [most] if is_fixed else _numbers(most)
        self._at = len(self._numbers) - 1
        self._times: dict[tuple[int, int], _Times] = {}
        self._trial: _Trial | None = None
        # Whether the next trial goes half the way: of eight threads beside three busy processes
        # seven are no faster.
        self._leaps = False
        self._up, self._down = _Pause(*_UP), _Pause(*_DOWN)

    @property
    def count(self) -> int:
        """Threads of the next step."""
        return self._numbers[self._trial.at if self._trial else self._at]

    def look_again(self) -> None:
        """Nothing was computed for a while: who took the cores then may have gone."""
        self._up.reset()

    def book(self, num_rows: int, seconds: float) -> None:
        """A step of `num_rows` rows took so long with `count` threads."""
        if len(self._numbers) == 1:
            return
        size = _size(num_rows)
        if self._trial is None:
            self._note(self._at, size, seconds)
            self._consider(size)
        else:
            self._try(self._trial, size, seconds)

    def _note(self, at: int, size: int, seconds: float) -> None:
        self._times.setdefault((at, size), _Times()).add(seconds)

    def _consider(self, size: int) -> None:
        """Begin a trial where one is due."""
        times = self._times[self._at, size]
        if times.is_slow:
            self._down.left = min(self._down.left, self._down.first)
        if self._at + 1 < len(self._numbers):
            self._up.left -= 1
            if self._up.left <= 0:
                top = len(self._numbers) - 1
                self._trial = _Trial((self._at + top + 1) // 2 if self._leaps else self._at + 1)
                return
        if self._at > 0:
            self._down.left -= 1
            if self._down.left <= 0:
                self._trial = _Trial(self._at // 2 if self._leaps else self._at - 1)

    def _try(self, trial: _Trial, size: int, seconds: float) -> None:
        trial.num_steps += 1
        present = self._times.get((self._at, size))
        if present is not None:
            trial.ratios.append(seconds / present.mean)
        taken = sum(trial.ratios)
        loses = (
            taken >= _GAIN * _TRIAL
            or (len(trial.ratios) == 2 and min(trial.ratios) > _LOSS)
            or max(trial.ratios, default=0.0) > _TOO_MUCH
        )
        if loses or trial.num_steps >= 3 * _TRIAL:
            self._reject(trial)
        elif len(trial.ratios) == _TRIAL:
            self._adopt(trial, size, seconds)

    def _adopt(self, trial: _Trial, size: int, seconds: float) -> None:
        """The number stays; what was measured of it in other times counts no more."""
        is_fewer = trial.at < self._at
        self._at, self._trial = trial.at, None
        for key in [key for key in self._times if key[0] == self._at]:
            del self._times[key]
        self._note(self._at, size, seconds)
        self._up.reset()
        if is_fewer:
            self._down.reset()
        else:
            self._down.grow()

    def _reject(self, trial: _Trial) -> None:
        self._trial = None
        pause = self._up if trial.at > self._at else self._down
        is_level = sum(trial.ratios) < _LOSS * len(trial.ratios)
        if is_level and not self._leaps:
            pause.left = pause.first  # then half the way, soon
        else:
            pause.grow()
        self._leaps = is_level and not self._leaps
        if pause is self._down:
            # Steps that are slow with fewer threads too are what this machine takes now.
            for (at, _), times in self._times.items():
                if at == self._at:
                    times.best = times.mean


def _numbers(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, … below `most`, the number before it, and itself."""
    steps = {base * 2**power for base in (2, 3) for power in range(most.bit_length())}
    return sorted({1, most, max(1, most - 1), *(number for number in steps if number < most)})


def _size(num_rows: int) -> int:
    """Steps of one size take about as long: by whole rows while they are few, then by eighths of a
    doubling.
    """
    return num_rows if num_rows <= 16 else 16 + round(8 * log2(num_rows / 16))
