"""What drafts gain where the machine's speed changes from second to second.

    python tools/bench/drafts_in_turns.py [--script "own words, sampled"] [--drafters head]
        [--batch 16] [-n 100] [-p 300] [-r 20] [--temperature 0.7]
        [--spec auto+draft:pocket-draft] [--text BOOK ...] [--lives 6] [--cpu-time]

`localllm bench --spec` lets one run follow the other. Here an engine that drafts and one that does
not take turns of eight steps, so that all see the same spells of the machine, and
each one's steps are timed. Runs of the same engine against itself (`--drafters none`) then give
1.00 within 0.02, where whole runs gave 0.86 to 1.20. What a policy learns first decides much of
what it does later: so it begins anew `--lives` times, each with `-r` runs. The interval holds 95 of
100 samples of the lives, drawn again, or of the runs of a single one (Efron 1979, "Bootstrap
methods"). `--cpu-time`: times are the CPU's of one thread, for a machine on which many processes
wait for each other; the policies see these, too. For the built-in model, on a CPU, where steps do
not overlap.
"""

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from localllm.bench.speculation import Script, begin_script, make_scripts
from localllm.bench.subject import Subject, open_subject
from localllm.drafting.speculation_config import SpeculationConfig
from localllm.drafting.speculator import Proposer, Speculator
from localllm.engine.config import EngineConfig
from localllm.engine.engine import Engine
from localllm.schedule.scheduler import Scheduler

_TURN, _SAMPLES = 8, 2000
_SPECULATION = SpeculationConfig()


def run_in_turns(engines: Sequence[Engine]) -> list[float]:
    """The seconds of each engine's steps, in turns, the one with the fewest tokens first."""
    seconds, tokens = [0.0] * len(engines), [0] * len(engines)
    left = set(range(len(engines)))
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


def new_speculator(proposers: Sequence[Proposer]) -> Speculator | None:
    """One that knows nothing yet; None if nobody drafts."""
    own = [each._replace(drafter=each.drafter.renewed()) for each in proposers]
    return Speculator(own, _SPECULATION.max_draft) if own else None


def measure(
    subject: Subject,
    script: Script,
    speculator: Speculator | None,
    args: argparse.Namespace,
) -> list[list[float]]:
    """The seconds without drafts and with them, of each run but the first, which measures step
    times.
    """
    own, found, known = subject.engine.scheduler, list[list[float]](), [None, speculator]
    for number in range(args.repeats + 1):
        order = list(range(len(known)))
        random.Random(number).shuffle(order)
        known = [None if each is None else each.renewed() for each in known]
        engines: dict[int, Engine] = {}
        for at in order:
            # Each has a scheduler of its own, and computes its own prompts.
            salt = f"{number} {at}".encode()
            mine = Scheduler(own.config, own.groups)
            engines[at] = begin_script(
                subject.engine, known[at], script, args.batch, number, salt, mine
            )
        seconds = run_in_turns([engines[at] for at in range(len(known))])
        if number:
            found.append(seconds)
    return found


def totals(runs: Sequence[Sequence[float]]) -> list[float]:
    """The seconds of each engine in all runs."""
    return [sum(each) for each in zip(*runs, strict=True)]


def interval(runs: Sequence[Sequence[float]]) -> str:
    """How many times as fast it is with drafts."""

    def ratio(some: Sequence[Sequence[float]]) -> float:
        return sum(plain for plain, _ in some) / sum(drafting for _, drafting in some)

    rng = random.Random(0)
    found = sorted(ratio(rng.choices(runs, k=len(runs))) for _ in range(_SAMPLES))
    low, high = found[_SAMPLES // 40], found[-_SAMPLES // 40]
    return f"{ratio(runs):.3f} ({low:.3f} to {high:.3f})"


def flags() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--script", dest="scripts", action="append", default=[])
    parser.add_argument("--drafters", action="append", default=[], help="none, or as bench names")
    parser.add_argument("--spec", default="auto", help="who drafts, as --spec of the program")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("-n", dest="num_tokens", type=int, default=100)
    parser.add_argument("-p", dest="num_prompt", type=int, default=300)
    parser.add_argument("-r", dest="repeats", type=int, default=20)
    parser.add_argument("--lives", type=int, default=1)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--text", dest="texts", type=Path, action="append", default=[])
    parser.add_argument("--cpu-time", action="store_true")
    return parser.parse_args()


def main() -> int:
    """Print what each group of drafters gives for each script."""
    args = flags()
    if args.cpu_time:
        time.perf_counter = time.process_time
    longest = args.num_prompt + args.num_tokens + 1
    config = EngineConfig(
        max_num_seqs=args.batch,
        kv_cache_tokens=2 * args.batch * (longest + 64) + 8192,
        threads=1 if args.cpu_time else None,
        speculation=replace(_SPECULATION, drafter=args.spec),
    )
    subject = open_subject(None, config, longest)
    texts = [path.read_text(encoding="utf-8") for path in args.texts]
    scripts = make_scripts(subject, args.num_tokens, 0, texts, args.num_prompt)
    assert subject.speculator is not None
    all_of_them = list(subject.speculator.proposers)
    groups = {each.name: [each] for each in all_of_them}
    groups |= {"together": all_of_them, "none": []}
    wanted = args.scripts or ["own words, sampled"]
    for script in [each for each in scripts if each.name in wanted]:
        if args.temperature is not None and script.params.temperature:
            params = replace(script.params, temperature=args.temperature)
            script = replace(script, params=params)
        for name in args.drafters or ["head"]:
            lives = [
                measure(subject, script, new_speculator(groups[name]), args)
                for _ in range(args.lives)
            ]
            # Of each run, or of each life, the seconds of both.
            runs = lives[0] if args.lives == 1 else [totals(life) for life in lives]
            line = f"{script.name}, {name}, batch {args.batch}: {interval(runs)}"
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
