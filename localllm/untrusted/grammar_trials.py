"""Compiles untrusted grammars in another process first, to find out what they cost."""

from collections.abc import Collection

from localllm.errors import BusyError, RequestError
from localllm.text.grammar import MAX_GRAMMAR_SECONDS
from localllm.untrusted.messages import OpenGrammars, Trial, TryGrammar
from localllm.untrusted.worker import StoppedError, WaitedError
from localllm.untrusted.worker_pool import WorkerPool

# The most seconds that a token may take, and the most memory that a grammar may hold.
STEP_S, GRAMMAR_BYTES = 0.1, 64 << 20
_HINT = "a simpler schema or grammar"


class GrammarTrials:
    """Tries grammars for the tokens of one model. Any thread may call it."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos: Collection[int]) -> None:
        self._pool = WorkerPool(OpenGrammars(tokenizer_json, vocab_size, tuple(sorted(eos))))

    def warm(self) -> None:
        """Start the process, without waiting for it."""
        self._pool.warm()

    def try_(self, source: str) -> Trial:
        """Compile `source`, written for the compiler, and follow it for some tokens.

        Raises: RequestError for a grammar that takes too long, or too much memory.
        """
        try:
            trial = self._pool.ask(TryGrammar(source), MAX_GRAMMAR_SECONDS)
            if not isinstance(trial, Trial):
                raise StoppedError("its process sent an unexpected reply")
        except WaitedError as error:
            raise BusyError(
                "other grammars are being compiled", param="grammar", hint="ask again in a moment"
            ) from error
        except StoppedError as error:
            raise _too_complex(f"it could not be compiled: {error}") from error
        if trial.step_s > STEP_S:
            raise _too_complex("finding the allowed tokens takes too long")
        if trial.num_bytes > GRAMMAR_BYTES:
            raise _too_complex(f"it takes {trial.num_bytes >> 20:,} MB of memory")
        return trial


def _too_complex(why: str) -> RequestError:
    return RequestError("the grammar is too complex", param="grammar", where=why, hint=_HINT)
