"""Compiles grammars into matchers for a model's tokens, with llguidance.

A model that thinks does so before its answer: the grammar begins after its thoughts.
"""

import json
import re
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLTokenizer

from localllm.errors import RequestError
from localllm.grammars.lark import read_lark
from localllm.grammars.lengths import check_length, regex_length
from localllm.grammars.parser_limits import parser_limits
from localllm.grammars.schema import read_compact_schema, read_schema, read_schema_of_tool
from localllm.grammars.vocabulary import single_token, spelling_vocabulary
from localllm.schedule.form_ends import FormEnds
from localllm.schedule.matcher import Matcher
from localllm.text.grammar import Grammar, refused
from localllm.text.prompt import Prompt
from localllm.text.thinking import Markers
from localllm.text.tokenizer import Tokenizer
from localllm.untrusted.grammar_trials import GrammarTrials

# Bytes of compiled grammars to keep; each counts what its trial took, at least _LEAST_BYTES.
_KEPT_BYTES, _LEAST_BYTES = 64 << 20, 64 << 10
# Messages of llguidance about things that users did not write or would not understand; and ours.
_REASONS = (
    ("lookarounds not supported", "look-around, word boundaries and anchors within an expression"),
    ("are not disjoint", "two of patternProperties may apply to the same name"),
    ("to determine if regex is empty", "pattern, format and lengths are too complex together"),
    ("Regex is empty", "no text has this pattern, format and length"),
    ("NoExtension", "no text matches it"),
)
_ANY_TEXT = r"/(.|\n)*/"
# How llguidance names a position: "at 1(8): ", the line and the character.
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")


def check_grammar(grammar: Grammar) -> None:
    """Check a grammar, as far as possible without a model. Raises: RequestError."""
    message = LLMatcher.validate_grammar(_source(grammar), limits=parser_limits())
    if message and not message.startswith("WARNING"):
        raise _refused(grammar, message)


def is_matched(grammar: Grammar, text: str) -> bool:
    """Whether a whole answer matches a grammar that did not constrain it. The layout of JSON and
    the order of its names are then free, so for a schema it only has to be JSON.
    """
    if grammar.kind == "json_schema":
        try:
            json.loads(text)
        except ValueError:
            return False
        return True
    state = LLMatcher(LLTokenizer("byte"), _source(grammar), log_level=0, limits=parser_limits())
    ids = list(text.encode())
    return bool(state.consume_tokens(ids)) and state.is_accepting()


class CompiledForm(NamedTuple):
    """The matcher of one answer, and its prompt, with the markers for reading the answer."""

    matcher: Matcher
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class _Kept:
    matcher: Matcher
    num_bytes: int
    # The markers that tell its answers from thoughts.
    markers: Markers | None


_Key = tuple[Grammar, Markers | None, bool]


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and keeps those last used. Any thread may call it.

    Other threads run while it compiles. `tries`: a new grammar is first compiled in a process that
    can be killed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        *,
        tries: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        num_tokens = min(tokenizer.num_token_ids, vocab_size)
        self._eos_token_ids = sorted(each for each in eos_token_ids if each < num_tokens)
        # Without an end token, an id that has no text; otherwise llguidance would choose a token.
        ends = self._eos_token_ids or [num_tokens]
        num_ids = max(vocab_size, ends[-1] + 1)
        self._trials: GrammarTrials | None = None
        try:
            vocabulary = spelling_vocabulary(tokenizer.to_json(), ends, num_ids)
            if tries:
                self._trials = GrammarTrials(vocabulary, num_ids, ends)
                self._trials.warm()
            self._tokens = LLTokenizer(vocabulary, n_vocab=num_ids, eos_token=ends)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # ValueError, and panics of its Rust side
            raise RequestError(
                "the model's tokenizer cannot be used with a grammar",
                param="grammar",
                where=f"{error!s:.200}",
                hint="an answer without a grammar, or another model",
            ) from error
        self._compiled: dict[_Key, _Kept] = {}
        self._lock = Lock()

    def compile(self, grammar: Grammar, prompt: Prompt) -> CompiledForm:
        """A matcher for the answer to `prompt`, advanced over the part of it that is said already.

        Raises: RequestError for a grammar that cannot be used.
        """
        kept = self._find(grammar, prompt)
        matcher = kept.matcher.copy()
        if matcher.count_allowed(prompt.said) < len(prompt.said):
            raise RequestError(
                "the beginning of the answer does not match the grammar", param="grammar"
            )
        for token_id in prompt.said:
            matcher.advance(token_id)
        return CompiledForm(matcher, replace(prompt, markers=kept.markers))

    def _find(self, grammar: Grammar, prompt: Prompt) -> _Kept:
        key = (grammar, prompt.markers, prompt.is_thinking)
        with self._lock:
            found = self._compiled.pop(key, None)
        if found is None:
            found = self._compile(grammar, prompt.markers, is_thinking=prompt.is_thinking)
        with self._lock:
            self._compiled[key] = found  # the one used last is last
            while sum(each.num_bytes for each in self._compiled.values()) > _KEPT_BYTES:
                del self._compiled[next(iter(self._compiled))]
        return found

    def _compile(self, grammar: Grammar, markers: Markers | None, *, is_thinking: bool) -> _Kept:
        answer = _source(grammar)
        may_call = grammar.kind == "calls"
        source = self._behind_thoughts(answer, markers, is_thinking=is_thinking, may_call=may_call)
        num_bytes, cost_s = self._try(grammar, source)
        told_apart = markers
        if markers is not None and grammar.kind in ("regex", "lark"):  # no other is ambiguous
            told_apart = _told_apart(answer, markers, is_thinking=is_thinking)
        if told_apart != markers:
            source = self._behind_thoughts(
                answer, told_apart, is_thinking=is_thinking, may_call=may_call
            )
            num_bytes, cost_s = self._try(grammar, source)
        state = LLMatcher(self._tokens, source, log_level=0, limits=parser_limits())
        if not state.is_error():
            state.compute_bitmask()  # finds grammars that no text matches
        if state.is_error():
            raise _refused(grammar, state.get_error())
        forced = state.compute_ff_bytes().decode(errors="ignore").encode()
        if self._tokens.decode_bytes(self._tokens.tokenize_bytes(forced)) != forced:
            raise _refused(grammar, f"the model has no tokens for {forced.decode()!r:.100}")
        closing = self._closing_of(told_apart)
        ends = FormEnds(partial(single_token, self._tokens), self._eos_token_ids, closing)
        return _Kept(Matcher(state, ends, cost_s), num_bytes, told_apart)

    def _try(self, grammar: Grammar, source: str) -> tuple[int, float]:
        """The bytes that a grammar takes, and the seconds of its slowest step; small defaults if it
        is not tried.

        Raises: RequestError.
        """
        if self._trials is None:
            return _LEAST_BYTES, 0.0
        trial = self._trials.try_(source)
        if trial.error:
            raise _refused(grammar, trial.error)
        return max(_LEAST_BYTES, trial.num_bytes), trial.step_s

    def _closing_of(self, markers: Markers | None) -> list[int]:
        """The tokens that end thoughts, if the first is a token that no text has; for a marker in
        plain text, it would be unknown how much of it is already written.
        """
        if markers is None or not self._tokenizer.as_lark(markers.closes).startswith("<["):
            return []
        return self._tokenizer.encode(markers.closes, add_special_tokens=False, parse_special=True)

    def _behind_thoughts(
        self, source: str, markers: Markers | None, *, is_thinking: bool, may_call: bool
    ) -> str:
        """`may_call`: the answer may be a tool call."""
        if markers is None:
            return source
        as_lark = self._tokenizer.as_lark
        opens, closes = as_lark(markers.opens), as_lark(markers.closes)

        def before_call(texts: tuple[str, ...]) -> list[str]:
            return [as_lark(each.removesuffix(markers.call)) for each in texts if may_call]

        any_end = " | ".join(f"({each})" for each in (closes, *before_call(markers.calls_behind)))
        if closes.startswith("<["):  # a token of its own, which no text has
            thoughts = f"rest: THOUGHTS ({any_end}) SPACE\nTHOUGHTS: {_ANY_TEXT}"
        else:
            thoughts = f"rest: thoughts SPACE\nthoughts[lazy]: {_ANY_TEXT} ({any_end})"
        ways = [f"{opens} rest"]
        if not markers.skip.startswith(markers.opens):  # otherwise `skip` is empty thoughts
            ways.append(as_lark(markers.skip))
        ways += before_call(markers.calls_first)
        start = "rest @answer" if is_thinking else f"({' | '.join(ways)})? @answer"
        space = '""' if markers.keeps_newlines else r"/\n{0,2}/"
        around = f"%llguidance {{}}\nstart: {start}\n{thoughts}\nSPACE: {space}\n"
        answer = json.loads(source)["grammars"]
        answer[0]["name"] = "answer"
        return json.dumps({"grammars": [{"lark_grammar": around}, *answer]})


def _told_apart(source: str, markers: Markers, *, is_thinking: bool) -> Markers | None:
    """Markers that tell an answer in this grammar from thoughts.

    None if the answer itself may begin with a marker: then the model answers at once.
    """
    state = LLMatcher(LLTokenizer("byte"), source, log_level=0, limits=parser_limits())

    def may_begin(text: str) -> bool:
        ids = list(text.encode())
        return state.validate_tokens(ids) == len(ids)

    if not is_thinking and any(may_begin(text) for text in markers.texts):
        return None
    return replace(markers, keeps_newlines=may_begin("\n"))


def _source(grammar: Grammar) -> str:
    """The source for llguidance: a JSON object of grammars, the first of which is the main one.

    Raises: RequestError.
    """
    match grammar.kind:
        case "json_schema":
            return _grammars(json_schema=read_compact_schema(json.loads(grammar.source)))
        case "regex":
            check_length(regex_length(grammar.source), "regular expression")
            return LLMatcher.grammar_from_regex(grammar.source)
        case "lark" | "calls":
            is_ours = grammar.kind == "calls"
            read = read_schema_of_tool if is_ours else read_schema
            source = read_lark(grammar.source, read, names_tokens=is_ours)
            return _grammars(lark_grammar=source)


def _grammars(**grammar: Any) -> str:
    return json.dumps({"grammars": [grammar]}, ensure_ascii=False)


def _refused(grammar: Grammar, message: str) -> RequestError:
    named = {"json_schema": "JSON schema", "regex": "regular expression"}
    reason, where = _reason_and_place(grammar, message.splitlines())
    return refused(named.get(grammar.kind, "grammar"), reason, where)


def _reason_and_place(grammar: Grammar, lines: list[str]) -> tuple[str, str]:
    """llguidance's message in our words: what is wrong, and where (empty if it does not say).

    For a regular expression, its message has the expression, carets below it, then the reason.
    """
    carets = [i for i, line in enumerate(lines) if i and line.strip() and not line.strip(" ^")]
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if carets and reasons:
        shown, below = lines[carets[0] - 1], lines[carets[0]]
        indent = len(shown) - len(shown.lstrip())
        return reasons[0], f"character {below.index('^') - indent + 1} of {shown.strip()}"
    reason = lines[0] if lines else ""
    reason = next((ours for theirs, ours in _REASONS if theirs in reason), reason)
    place = _PLACE.match(reason)
    if place is None or grammar.kind != "lark":
        return reason, ""
    line = int(place[1])
    source = grammar.source.splitlines()[line - 1 : line]
    return reason[place.end() :], f"line {line}, character {place[2]}: {' '.join(source).strip()}"
