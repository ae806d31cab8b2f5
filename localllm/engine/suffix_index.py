"""Finds earlier occurrences of a growing text's newest tokens, in time independent of its length.

A trie of the text's n-grams read backwards, level by level: an n-gram is looked up by its tokens,
newest first, and holds the position where it last ended. As in a suffix tree, a branch is no longer
than necessary: nothing is stored below an n-gram that has occurred once, since the text itself
shows the tokens before it. So text that does not repeat costs one entry per token, and text that
does repeat shares entries. (Weiner 1973, "Linear pattern matching algorithms"; the longest match of
the newest tokens is what Lempel and Ziv's 1977 compression copies from.)
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from sys import getsizeof

# Separates texts; matches do not cross it.
END_OF_TEXT = -1
# The number of bits of a key for a token id plus one.
_TOKEN_BITS = 24


@dataclass(frozen=True, slots=True)
class Match:
    """An earlier occurrence of the newest `length` tokens; the last one ends before `end`."""

    length: int
    end: int


NO_MATCH = Match(0, 0)


class SuffixIndex:
    """Token ids with the last position of every n-gram of `min_match` to `max_match` tokens.

    Holds one text, or several with END_OF_TEXT between them.
    """

    def __init__(self, min_match: int, max_match: int) -> None:
        assert 1 <= min_match <= max_match
        self._min, self._max = min_match, max_match
        self._tokens = array("i")
        # By n-gram: the position after it, negative once it has occurred again.
        self._ends: dict[int, int] = {}
        self._match = NO_MATCH
        self._run = 0  # tokens of the last text

    def copy(self) -> "SuffixIndex":
        """An independent copy, which is far cheaper than indexing the text again."""
        other = SuffixIndex(self._min, self._max)
        other._tokens, other._ends = self._tokens[:], self._ends.copy()
        other._run, other._match = self._run, self._match
        return other

    def __len__(self) -> int:
        return len(self._tokens)

    def begins(self, token_ids: Sequence[int]) -> bool:
        """Whether `token_ids` begin with this text."""
        return self._tokens.tolist() == token_ids[: len(self._tokens)]

    @property
    def num_entries(self) -> int:
        """The number of stored n-grams, which determines the memory used."""
        return len(self._ends)

    def num_bytes(self) -> int:
        """Bytes of memory used; slow to compute."""
        entries = sum(getsizeof(key) + getsizeof(end) for key, end in self._ends.items())
        return getsizeof(self._tokens) + getsizeof(self._ends) + entries

    @property
    def match(self) -> Match:
        """The longest match of this text's newest tokens; of several, the last."""
        return self._match

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        rest = list(token_ids)
        while END_OF_TEXT in rest:
            end = rest.index(END_OF_TEXT)
            self._append(rest[:end])
            self._tokens.append(END_OF_TEXT)
            self._run, self._match = 0, NO_MATCH
            del rest[: end + 1]
        self._append(rest)

    def _append(self, token_ids: list[int]) -> None:
        """Append tokens of one text, in bulk as far as nothing repeats, since prompts are long."""
        tokens, ends, first = self._tokens, self._ends, self._min
        num_old = min(self._run, first - 1)
        window = [*tokens[len(tokens) - num_old :], *token_ids]
        tokens.extend(token_ids)
        self._run += len(token_ids)
        # The n-grams of the minimum length that end in a new token.
        keys = [0] * max(0, len(window) - first + 1)
        for newer in range(first):
            each = window[first - 1 - newer :]
            keys = [key << _TOKEN_BITS | token + 1 for key, token in zip(keys, each, strict=False)]
        end = len(tokens) - len(keys) + 1
        start = len(tokens) - self._run
        found = (0, 0)
        for key in keys:
            before = ends.setdefault(key, end)
            if before == end:
                found = (0, 0)
            else:
                found = self._descend(key, before, end, min(self._max, end - start))
            end += 1
        if token_ids:
            self._match = Match(*found)

    def _descend(self, key: int, before: int, end: int, longest: int) -> tuple[int, int]:
        """Store the n-grams that end before position `end`, level by level from the first, whose
        n-gram `key` has occurred before; returns length and end of the match.
        """
        tokens, ends = self._tokens, self._ends
        length = self._min
        while True:
            if before > 0:  # it had occurred only once so far
                if length < self._max and before > length:
                    older = tokens[before - length - 1]
                    if older != END_OF_TEXT:
                        ends[key << _TOKEN_BITS | older + 1] = before
            else:
                before = -before
            ends[key] = -end
            if length == longest:
                return length, before
            key = key << _TOKEN_BITS | tokens[end - length - 1] + 1
            deeper = ends.get(key)
            if deeper is None:
                ends[key] = end
                return length, before
            length, before = length + 1, deeper

    def find(self, newest: Sequence[int]) -> Match:
        """The longest match in this index of the last tokens of `newest`, a different text."""
        tokens, key, match = self._tokens, 0, NO_MATCH
        for length in range(1, min(self._max, len(newest)) + 1):
            key = key << _TOKEN_BITS | newest[-length] + 1
            if length < self._min:
                continue
            end = self._ends.get(key)
            if end is None:
                break
            match = Match(length, abs(end))
            if end > 0:  # it occurs only once, so the text itself is compared
                longest = min(self._max, len(newest), end)
                while length < longest and tokens[end - length - 1] == newest[-length - 1]:
                    length += 1
                return Match(length, end)
        return match

    def continuation(self, end: int, count: int) -> list[int]:
        """`count` tokens from position `end` on; fewer if the text ends."""
        found = self._tokens[end : end + count].tolist()
        return found[: found.index(END_OF_TEXT)] if END_OF_TEXT in found else found

    def repetition(self, count: int) -> list[int]:
        """The next `count` tokens if the text continues as it did after its match, repeating that
        as a cycle; none without a match.
        """
        if self._match.length == 0:
            return []
        period = self.continuation(self._match.end, count)
        return [period[i % len(period)] for i in range(count)]
