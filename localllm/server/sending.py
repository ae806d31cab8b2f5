"""Responses that send an answer for as long as the client is connected."""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace

from fastapi.responses import JSONResponse
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from localllm.answer.completion import TextEvent
from localllm.errors import LocalLLMError
from localllm.schedule.request import FinishReason
from localllm.server.choice import AnswerWriter, Frame
from localllm.server.engines import AnswerStream
from localllm.server.limits import LIMITS
from localllm.server.metrics import Meter
from localllm.server.refusals import Refusal, as_response, refusal_of
from localllm.text.prompt import Prompt

logger = logging.getLogger(__name__)


async def merged(
    streams: Sequence[AnswerStream], num_samples: int, writer: AnswerWriter, meter: Meter
) -> AsyncIterator[tuple[int, TextEvent]]:
    """Events of all streams as they come, each with the number of its choice, after `writer` and
    `meter` have counted it.

    Raises: RequestError, EngineDownError.
    """
    # Bounded, so that the unread events of a slow client wait, and are counted, in its streams.
    arrived: asyncio.Queue[tuple[int, TextEvent] | LocalLLMError | None] = asyncio.Queue(64)

    async def read(number: int, stream: AnswerStream) -> None:
        try:
            async for event in stream:
                if event.finish_reason is FinishReason.ERROR:
                    assert event.error is not None
                    raise event.error
                if event.sample == 0 and event.token is not None:
                    cached[number] = event.num_cached_tokens
                await arrived.put((number * num_samples + event.sample, event))
            await arrived.put(None)
        except LocalLLMError as error:
            await arrived.put(error)
        except Exception:
            logger.exception("a request ended in an unexpected way")
            await arrived.put(LocalLLMError("internal server error"))

    cached = [0] * len(streams)
    tasks = [asyncio.create_task(read(i, stream)) for i, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            found = await arrived.get()
            if isinstance(found, LocalLLMError):
                raise found
            if found is None:
                left -= 1
                continue
            writer.add(*found)
            writer.usage.num_cached = sum(cached)
            meter.add(*found, writer.usage.num_cached)
            yield found
    finally:
        for task in tasks:
            task.cancel()


class _UntilGone(Response):
    """A response whose work ends when the client disconnects, whether anything was sent or not."""

    def __init__(
        self,
        events: AsyncIterator[tuple[int, TextEvent]],
        writer: AnswerWriter,
        finished: Callable[[], None],
        grammar_field: str,
    ) -> None:
        """`grammar_field`: the field to name if the grammar cannot be used."""
        super().__init__()
        self._events, self._writer = events, writer
        self._finished, self._grammar_field = finished, grammar_field

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._work(scope, receive, send))
        gone = asyncio.create_task(_wait_until_gone(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await work
        except asyncio.CancelledError:
            pass  # the server ends
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            self._finished()

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError

    def _refusal_of(self, error: LocalLLMError) -> Refusal:
        refusal = refusal_of(error)
        return (
            replace(refusal, param=self._grammar_field) if refusal.param == "grammar" else refusal
        )


class WholeAnswer(_UntilGone):
    """The whole answer at once."""

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async for _ in self._events:
                pass
            # In a thread: log-probabilities of a long text take a while.
            response = await asyncio.to_thread(lambda: JSONResponse(self._writer.whole()))
        except LocalLLMError as error:
            response = as_response(self._refusal_of(error), scope["path"])
        await response(scope, receive, send)


class StreamedAnswer(_UntilGone):
    """The answer as it comes, in server-sent events."""

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def say(frames: Sequence[Frame]) -> None:
            nonlocal has_begun
            if not has_begun:
                headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
                start = {"type": "http.response.start", "status": 200, "headers": headers}
                await send(start)
                has_begun = True
            async with asyncio.timeout(LIMITS.idle_seconds):
                body = _as_bytes(frames)
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await asyncio.sleep(0)  # otherwise nobody notices that the client has disconnected

        writer = self._writer
        try:
            async for index, event in self._events:
                # Not earlier: a refused request gets a status of its own.
                first = [] if has_begun else [*writer.begin()]
                if event.prompt_scores is None:
                    frames = list(writer.frames(index, event))
                else:
                    frames = await asyncio.to_thread(_listed, writer, index, event)
                if first or frames:
                    await say([*first, *frames])
            await say(list(writer.end()))
        except LocalLLMError as error:
            refusal = self._refusal_of(error)
            if not has_begun:
                await as_response(refusal, scope["path"])(scope, receive, send)
                return
            await say(list(writer.failed(refusal)))
        except TimeoutError:
            return  # a client that reads nothing for so long has given up
        except asyncio.CancelledError:
            # The server ends, and the grace period is over.
            if has_begun:
                body = _as_bytes(writer.cut())
                await send({"type": "http.response.body", "body": body, "more_body": False})
            raise
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _listed(writer: AnswerWriter, index: int, event: TextEvent) -> list[Frame]:
    return list(writer.frames(index, event))


def _as_bytes(frames: Iterable[Frame]) -> bytes:
    """As the HTML standard writes server-sent events."""
    lines = []
    for frame in frames:
        if frame.name is not None:
            lines.append(f"event: {frame.name}\n")
        data = frame.data if isinstance(frame.data, str) else json.dumps(frame.data)
        lines.append(f"data: {data}\n\n")
    return "".join(lines).encode()


def warning_of(unknown: Sequence[str]) -> tuple[bytes, bytes]:
    """The header that names unknown fields of a request."""
    shown = ", ".join(re.sub(r"[^\w.-]", "?", name, flags=re.A)[:40] for name in unknown[:8])
    return b"warning", f'299 - "ignored: {shown}"'.encode()


class WithHeader(Response):
    """Another response, with a header that is known when it begins; None for none."""

    def __init__(self, answer: Response, header: Callable[[], tuple[bytes, bytes] | None]) -> None:
        super().__init__()
        self._answer, self._header = answer, header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with(message: Message) -> None:
            header = self._header() if message["type"] == "http.response.start" else None
            if header is not None:
                message["headers"] = [*message["headers"], header]
            await send(message)

        await self._answer(scope, receive, send_with)


def with_changes(response: Response, prompts: Sequence[Prompt]) -> Response:
    """The response, with a header that says what was changed in conversations so that the model's
    chat template takes them.
    """
    told = "; ".join(dict.fromkeys(change for prompt in prompts for change in prompt.changes))
    header = b"warning", f'299 - "changed: {told}"'.encode()
    return WithHeader(response, lambda: header) if told else response


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
