"""A worker's jobs on grammars: compile one and follow it for some tokens; see GrammarTrials."""

import time
from functools import partial

from llguidance import LLMatcher, LLTokenizer

from localllm.grammars.parser_limits import parser_limits
from localllm.grammars.vocabulary import single_token
from localllm.process.memory import resident_bytes, return_freed
from localllm.schedule.form_ends import FormEnds
from localllm.schedule.matcher import LONGEST_WAY, MAX_FORCED
from localllm.untrusted.messages import Jobs, OpenGrammars, Trial, TryGrammar, Work

# Tokens for which a trial follows a grammar: its states cost most when first reached.
_STEPS = 24


def open_grammar_jobs(opening: OpenGrammars) -> Jobs:
    """A function that does the jobs, for the tokens of one model."""
    tokens = LLTokenizer(
        opening.tokenizer, n_vocab=opening.vocab_size, eos_token=list(opening.eos) or None
    )

    def do(work: Work) -> Trial:
        match work:
            case TryGrammar(source):
                return try_grammar(tokens, source)
            case _:
                raise ValueError(f"not a grammar: {type(work).__name__}")

    return do


def try_grammar(tokens: LLTokenizer, source: str) -> Trial:
    """Compile `source`, then do what an engine's step does, at its beginning and after each of some
    tokens that it allows.

    The trial reports what is wrong with it, or the seconds of the slowest step, and the bytes that
    everything took.
    """
    before = _held_bytes()
    state = LLMatcher(tokens, source, log_level=0, limits=parser_limits())
    ends = FormEnds(partial(single_token, tokens), tokens.eos_tokens)
    slowest_s, error = 0.0, state.get_error() if state.is_error() else ""
    for step in range(_STEPS):
        if state.is_error() or state.is_stopped():
            break  # later on, it is not the grammar's fault, but due to the tokens taken
        began_s = time.process_time()
        state.compute_ff_tokens()
        forced_s = time.process_time() - began_s
        ends.way(state, LONGEST_WAY)
        mask = state.compute_bitmask()
        step_s = time.process_time() - began_s
        # If forced text is drafted, each position of the draft computes it twice.
        slowest_s = max(slowest_s, step_s + 2 * MAX_FORCED * forced_s)
        if step == 0:
            error = state.get_error() if state.is_error() else ""
        token_id = _nth_allowed(mask, step)
        if token_id is None or not state.consume_token(token_id):
            break
    taken = max(0, _held_bytes() - before)
    return Trial(error, slowest_s, taken)


def _nth_allowed(mask: bytes, count: int) -> int | None:
    """The id of some token that a mask allows, a different one for each `count`."""
    places = [place for place, byte in enumerate(mask) if byte]
    if not places:
        return None
    place = places[count * 7919 % len(places)]
    byte = mask[place]
    return 8 * place + (byte & -byte).bit_length() - 1


def _held_bytes() -> int:
    """Memory that the process holds, after giving back what was freed."""
    return_freed()
    return resident_bytes()
