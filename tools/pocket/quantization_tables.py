"""Quantize pocket in every way and write what each costs as markdown tables.

    python tools/pocket/quantization_tables.py --books BOOKS [--samples 32] > tables.md
    python tools/pocket/quantization_tables.py --books BOOKS --experts FOLDER > experts.md

The second command quantizes the model that `experts.py` makes, once by every method.

The evaluation text is from two books that neither the model nor the calibration has seen. KL
divergences (nats a token, float32 activations) are of the result from the source; the share is
relative to round-to-nearest with the same group and grid.
"""

import argparse
import itertools
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from corpus import HELD_OUT_BOOKS, read_books
from localllm.answer.evaluation import Comparison, evaluate
from localllm.engine.config import EngineConfig
from localllm.quantize.calibrate import CalibrationRequest
from localllm.quantize.recipe import GROUP_SIZES, Recipe
from localllm.quantize.run import QuantizeRequest, quantize_model

CHARS_OF_EACH = 40_000


@dataclass(frozen=True)
class Bench:
    """What every row has in common."""

    text: str
    calibration: CalibrationRequest
    model: str = "pocket"

    def measure(self, recipe: Recipe) -> tuple[Comparison, float]:
        """The comparison with the source, and the seconds that quantizing took."""
        with tempfile.TemporaryDirectory() as folder:
            request = QuantizeRequest(
                self.model,
                Path(folder) / "out",
                recipe,
                self.calibration,
                torch.device("cpu"),
                verify=False,
            )
            outcome = quantize_model(request, lambda *args: None)
            config = EngineConfig(dtype="float32", max_model_len=512, max_num_seqs=1)
            evaluation = evaluate(self.text, [str(request.out), self.model], config)
        assert evaluation.against is not None
        comparison = replace(evaluation.against, perplexity=evaluation.perplexity)
        return comparison, outcome.seconds


def table(title: str, names: tuple[str, ...]) -> None:
    """Print the head of a table."""
    columns = (*names, "KL mean", "share of rtn", "KL p99", "same top 1", "perplexity", "s")
    sys.stdout.write(f"\n### {title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n")


def row(names: tuple[str, ...], found: tuple[Comparison, float], rtn: float) -> None:
    """Print one row."""
    comparison, seconds = found
    cells = (
        *names,
        f"{comparison.kl_mean:.5f}",
        f"{comparison.kl_mean / rtn:.3f}",
        f"{comparison.kl_p99:.4f}",
        f"{comparison.same_top1:.1%}",
        f"{comparison.perplexity:.2f}",
        f"{seconds:.0f}",
    )
    sys.stdout.write(f"| {' | '.join(cells)} |\n")
    sys.stdout.flush()


def of_books(books: dict[str, list[str]], samples: int) -> CalibrationRequest:
    """Calibration on the books that the model was trained on."""
    texts = [
        text for name, passages in books.items() if name not in HELD_OUT_BOOKS for text in passages
    ]
    return CalibrationRequest(text="\n\n".join(texts), text_name="books", num_windows=samples)


def every_method(bench: Bench) -> None:
    """One row for each method, in the symmetric groups of 128 that are the default."""
    table("Every method, against rtn with symmetric groups of 128", ("method",))
    nearest = 0.0
    recipes = [Recipe(method, 128, True) for method in ("rtn", "awq", "gptq", "awq+gptq")]
    recipes += [Recipe("int8"), Recipe("fp8"), Recipe("fp8", file_format="fp8"), Recipe("mxfp4")]
    for recipe in recipes:
        found = bench.measure(recipe)
        nearest = nearest or found[0].kl_mean
        row((recipe.summary,), found, nearest)


def main() -> None:
    """Quantize, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--books", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=CalibrationRequest().num_windows)
    parser.add_argument("--experts", type=Path)
    args = parser.parse_args()
    books = read_books(args.books)
    text = "\n\n".join("\n\n".join(books[name])[:CHARS_OF_EACH] for name in HELD_OUT_BOOKS)
    model = "pocket" if args.experts is None else str(args.experts)
    written = CalibrationRequest(num_windows=args.samples)
    own = Bench(text, written, model)
    if args.experts is not None:
        every_method(own)
        return
    table("Methods, groups and grids", ("method", "group", "grid"))
    nearest = {}
    for group, symmetric in itertools.product(GROUP_SIZES, (True, False)):
        for method in ("rtn", "awq", "gptq", "awq+gptq"):
            found = own.measure(Recipe(method, group, symmetric))
            if method == "rtn":
                nearest[group, symmetric] = found[0].kl_mean
            names = (method, str(group), "symmetric" if symmetric else "asymmetric")
            row(names, found, nearest[group, symmetric])
    table("Eight bits, against rtn with symmetric groups of 128", ("method",))
    for recipe in (Recipe("int8"), Recipe("fp8"), Recipe("fp8", file_format="fp8")):
        row((recipe.summary,), own.measure(recipe), nearest[128, True])
    table("The embedding and the head, gptq", ("embedding", "head"))
    for ends in ({}, {"embedding": "int8", "head": "int8"}, {"embedding": "int8", "head": "int4"}):
        recipe = Recipe("gptq", **ends)
        row((recipe.embedding, recipe.head), own.measure(recipe), nearest[128, True])
    table("Calibration, gptq, symmetric groups of 128", ("text", "windows"))
    sources = {"the model's": written, "books": of_books(books, args.samples)}
    for (name, request), samples in itertools.product(sources.items(), (16, args.samples)):
        found = Bench(text, replace(request, num_windows=samples)).measure(Recipe("gptq"))
        row((name, str(samples)), found, nearest[128, True])


if __name__ == "__main__":
    main()
