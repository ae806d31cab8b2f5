"""The answers that the server keeps, read and written in a thread of their own."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from localllm.chat.response_store import Quota, ResponseStore, StoredResponse
from localllm.errors import DiskError, LocalLLMError
from localllm.server.limits import LIMITS
from localllm.user.places import sessions_file

logger = logging.getLogger(__name__)
T = TypeVar("T")
_DAY_S = 86400.0


def responses_here(num_bytes: int = LIMITS.kept_bytes) -> "KeptResponses":
    """Answers in the user's own file, up to `num_bytes`."""
    return KeptResponses(sessions_file(), Quota(num_bytes, LIMITS.kept_days * _DAY_S))


class KeptResponses:
    """See ResponseStore. Writes are done in order, before any later read."""

    def __init__(self, path: Path, quota: Quota) -> None:
        """`quota`: of 0 bytes, nothing is kept."""
        self.keeps = quota.num_bytes > 0
        self._path, self._quota = path, quota
        self._store: ResponseStore | None = None
        self._thread = ThreadPoolExecutor(1, "responses")

    def put(self, owner: bytes, stored: StoredResponse) -> None:
        """Keep an answer; a disk that takes nothing costs only what would have been kept."""
        if self.keeps:
            self._thread.submit(self._put, owner, stored)

    async def get(self, owner: bytes, name: str) -> StoredResponse | None:
        """See ResponseStore. Raises: LocalLLMError."""
        return await self._ask(lambda store: store.get(owner, name))

    async def conversation(self, owner: bytes, name: str) -> list[StoredResponse] | None:
        """See ResponseStore. Raises: LocalLLMError."""
        return await self._ask(lambda store: store.conversation(owner, name))

    async def remove(self, owner: bytes, name: str) -> bool:
        """See ResponseStore. Raises: LocalLLMError."""
        return await self._ask(lambda store: store.remove(owner, name))

    def _put(self, owner: bytes, stored: StoredResponse) -> None:
        try:
            self._opened().put(owner, stored)
        except DiskError as error:
            logger.warning("the answer %s is not kept: %s", stored.id, error)
        except Exception:
            logger.exception("the answer %s is not kept", stored.id)

    async def _ask(self, question: Callable[[ResponseStore], T]) -> T:
        def ask() -> T:
            return question(self._opened())

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, ask)
        except DiskError as error:
            logger.warning("kept answers cannot be read: %s", error)
            # Without the path, which is nothing that clients need to know.
            raise LocalLLMError(error.message) from error

    def _opened(self) -> ResponseStore:
        if self._store is None:
            self._store = ResponseStore(self._path, self._quota)
        return self._store
