"""The self-check's verdict for one machine and one shape of model, and the file that keeps it."""

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import exp, log
from pathlib import Path
from typing import Literal

from localllm.files.private_files import private_folder, read_private, write_private
from localllm.user.places import cache_folder
from localllm_kernels.compiling.choice import SECOND_WAYS, Choice, Piece

logger = logging.getLogger(__name__)

State = Literal["good", "wrong", "crashed", "hung", "slower", "unchecked"]
_BROKEN = ("wrong", "crashed", "hung")
# An operator may take this much longer than torch's, since clocks are not exact.
_SLOWER = 1.05
KIND = "self-checks"
_MAX_BYTES = 10_000_000
_WITHOUT = "the verdict on this GPU's kernels is not kept"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one case; seconds are 0 if none were measured."""

    piece: Piece
    name: str
    rows: int
    state: State
    why: str = ""
    own_s: float = 0.0
    plain_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Finding:
    """The result for a piece, over all its cases. `times`: how many times as long its alternative
    takes, as a geometric mean; 0 if nothing was measured.
    """

    piece: Piece
    state: State
    why: str
    times: float

    @property
    def is_taken(self) -> bool:
        """Whether this library's kernel is used; an unchecked one is, unless it is a second way."""
        return self.state == "good" or (self.state == "unchecked" and self.piece not in SECOND_WAYS)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcomes of all cases, valid for one `machine` and `shape`, which are given in words."""

    machine: str
    shape: str
    outcomes: tuple[Outcome, ...]

    def choice(self) -> Choice:
        """The operators to use: torch's for each piece that is broken or slower, and fragments for
        the numbers of rows for which they are right and faster.
        """
        taken = {each.piece: each.is_taken for each in self.findings()}
        to_torch = frozenset(piece for piece, is_taken in taken.items() if not is_taken)
        return Choice(
            to_torch - SECOND_WAYS,
            self._fragment_rows(),
            taken.get(Piece.KEY_FRAGMENTS, False),
        )

    @property
    def is_whole(self) -> bool:
        """Whether every case could be checked."""
        return all(each.state != "unchecked" for each in self.outcomes)

    def findings(self) -> Iterator[Finding]:
        """One finding for each piece."""
        for piece in dict.fromkeys(each.piece for each in self.outcomes):
            yield self._finding(piece, [each for each in self.outcomes if each.piece == piece])

    def _finding(self, piece: Piece, cases: Sequence[Outcome]) -> Finding:
        measured = [each for each in cases if each.own_s > 0 and each.plain_s > 0]
        times = _mean_times(measured) if measured else 0.0
        broken = [each for each in cases if each.state in _BROKEN]
        if piece is Piece.FRAGMENTS:
            taken = self._fragment_rows()
            if taken:
                used = [each for each in measured if each.rows in taken]
                return Finding(piece, "good", _rows_of_range(taken), _mean_times(used))
            if measured and not broken:
                return Finding(piece, "slower", "", times)
        if broken:
            first = broken[0]
            case = f"{first.name}, {rows_of(first.rows)}"
            return Finding(piece, first.state, f"{case}: {first.why}".rstrip(": "), times)
        if not measured:
            return Finding(piece, "unchecked", cases[0].why, times)
        # A second way has to be faster than the first; a kernel may be just as fast as torch's.
        is_slower = times <= 1 if piece in SECOND_WAYS else times * _SLOWER < 1
        return Finding(piece, "slower" if is_slower else "good", "", times)

    def _fragment_rows(self) -> range:
        """Up to the first number of rows that is wrong or slower again. Numbers that were not
        tried are computed like the next one that was.
        """
        least, most, before = 0, 0, 0
        tried = [each for each in self.outcomes if each.piece is Piece.FRAGMENTS]
        if any(each.state in ("crashed", "hung") for each in tried):
            return range(0)  # other cases may be untried because of it
        for rows in sorted({each.rows for each in tried}):
            cases = [each for each in tried if each.rows == rows]
            is_right = all(each.state == "good" for each in cases)
            is_faster = is_right and _mean_times(cases) > 1
            if is_faster:
                least, most = least or before + 1, rows
            elif most or not is_right:
                break
            before = rows
        return range(least, most + 1) if most else range(0)


def _rows_of_range(rows: range) -> str:
    first, last = rows.start, rows.stop - 1
    if first == last:
        return rows_of(first)
    return f"up to {rows_of(last)}" if first == 1 else f"{first} to {rows_of(last)}"


def rows_of(count: int) -> str:
    """A number of rows in words."""
    return f"{count} row{'s' * (count > 1)}"


def _mean_times(cases: Sequence[Outcome]) -> float:
    return exp(sum(log(each.plain_s / each.own_s) for each in cases) / len(cases))


@dataclass(frozen=True, slots=True)
class VerdictFile:
    """The file that keeps the verdict for a machine and a shape."""

    path: Path

    @classmethod
    def of(cls, machine: str, shape: str) -> "VerdictFile":
        """The file for everything that the verdict depends on."""
        digest = hashlib.sha256(f"{machine}\n{shape}".encode()).hexdigest()
        return cls(cache_folder(KIND) / f"{digest[:16]}.json")

    @classmethod
    def all(cls) -> list["VerdictFile"]:
        """All existing files, the newest last."""
        found = [path for path in cache_folder(KIND).glob("*.json") if path.is_file()]
        return [cls(path) for path in sorted(found, key=lambda path: path.stat().st_mtime)]

    def read(self) -> Verdict | None:
        """The verdict; None if there is none, or the file is damaged."""
        if private_folder(self.path.parent, _WITHOUT) is None:
            return None
        try:
            raw = json.loads(read_private(self.path, _MAX_BYTES))
            outcomes = tuple(
                Outcome(**{**each, "piece": Piece(each["piece"])}) for each in raw["outcomes"]
            )
            verdict = Verdict(str(raw["machine"]), str(raw["shape"]), outcomes)
            list(verdict.findings())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.warning("%s is not used and will be rewritten: %s", self.path, error)
            return None
        return verdict

    def write(self, verdict: Verdict) -> None:
        """Write the verdict; if that fails, log a warning, and the next start checks again."""
        if private_folder(self.path.parent, _WITHOUT) is None:
            return
        try:
            write_private(self.path, json.dumps(asdict(verdict), indent=1).encode())
        except OSError as error:
            logger.warning("%s: %s", _WITHOUT, error)
