"""The user's saved conversations, for the page: those that `localllm chat` has too.

They are shown to whoever has the token that `localllm serve --open` makes, since other users of
this machine can reach the address.
"""

import hmac
import logging
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import Field
from starlette.responses import Response

from localllm.chat.store import (
    ConflictError,
    NoSessionError,
    SavedSession,
    SessionStore,
    check_name,
)
from localllm.chat.transcript import Transcript, Turn
from localllm.errors import DiskError, LocalLLMError, RequestError
from localllm.schedule.request import FinishReason
from localllm.server.body import Body, Name, WholeBody
from localllm.server.limits import LIMITS
from localllm.server.refusals import Refusal, RefusedError, refusal_of
from localllm.server.store_thread import StoreThread

logger = logging.getLogger(__name__)
T = TypeVar("T")
_HEADER = "x-localllm-token"
_SHOWN = ("question", "answer", "thinking", "finish_reason", "model", "figures")
# Conversations whose drafts are known; a page asks again within seconds.
_MAX_DRAFTS = 256
_NUMBER = re.compile("[0-9]{1,18}")  # as many digits as the file's numbers can have


class TurnBody(Body):
    """A question and its answer so far."""

    question: str
    answer: str = ""
    thinking: str = ""
    finish_reason: str | None = None
    model: Name = ""
    figures: Annotated[str, Field(max_length=1000)] = ""

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
            figures=self.figures,
        )


class NewBody(WholeBody):
    """A conversation that has no number yet. `draft`: the page's own name for it, so that it is
    saved once even if the page could not read the answer.
    """

    model: Name
    system: str | None = None
    title: Annotated[str, Field(max_length=1000)] = ""
    turns: Annotated[list[TurnBody], Field(max_length=LIMITS.messages, fail_fast=True)]
    draft: Annotated[str, Field(max_length=64)] = ""

    def after(self, kept: list[Turn]) -> Transcript:
        """The conversation, behind turns that are saved already. Raises: RefusedError."""
        turns = [*kept, *(turn.as_turn() for turn in self.turns)]
        return Transcript(self.model, self.system, turns, self.title)


class SavedBody(NewBody):
    """What follows the first `keep` turns of a saved conversation, as it was at `revision`.

    With `keep` 0 it is all of the conversation, which can be compared with any revision.
    """

    revision: Annotated[int, Field(ge=0, lt=1 << 53)] = 0
    keep: Annotated[int, Field(ge=0, le=LIMITS.messages)] = 0


class NameBody(WholeBody):
    """A name; empty: the conversation is called by its first question again."""

    name: Annotated[str, Field(max_length=200)]


class ConversationsApi:
    """The routes. Without a token, nothing is shown or saved."""

    def __init__(self, path: Path, token: str | None) -> None:
        self._token = token
        self._stores = StoreThread(lambda: SessionStore(path))
        self._drafts: OrderedDict[str, int] = OrderedDict()  # used in the store's thread alone

    async def check(self, request: Request) -> Response:
        """`GET /page/token`: whether the request's token is the right one."""
        self._check(request)
        return JSONResponse({"fits": True})

    async def rows(self, request: Request) -> Response:
        """`GET /page/conversations`; `?containing=`: only those with this text."""
        self._check(request)
        containing = request.query_params.get("containing", "")
        found = await self._ask(lambda store: store.rows(containing))
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
        wanted = _number(number)
        saved = await self._ask(lambda store: store.load(wanted))
        told = {
            "id": saved.id,
            "revision": saved.revision,
            "title": saved.transcript.title,
            "system": saved.transcript.system,
            "turns": [
                {name: getattr(turn, name) for name in _SHOWN} for turn in saved.transcript.turns
            ],
        }
        return JSONResponse(told)

    async def create(self, body: NewBody, request: Request) -> Response:
        """`POST /page/conversations`"""
        self._check(request)
        transcript = body.after([])
        return _told(*await self._ask(lambda store: self._create(store, transcript, body.draft)))

    async def save(self, body: SavedBody, request: Request) -> Response:
        """`POST /page/conversations/NUMBER`"""
        self._check(request)
        number = _number(request.path_params["number"])
        return _told(*await self._ask(lambda store: _save(store, number, body)))

    async def rename(self, body: NameBody, request: Request) -> Response:
        """`POST /page/conversations/NUMBER/name`"""
        self._check(request)
        number, name = _number(request.path_params["number"]), body.name.strip() or None
        await self._ask(lambda store: _rename(store, number, name))
        return JSONResponse({"id": number, "name": name})

    async def remove(self, number: str, request: Request) -> Response:
        """`DELETE /page/conversations/NUMBER`"""
        self._check(request)
        wanted = _number(number)
        await self._ask(lambda store: store.remove(store.load(wanted).id))
        return JSONResponse({"deleted": True})

    def _check(self, request: Request) -> None:
        given = request.headers.get(_HEADER, "")
        if self._token is None or not hmac.compare_digest(given.encode(), self._token.encode()):
            message = "conversations need the token that localllm serve --open makes"
            raise RefusedError(Refusal(403, message, code="no_token"))

    def _create(
        self, store: SessionStore, transcript: Transcript, draft: str
    ) -> tuple[SavedSession, bool]:
        known = self._drafts.get(draft)
        if known is not None:
            try:
                return _join(store, store.load(known), transcript, 0)
            except NoSessionError:
                pass  # it was deleted
        saved = store.create(transcript)
        if draft:
            self._drafts[draft] = saved.id
        if len(self._drafts) > _MAX_DRAFTS:
            self._drafts.popitem(last=False)
        return saved, False

    async def _ask(self, question: Callable[[SessionStore], T]) -> T:
        """The store's answer. Raises: RefusedError for what it refuses, or if it cannot be used."""
        try:
            return await self._stores.ask(question)
        except ConflictError as error:
            message = "the conversation was continued elsewhere; send all of its turns"
            raise RefusedError(Refusal(409, message, code="conflict")) from error
        except RequestError as error:
            status = 404 if isinstance(error, NoSessionError) else 400
            raise RefusedError(Refusal(status, error.message)) from error
        except DiskError as error:
            logger.warning("conversations cannot be used: %s", error)
            raise RefusedError(refusal_of(LocalLLMError(error.message))) from error


def _rename(store: SessionStore, number: int, name: str | None) -> None:
    if name is not None:
        check_name(name)
    store.rename(store.load(number), name)


def _save(store: SessionStore, number: int, body: SavedBody) -> tuple[SavedSession, bool]:
    """What is saved, and whether it is a conversation of its own now. Raises: ConflictError if only
    all of the turns could tell.
    """
    saved = store.load(number)
    if body.keep == 0 and saved.revision != body.revision:
        return _join(store, saved, body.after([]), body.revision)
    if saved.revision != body.revision or body.keep > len(saved.transcript.turns):
        raise ConflictError
    transcript = body.after(list(saved.transcript.turns[: body.keep]))
    return store.save(saved, _with_token_ids(transcript, saved.transcript)), False


def _join(
    store: SessionStore, saved: SavedSession, ours: Transcript, revision: int
) -> tuple[SavedSession, bool]:
    """Save a page's version of a conversation that is no longer at the page's revision.

    A page that is reloaded may not know of its own last save, which its version continues. If
    another window went another way, the version becomes a conversation of its own: nothing is lost.
    """
    if ours.continues(saved.transcript):
        return store.save(saved, _with_token_ids(ours, saved.transcript)), False
    if saved.transcript.continues(ours):  # a late save; the next one is compared again
        return replace(saved, revision=revision), False
    return store.create(ours), True


def _with_token_ids(new: Transcript, saved: Transcript) -> Transcript:
    """Answers that have not changed keep the tokens that only the terminal knows."""
    turns = list(new.turns)
    for place, (turn, old) in enumerate(zip(turns, saved.turns, strict=False)):
        if (turn.question, turn.answer, turn.thinking) == (old.question, old.answer, old.thinking):
            turns[place] = replace(turn, token_ids=old.token_ids)
    return replace(new, turns=turns)


def _number(text: str) -> int:
    """Raises: RefusedError."""
    if not _NUMBER.fullmatch(text):
        raise RefusedError(Refusal(404, f"{text!r:.40} is no number of a conversation"))
    return int(text)


def _told(saved: SavedSession, is_apart: bool) -> Response:
    """`apart`: the page goes on with a conversation of its own, since another one was continued."""
    return JSONResponse({"id": saved.id, "revision": saved.revision, "apart": is_apart})
