"""Where in a prompt its messages are: a template may write anything between and around them."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from localllm.text.prompt import ChatMessage

Decode = Callable[[Sequence[int]], str]


def message_at(
    decode: Decode, prompt: Sequence[int], messages: Sequence[ChatMessage], token: int
) -> int | None:
    """The message whose text holds token number `token`, or else the first one after that token."""
    place = len(decode(prompt[:token]))
    ends = _ends(decode(prompt), messages)
    return next((index for index, end in ends if place < end), None)


def end_of_message(
    decode: Decode,
    prompt: Sequence[int],
    borders: Sequence[int],
    messages: Sequence[ChatMessage],
    index: int,
) -> int:
    """The first of the prompt's borders that is behind the text of message `index`; 0 if that text
    is not found.
    """
    found = [end for number, end in _ends(decode(prompt), messages) if number <= index]
    if not found:
        return 0
    place = bisect_left(borders, found[-1], key=lambda border: len(decode(prompt[:border])))
    return borders[place] if place < len(borders) else len(prompt)


def _ends(text: str, messages: Sequence[ChatMessage]) -> Iterator[tuple[int, int]]:
    """Of each message that is found, its index and the characters up to its end."""
    end = 0
    for index, message in enumerate(messages):
        content = str(message.get("content") or "").strip()
        found = text.find(content, end)
        if found >= 0:
            end = found + len(content)
            yield index, end
