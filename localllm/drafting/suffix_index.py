"""Finds earlier occurrences of a growing text's newest tokens, in time independent of its length.

The places where each n-gram of the minimum length ends form a chain, newest first, as in Deflate
(RFC 1951, section 4). A look-up walks back along it for a bounded number of places, and takes the
one before which the most tokens match. A match that goes on is kept unless a longer one is found,
since of several places that match as far the one that has been right is the likeliest. One of full
length is not looked up again.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from sys import getsizeof

# Separates texts; matches do not cross it.
END_OF_TEXT = -1
# The number of bits of a key for a token id plus one.
_TOKEN_BITS = 24
# A look-up tries at most so many places.
MOST_TRIED = 64


@dataclass(frozen=True, slots=True)
class Match:
    """An earlier occurrence of the newest `length` tokens; the last one ends before `end`."""

    length: int
    end: int


NO_MATCH = Match(0, 0)


class SuffixIndex:
    """Token ids with the places of every n-gram of `min_match` tokens; matches have up to
    `max_match`.

    Holds one text, or several with END_OF_TEXT between them.
    """

    def __init__(self, min_match: int, max_match: int) -> None:
        assert 1 <= min_match <= max_match
        self._min, self._max = min_match, max_match
        self._tokens = array("i")
        # Where the newest text begins, and the key of its last `min_match` tokens.
        self._start = self._key = 0
        # By n-gram, the position after its last occurrence; by position, that after the occurrence
        # before of the n-gram that ends there, 0 if there is none.
        self._last: dict[int, int] = {}
        self._before = array("i")
        # A match of the newest tokens, and whether a longer one was looked for.
        self._match, self._is_longest = NO_MATCH, True

    def copy(self) -> "SuffixIndex":
        """An independent copy, which is far cheaper than indexing the text again."""
        other = SuffixIndex(self._min, self._max)
        other._tokens, other._before = self._tokens[:], self._before[:]
        other._last, other._key, other._start = self._last.copy(), self._key, self._start
        other._match, other._is_longest = self._match, self._is_longest
        return other

    def __len__(self) -> int:
        return len(self._tokens)

    def begins(self, token_ids: Sequence[int]) -> bool:
        """Whether `token_ids` begin with this text."""
        return self._tokens.tolist() == token_ids[: len(self._tokens)]

    def num_bytes(self) -> int:
        """Bytes of memory used; slow to compute."""
        entries = sum(getsizeof(key) + getsizeof(end) for key, end in self._last.items())
        arrays = getsizeof(self._tokens) + getsizeof(self._before)
        return arrays + getsizeof(self._last) + entries

    @property
    def match(self) -> Match:
        """The longest match of this text's newest tokens, of those that are tried. Of several that
        are as long, the one that goes on with the last match, else the last one.
        """
        if not self._is_longest:
            newest = self._tokens[max(self._start, len(self) - self._max) :]
            self._match = self._longest(newest, self._before[-1], self._match)
            self._is_longest = True
        return self._match

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        last, before, key = self._last, self._before, self._key
        mask = (1 << _TOKEN_BITS * self._min) - 1
        least = 1 << _TOKEN_BITS * (self._min - 1)  # of the keys of so many tokens
        end = len(self._tokens)
        for token in token_ids:
            end += 1
            if token == END_OF_TEXT:
                key, self._start = 0, end
            else:
                key = (key << _TOKEN_BITS | token + 1) & mask
            if key < least:
                before.append(0)
            else:
                before.append(last.get(key, 0))
                last[key] = end
        self._key = key
        self._tokens.extend(token_ids)
        if token_ids:
            self._match, self._is_longest = self._continued(len(token_ids)), False

    def _continued(self, count: int) -> Match:
        """The match from before the newest `count` tokens, if these go on as it does."""
        length, end = self._match.length, self._match.end + count
        is_one_text = self._start <= len(self._tokens) - count
        if length and is_one_text and self._tokens[end - count : end] == self._tokens[-count:]:
            return Match(min(self._max, length + count), end)
        return NO_MATCH

    def find(self, newest: Sequence[int]) -> Match:
        """The longest match in this index of the last tokens of `newest`, a different text; of
        those that are tried, and of several the last.
        """
        key = 0
        for token in newest[-self._min :]:
            key = key << _TOKEN_BITS | token + 1
        return self._longest(newest, self._last.get(key, 0), NO_MATCH)

    def _longest(self, newest: Sequence[int], end: int, known: Match) -> Match:
        """The longest match of the last tokens of `newest`, `known` if none is longer; `end`: the
        last place that is tried first, 0 for none.
        """
        tokens, before, longest = self._tokens, self._before, min(self._max, len(newest))
        best, at = known.length, known.end
        if not end or best >= longest:
            return known
        # Of a place, the token that a match longer than the best needs is looked at first. All have
        # the first `_min` ones.
        least = max(best + 1, self._min)
        wanted = newest[-least]
        for _ in range(MOST_TRIED):
            if not end:
                break
            if end >= least and tokens[end - least] == wanted:
                length = self._min
                while length < longest and length < end:
                    if tokens[end - length - 1] != newest[-length - 1]:
                        break
                    length += 1
                if length > best:
                    best, at = length, end
                    if best >= longest:
                        break
                    least, wanted = best + 1, newest[-best - 1]
            end = before[end - 1]
        return Match(best, at)

    def continuation(self, end: int, count: int) -> list[int]:
        """`count` tokens from position `end` on; fewer if the text ends."""
        found = self._tokens[end : end + count].tolist()
        return found[: found.index(END_OF_TEXT)] if END_OF_TEXT in found else found

    def repetition(self, count: int) -> list[int]:
        """The next `count` tokens if the text continues as it did after its match, repeating that
        as a cycle; none without a match.
        """
        match = self.match
        if match.length == 0:
            return []
        period = self.continuation(match.end, count)
        if not period:
            return []
        return [period[i % len(period)] for i in range(count)]
