"""Train `pocket`, the model in the wheel, on a folder of books, and write its checkpoint.

    python tools/pocket/train.py --books BOOKS --work WORK [--out localllm/pocket]

BOOKS holds plain-text files (`*.txt`); WORK keeps the checkpoint of the training, so that a run
which was stopped goes on where it was; the finished model goes to OUT. Seeded: the same books
give the same tokenizer, the same order of rows and the same first weights. Needs a C++ compiler
(the step is compiled, 1.7 times faster than eager on two cores).

The matrices inside the layers are trained by Muon (K. Jordan et al., 2024, as in `torch.optim`),
everything else by AdamW; the learning rate warms up, stays, and falls linearly to zero.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from corpus import Corpus, encode_books, epoch_stream, read_books, train_tokenizer
from export import write_checkpoint
from network import Network, Shape


@dataclass(frozen=True, slots=True)
class Phase:
    """`num_steps` steps on `num_rows` rows of `length` tokens."""

    num_steps: int
    num_rows: int
    length: int


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides what is learnt."""

    seed: int = 20260
    # Short rows first (attention is cheap there), the whole context in the last tenth.
    phases: tuple[Phase, ...] = (Phase(4600, 8, 512), Phase(400, 2, 2048))
    muon_lr: float = 2e-3
    adam_lr: float = 3e-3
    weight_decay: float = 0.1
    warmup_steps: int = 100
    decay_share: float = 0.6
    clip_norm: float = 1.0
    shape: Shape = field(default_factory=Shape)

    @property
    def num_steps(self) -> int:
        """Steps over all phases."""
        return sum(phase.num_steps for phase in self.phases)

    def lr_factor(self, step: int) -> float:
        """Share of the peak learning rate at `step`."""
        left = (self.num_steps - step) / (self.decay_share * self.num_steps)
        return min(1.0, (step + 1) / self.warmup_steps, left)


class Rows:
    """Batches of training rows; the batch at a step depends on nothing but the recipe."""

    def __init__(self, corpus: Corpus, recipe: Recipe) -> None:
        self._corpus, self._recipe = corpus, recipe
        self._stream_key: tuple[int, int] | None = None
        self._stream = np.zeros(0, dtype=np.int64)

    def at(self, step: int) -> Tensor:
        """Rows of `step`: int64 [num_rows, length + 1]."""
        index = 0
        while step >= self._recipe.phases[index].num_steps:
            step -= self._recipe.phases[index].num_steps
            index += 1
        phase = self._recipe.phases[index]
        passages = self._corpus.training + self._corpus.tales
        num_tokens = sum(len(passage) for passage in passages)
        batch_tokens = phase.num_rows * phase.length
        epoch, batch = divmod(step, (num_tokens - 1) // batch_tokens)
        if self._stream_key != (index, epoch):
            self._stream_key = (index, epoch)
            self._stream = epoch_stream(self._corpus, self._recipe.seed + index, epoch)
        start = batch * batch_tokens
        rows = [
            self._stream[start + i * phase.length : start + (i + 1) * phase.length + 1]
            for i in range(phase.num_rows)
        ]
        return torch.from_numpy(np.stack(rows))


def make_optimizers(network: Network, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    matrices = [p for n, p in network.named_parameters() if p.ndim == 2 and "layers" in n]
    embedding = [p for n, p in network.named_parameters() if p.ndim == 2 and "layers" not in n]
    norms = [p for p in network.parameters() if p.ndim == 1]
    groups = [
        {"params": embedding, "weight_decay": recipe.weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    return [
        torch.optim.Muon(
            matrices,
            lr=recipe.muon_lr,
            weight_decay=recipe.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(groups, lr=recipe.adam_lr, betas=(0.9, 0.95)),
    ]


@torch.no_grad()
def held_out_loss(network: Network, corpus: Corpus, length: int = 512) -> float:
    """Mean nats a token over the books that are not trained on, in windows of `length`."""
    stream = np.concatenate(corpus.held_out).astype(np.int64)
    num_rows = (len(stream) - 1) // length
    rows = np.stack([stream[i * length : (i + 1) * length + 1] for i in range(num_rows)])
    with torch.autocast("cpu", torch.bfloat16):
        losses = [
            network.loss(batch).item() * len(batch) for batch in torch.from_numpy(rows).split(16)
        ]
    return sum(losses) / num_rows


def save(path: Path, state: dict[str, object]) -> None:
    """Write a training checkpoint aside and rename it, so that a kill leaves the old one."""
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)


def train(corpus: Corpus, recipe: Recipe, work: Path) -> Iterator[dict[str, float]]:
    """Run or resume the training in `work`; yields a row of figures at each measurement."""
    torch.manual_seed(recipe.seed)
    network = Network(recipe.shape)
    optimizers = make_optimizers(network, recipe)
    rows = Rows(corpus, recipe)
    path, first, elapsed_s = work / "training.pt", 0, 0.0
    if path.exists():
        state = torch.load(path, weights_only=True)
        network.load_state_dict(state["network"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        first, elapsed_s = state["step"], state["elapsed_s"]
    compiled_loss = torch.compile(network.loss, dynamic=False)
    peak = [[recipe.muon_lr], [recipe.adam_lr] * 2]
    started, losses = time.monotonic() - elapsed_s, []
    for step in range(first, recipe.num_steps):
        for optimizer, lrs in zip(optimizers, peak, strict=True):
            for group, lr in zip(optimizer.param_groups, lrs, strict=True):
                group["lr"] = lr * recipe.lr_factor(step)
        with torch.autocast("cpu", torch.bfloat16):
            loss = compiled_loss(rows.at(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), recipe.clip_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        done = step + 1
        if done % 250 == 0 or done == recipe.num_steps:
            figures = {
                "step": done,
                "training_loss": sum(losses) / len(losses),
                "held_out_loss": held_out_loss(network, corpus),
                "elapsed_s": round(time.monotonic() - started, 1),
            }
            losses = []
            save(
                path,
                {
                    "network": network.state_dict(),
                    "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                    "step": done,
                    "elapsed_s": figures["elapsed_s"],
                },
            )
            yield figures


def main() -> None:
    """Read the books, train, export."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--books", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("localllm/pocket"))
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    recipe = Recipe()
    books = read_books(args.books)
    tokenizer = train_tokenizer(books, recipe.shape.vocab_size)
    corpus = encode_books(books, tokenizer)
    log = args.work / "log.jsonl"
    for figures in train(corpus, recipe, args.work):
        with log.open("a") as file:
            file.write(json.dumps(figures) + "\n")
    network = Network(recipe.shape)
    network.load_state_dict(torch.load(args.work / "training.pt", weights_only=True)["network"])
    last = json.loads(log.read_text().splitlines()[-1])
    facts = {
        "parameters": sum(p.numel() for p in network.parameters()),
        "training_tokens": sum(p.num_steps * p.num_rows * p.length for p in recipe.phases),
        "corpus_tokens": sum(len(passage) for passage in corpus.training),
        "held_out_perplexity": round(math.exp(last["held_out_loss"]), 1),
        "training_minutes": round(last["elapsed_s"] / 60),
        "recipe": asdict(recipe),
    }
    write_checkpoint(network, tokenizer, facts, args.out)


if __name__ == "__main__":
    main()
