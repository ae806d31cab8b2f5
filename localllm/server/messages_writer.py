"""Writes answers in the format of Anthropic's Messages API, whole and in events.

Source: Anthropic's API reference, "Create a Message" and "Streaming messages".
"""

import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from localllm.answer.completion import TextEvent
from localllm.server.choice import Frame, Part, PartsWriter
from localllm.server.messages_schema import as_json
from localllm.server.refusals import Refusal
from localllm.text.tool_calls import ToolCall, ToolFormat

PATH = "/v1/messages"
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
# Thoughts come with a signature that their makers can check; there is nothing to check here.
_SIGNATURE = "localllm"


class MessagesWriter(PartsWriter):
    """Writes the answer to one request."""

    def __init__(
        self,
        model: str,
        tools: ToolFormat | None,
        *,
        only_reads: bool = False,
        compares_with: str | None = None,
    ) -> None:
        """`tools`: how the model writes calls, if the request has tools; `only_reads`: the answer
        is empty, since only the prompt was to be read; `compares_with`: the answer whose prompt the
        client wants this one to be compared with.
        """
        super().__init__(tools)
        self.name = f"msg_{uuid.uuid4().hex}"
        self._model, self._only_reads, self._compares_with = model, only_reads, compares_with
        self._blocks: list[dict[str, Any]] = []
        self._new: list[Frame] = []

    def add(self, index: int, event: TextEvent) -> None:
        self._new = []
        if self._only_reads:
            self._choice.ending = "length"
        else:
            super().add(index, event)

    def whole(self) -> dict[str, Any]:
        return {
            **self._head(),
            "content": self._blocks,
            **self._ending(),
            "usage": self._described_usage(),
        }

    def begin(self) -> Iterator[Frame]:
        usage = self._described_usage() | {"output_tokens": 0}
        empty: dict[str, Any] = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        yield _frame("message_start", message={**self._head(), **empty})
        yield _frame("ping")

    def frames(self, index: int, event: TextEvent) -> Iterable[Frame]:
        return self._new

    def end(self) -> Iterator[Frame]:
        yield _frame("message_delta", delta=self._ending(), usage=self._described_usage())
        yield _frame("message_stop")

    def failed(self, refusal: Refusal) -> Iterable[Frame]:
        return (Frame(refusal.content_at(PATH), "error"),)

    def _say(self, part: Part, piece: str) -> None:
        if self._open != part:
            self._close()
            self._open = part
            self._start({"type": part, part: ""} | ({"signature": ""} if part != "text" else {}))
        self._pieces.append(piece)
        self._delta({"type": f"{part}_delta", part: piece})

    def _call(self, call: ToolCall) -> None:
        self._close()
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        self._start(block)
        self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        self._blocks[-1] = {**block, "input": as_json(call.arguments)}
        self._new.append(_frame("content_block_stop", index=len(self._blocks) - 1))

    def _start(self, block: dict[str, Any]) -> None:
        self._blocks.append(block)
        place = len(self._blocks) - 1
        self._new.append(_frame("content_block_start", index=place, content_block=block))

    def _delta(self, delta: dict[str, Any]) -> None:
        place = len(self._blocks) - 1
        self._new.append(_frame("content_block_delta", index=place, delta=delta))

    def _close(self, *, is_cut: bool = False) -> None:
        if self._open is None:
            return
        whole: dict[str, Any] = {"type": self._open, self._open: "".join(self._pieces)}
        if self._open == "thinking":
            whole["signature"] = _SIGNATURE
            self._delta({"type": "signature_delta", "signature": _SIGNATURE})
        self._blocks[-1] = whole
        self._new.append(_frame("content_block_stop", index=len(self._blocks) - 1))
        self._open, self._pieces = None, []

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "diagnostics": self._diagnostics(),
        }

    def _diagnostics(self) -> dict[str, Any] | None:
        """Why the cache could not be used, if the client wants to know."""
        compared = self.usage.compared
        if self._compares_with is None:
            return None
        if compared is None:
            return {"cache_miss_reason": {"type": "previous_message_not_found"}}
        if compared.difference is None or compared.part is None:
            return None
        missed = compared.num_lost(self.usage.num_cached)
        kind = f"{compared.part}_changed"
        return {"cache_miss_reason": {"type": kind, "cache_missed_input_tokens": missed}}

    def _ending(self) -> dict[str, Any]:
        choice = self._choice
        reason = _REASONS.get(choice.ending or "", "end_turn")
        if choice.stop_string is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": choice.stop_string}

    def _described_usage(self) -> dict[str, Any]:
        usage = self.usage
        return {
            "input_tokens": usage.num_prompt - usage.num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.num_cached,
            "output_tokens": usage.num_completion,
            "output_tokens_details": {
                "thinking_tokens": usage.num_thinking,
                "accepted_draft_tokens": usage.num_accepted,
            },
            **usage.why(),
        }


def _frame(kind: str, **fields: Any) -> Frame:
    return Frame({"type": kind, **fields}, kind)
