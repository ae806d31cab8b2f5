"""How much of the server each key takes at the moment: one count for every route."""

from collections import Counter

from localllm.server.limits import LIMITS


class Places:
    """The places that requests take: one each, and one more for each further prompt that is
    computed at the same time. Without keys, nobody can be told apart, and nothing is limited.
    """

    def __init__(self) -> None:
        self._taken: Counter[str] = Counter()

    def take(self, key: str, count: int) -> bool:
        """Take `count` places for a key; False, and none is taken, if it would have too many."""
        if key and self._taken[key] + count > LIMITS.requests_of_a_key:
            return False
        self._taken[key] += count
        return True

    def give_back(self, key: str, count: int) -> None:
        """Give places back that were taken."""
        self._taken[key] -= count
        if not self._taken[key]:
            del self._taken[key]
