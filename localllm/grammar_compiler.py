"""Grammars made into matchers for a model's tokens, by llguidance.

A model that thinks does so before its answer: the grammar begins behind its thoughts.
"""

import json
import re
from dataclasses import dataclass
from threading import Lock

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from localllm.engine.form_ends import FormEnds
from localllm.engine.matcher import Matcher
from localllm.errors import RequestError
from localllm.grammar import JSON_SPACE, Grammar
from localllm.prompt import Prompt
from localllm.thinking import Markers
from localllm.tokenizer import Tokenizer
from localllm.untrusted.grammar_trials import GrammarTrials

# What is kept of compiled grammars; each counts as much as its trial took, and something at least.
_KEPT_BYTES, _LEAST_BYTES = 256 << 20, 64 << 10
_ANY_TEXT = r"/(.|\n)*/"
# How llguidance names a place: "at 1(8): ", the line and the character.
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")


def check_grammar(grammar: Grammar) -> None:
    """Whether it can be followed, as far as that is known without a model. Raises: RequestError."""
    message = LLMatcher.validate_grammar(_source(grammar), limits=_limits())
    if message and not message.startswith("WARNING"):
        raise _refused(grammar, message)


def is_matched(grammar: Grammar, text: str) -> bool:
    """Whether a whole answer has its form, as far as can be said of one that was not led by it: the
    layout of JSON, and the order of names in it, are free, so it only has to be JSON.
    """
    if grammar.kind == "json_schema":
        try:
            json.loads(text)
        except ValueError:
            return False
        return True
    state = LLMatcher(LLTokenizer("byte"), _source(grammar), log_level=0, limits=_limits())
    ids = list(text.encode())
    return bool(state.consume_tokens(ids)) and state.is_accepting()


@dataclass(frozen=True, slots=True)
class _Compiled:
    matcher: Matcher
    num_bytes: int


_Key = tuple[Grammar, Markers | None, bool]


class GrammarCompiler:
    """Compiles for one tokenizer; what was compiled last is kept. Any thread may call it.

    Compiling lets other threads run. `trials`, where there are some, compile first what nobody has
    seen yet, in a process that can be killed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        trials: GrammarTrials | None = None,
    ):
        self._tokenizer, self._trials = tokenizer, trials
        self._tokens = LLTokenizer(
            tokenizer.to_json(), n_vocab=vocab_size, eos_token=sorted(eos_token_ids) or None
        )
        self._eos_token_ids = sorted(eos_token_ids)
        self._compiled: dict[_Key, _Compiled] = {}
        self._lock = Lock()

    def compile(self, grammar: Grammar, prompt: Prompt) -> Matcher:
        """A matcher for the answer to `prompt`, behind what of it is said already.

        Raises: RequestError for a grammar that cannot be followed.
        """
        key = (grammar, prompt.markers, prompt.is_thinking)
        with self._lock:
            found = self._compiled.pop(key, None)
        if found is None:
            found = self._compile(grammar, prompt.markers, is_thinking=prompt.is_thinking)
        with self._lock:
            self._compiled[key] = found  # the last one used stands last
            while sum(each.num_bytes for each in self._compiled.values()) > _KEPT_BYTES:
                del self._compiled[next(iter(self._compiled))]
        matcher = found.matcher.copy()
        if matcher.count_allowed(prompt.said) < len(prompt.said):
            raise RequestError(
                "the beginning of the answer does not follow the grammar", param="grammar"
            )
        for token_id in prompt.said:
            matcher.advance(token_id)
        return matcher

    def _compile(
        self, grammar: Grammar, markers: Markers | None, *, is_thinking: bool
    ) -> "_Compiled":
        source = _source(grammar)
        if markers is not None:
            source = self._behind_thoughts(source, markers, is_thinking=is_thinking)
        num_bytes, cost_s = _LEAST_BYTES, 0.0
        if self._trials is not None:
            trial = self._trials.try_(source)
            if trial.error:
                raise _refused(grammar, trial.error)
            num_bytes, cost_s = max(num_bytes, trial.num_bytes), trial.step_s
        state = LLMatcher(self._tokens, source, log_level=0, limits=_limits())
        if state.is_error():
            raise _refused(grammar, state.get_error())
        ends = FormEnds(self._id_of, self._eos_token_ids, self._closing_of(markers))
        return _Compiled(Matcher(state, ends, cost_s), num_bytes)

    def _id_of(self, char: str) -> int | None:
        ids = self._tokens.tokenize_bytes(char.encode())
        return ids[0] if len(ids) == 1 else None

    def _closing_of(self, markers: Markers | None) -> list[int]:
        """The token that ends thoughts, where it is one."""
        if markers is None:
            return []
        ids = self._tokenizer.encode(markers.closes, add_special_tokens=False, parse_special=True)
        return ids if len(ids) == 1 else []

    def _behind_thoughts(self, source: str, markers: Markers, *, is_thinking: bool) -> str:
        as_lark = self._tokenizer.as_lark
        opens, closes = as_lark(markers.opens), as_lark(markers.closes)
        if closes.startswith("<["):  # a token of its own, which no text is
            thoughts = f"rest: THOUGHTS {closes} SPACE\nTHOUGHTS: {_ANY_TEXT}"
        else:
            thoughts = f"rest: thoughts SPACE\nthoughts[lazy]: {_ANY_TEXT} {closes}"
        ways = [f"{opens} rest"]
        if not markers.skip.startswith(markers.opens):  # else thoughts, which are empty
            ways.append(as_lark(markers.skip))
        start = "rest @answer" if is_thinking else f"({' | '.join(ways)})? @answer"
        around = f"%llguidance {{}}\nstart: {start}\n{thoughts}\nSPACE: /\\n{{0,2}}/\n"
        answer = json.loads(source)["grammars"]
        answer[0]["name"] = "answer"
        return json.dumps({"grammars": [{"lark_grammar": around}, *answer]})


def _source(grammar: Grammar) -> str:
    """As llguidance reads it: a JSON object of grammars, the first of which is the whole.

    Raises: RequestError.
    """
    try:
        return _written(grammar)
    except ValueError as error:  # numbers that it does not read, say
        raise _refused(grammar, str(error) or "it cannot be read") from error


def _written(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(
                grammar.source, overrides={"whitespace_pattern": JSON_SPACE}
            )
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.source)
        case "lark":
            return json.dumps({"grammars": [{"lark_grammar": grammar.source}]})


def _limits() -> LLParserLimits:
    # Its own limits: some 20 ms for a grammar's expressions, 15 ms for a mask.
    return LLParserLimits(verbose_errors=False)


def _refused(grammar: Grammar, message: str) -> RequestError:
    named = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "grammar"}
    reason, where = _reason_and_place(grammar, message.splitlines())
    return RequestError(
        f"the {named[grammar.kind]} cannot be followed: {reason[:300]}",
        param="grammar",
        where=where[:300],
    )


def _reason_and_place(grammar: Grammar, lines: list[str]) -> tuple[str, str]:
    """What llguidance says, in our words: what is wrong, and where (empty where it does not say).

    Of a regular expression it shows the expression, carets under it, and the reason last.
    """
    carets = [i for i, line in enumerate(lines) if i and line.strip() and not line.strip(" ^")]
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if carets and reasons:
        shown, below = lines[carets[0] - 1], lines[carets[0]]
        indent = len(shown) - len(shown.lstrip())
        return reasons[0], f"character {below.index('^') - indent + 1} of {shown.strip()}"
    reason = lines[0].partition(". Enable '")[0]  # an option that nobody can set here
    place = _PLACE.match(reason)
    if place is None or grammar.kind != "lark":
        return reason, ""
    line = int(place[1])
    source = grammar.source.splitlines()[line - 1 : line]
    return reason[place.end() :], f"line {line}, character {place[2]}: {' '.join(source).strip()}"
