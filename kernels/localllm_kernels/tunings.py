"""Which configuration a kernel takes for a shape: one that was found fastest here, or a default.

Launchers ask by kernel and shape, every time; so the answer is kept. Who tunes listens to what is
asked for, and forces one configuration after the other.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from localllm_kernels.tiles import TileConfig

# Given a configuration, others that are worth a try.
Vary = Callable[[TileConfig], list[TileConfig]]


class Tunings:
    """Configurations by key: the kernel's name and the numbers of its shape."""

    def __init__(self, found: Mapping[str, TileConfig] | None = None) -> None:
        self.found = dict(found or {})
        self._kept: dict[tuple[object, ...], TileConfig] = {}
        self._forced: dict[str, TileConfig] = {}
        self._asked: dict[str, tuple[TileConfig, Vary]] | None = None

    def config(
        self, kernel: str, shape: tuple[int, ...], choose: Callable[[], TileConfig], vary: Vary
    ) -> TileConfig:
        """What `kernel` takes for `shape`; `choose` gives the default.

        The rows of a tile are always those of the default, which the shape says.
        """
        known = self._kept.get((kernel, *shape))
        if known is not None and self._asked is None and not self._forced:
            return known
        key = " ".join((kernel, *map(str, shape)))
        default = choose()
        if self._asked is not None:
            self._asked[key] = (default, vary)
        if key in self._forced:
            return self._forced[key]
        chosen = self.found.get(key, default)
        if chosen.block_m != default.block_m:
            chosen = default
        self._kept[kernel, *shape] = chosen
        return chosen

    @contextmanager
    def listening(self) -> Iterator[dict[str, tuple[TileConfig, Vary]]]:
        """Within it, the keys that are asked for, with their defaults and what varies them."""
        self._asked = {}
        try:
            yield self._asked
        finally:
            self._asked = None

    @contextmanager
    def forcing(self, key: str, config: TileConfig) -> Iterator[None]:
        """Within it `key` gets `config`."""
        self._forced[key] = config
        try:
            yield
        finally:
            del self._forced[key]
