"""The configuration that a kernel takes for a shape: the fastest one found here, or a default.

Launchers ask by kernel and shape on every launch, so the answer is kept. A tuner listens to what is
asked for, and forces one configuration after another.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from localllm_kernels.compiling.tiles import TileConfig

# Given a configuration, others that are worth trying.
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
        """The configuration of `kernel` for `shape`; `choose` gives the default.

        The rows of a tile are always those of the default, which the shape determines.
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
        """Collects the keys that are asked for meanwhile, with their defaults and variations."""
        self._asked = {}
        try:
            yield self._asked
        finally:
            self._asked = None

    @contextmanager
    def forcing(self, key: str, config: TileConfig) -> Iterator[None]:
        """While the `with` block runs, `key` gets `config`."""
        self._forced[key] = config
        try:
            yield
        finally:
            del self._forced[key]
