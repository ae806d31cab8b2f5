"""What drafts gain where the machine's speed changes from second to second.

    python tools/bench/drafts_in_turns.py [--script "own words, sampled"] [--drafters head]
        [--batch 16] [-n 100] [-p 300] [-r 20] [--text BOOK ...]

`localllm bench --spec` lets one run follow the other. Here an engine that drafts and one that does
not take turns of eight steps, so that both see the same spells of the machine, and each one's steps
are timed. Runs of the same engine against itself (`--drafters none`) then give 1.00 within 0.02,
where whole runs gave 0.86 to 1.20. The interval holds 95 of 100 samples of the pairs, drawn again
(Efron 1979, "Bootstrap methods"). For the built-in model, on a CPU, where steps do not overlap.
"""

import argparse
import random
import sys
import time
from pathlib import Path

from localllm.bench.speculation import begin_script, make_scripts
from localllm.bench.subject import open_subject
from localllm.drafting.speculation import Speculator
from localllm.engine.config import EngineConfig
from localllm.engine.engine import Engine
from localllm.schedule.scheduler import Scheduler

_TURN, _SAMPLES = 8, 2000


def run_pair(engines: list[Engine]) -> list[float]:
    """The seconds of each engine's steps, in turns, the one with fewer tokens first."""
    seconds, tokens = [0.0, 0.0], [0, 0]
    left = {0, 1}
    while left:
        at = min(left, key=lambda each: tokens[each])
        for _ in range(_TURN):
            if engines[at].has_unfinished():
                began = time.perf_counter()
                tokens[at] += len(engines[at].step())
                seconds[at] += time.perf_counter() - began
        if not engines[at].has_unfinished():
            left.remove(at)
    return seconds


def times_as_fast(pairs: list[list[float]]) -> float:
    """Of the sums of all pairs."""
    return sum(plain for plain, _ in pairs) / sum(drafting for _, drafting in pairs)


def main() -> int:
    """Print each pair as it ends, and what all give together."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--script", default="own words, sampled")
    parser.add_argument("--drafters", default="head", help="none, or as bench --spec names them")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("-n", dest="num_tokens", type=int, default=100)
    parser.add_argument("-p", dest="num_prompt", type=int, default=300)
    parser.add_argument("-r", dest="repeats", type=int, default=20)
    parser.add_argument("--text", dest="texts", type=Path, action="append", default=[])
    args = parser.parse_args()
    longest = args.num_prompt + args.num_tokens + 1
    config = EngineConfig(
        max_num_seqs=args.batch, kv_cache_tokens=2 * args.batch * (longest + 64) + 8192
    )
    subject = open_subject(None, config, longest)
    texts = [path.read_text(encoding="utf-8") for path in args.texts]
    made = make_scripts(subject, args.num_tokens, 0, texts, args.num_prompt)
    scripts = {script.name: script for script in made}
    assert subject.speculator is not None
    parts: dict[str, Speculator | None] = {**subject.speculator.parts(), "none": None}
    if args.script not in scripts or args.drafters not in parts:
        parser.error(f"known: {'; '.join(scripts)}; drafters: {'; '.join(parts)}")
    speculator, pairs = parts[args.drafters], list[list[float]]()
    own = subject.engine.scheduler
    for number in range(args.repeats + 1):
        speculator = None if speculator is None else speculator.renewed()
        order = [0, 1] if number % 2 else [1, 0]
        engines: dict[int, Engine] = {}
        for at in order:
            # Each has a scheduler of its own, and computes its own prompts.
            engines[at] = begin_script(
                subject.engine,
                speculator if at else None,
                scripts[args.script],
                args.batch,
                number,
                f"{number} {at}".encode(),
                Scheduler(own.config, own.groups),
            )
        plain, drafting = run_pair([engines[0], engines[1]])
        sys.stdout.write(f"{number:3d}  {plain / drafting:.3f}  {plain:.3f} s without\n")
        sys.stdout.flush()
        if number:  # the first one measures step times
            pairs.append([plain, drafting])
    rng = random.Random(0)
    found = sorted(times_as_fast(rng.choices(pairs, k=len(pairs))) for _ in range(_SAMPLES))
    low, high = found[_SAMPLES // 40], found[-_SAMPLES // 40]
    sys.stdout.write(
        f"{args.script}, {args.drafters}, batch {args.batch}: {times_as_fast(pairs):.3f} times as "
        f"fast ({low:.3f} to {high:.3f})\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
