"""What drafts gain: the same text with and without them, alternating, on several kinds of text.

An answer is given, or it is the model's own: a head guesses what the model says, so a given text
would tell nothing about it.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from localllm.bench.results import Result, Spread, Suite
from localllm.bench.scripted import ScriptedRunner
from localllm.bench.subject import Subject
from localllm.bench.texts import copying_texts, prose
from localllm.drafting.speculator import Speculator
from localllm.drafting.suffix_index import SuffixIndex
from localllm.engine.engine import Engine
from localllm.hub.catalog import BUILT_IN_MODEL
from localllm.hub.checkpoint import Checkpoint, open_checkpoint
from localllm.schedule.sampling_params import SamplingParams
from localllm.schedule.scheduler import Scheduler
from localllm.text.tokenizer import Tokenizer

# Maximum tokens of a prompt: enough for what the answer repeats.
PROMPT_TOKENS = 700
INDEX_TOKENS, LOOK_UPS = 1_000_000, 100
# The most passages of a text that the model goes on from.
PASSAGES = 100


@dataclass(frozen=True, slots=True)
class Script:
    """Prompts, each for another request, and their answer in tokens; None: the model's own."""

    name: str
    prompts: Sequence[list[int]]
    answer: list[int] | None
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a batch, from the first token on."""

    seconds: float
    num_steps: int
    num_tokens: int
    num_drafted: int
    num_accepted: int


class SpeculationSuite(Suite):
    """Every text at every batch size, in `repeats` pairs of runs."""

    def __init__(
        self,
        subject: Subject,
        batches: Sequence[int],
        num_tokens: int,
        repeats: int,
        seed: int,
        texts: Sequence[str] = (),
        num_prompt: int = PROMPT_TOKENS,
    ) -> None:
        """`texts`: what the model's own words go on from, if not this package's prose."""
        self._subject = subject
        self._batches, self._num_tokens, self._repeats = batches, num_tokens, repeats
        self._scripts = make_scripts(subject, num_tokens, seed, texts, num_prompt)
        # By drafters, text and batch: the runs without drafts and with them.
        self._found: dict[tuple[str, str, int], list[tuple[Run, Run]]] = {}
        self._index: Result | None = None
        self._seed = seed

    def run(self, progress: Callable[[str], None]) -> None:
        """Run all pairs of each batch size and text in turn; the first pair is left out."""
        progress("the suffix index")
        self._index = measure_index(self._seed)
        for batch in self._batches:
            for script in self._scripts:
                assert self._subject.speculator is not None
                # Step times and acceptance rates are learned for each text anew.
                for drafters, speculator in self._subject.speculator.parts().items():
                    self._run_pairs(drafters, speculator, script, batch, progress)

    def results(self) -> list[Result]:
        rows = [] if self._index is None else [self._index]
        for (drafters, name, batch), pairs in self._found.items():
            if not pairs:
                continue
            plain, drafting = zip(*pairs, strict=True)
            speedup = Spread.of([one.seconds / other.seconds for one, other in pairs])
            num_tokens = sum(run.num_tokens for run in drafting)
            num_drafted = sum(run.num_drafted for run in drafting)
            num_accepted = sum(run.num_accepted for run in drafting)
            rows.append(
                Result(
                    "speculation",
                    name,
                    {"drafters": drafters, "batch": batch, "pairs": len(pairs)},
                    {
                        "plain_tokens_per_s": _speed(num_tokens / len(pairs), plain),
                        "tokens_per_s": _speed(num_tokens / len(pairs), drafting),
                        "speedup": speedup,
                        # In each of its steps a request gets one token that was not drafted.
                        "tokens_per_step": num_tokens / (num_tokens - num_accepted),
                        "drafted": num_drafted,
                        "accepted": num_accepted / max(1, num_drafted),
                    },
                    f"{speedup.median:.2f} times ({speedup.min:.2f} to {speedup.max:.2f})",
                )
            )
        return rows

    def _run_pairs(
        self,
        drafters: str,
        speculator: Speculator,
        script: Script,
        batch: int,
        progress: Callable[[str], None],
    ) -> None:
        pairs = self._found[drafters, script.name, batch] = list[tuple[Run, Run]]()
        plain = self._subject.engine
        # What was learned in a run is known to the next, as in a long-running process. Its text is
        # not, since all runs may produce the same.
        for pair in range(self._repeats + 1):
            progress(f"{script.name}, {drafters}, batch {batch}, pair {pair}")
            speculator = speculator.renewed()
            # The two take turns to go first.
            order = (None, speculator)[:: 1 if pair % 2 else -1]
            runs = {each is None: run_script(plain, each, script, batch, pair) for each in order}
            if pair > 0:  # the first one measures step times
                pairs.append((runs[True], runs[False]))


def measure_index(seed: int, num_tokens: int = INDEX_TOKENS) -> Result:
    """Measure a suffix index of text without repetition, the worst case for memory, and look-ups
    in one whose pairs of tokens are all frequent, the worst case for time.
    """
    rng = random.Random(seed)
    text = [rng.randrange(1 << 17) for _ in range(num_tokens)]
    index, frequent = SuffixIndex(2, 8), SuffixIndex(2, 8)
    began = time.perf_counter()
    index.extend(text)
    build_s = time.perf_counter() - began
    frequent.extend([token % 64 for token in text])
    times = []
    for _ in range(20):
        new = [rng.randrange(64) for _ in range(LOOK_UPS)]
        began = time.perf_counter()
        for token in new:
            frequent.extend([token])
            frequent.repetition(15)
        times.append((time.perf_counter() - began) / LOOK_UPS)
    look_up, num_bytes = Spread.of(times), index.num_bytes()
    return Result(
        "suffix index",
        f"{num_tokens:,} tokens",
        {"tokens": num_tokens},
        {"build_s": build_s, "look_up_s": look_up, "bytes": num_bytes},
        f"{num_bytes / num_tokens:.0f} bytes a token",
    )


def make_scripts(
    subject: Subject,
    num_tokens: int,
    seed: int,
    texts: Sequence[str] = (),
    num_prompt: int = PROMPT_TOKENS,
) -> list[Script]:
    """The texts in the model's tokens, or in the built-in model's if the weights are random.

    `texts`, `num_prompt`: see SpeculationSuite.
    """
    tokenizer = _tokenizer_of(subject)
    num_prompt = max(1, min(num_prompt, subject.engine.context_length - num_tokens - 1))
    scripts = []
    for text in (*copying_texts(), prose()):
        prompt, answer = (
            tokenizer.encode(part, add_special_tokens=False) for part in (text.prompt, text.answer)
        )
        greedy = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        prompt, answer = prompt[:num_prompt], answer[:num_tokens]
        scripts.append(Script(text.name, [prompt], answer, replace(greedy, max_tokens=len(answer))))
    passages = [part for text in texts for part in _passages(tokenizer, text, num_prompt)]
    sampled = replace(greedy, temperature=1.0, seed=seed)
    for name, params in (("greedy", greedy), ("sampled", sampled)):
        prompts = passages or scripts[-1].prompts
        scripts.append(Script(f"own words, {name}", prompts, None, params))
    tokens = subject.random_tokens(random.Random(seed), num_prompt + num_tokens)
    return [*scripts, Script("random tokens", [tokens[num_tokens:]], tokens[:num_tokens], greedy)]


def _passages(tokenizer: Tokenizer, text: str, num_tokens: int) -> list[list[int]]:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    count = max(1, min(PASSAGES, len(tokens) // num_tokens))
    starts = [i * len(tokens) // count for i in range(count)]
    return [tokens[start : start + num_tokens] for start in starts]


def run_script(
    engine: Engine, speculator: Speculator | None, script: Script, batch: int, number: int = 0
) -> Run:
    """Let `batch` requests output the answer, timed from their first tokens on."""
    # Each run of a pair computes its own prompts: steps behind that take less time, about 7 % with
    # pocket and sixteen at once.
    salt = f"{number} {speculator is None}".encode()
    told = begin_script(engine, speculator, script, batch, number, salt)
    began = time.perf_counter()
    num_steps = num_tokens = num_accepted = 0
    drafted: dict[int, int] = {}
    while told.has_unfinished():
        events = told.step()
        num_steps += bool(events)
        num_tokens += len(events)
        num_accepted += sum(event.is_draft for event in events)
        drafted |= {event.request_id: event.num_drafted_tokens for event in events}
    seconds = time.perf_counter() - began
    return Run(seconds, num_steps, num_tokens, sum(drafted.values()), num_accepted)


def begin_script(
    engine: Engine,
    speculator: Speculator | None,
    script: Script,
    batch: int,
    number: int,
    salt: bytes,
    scheduler: Scheduler | None = None,
) -> Engine:
    """An engine beside `engine`, with `batch` requests for the answer that have their first token.
    Own answers differ in their seed, and in their prompt if there are several, of which run
    `number` takes the next ones. `scheduler`: see `Engine.beside`.
    """
    scripts: dict[int, Sequence[int]] = {}
    told = engine.beside(
        scheduler=scheduler,
        speculator=speculator,
        wrap=lambda runner: ScriptedRunner(runner, scripts),
    )
    for i in range(batch):
        params = script.params
        if params.seed is not None:
            params = replace(params, seed=params.seed + i)
        prompt = script.prompts[(number * batch + i) % len(script.prompts)]
        request_id = told.add_request(prompt, params, salt)
        if script.answer is not None:
            scripts[request_id] = script.answer
    started: set[int] = set()
    while len(started) < batch:
        started.update(event.request_id for event in told.step())
    return told


def _speed(num_tokens: float, runs: Sequence[Run]) -> Spread:
    return Spread.of([num_tokens / run.seconds for run in runs])


def _tokenizer_of(subject: Subject) -> Tokenizer:
    if isinstance(subject.source, Checkpoint):
        return subject.source.tokenizer
    return open_checkpoint(BUILT_IN_MODEL).tokenizer
