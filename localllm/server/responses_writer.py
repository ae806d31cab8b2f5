"""Writes answers in the format of OpenAI's Responses API, whole and in events.

Source: OpenAI's API reference, "The response object" and "Streaming events".
"""

import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from localllm.answer.completion import TextEvent
from localllm.server.choice import Frame, Part, PartsWriter
from localllm.server.refusals import Refusal
from localllm.server.responses_schema import ChosenFunction, ResponseRequest
from localllm.text.tool_calls import ToolCall, ToolFormat

_IN_PROGRESS, _COMPLETED, _INCOMPLETE = "in_progress", "completed", "incomplete"


class ResponsesWriter(PartsWriter):
    """Writes the answer to one request."""

    def __init__(
        self,
        body: ResponseRequest,
        model: str,
        tools: ToolFormat | None,
        keep: Callable[[dict[str, Any]], None],
    ) -> None:
        """`tools`: how the model writes calls, if the request has tools; `keep` gets the response
        once it is whole.
        """
        super().__init__(tools)
        self.name = _new_id("resp")
        self._body, self._model, self._keep = body, model, keep
        self._created_s = int(time.time())
        self._items: list[dict[str, Any]] = []
        self._open_id = ""
        self._new: list[dict[str, Any]] = []  # what the newest event brought
        self._num_frames = 0

    def add(self, index: int, event: TextEvent) -> None:
        self._new = []
        super().add(index, event)

    def whole(self) -> dict[str, Any]:
        response = self._response(self._status)
        self._keep(response)
        return response

    def begin(self) -> Iterator[Frame]:
        empty = self._response(_IN_PROGRESS) | {"output": [], "usage": None}
        for kind in ("created", "in_progress"):
            yield self._frame({"type": f"response.{kind}", "response": empty})

    def frames(self, index: int, event: TextEvent) -> Iterable[Frame]:
        return map(self._frame, self._new)

    def end(self) -> Iterator[Frame]:
        yield self._frame({"type": f"response.{self._status}", "response": self.whole()})

    def failed(self, refusal: Refusal) -> Iterable[Frame]:
        code = "server_error" if refusal.status >= 500 else "invalid_prompt"
        error = {"code": code, "message": refusal.message}
        response = self._response("failed") | {"error": error}
        return [self._frame({"type": "response.failed", "response": response})]

    @property
    def _status(self) -> str:
        return _INCOMPLETE if self._choice.ending == "length" else _COMPLETED

    def _say(self, part: Part, piece: str) -> None:
        if self._open != part:
            self._close()
            self._open, self._open_id = part, _new_id(_PREFIXES[part])
            started = self._item(_IN_PROGRESS) | {"content": []}
            self._items.append(started)
            self._event("output_item.added", item=started)
            self._event("content_part.added", **self._place(), part=self._part())
        self._pieces.append(piece)
        extra: dict[str, Any] = {"logprobs": []} if part == "text" else {}
        self._event(f"{_NAMES[part]}.delta", **self._place(), delta=piece, **extra)

    def _close(self, *, is_cut: bool = False) -> None:
        if self._open is None:
            return
        item = self._item(_INCOMPLETE if is_cut else _COMPLETED)
        extra: dict[str, Any] = {"logprobs": []} if self._open == "text" else {}
        text = "".join(self._pieces)
        self._event(f"{_NAMES[self._open]}.done", **self._place(), text=text, **extra)
        self._event("content_part.done", **self._place(), part=self._part())
        self._items[-1] = item
        self._event("output_item.done", item=item)
        self._open, self._pieces = None, []

    def _call(self, call: ToolCall) -> None:
        self._close()
        item = {
            "type": "function_call",
            "id": _new_id("fc"),
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": _COMPLETED,
        }
        self._items.append(item)
        started = item | {"arguments": "", "status": _IN_PROGRESS}
        self._event("output_item.added", item=started)
        where, kind = {"item_id": item["id"]}, "function_call_arguments"
        self._event(f"{kind}.delta", **where, delta=call.arguments)
        self._event(f"{kind}.done", **where, name=call.name, arguments=call.arguments)
        self._event("output_item.done", item=item)

    def _item(self, status: str) -> dict[str, Any]:
        """The open item, as far as it goes."""
        kind, extra = "message", dict[str, Any](role="assistant")
        if self._open == "thinking":
            kind, extra = "reasoning", {"summary": []}
        head = {"type": kind, "id": self._open_id, "status": status}
        return {**head, **extra, "content": [self._part()]}

    def _part(self) -> dict[str, Any]:
        text = "".join(self._pieces)
        if self._open == "thinking":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._open_id, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> None:
        place = len(self._items) - 1
        self._new.append({"type": f"response.{kind}", "output_index": place, **fields})

    def _frame(self, data: dict[str, Any]) -> Frame:
        numbered = {**data, "sequence_number": self._num_frames}
        self._num_frames += 1
        return Frame(numbered, data["type"])

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body
        reasoning, text = body.reasoning, body.text
        is_cut = status == _INCOMPLETE
        return {
            "id": self.name,
            "object": "response",
            "created_at": self._created_s,
            "completed_at": int(time.time()) if status in (_COMPLETED, _INCOMPLETE) else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": list(self._items),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "prompt_cache_diagnostics": self._diagnostics(),
            "reasoning": {
                "effort": None if reasoning is None else reasoning.effort,
                "summary": None,
            },
            "store": body.store is not False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}}
            if text is None or text.format is None
            else text.model_dump(by_alias=True, exclude_none=True),
            "tool_choice": body.tool_choice.model_dump()
            if isinstance(body.tool_choice, ChosenFunction)
            else body.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in body.functions],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": self._described_usage(),
        }

    def _diagnostics(self) -> dict[str, Any] | None:
        """Whether the cache could be used, if the client wants to know."""
        compared = self.usage.compared
        if self._body.asked_to_compare is None:
            return None
        if compared is None:
            return {"type": "comparison_response_not_found"}
        if compared.difference is None or compared.part is None:
            return {"type": "cache_hit"}
        return {
            "type": "cache_miss",
            "reason": "tools_changed" if compared.part == "tools" else "input_changed",
            "cache_missed_tokens": compared.num_lost(self.usage.num_cached),
            "comparison_reusable_tokens": compared.num_shared,
        }

    def _described_usage(self) -> dict[str, Any]:
        usage = self.usage
        return {
            "input_tokens": usage.num_prompt,
            "input_tokens_details": {
                "cached_tokens": usage.num_cached,
                "cache_write_tokens": usage.num_prompt - usage.num_cached,
                **usage.why(),
            },
            "output_tokens": usage.num_completion,
            "output_tokens_details": {"reasoning_tokens": usage.num_thinking},
            "total_tokens": usage.num_prompt + usage.num_completion,
        }


_NAMES: dict[Part, str] = {"thinking": "reasoning_text", "text": "output_text"}
_PREFIXES: dict[Part, str] = {"thinking": "rs", "text": "msg"}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
