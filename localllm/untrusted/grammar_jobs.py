"""What a worker does with a grammar: it is compiled and followed for a while; see GrammarTrials."""

import ctypes
import time
from contextlib import suppress
from functools import partial

from llguidance import LLMatcher, LLTokenizer

from localllm.engine.form_ends import FormEnds
from localllm.engine.matcher import LONGEST_WAY, MAX_FORCED
from localllm.grammars.parser_limits import parser_limits
from localllm.grammars.vocabulary import single_token
from localllm.process.memory import resident_bytes
from localllm.untrusted.messages import OpenGrammars, Trial, TryGrammar, Work
from localllm.untrusted.worker_process import Jobs

# Tokens that a trial follows a grammar for: its states cost most where they are met first.
_STEPS = 24


def open_grammar_jobs(opening: OpenGrammars) -> Jobs:
    """The jobs for the tokens of one model."""
    tokens = LLTokenizer(
        opening.tokenizer, n_vocab=opening.vocab_size, eos_token=list(opening.eos) or None
    )

    def do(work: Work) -> Trial:
        match work:
            case TryGrammar(source):
                return try_grammar(tokens, source)
            case _:
                raise ValueError(f"no grammar: {type(work).__name__}")

    return do


def try_grammar(tokens: LLTokenizer, source: str) -> Trial:
    """Compile `source`, and do at its beginning and behind some tokens that it admits what a step
    of an engine does.

    The trial tells what is wrong with it, or the seconds of the slowest step, and the bytes that
    all of it took.
    """
    before = _held_bytes()
    state = LLMatcher(tokens, source, log_level=0, limits=parser_limits())
    ends = FormEnds(partial(single_token, tokens), tokens.eos_tokens)
    slowest_s, error = 0.0, state.get_error() if state.is_error() else ""
    for step in range(_STEPS):
        if state.is_error() or state.is_stopped():
            break  # further on it is no fault of the grammar, but of the way that was taken
        began_s = time.process_time()
        state.compute_ff_tokens()
        forced_s = time.process_time() - began_s
        ends.way(state, LONGEST_WAY)
        mask = state.compute_bitmask()
        step_s = time.process_time() - began_s
        # Where forced text is drafted, each position of the draft asks what is forced, twice.
        slowest_s = max(slowest_s, step_s + 2 * MAX_FORCED * forced_s)
        if step == 0:
            error = state.get_error() if state.is_error() else ""
        token_id = _nth_allowed(mask, step)
        if token_id is None or not state.consume_token(token_id):
            break
    taken = max(0, _held_bytes() - before)
    return Trial(error, slowest_s, taken)


def _nth_allowed(mask: bytes, count: int) -> int | None:
    """The id of some token that a mask admits, another one for each `count`."""
    places = [place for place, byte in enumerate(mask) if byte]
    if not places:
        return None
    place = places[count * 7919 % len(places)]
    byte = mask[place]
    return 8 * place + (byte & -byte).bit_length() - 1


def _held_bytes() -> int:
    """Memory that the process holds, without what was freed."""
    with suppress(OSError, AttributeError):  # another C library has no such call
        ctypes.CDLL(None).malloc_trim(0)
    return resident_bytes()
