"""What a grammar costs a step, side by side: `python tools/grammar_cost.py [MODEL] [--pairs 10]`.

The same engine answers the same question freely and as JSON in turn, without drafts, so that each
step gives one token. The times of a step are compared.
"""

import argparse
from statistics import median

from localllm import LLM
from localllm.drafting.speculation_config import SpeculationConfig
from localllm.text.grammar import Grammar

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 2000},
        "scores": {"type": "array", "items": {"type": "number"}},
    },
    "required": ["title", "scores"],
}
QUESTION = [{"role": "user", "content": "Describe a long day in a small town."}]


def main() -> None:
    """Print the time of a step, freely and as JSON, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=128)
    asked = parser.parse_args()
    llm = LLM(asked.model, max_num_seqs=1, speculation=SpeculationConfig("off"))
    free = llm.sampling_params(temperature=0.0, ignore_eos=True, max_tokens=asked.tokens)
    bound = llm.sampling_params(
        temperature=0.0, max_tokens=asked.tokens, grammar=Grammar.of_schema(SCHEMA)
    )
    times: dict[str, list[float]] = {"free": [], "json": []}
    for turn in range(asked.pairs + 1):
        for name, params in (("free", free), ("json", bound)):
            [completion] = llm.chat(QUESTION, params)
            assert completion.num_generated_tokens == asked.tokens, completion.finish_reason
            if turn:  # the first one warms up
                times[name].append(1000 / completion.decode_tokens_per_s)
    ratios = [bound / free for free, bound in zip(times["free"], times["json"], strict=True)]
    for name, found in times.items():
        print(f"{name}: {median(found):.3f} ms a step")  # noqa: T201
    low, high = min(ratios), max(ratios)
    print(f"ratio: {median(ratios):.3f} ({low:.3f} to {high:.3f}), {len(ratios)} pairs")  # noqa: T201


if __name__ == "__main__":
    main()
