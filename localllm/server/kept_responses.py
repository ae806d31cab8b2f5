"""The answers that the server keeps for later requests."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from localllm.chat.response_store import Quota, ResponseStore, StoredResponse
from localllm.errors import DiskError, LocalLLMError
from localllm.server.limits import LIMITS
from localllm.server.store_thread import StoreThread
from localllm.user.places import sessions_file

logger = logging.getLogger(__name__)
T = TypeVar("T")
_DAY_S = 86400.0


def responses_here(num_bytes: int = LIMITS.kept_bytes) -> "KeptResponses":
    """Answers in the user's own file, up to `num_bytes`."""
    return KeptResponses(sessions_file(), Quota(num_bytes, LIMITS.kept_days * _DAY_S))


class KeptResponses:
    """See ResponseStore."""

    def __init__(self, path: Path, quota: Quota) -> None:
        """`quota`: of 0 bytes, nothing is kept."""
        self._keeps = quota.num_bytes > 0
        self._stores = StoreThread(lambda: ResponseStore(path, quota))

    def put(self, owner: bytes, stored: StoredResponse) -> None:
        """Keep an answer; a disk that takes nothing costs only what would have been kept."""
        if self._keeps:
            self._stores.tell(
                lambda store: store.put(owner, stored),
                lambda error: logger.warning("the answer %s is not kept: %s", stored.id, error),
            )

    async def get(self, owner: bytes, name: str) -> StoredResponse | None:
        """See ResponseStore. Raises: LocalLLMError."""
        return await self._ask(lambda store: store.get(owner, name))

    async def conversation(self, owner: bytes, name: str) -> list[StoredResponse] | None:
        """See ResponseStore. Raises: LocalLLMError."""
        return await self._ask(lambda store: store.conversation(owner, name, LIMITS.body_bytes))

    async def remove(self, owner: bytes, name: str) -> bool:
        """See ResponseStore. Raises: LocalLLMError."""
        return await self._ask(lambda store: store.remove(owner, name))

    async def _ask(self, question: Callable[[ResponseStore], T]) -> T:
        try:
            return await self._stores.ask(question)
        except DiskError as error:
            logger.warning("kept answers cannot be read: %s", error)
            # Without the path, which is nothing that clients need to know.
            raise LocalLLMError(error.message) from error
