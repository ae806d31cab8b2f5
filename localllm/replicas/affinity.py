"""Which replica should answer a prompt: the one that has most of it in its cache, unless others
would be done sooner.

A prompt is known by the keys of its blocks, as in the prefix cache. Costs are in tokens of prefill:
what a replica has to do already, and what of the prompt it would have to compute. Replicas that
cost about the same are ranked by what they hold, so that conversations stay where they are, and
then by how much, so that new ones are spread even where answers come at once.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

BLOCK_TOKENS = 16
# What an answer that is being generated costs others, and what a replica's own counts add for each
# request that came from elsewhere.
_ANSWER_TOKENS, _OTHER_TOKENS = 64, 256
# Costs that differ by less are the same.
_ABOUT_TOKENS = 512
# A token that another replica holds costs so many: it would be computed now, and kept twice.
_HELD_ELSEWHERE = 4
# What of a prompt is new goes rather where less is held: each token of the difference costs so
# many, up to a limit.
_SPREAD, _MOST_SPREAD_TOKENS = 4, 4096
# Keys that are remembered for each replica: those of 4 million tokens.
_MOST_KEYS = 1 << 18
# More requests are not answered at once; ends of which nobody told are forgotten by this.
_MOST_RUNNING, _MOST_ENDED = 4096, 64


@dataclass(slots=True)
class _Known:
    """`held`: keys of blocks, the longest unused first."""

    held: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def num_held(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys it holds."""
        for i, key in enumerate(keys):
            if key not in self.held:
                return i
        return len(keys)

    def hold(self, keys: Iterable[bytes], most: int) -> None:
        for key in keys:
            self.held[key] = None
            self.held.move_to_end(key)
        while len(self.held) > most:
            self.held.popitem(last=False)


@dataclass(frozen=True, slots=True)
class _Given:
    replica: str
    cost: int


class Affinity:
    """What is known of each replica, by its name. Not safe for several threads."""

    def __init__(self, most_keys: int = _MOST_KEYS) -> None:
        self._most_keys = most_keys
        self._replicas: dict[str, _Known] = {}
        # Requests that are being answered, by their names, the oldest first; and names of some that
        # have ended, which may be heard of before it is told where they went.
        self._running: dict[str, _Given] = {}
        self._ended: deque[str] = deque(maxlen=_MOST_ENDED)

    def keep(self, names: Iterable[str]) -> None:
        """Know these replicas, and forget all others."""
        self._replicas = {name: self._replicas.get(name) or _Known() for name in names}

    def rank(
        self, keys: Sequence[bytes], num_tokens: int, reported: Mapping[str, int]
    ) -> list[str]:
        """The replicas for a prompt of `num_tokens` tokens whose full blocks have `keys`, best
        first. `reported`: how many requests each says that it has.
        """
        held = {name: each.num_held(keys) for name, each in self._replicas.items()}
        running = {name: [0, 0] for name in self._replicas}
        for given in self._running.values():
            if given.replica in running:
                running[given.replica][0] += 1
                running[given.replica][1] += given.cost
        least_held = min((len(each.held) for each in self._replicas.values()), default=0)
        most_held = max(held.values(), default=0)
        costs = {}
        for name, (count, cost) in running.items():
            new = max(0, num_tokens - BLOCK_TOKENS * held[name])
            elsewhere = BLOCK_TOKENS * (most_held - held[name])
            others = _OTHER_TOKENS * max(0, reported.get(name, 0) - count)
            more = _SPREAD * BLOCK_TOKENS * (len(self._replicas[name].held) - least_held)
            spread = min(_MOST_SPREAD_TOKENS, more) * new / max(1, num_tokens)
            costs[name] = cost + others + new + (_HELD_ELSEWHERE - 1) * elsewhere + spread
        least = min(costs.values(), default=0)

        def order(name: str) -> tuple[float, int, int, str]:
            about = max(0.0, costs[name] - least - _ABOUT_TOKENS)
            return about, -held[name], len(self._replicas[name].held), name

        return sorted(self._replicas, key=order)

    def give(self, request: str, replica: str, keys: Sequence[bytes], num_tokens: int) -> None:
        """Note that a request goes to `replica`; a request that went elsewhere before does not."""
        before, known = self._running.get(request), self._replicas.get(replica)
        if before is not None and before.replica == replica:
            return
        self._running.pop(request, None)
        if known is None or request in self._ended:
            return
        while len(self._running) >= _MOST_RUNNING:
            del self._running[next(iter(self._running))]
        cost = max(0, num_tokens - BLOCK_TOKENS * known.num_held(keys)) + _ANSWER_TOKENS
        self._running[request] = _Given(replica, cost)
        known.hold(keys, self._most_keys)

    def ended(self, request: str) -> None:
        """Note that a request is answered, or was given up."""
        self._running.pop(request, None)
        self._ended.append(request)
