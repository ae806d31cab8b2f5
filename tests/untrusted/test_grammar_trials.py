"""Grammars are tried in another process, where what they cost hurts nobody."""

import json
import re
import threading
import time

import pytest
from llguidance import LLMatcher

from localllm.answer import grammar_compiler
from localllm.answer.grammar_compiler import GrammarCompiler
from localllm.errors import RequestError
from localllm.hub.checkpoint import open_checkpoint
from localllm.text.grammar import Grammar
from localllm.text.prompt import Prompt
from localllm.untrusted.grammar_trials import GrammarTrials

TOKENIZER = open_checkpoint().tokenizer
VOCAB = TOKENIZER.num_token_ids
SMALL = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}


def schema(value: object) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(value))


FOREVER = schema({"type": "integer", "multipleOf": 215656441})
SLOW_MASK = LLMatcher.grammar_from_regex("(a{900}){1000}")


@pytest.fixture(scope="module")
def trials() -> GrammarTrials:
    return GrammarTrials(TOKENIZER.to_json(), VOCAB, {2})


def test_a_grammar_that_can_be_followed_is_told_with_what_it_takes(trials: GrammarTrials) -> None:
    found = trials.try_(schema(SMALL))
    assert found.error == ""
    assert 0 <= found.num_bytes < 16 << 20
    assert (
        "unknown name"
        in trials.try_(json.dumps({"grammars": [{"lark_grammar": "start: x"}]})).error
    )


@pytest.mark.parametrize(
    ("source", "why"),
    [(FOREVER, "took longer than"), (SLOW_MASK, "takes too long|took longer than")],
    ids=["compiles for ever", "a mask takes a second"],
)
def test_one_that_costs_too_much_is_refused_and_the_next_is_tried(
    trials: GrammarTrials, source: str, why: str
) -> None:
    began_s = time.monotonic()
    with pytest.raises(RequestError, match="too complex") as found:
        trials.try_(source)
    assert re.search(why, found.value.where)
    assert time.monotonic() - began_s < 5
    assert trials.try_(schema(SMALL)).error == ""


def test_memory_is_bounded(trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.untrusted.grammar_trials.GRAMMAR_BYTES", -1)
    with pytest.raises(RequestError, match="too complex") as found:
        trials.try_(schema(SMALL))
    assert "MB of memory" in found.value.where


def test_who_waits_behind_those_that_cost_too_much_is_told_in_time() -> None:
    trials = GrammarTrials(TOKENIZER.to_json(), VOCAB, {2})
    taken: list[float] = []

    def try_() -> None:
        began_s = time.monotonic()
        with pytest.raises(RequestError):
            trials.try_(FOREVER)
        taken.append(time.monotonic() - began_s)

    threads = [threading.Thread(target=try_) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 8
    assert max(taken) < 6


def test_what_is_kept_is_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "_KEPT_BYTES", 5 * grammar_compiler._LEAST_BYTES)
    compiler = GrammarCompiler(TOKENIZER, VOCAB, frozenset({2}))
    for i in range(20):
        compiler.compile(Grammar("regex", f"number {i}"), Prompt([]))
    kept = [grammar.source for grammar, _, _ in compiler._compiled]
    assert kept == [f"number {i}" for i in range(15, 20)]
    compiler.compile(Grammar("regex", "number 15"), Prompt([]))  # used again: it stays longest
    compiler.compile(Grammar("regex", "number 20"), Prompt([]))
    assert [grammar.source for grammar, _, _ in compiler._compiled][-2:] == [
        "number 15",
        "number 20",
    ]


def test_a_trial_changes_nothing() -> None:
    tried = GrammarCompiler(TOKENIZER, VOCAB, frozenset({2}), tries=True)
    own = GrammarCompiler(TOKENIZER, VOCAB, frozenset({2}))
    grammar = Grammar("json_schema", json.dumps(SMALL))
    matchers = [compiler.compile(grammar, Prompt([])).matcher for compiler in (tried, own)]
    masks = [matcher.mask([], VOCAB) for matcher in matchers]
    assert masks[0] is not None
    assert masks[1] is not None
    assert masks[0].tolist() == masks[1].tolist()
    errors = []
    for compiler in (tried, own):
        with pytest.raises(RequestError) as found:
            compiler.compile(Grammar("regex", "(a"), Prompt([]))
        errors.append((found.value.message, found.value.where))
    assert errors[0] == errors[1]
