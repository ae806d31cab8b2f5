"""Train `pocket` and `pocket-draft`, the models in the wheel, and write their checkpoints.

    python tools/pocket/train.py --books BOOKS --work WORK [--out localllm] [--start FOLDER]

Four stages, one after the other:

- pocket: it learns to read and write from plain-text files (`BOOKS/*.txt`) and to answer from the
  conversations of `dialogues.py`, both in every step, towards the end more of the latter;
- answers: it learns answers, with some book text so that it does not forget English. `--start
  FOLDER` begins here, with the network and vocabulary of a finished checkpoint: new topics need no
  more. (The weights in the wheel went through the first stage with 103 topics, and then several
  times through this one, with 126 and more wordings each time; their card counts all tokens.)
- draft: pocket-draft, a tenth of its size, learns to predict what pocket would say;
- head: so does a head on pocket's own hidden states, see head.py.

WORK keeps a checkpoint of each stage, so that a stopped run continues where it was.
Seeded: the same books give the same tokenizer, the same rows and the same first weights. Needs a
C++ compiler (the step is compiled, 1.7 times faster than eager on two cores).

The matrices inside the layers are trained by Muon (K. Jordan et al., 2024, as in `torch.optim`),
everything else by AdamW; the learning rate warms up, stays, and falls to zero.
"""

import argparse
import json
import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from corpus import Corpus, encode_books, epoch_stream, read_books, train_tokenizer
from dialogues import Topic, dialogue_rows, draw_texts, read_topics
from export import Facts, write_checkpoint
from network import Network, Shape

SEED = 20260
DRAFT_SHAPE = Shape(
    hidden_size=128, intermediate_size=256, num_layers=2, num_heads=2, num_kv_heads=1
)
MEASURE_EVERY = 50
VOCABULARY_CONVERSATIONS = 5000
POCKET_FOLDER = Path(__file__).parents[2] / "localllm" / "pocket"


@dataclass(frozen=True, slots=True)
class Phase:
    """`num_steps` steps on rows of `length` tokens, some from books and some from dialogues."""

    num_steps: int
    length: int
    book_rows: int
    dialogue_rows: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens over all its steps."""
        return self.num_steps * self.length * (self.book_rows + self.dialogue_rows)


@dataclass(frozen=True, slots=True)
class Stage:
    """Everything that decides what is learnt in one stage."""

    name: str
    # Short rows first (attention is cheap there), the whole context in the last part.
    phases: tuple[Phase, ...]
    muon_lr: float | None  # None: AdamW trains the layers' matrices too
    adam_lr: float
    decay_share: float
    weight_decay: float = 0.1
    warmup_steps: int = 100
    clip_norm: float = 1.0

    @property
    def num_steps(self) -> int:
        """Steps over all phases."""
        return sum(phase.num_steps for phase in self.phases)

    @property
    def num_tokens(self) -> int:
        """Tokens over all phases."""
        return sum(phase.num_tokens for phase in self.phases)

    def lr_factor(self, step: int) -> float:
        """Share of the peak learning rate at `step`."""
        left = (self.num_steps - step) / (self.decay_share * self.num_steps)
        return min(1.0, (step + 1) / self.warmup_steps, left)


POCKET = Stage(
    "pocket",
    (Phase(3500, 512, 6, 2), Phase(1500, 512, 4, 4), Phase(300, 2048, 1, 1)),
    2e-3,
    3e-3,
    decay_share=0.6,
)
ANSWERS = Stage(
    "answers",
    (Phase(1200, 512, 2, 6), Phase(60, 2048, 1, 1)),
    1e-3,
    1.5e-3,
    decay_share=0.9,
)
DRAFT = Stage("draft", (Phase(600, 512, 2, 3),), 2e-3, 3e-3, decay_share=0.6)
# Without AVX512 a backward pass in bfloat16 takes 30 times as long as one in float32 (measured).
AUTOCASTS = torch.backends.cpu.get_cpu_capability().startswith("AVX512")


class Rows(Protocol):
    """Batches of training rows."""

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Rows of `step` and their targets: int64 [num_rows, length + 1] each."""


class RowSource:
    """Batches of training rows; the batch at a step depends on nothing but stage and seed."""

    def __init__(
        self, stage: Stage, corpus: Corpus, topics: list[Topic], tokenizer: Tokenizer, seed: int
    ) -> None:
        self._stage, self._corpus, self._seed = stage, corpus, seed
        self._topics, self._tokenizer = topics, tokenizer
        self._num_tokens = sum(len(p) for p in corpus.training + corpus.tales)
        self._stream_key: tuple[int, int] | None = None
        self._stream = np.zeros(0, dtype=np.int64)

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Rows of `step` and their targets: int64 [num_rows, length + 1] each."""
        index, global_step = 0, step
        while step >= self._stage.phases[index].num_steps:
            step -= self._stage.phases[index].num_steps
            index += 1
        phase = self._stage.phases[index]
        written = self._book_rows(index, step, phase)
        seed = (self._seed + len(self._stage.name), global_step)
        spoken = dialogue_rows(
            self._topics, self._tokenizer, seed, phase.dialogue_rows, phase.length
        )
        return (
            torch.from_numpy(np.concatenate([written, spoken.ids])),
            torch.from_numpy(np.concatenate([written, spoken.targets])),
        )

    def _book_rows(self, index: int, step: int, phase: Phase) -> np.ndarray:
        batch_tokens = phase.book_rows * phase.length
        epoch, batch = divmod(step, (self._num_tokens - 1) // batch_tokens)
        if self._stream_key != (index, epoch):
            self._stream_key = (index, epoch)
            self._stream = epoch_stream(self._corpus, self._seed + index, epoch)
        start = batch * batch_tokens
        return np.stack(
            [
                self._stream[start + i * phase.length : start + (i + 1) * phase.length + 1]
                for i in range(phase.book_rows)
            ]
        )


def make_optimizers(network: nn.Module, stage: Stage) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, if it has a rate, AdamW for everything else."""
    if stage.muon_lr is None:
        decayed = [p for p in network.parameters() if p.ndim == 2]
        return [_adam_w(network, decayed, stage)]
    matrices = [p for n, p in network.named_parameters() if p.ndim == 2 and "layers" in n]
    decayed = [p for n, p in network.named_parameters() if p.ndim == 2 and "layers" not in n]
    muon = torch.optim.Muon(
        matrices,
        lr=stage.muon_lr,
        weight_decay=stage.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return [muon, _adam_w(network, decayed, stage)]


def _adam_w(network: nn.Module, decayed: list[nn.Parameter], stage: Stage) -> torch.optim.AdamW:
    groups = [
        {"params": decayed, "weight_decay": stage.weight_decay},
        {"params": [p for p in network.parameters() if p.ndim != 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=stage.adam_lr, betas=(0.9, 0.95))


def distillation_loss(draft: Network, teacher: Network, rows: Tensor) -> Tensor:
    """Mean cross-entropy (nats) of the draft under the teacher's distribution at each position.

    `rows`: int64 [batch, seq + 1]. Source: Hinton et al. 2015, section 2, at temperature 1.
    """
    with torch.no_grad():
        target = teacher.logits(rows[:, :-1]).float().softmax(-1)
    predicted = draft.logits(rows[:, :-1]).float().log_softmax(-1)
    return -(target * predicted).sum(-1).mean()


@torch.no_grad()
def held_out_loss(network: Network, corpus: Corpus, length: int = 512) -> float:
    """Mean nats a token over the held-out books, in windows of `length`."""
    stream = np.concatenate(corpus.held_out).astype(np.int64)
    num_rows = (len(stream) - 1) // length
    rows = np.stack([stream[i * length : (i + 1) * length + 1] for i in range(num_rows)])
    with torch.autocast("cpu", torch.bfloat16, enabled=AUTOCASTS):
        losses = [
            network.loss(batch).item() * len(batch) for batch in torch.from_numpy(rows).split(16)
        ]
    return sum(losses) / num_rows


def save(path: Path, state: dict[str, object]) -> None:
    """Write a training checkpoint aside and rename it, so that a kill leaves the old one."""
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)


def train(
    network: nn.Module,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    rows: Rows,
    stage: Stage,
    path: Path,
) -> Iterator[dict[str, float]]:
    """Run or resume one stage whose checkpoint is `path`; yields each measured step's figures."""
    optimizers = make_optimizers(network, stage)
    peak_lrs = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    first, elapsed_s = 0, 0.0
    if path.exists():
        state = torch.load(path, weights_only=True)
        network.load_state_dict(state["network"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        first, elapsed_s = state["step"], state["elapsed_s"]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    compiled_loss = torch.compile(loss_of, dynamic=False)
    started, losses = time.monotonic() - elapsed_s, []
    for step in range(first, stage.num_steps):
        for group, peak_lr in zip(groups, peak_lrs, strict=True):
            group["lr"] = peak_lr * stage.lr_factor(step)
        with torch.autocast("cpu", torch.bfloat16, enabled=AUTOCASTS):
            loss = compiled_loss(*rows.at(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), stage.clip_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        done = step + 1
        if done % MEASURE_EVERY == 0 or done == stage.num_steps:
            state = {
                "network": network.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                "step": done,
                "elapsed_s": round(time.monotonic() - started, 1),
            }
            save(path, state)
            yield {
                "step": done,
                "training_loss": sum(losses) / len(losses),
                "elapsed_s": state["elapsed_s"],
            }
            losses = []


@dataclass(frozen=True, slots=True)
class Course:
    """What every stage uses: the texts, the questions, and the folder of the checkpoints."""

    corpus: Corpus
    topics: list[Topic]
    tokenizer: Tokenizer
    work: Path
    seed: int

    def rows(self, stage: Stage) -> Rows:
        """The rows of a stage."""
        return RowSource(stage, self.corpus, self.topics, self.tokenizer, self.seed)

    def run(
        self, stage: Stage, network: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor]
    ) -> float:
        """Train `network` through `stage`, writing `log.jsonl`; returns the seconds it took."""
        rows = self.rows(stage)
        path = self.work / f"{stage.name}.pt"
        for figures in train(network, loss_of, rows, stage, path):
            with (self.work / "log.jsonl").open("a") as log:
                log.write(json.dumps({"stage": stage.name, **figures}) + "\n")
        # A stage that was already finished yields nothing, but its network is wanted.
        state = torch.load(path, weights_only=True)
        network.load_state_dict(state["network"])
        return float(state["elapsed_s"])


def load_weights(network: Network, folder: Path) -> None:
    """Take the weights of a checkpoint, without those of its head."""
    tensors = load_file(folder / "model.safetensors")
    own = {name: each for name, each in tensors.items() if not name.startswith("mtp.")}
    network.load_state_dict(own)


def start_from_pocket(books: Path, work: Path) -> tuple[Network, Course]:
    """Pocket itself, and a course whose rows it has not seen."""
    work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    network = Network(Shape())
    load_weights(network, POCKET_FOLDER)
    tokenizer = Tokenizer.from_file(str(POCKET_FOLDER / "tokenizer.json"))
    corpus = encode_books(read_books(books), tokenizer)
    seed = SEED + tokens_seen(POCKET_FOLDER)
    return network, Course(corpus, read_topics(), tokenizer, work, seed)


def facts_of(name: str, network: Network, course: Course, stage: Stage) -> Facts:
    """What the card of a model says that was made from pocket in one stage."""
    return Facts(
        name=name,
        corpus_tokens=sum(len(passage) for passage in course.corpus.training),
        training_tokens=tokens_seen(POCKET_FOLDER) + stage.num_tokens,
        perplexity=math.exp(held_out_loss(network, course.corpus)),
        num_topics=len(course.topics),
    )


def tokens_seen(folder: Path) -> int:
    """Tokens that a finished checkpoint was trained on, by its card."""
    found = re.search(r"([\d,]+) tokens seen in all", (folder / "README.md").read_text())
    if found is None:
        raise SystemExit(f"the card of {folder} does not say how many tokens it was trained on")
    return int(found[1].replace(",", ""))


def main() -> None:
    """Read the books, train, export."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--books", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("localllm"))
    parser.add_argument("--start", type=Path)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    books, topics = read_books(args.books), read_topics()
    pocket, draft = Network(Shape()), Network(DRAFT_SHAPE)
    seconds, seen = {}, POCKET.num_tokens
    if args.start is not None:
        seen = tokens_seen(args.start)
        load_weights(pocket, args.start)
        tokenizer = Tokenizer.from_file(str(args.start / "tokenizer.json"))
    else:
        spoken = draw_texts(topics, SEED, VOCABULARY_CONVERSATIONS)
        tokenizer = train_tokenizer(books, spoken, pocket.shape.vocab_size)
    # A further round draws different rows.
    seed = SEED if args.start is None else SEED + seen
    course = Course(encode_books(books, tokenizer), topics, tokenizer, args.work, seed)
    if args.start is None:
        seconds["pocket"] = course.run(POCKET, pocket, pocket.loss)
    seconds["answers"] = course.run(ANSWERS, pocket, pocket.loss)
    seconds["draft"] = course.run(
        DRAFT, draft, lambda rows, _: distillation_loss(draft, pocket.requires_grad_(False), rows)
    )
    models = {
        "pocket": (pocket, seen + ANSWERS.num_tokens),
        "pocket-draft": (draft, DRAFT.num_tokens),
    }
    for name, (network, training_tokens) in models.items():
        facts = Facts(
            name=name,
            corpus_tokens=sum(len(passage) for passage in course.corpus.training),
            training_tokens=training_tokens,
            perplexity=math.exp(held_out_loss(network, course.corpus)),
            num_topics=len(course.topics),
        )
        write_checkpoint(network, tokenizer, facts, args.out / name)
    from head import agreement_on_held_out, train_head, write_head  # which imports this module

    head = train_head(pocket, course, args.out / "pocket")
    write_head(head, agreement_on_held_out(head, pocket, course), args.out / "pocket")
    (args.work / "seconds.json").write_text(json.dumps(seconds) + "\n")


if __name__ == "__main__":
    main()
