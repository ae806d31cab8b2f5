"""The user's saved conversations, for the page: those that `localllm chat` has too.

They are shown to whoever has the token that `localllm serve --open` makes, since other users of
this machine can reach the address.
"""

import hmac
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import Field
from starlette.responses import Response

from localllm.chat.store import ConflictError, SavedSession, SessionStore
from localllm.chat.transcript import Transcript, Turn
from localllm.engine.request import FinishReason
from localllm.errors import DiskError, LocalLLMError, RequestError
from localllm.server.body import Body, Name, WholeBody
from localllm.server.guard import Refusal
from localllm.server.limits import LIMITS
from localllm.server.refusals import RefusedError, refusal_of
from localllm.server.store_thread import StoreThread

logger = logging.getLogger(__name__)
T = TypeVar("T")
_HEADER = "x-localllm-token"
_NUMBER = re.compile("[0-9]{1,18}")  # as many digits as the file's numbers can have


class TurnBody(Body):
    """A question and its answer so far."""

    question: str
    answer: str = ""
    thinking: str = ""
    finish_reason: str | None = None
    model: Name = ""

    def as_turn(self) -> Turn:
        """As it is saved. Raises: RefusedError."""
        reason = self.finish_reason
        if reason is not None and reason not in list(FinishReason):
            message = f"{reason!r:.40} is no finish reason"
            raise RefusedError(Refusal(400, message, param="finish_reason"))
        return Turn(
            self.question,
            self.model,
            self.answer,
            self.thinking,
            None if reason is None else FinishReason(reason),
        )


class SavedBody(WholeBody):
    """A whole conversation; `revision`: that of the saved one which it continues."""

    model: Name
    system: str | None = None
    turns: Annotated[list[TurnBody], Field(max_length=LIMITS.messages, fail_fast=True)]
    revision: Annotated[int, Field(ge=0, lt=1 << 53)] = 0

    @property
    def transcript(self) -> Transcript:
        """As it is saved. Raises: RefusedError."""
        return Transcript(self.model, self.system, [turn.as_turn() for turn in self.turns])


class ConversationsApi:
    """The routes. Without a token, nothing is shown or saved."""

    def __init__(self, path: Path, token: str | None) -> None:
        self._token = token
        self._stores = StoreThread(lambda: SessionStore(path))

    async def rows(self, request: Request) -> Response:
        """`GET /page/conversations`"""
        self._check(request)
        found = await self._ask(lambda store: store.rows())
        rows = [
            {
                "id": row.id,
                "title": row.name or row.title,
                "model": row.model,
                "turns": row.num_turns,
                "updated": row.updated_s,
            }
            for row in found
        ]
        return JSONResponse({"conversations": rows})

    async def get(self, number: str, request: Request) -> Response:
        """`GET /page/conversations/NUMBER`"""
        self._check(request)
        saved = await self._load(number)
        turns = [
            {
                "question": turn.question,
                "answer": turn.answer,
                "thinking": turn.thinking,
                "finish_reason": turn.finish_reason,
                "model": turn.model,
            }
            for turn in saved.transcript.turns
        ]
        told = {"system": saved.transcript.system, "turns": turns}
        return JSONResponse({"id": saved.id, "revision": saved.revision, **told})

    async def create(self, body: SavedBody, request: Request) -> Response:
        """`POST /page/conversations`"""
        self._check(request)
        saved = await self._ask(lambda store: store.create(body.transcript))
        return _told(saved)

    async def save(self, body: SavedBody, request: Request) -> Response:
        """`POST /page/conversations/NUMBER`"""
        self._check(request)
        saved = await self._load(request.path_params["number"])
        if saved.revision != body.revision:
            raise _conflict()
        transcript = _with_token_ids(body.transcript, saved.transcript)
        try:
            return _told(await self._ask(lambda store: store.save(saved, transcript)))
        except ConflictError as error:
            raise _conflict() from error

    async def remove(self, number: str, request: Request) -> Response:
        """`DELETE /page/conversations/NUMBER`"""
        self._check(request)
        saved = await self._load(number)
        await self._ask(lambda store: store.remove(saved.id))
        return JSONResponse({"deleted": True})

    def _check(self, request: Request) -> None:
        given = request.headers.get(_HEADER, "")
        if self._token is None or not hmac.compare_digest(given.encode(), self._token.encode()):
            message = "conversations need the token that localllm serve --open makes"
            raise RefusedError(Refusal(403, message, code="no_token"))

    async def _load(self, number: str) -> SavedSession:
        """Raises: RefusedError if there is no such conversation."""
        if not _NUMBER.fullmatch(number):
            raise RefusedError(Refusal(404, f"{number!r:.40} is no number of a conversation"))
        try:
            return await self._ask(lambda store: store.load(int(number)))
        except RequestError as error:
            raise RefusedError(Refusal(404, error.message)) from error

    async def _ask(self, question: Callable[[SessionStore], T]) -> T:
        try:
            return await self._stores.ask(question)
        except DiskError as error:
            logger.warning("conversations cannot be used: %s", error)
            raise RefusedError(refusal_of(LocalLLMError(error.message))) from error


def _with_token_ids(new: Transcript, saved: Transcript) -> Transcript:
    """Turns that have not changed keep the tokens that only the terminal knows."""
    turns = list(new.turns)
    for place, (turn, old) in enumerate(zip(turns, saved.turns, strict=False)):
        if (turn.question, turn.answer, turn.thinking) == (old.question, old.answer, old.thinking):
            turns[place] = old
    return Transcript(new.model, new.system, turns)


def _told(saved: SavedSession) -> Response:
    return JSONResponse({"id": saved.id, "revision": saved.revision})


def _conflict() -> RefusedError:
    message = "the conversation was continued elsewhere"
    return RefusedError(Refusal(409, message, code="conflict"))
