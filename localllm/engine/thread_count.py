"""Chooses the number of threads that compute a step: the fastest, as measured while steps run.

If other processes use the cores, more threads are slower, not faster: the threads run in lockstep,
so all wait for one that has no core. So other numbers are tried for a few steps at a time: soon
when steps have become slower, and seldom otherwise, so that trials cost an idle machine less than
one step in a hundred. A step of a prompt takes far longer than one of an answer, so fewer
threads are tried in it only once it has become slower. Only times are compared; no result depends
on the number of threads.
"""

from dataclasses import dataclass, field
from math import log2

from localllm.schedule.step_clock import StepClock

# Steps in a trial; it ends sooner once it cannot win any more.
_TRIAL = 4
# Times relative to those at the current number: a trial is adopted if it takes less than _GAIN; it
# ends if its first two steps both take more than _LOSS, or if any step takes more than _TOO_MUCH.
_GAIN, _LOSS, _TOO_MUCH = 0.9, 1.2, 2.0
# Steps have become slow if they take this many times as long as they did at best.
_SLOW = 1.5
# Steps between two trials of more threads, and of fewer: the first pause, the longest pause, and
# the factor from each pause to the next. More threads are tried often, since what made them slow
# passes.
_UP, _DOWN = (8, 64, 2), (4, 4096, 8)
# Weight of the newest value in the moving average, and how fast the best value is forgotten.
_NEWEST, _FORGET = 0.35, 1.002
# The first steps of a size run with cold processor caches.
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
    """A trial of another number: times of its steps, relative to those at the current number."""

    at: int
    ratios: list[float] = field(default_factory=list)
    num_steps: int = 0


class ThreadCount:
    """Records the times of steps, and decides how many threads the next one gets: at most `most`,
    or always `most` if `is_fixed`.
    """

    def __init__(
        self, most: int, clock: StepClock | None = None, *, is_fixed: bool = False
    ) -> None:
        """`clock`: says whether it may try other numbers."""
        self._clock = clock or StepClock()
        self._numbers = [most] if is_fixed else _numbers(most)
        self._at = len(self._numbers) - 1
        self._times: dict[tuple[int, int], _Times] = {}
        self._trial: _Trial | None = None
        # Whether the next trial jumps half the way: with three busy processes on eight cores, seven
        # threads are no faster than eight.
        self._leaps = False
        self._up, self._down = _Pause(*_UP), _Pause(*_DOWN)

    def count(self, num_rows: int, *, has_prompt: bool = False) -> int:
        """The number of threads for a step of `num_rows` rows; `has_prompt`: whether some are a
        prompt's, which ends a trial of fewer threads.
        """
        trial = self._trial
        if trial is not None and not (trial.at > self._at or self._may_lose(num_rows, has_prompt)):
            self._end()
            self._down.reset()
        return self._numbers[self._trial.at if self._trial else self._at]

    def _may_lose(self, num_rows: int, has_prompt: bool) -> bool:
        """Whether fewer threads may be tried in such a step."""
        times = self._times.get((self._at, _size(num_rows)))
        return not has_prompt or (times is not None and times.is_slow)

    def look_again(self) -> None:
        """Try more threads again soon, after a pause in which other processes may have ended."""
        self._up.reset()

    def book(self, num_rows: int, seconds: float, *, has_prompt: bool = False) -> None:
        """Record that a step took `seconds` with the threads that `count` gave it."""
        if len(self._numbers) == 1:
            return
        size = _size(num_rows)
        if self._clock.is_disturbed(self):
            pass
        elif self._trial is None:
            self._note(self._at, size, seconds)
            self._consider(num_rows, has_prompt)
        else:
            self._try(self._trial, size, seconds)

    def _note(self, at: int, size: int, seconds: float) -> None:
        self._times.setdefault((at, size), _Times()).add(seconds)

    def _consider(self, num_rows: int, has_prompt: bool) -> None:
        """Begin a trial if one is due behind a step of `num_rows` rows."""
        times = self._times[self._at, _size(num_rows)]
        if times.is_slow:
            self._down.left = min(self._down.left, self._down.first)
        if self._at + 1 < len(self._numbers):
            self._up.left -= 1
            if self._up.left <= 0:
                top = len(self._numbers) - 1
                self._begin((self._at + top + 1) // 2 if self._leaps else self._at + 1)
                return
        if self._at > 0 and self._may_lose(num_rows, has_prompt):
            self._down.left -= 1
            if self._down.left <= 0:
                self._begin(self._at // 2 if self._leaps else self._at - 1)

    def _begin(self, at: int) -> None:
        self._clock.begin_experiment(self)
        self._trial = _Trial(at)

    def _end(self) -> None:
        self._clock.end_experiment(self)
        self._trial = None

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
        """Keep the tried number; its older measurements are dropped."""
        is_fewer = trial.at < self._at
        self._at = trial.at
        self._end()
        for key in [key for key in self._times if key[0] == self._at]:
            del self._times[key]
        self._note(self._at, size, seconds)
        self._up.reset()
        if is_fewer:
            self._down.reset()
        else:
            self._down.grow()

    def _reject(self, trial: _Trial) -> None:
        self._end()
        pause = self._up if trial.at > self._at else self._down
        is_level = sum(trial.ratios) < _LOSS * len(trial.ratios)
        if is_level and not self._leaps:
            pause.left = pause.first  # soon try again, half the way
        else:
            pause.grow()
        self._leaps = is_level and not self._leaps
        if pause is self._down:
            # Fewer threads do not help, so the current times are this machine's normal ones now.
            for (at, _), times in self._times.items():
                if at == self._at:
                    times.best = times.mean


def _numbers(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, … below `most`, then `most` - 1 and `most`."""
    steps = {base * 2**power for base in (2, 3) for power in range(most.bit_length())}
    return sorted({1, most, max(1, most - 1), *(number for number in steps if number < most)})


def _size(num_rows: int) -> int:
    """The size class of a step: its number of rows up to 16, then eighths of a doubling. Steps of
    one class take about the same time.
    """
    return num_rows if num_rows <= 16 else 16 + round(8 * log2(num_rows / 16))
