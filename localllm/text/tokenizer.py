"""Text to token ids and back: a checkpoint's own vocabulary, template and special tokens."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any

from tokenizers import Tokenizer as Backend

from localllm.errors import RequestError, TemplateError
from localllm.text.earlier_calls import with_earlier_calls
from localllm.text.fitted_chat import Fitted, fit
from localllm.text.grammar import lark_literal
from localllm.text.prompt import ChatMessage, Conversation, Prompt, ThinkLevel
from localllm.text.special_text import SpecialText
from localllm.text.template import render_chat_template
from localllm.text.template_files import read_chat_templates
from localllm.text.template_manners import TemplateManners
from localllm.text.thinking import Markers, find_markers
from localllm.text.tokenizer_files import load_backend, read_special_texts
from localllm.text.tool_calls import find_tool_format

__all__ = ["StreamDecoder", "Tokenizer", "render_chat_template"]

# A long text is counted in slices of this many characters before it is encoded whole.
SLICE_CHARS = 1 << 18
_SLICE_LEAST = 1 << 12
MAX_PENDING_TOKENS = 16
_REPLACEMENT = "\ufffd"
# A text that no template writes.
_USERS_TEXT = "Where does my text go?"
# The letters as which a vocabulary of bytes writes them. Source: GPT-2's encoder.py.
_PRINTED = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_BYTE_OF = {chr(byte): byte for byte in _PRINTED} | {
    chr(0x100 + i): byte for i, byte in enumerate(sorted(set(range(256)) - set(_PRINTED)))
}
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


class Tokenizer:
    """The vocabulary of a checkpoint (`tokenizer.json`), with its chat template if it has one."""

    def __init__(
        self,
        load_backend: Callable[[], Backend],
        special_tokens: Mapping[str, str],
        chat_templates: Mapping[str, str],
    ) -> None:
        self._load_backend = load_backend
        self._chat_templates = chat_templates
        self._special_tokens = special_tokens
        # A server encodes in several threads, and `encode_special_tokens` is state of the backend.
        self._lock = Lock()
        # Of the template with tools and without; asking takes long.
        self._manners: dict[bool, TemplateManners] = {}

    @classmethod
    def from_folder(cls, folder: Path, fallback_template: str | None = None) -> "Tokenizer":
        """Read a folder's vocabulary and templates; `fallback_template` is used if it has none.

        Raises: CheckpointError for a file that is missing or broken.
        """
        backend = load_backend(folder)
        templates = read_chat_templates(folder, fallback_template)
        return cls(lambda: backend, read_special_texts(folder), templates)

    @cached_property
    def _backend(self) -> Backend:
        return self._load_backend()

    @cached_property
    def _special_text(self) -> SpecialText:
        return SpecialText(self._backend)

    @cached_property
    def _special_ids(self) -> dict[int, str]:
        added = self._backend.get_added_tokens_decoder()
        return {i: token.content for i, token in added.items() if token.special}

    @cached_property
    def _tag_ids(self) -> set[int]:
        """Special tokens and tags: to llguidance, a tag is not text either, special or not."""
        added = self._backend.get_added_tokens_decoder()
        tags = (i for i, token in added.items() if re.fullmatch("<.*>", token.content))
        return {*self._special_ids, *tags}

    def warm(self) -> None:
        """Start getting ready to encode, without waiting; this tokenizer is always ready."""

    def vocabulary(self) -> dict[str, int]:
        """Every token, including added ones, and its id."""
        return dict(self._backend.get_vocab(with_added_tokens=True))

    def to_json(self) -> str:
        """The `tokenizer.json` as it is used here."""
        return str(self._backend.to_str())

    @property
    def num_token_ids(self) -> int:
        """One more than the largest token id."""
        return max(self.vocabulary().values(), default=-1) + 1

    def token_text(self, token_id: int) -> str | None:
        """The text of a token as the vocabulary writes it; None for an id without one."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < 1 << 31 else None

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template; without one, it continues text."""
        return bool(self._chat_templates)

    @property
    def eos_token_id(self) -> int | None:
        """The end token that the tokenizer names, if any."""
        eos = self._special_tokens.get("eos_token")
        return None if eos is None else self._backend.token_to_id(eos)

    @property
    def ordinary_token_ids(self) -> list[int]:
        """Tokens that are text by themselves: none that was added, which the model may not have,
        and no part of a character.
        """
        added = self._backend.get_added_tokens_decoder()
        return [
            token_id
            for token_id in range(self.num_token_ids)
            if token_id not in added
            and (text := self.decode([token_id]))
            and _REPLACEMENT not in text
        ]

    @cached_property
    def letter(self) -> list[int]:
        """A token of letters, for use where some text must come before; empty if there is none.

        Found by decoding, since the thread that computes steps cannot wait for an encoder.
        """
        ids = range(self.num_token_ids)
        found = (i for i in ids if i not in self._special_ids and self.decode([i]).isalpha())
        return list(islice(found, 1))

    @cached_property
    def special_text(self) -> str:
        """The texts of all special tokens, for `decode`."""
        return "".join(self._special_ids.values())

    def is_special(self, token_id: int) -> bool:
        """Whether a token is special: it is no text unless it is shown."""
        return token_id in self._special_ids

    def spell(self, token_id: int) -> bytes:
        """What a token adds to a text, which may be a part of a character; the name of a special
        token.
        """
        before, after = (
            self.decode([*self.letter, *more], self.special_text) for more in ((), (token_id,))
        )
        text = after[len(before) :]
        if _REPLACEMENT not in text:
            return text.encode()
        piece = self._backend.id_to_token(token_id) or ""
        if (byte := _BYTE_TOKEN.fullmatch(piece)) is not None:
            return bytes([int(byte[1], 16)])
        if all(letter in _BYTE_OF for letter in piece):
            return bytes(_BYTE_OF[letter] for letter in piece)
        return text.encode()

    @property
    def chat_template(self) -> str | None:
        """The source of the template for a plain chat."""
        return self._chat_templates.get("default")

    @property
    def tool_template(self) -> str | None:
        """The source of the template for a chat with tools."""
        return self._chat_templates.get("tool_use", self.chat_template)

    @property
    def markers(self) -> Markers | None:
        """The markers around the model's thoughts, None for a model that does not think."""
        return find_markers(self.chat_template or "")

    @property
    def can_think(self) -> bool:
        """Whether the template has markers for thoughts, or a variable that controls thinking."""
        template = self.chat_template or ""
        return self.markers is not None or any(
            name in template for name in _think_variables("high")
        )

    def encode(
        self, text: str, *, add_special_tokens: bool, parse_special: bool = False
    ) -> list[int]:
        """Token ids of `text`; special-token text in it is plain text unless `parse_special`.

        Raises: RequestError for text that is not valid Unicode.
        """
        with self._lock:
            self._backend.encode_special_tokens = not parse_special
            try:
                # Of a batch, since encode() keeps all other threads from running meanwhile: for
                # over a second with 6 MB.
                [encoding] = self._backend.encode_batch_fast(
                    [text], add_special_tokens=add_special_tokens
                )
            except (TypeError, UnicodeEncodeError) as error:  # lone surrogates
                raise RequestError("the prompt is not valid Unicode", param="prompt") from error
            finally:
                self._backend.encode_special_tokens = False
        return list(encoding.ids)

    def encode_chat(self, asked: Conversation) -> Prompt:
        """A conversation as the model reads it, up to the beginning of the assistant's answer.

        Raises: TemplateError, RequestError.
        """
        given = [asked.messages, asked.tools, asked.variables]
        protects = not asked.parse_special and self._special_text.occurs_in(given)
        if protects:
            messages, tools, variables = self._special_text.protect(given)
            asked = Conversation(messages, tools, asked.think, variables=variables)
        fitted = self._fitted(asked)
        text = self._render(fitted, asked)
        if protects:
            token_ids = self._special_text.encode(text)
        else:
            token_ids = self.encode(text, add_special_tokens=False, parse_special=True)
        markers = self.markers
        is_thinking = markers is not None and text.rstrip().endswith(markers.opens.rstrip())
        borders = self._ends_of_text(token_ids)
        return Prompt(token_ids, markers, is_thinking, borders=borders, changes=fitted.changes)

    def encode_before_user(self) -> list[int]:
        """Token ids of what the template writes before the text of a chat's first user.

        Raises: TemplateError.
        """
        text = self.render_chat(Conversation([{"role": "user", "content": _USERS_TEXT}]))
        before, found, _ = text.partition(_USERS_TEXT)
        return self.encode(before if found else "", add_special_tokens=False, parse_special=True)

    def _ends_of_text(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Where a special token follows text: templates end messages so, and begin them."""
        special = self._special_ids
        is_special = [token_id in special for token_id in token_ids]
        return tuple(i for i in range(1, len(is_special)) if is_special[i] > is_special[i - 1])

    def count_at_least(self, text: str, limit: int) -> int:
        """A lower bound on the tokens of `text`; counting stops once it is over `limit`."""
        total = 0
        # No more than is likely to be over the limit: the rest would be encoded for nothing.
        num_chars = min(SLICE_CHARS, _SLICE_LEAST + 8 * limit)
        for start in range(0, len(text), num_chars):
            ids = self.encode(text[start : start + num_chars], add_special_tokens=False)
            # A cut can add a few tokens to those of the whole text; they are at the slice's ends.
            total += max(0, len(ids) - 16)
            if total > limit:
                return total
        return total

    def render_chat(self, asked: Conversation) -> str:
        """The prompt text of a conversation, up to the beginning of the assistant's answer.

        `think` is passed to the template under the names that each family uses; if "off" changes
        nothing, the prompt is continued past the thoughts. Raises: TemplateError if there is no
        template, or it fails.
        """
        return self._render(self._fitted(asked), asked)

    def _fitted(self, asked: Conversation) -> Fitted:
        """The conversation as the template takes it. Raises: TemplateError if there is none."""
        template = self.tool_template if asked.tools else self.chat_template
        if template is None:
            raise self._no_template()
        has_tools = bool(asked.tools)
        if has_tools not in self._manners:
            render, form = self._render_as_it_is, find_tool_format(template)
            self._manners[has_tools] = TemplateManners(render, form, has_tools=has_tools)
        return fit(asked.messages, asked.tools, self._manners[has_tools])

    def _render(self, fitted: Fitted, asked: Conversation) -> str:
        messages, tools = fitted.messages, fitted.tools
        if asked.think is None:
            return self._render_as_it_is(messages, tools, **asked.variables)
        switched = {**_think_variables(asked.think), **asked.variables}
        text = self._render_as_it_is(messages, tools, **switched)
        if asked.think != "off" or self.markers is None:
            return text
        unasked = self._render_as_it_is(messages, tools, **asked.variables)
        return text if text != unasked else _without_thoughts(text, self.markers)

    def _render_as_it_is(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None,
        **variables: Any,
    ) -> str:
        """Raises: TemplateError."""
        template = (self.tool_template if tools else self.chat_template) or ""
        form = find_tool_format(template)
        if form is not None:
            messages = with_earlier_calls(messages, form, template)
        if "xml_tools" in template:  # SmolLM3's name for tools that are called in JSON
            variables = {"xml_tools": tools, **variables}
        return render_chat_template(
            template,
            messages,
            tools,
            **{"add_generation_prompt": True, **self._special_tokens, **variables},
        )

    def _no_template(self) -> TemplateError:
        if not self._chat_templates:
            what = "the model has no chat template"
        else:
            names = ", ".join(sorted(self._chat_templates))
            what = f"none of the model's chat templates is the default: it has {names:.200}"
        return TemplateError(what, hint="--raw to complete the prompt as it stands")

    def as_lark(self, text: str) -> str:
        """`text` in Lark's notation: special tokens and tags by number, all else as literals."""
        parts, run = list[str](), list[int]()
        for token_id in self.encode(text, add_special_tokens=False, parse_special=True):
            if token_id not in self._tag_ids:
                run.append(token_id)
                continue
            parts += [_literal(self.decode(run)), f"<[{token_id}]>"]
            run = []
        return " ".join(part for part in [*parts, _literal(self.decode(run))] if part)

    def decode(self, token_ids: Sequence[int], shown: str = "") -> str:
        """Text of `token_ids`, without special tokens except those that occur in `shown`.

        Raises: RequestError if the vocabulary's decoder fails on these tokens.
        """
        special = self._special_ids
        kept = [i for i in token_ids if i not in special or (shown and special[i] in shown)]
        if not kept:
            return ""
        try:
            return str(self._backend.decode(kept, skip_special_tokens=False))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # panics of its Rust side, by a decoder and these tokens
            raise RequestError(
                "the text of these tokens cannot be told",
                where=f"the decoder of tokenizer.json fails: {error!s:.100}",
                hint="report it to the model's publisher",
            ) from error


class StreamDecoder:
    """Text of a growing list of tokens, piece by piece, never half a character.

    The joined pieces are the text of all tokens, up to the number of replacement characters for
    bytes that are not UTF-8. A piece is the difference between the text of the last few tokens with
    and without the new ones, since a token's text can depend on what comes before it (spaces at the
    start, characters over several tokens). `shown`: see Tokenizer.decode; `context`: the tokens
    before the first one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        shown: str = "",
        context: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._shown = shown
        # A context that ends within a character would add its bytes to the first piece.
        ends_whole = not tokenizer.decode(context).endswith(_REPLACEMENT)
        self._token_ids = list(context) if ends_whole else []
        self._context = 0  # where the context of the next tokens starts
        self._emitted = len(self._token_ids)  # tokens whose text has been returned

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is incomplete."""
        self._token_ids.append(token_id)
        piece = self._pending()
        num_pending = len(self._token_ids) - self._emitted
        # A character has at most four bytes; if more is pending, it is not a character.
        if piece.endswith(_REPLACEMENT) and num_pending < MAX_PENDING_TOKENS:
            return ""
        if piece or num_pending >= MAX_PENDING_TOKENS:
            self._advance()
        return piece

    def flush(self) -> str:
        """What is left at the end, an incomplete character as U+FFFD."""
        piece = self._pending()
        self._advance()
        return piece

    def _pending(self) -> str:
        before, after = (
            self._tokenizer.decode(self._token_ids[self._context : end], self._shown)
            for end in (self._emitted, None)
        )
        return after[len(before) :]

    def _advance(self) -> None:
        self._context, self._emitted = self._emitted, len(self._token_ids)


def _literal(text: str) -> str:
    return lark_literal(text) if text else ""


def _think_variables(think: ThinkLevel) -> dict[str, Any]:
    """`think` under every family's names for it; a template ignores the names it does not use."""
    if think == "off":
        return {"enable_thinking": False, "thinking": False}
    level = {} if think == "on" else {"reasoning_effort": think}
    return {"enable_thinking": True, "thinking": True, **level}


def _without_thoughts(text: str, markers: Markers) -> str:
    """The prompt text, continued so that the model answers at once."""
    if text.rstrip().endswith(markers.opens.rstrip()):
        return f"{text.rstrip()}\n\n{markers.closes}\n\n"
    return text + markers.skip
