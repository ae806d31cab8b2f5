"""Print what the precision of recurrent states costs, as a markdown table.

    python tools/pocket/state_precision.py --books BOOKS --model FOLDER [--bfloat16]

FOLDER: the model that `hybrid.py` makes. The text is from two books that it has not seen, in
windows of 2,048 tokens, so that a state takes up to as many; everything else is in float32.
Divergences are from the model with states in float32. `--bfloat16` measures that type too, which
the engine does not offer, by torch's operators, which are slow.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from tokenizers import Tokenizer
from torch import Tensor

from corpus import HELD_OUT_BOOKS, read_books
from localllm.engine.config import EngineConfig
from localllm.engine.loaded_decoder import load_decoder
from localllm.engine.scoring import WindowScorer
from localllm.model.dtypes import STATE_DTYPES, StateDType
from localllm.model.families.table import read_architecture

WINDOW, NUM_WINDOWS = 2048, 12


def log_probabilities(folder: Path, dtype: str, windows: Tensor) -> Iterator[Tensor]:
    """Of each next token of each window, float32 [tokens - 1, vocab_size]."""
    is_offered = dtype in STATE_DTYPES
    config = EngineConfig(
        dtype="float32",
        max_model_len=WINDOW,
        max_num_seqs=1,
        backend="auto" if is_offered else "torch",
    )
    model = load_decoder(folder, read_architecture(folder), config).model
    model = replace(model, architecture=model.architecture.with_states(cast(StateDType, dtype)))
    scorer = WindowScorer(model, WINDOW)
    for window in windows.tolist():
        yield torch.cat([rows.log_softmax(-1) for rows in scorer.logits(window[:-1])])


def main() -> None:
    """Measure each precision against float32."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--books", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--bfloat16", action="store_true")
    args = parser.parse_args()
    books = read_books(args.books)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    half = NUM_WINDOWS * WINDOW // len(HELD_OUT_BOOKS)
    ids = [tokenizer.encode("\n\n".join(books[name])).ids[:half] for name in HELD_OUT_BOOKS]
    windows = torch.tensor(ids).view(-1, WINDOW)
    columns = ("states", "perplexity", "KL mean", "KL p99", "same top 1")
    sys.stdout.write(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n")
    for dtype in (*STATE_DTYPES, *(["bfloat16"] if args.bfloat16 else [])):
        losses, divergences, same = [], [], []
        both = (log_probabilities(args.model, each, windows) for each in (dtype, "float32"))
        for window, own, whole in zip(windows, *both, strict=True):
            losses.append(-own.gather(1, window[1:, None])[:, 0])
            divergences.append((whole.exp() * (whole - own)).sum(-1))
            same.append(own.argmax(-1) == whole.argmax(-1))
        divergence = torch.cat(divergences)
        cells = (
            dtype,
            f"{torch.cat(losses).mean().exp():.4f}",
            f"{divergence.mean():.2e}",
            f"{divergence.quantile(0.99):.2e}",
            f"{torch.cat(same).float().mean():.3%}",
        )
        sys.stdout.write(f"| {' | '.join(cells)} |\n")


if __name__ == "__main__":
    main()
