"""A store that is opened, read and written in a thread of its own, in order."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

StoreT = TypeVar("StoreT")
T = TypeVar("T")


class StoreThread(Generic[StoreT]):
    """Opened once it is needed; an error at that is raised by each call, which tries again."""

    def __init__(self, open_store: Callable[[], StoreT]) -> None:
        self._open = open_store
        self._store: StoreT | None = None
        self._thread = ThreadPoolExecutor(1, "store")

    async def ask(self, question: Callable[[StoreT], T]) -> T:
        """Its answer; raises what that raises."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: question(self._opened()))

    def tell(self, change: Callable[[StoreT], None], failed: Callable[[Exception], None]) -> None:
        """Change the store later, before anything that is asked after this."""

        def work() -> None:
            try:
                change(self._opened())
            except Exception as error:  # nobody waits for it
                failed(error)

        self._thread.submit(work)

    def _opened(self) -> StoreT:
        if self._store is None:
            self._store = self._open()
        return self._store
