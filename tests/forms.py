"""Which texts a form admits, and random answers within it."""

import json
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from localllm.answer.grammar_compiler import GrammarCompiler, _source
from localllm.answer.text_engine import _TextAssembler
from localllm.grammars.parser_limits import parser_limits
from localllm.schedule.matcher import Matcher
from localllm.schedule.sampling_params import SamplingParams
from localllm.text.grammar import Grammar
from localllm.text.prompt import Prompt
from localllm.text.tokenizer import Tokenizer


def state_of(grammar: Grammar) -> LLMatcher:
    """For a vocabulary of bytes."""
    return LLMatcher(LLTokenizer("byte"), _source(grammar), log_level=0, limits=parser_limits())


def admits(grammar: Grammar, text: str) -> bool:
    """Whether `text` is a whole answer."""
    state = state_of(grammar)
    assert not state.is_error(), state.get_error()
    token_ids = list(text.encode())
    is_prefix = state.validate_tokens(token_ids) == len(token_ids)
    return is_prefix and state.consume_tokens(token_ids) and state.is_accepting()


def is_valid(schema: Any, value: Any) -> bool:
    """Whether JSON of a schema may be `value`."""
    written = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return admits(Grammar.of_schema(schema), written)


PROMPT = Prompt([1])


class Walker:
    """Random answers of a vocabulary, decoded as the engine decodes them."""

    def __init__(self, tokenizer: Tokenizer, end_ids: Sequence[int]) -> None:
        self.tokenizer, self.end_ids = tokenizer, end_ids
        self.vocab_size = tokenizer.num_token_ids
        self.special_ids = sorted(set(tokenizer._special_ids) - set(end_ids))
        self.compiler = GrammarCompiler(tokenizer, self.vocab_size, frozenset(end_ids))

    def matcher(self, grammar: Grammar, num_tokens: int, prompt: Prompt = PROMPT) -> Matcher:
        """One that leads to the end where tokens run short. Raises: RequestError."""
        matcher = self.compiler.compile(grammar, prompt).matcher
        matcher.limit(num_tokens)
        return matcher

    def walk(
        self, matcher: Matcher, num_tokens: int, random: Random, *, thinks: bool = False
    ) -> list[int] | None:
        """Tokens that are drawn of those allowed, to a finished answer; None where none came.

        `thinks`: special tokens stand around thoughts.
        """
        never = [] if thinks else self.special_ids
        token_ids = list[int]()
        while len(token_ids) < num_tokens:
            mask = matcher.mask([], self.vocab_size)
            assert mask is not None, matcher.error
            # Nor may any of them be drafted.
            assert not mask[never].any()
            assert not any(matcher.count_allowed([each]) for each in never)
            token_id = random.choice(np.flatnonzero(mask).tolist())
            # Asked about one token, as on a processor, it must say the same.
            assert matcher.allows([], token_id)
            token_ids.append(token_id)
            if token_id in self.end_ids:
                return token_ids
            matcher.advance(token_id)
            assert matcher.error is None
            if matcher.is_finished:
                return token_ids
        return None

    def text(self, grammar: Grammar, token_ids: Sequence[int], prompt: Prompt = PROMPT) -> str:
        """What a user is shown of an answer."""
        is_ended = token_ids[-1] in self.end_ids
        read = self.compiler.compile(grammar, prompt).prompt
        assembler = _TextAssembler(self.tokenizer, read, SamplingParams(grammar=grammar))
        pieces = [assembler.push(token_id) for token_id in token_ids[: len(token_ids) - is_ended]]
        return "".join(piece.answer for piece in [*pieces, assembler.flush()])
