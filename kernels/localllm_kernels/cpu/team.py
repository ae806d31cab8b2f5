"""How many threads of the C library compute, beside torch's."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Team:
    """Shared by the operators and products of one table, see `cpu_ops`."""

    def __init__(self) -> None:
        self._size: int | None = None

    @property
    def size(self) -> int:
        """As many as torch has, but while `alone`."""
        return self._size or torch.get_num_threads()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While the block runs, torch has one thread and the library as many as torch had: after
        each of torch's operators its other threads spin, on the cores that the library needs next.
        For blocks in which torch multiplies nothing.
        """
        before = torch.get_num_threads()
        self._size = before
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)
            self._size = None
