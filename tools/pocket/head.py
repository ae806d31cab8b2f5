"""Train pocket's head, which drafts pocket's next tokens from its hidden states.

    python tools/pocket/head.py --books BOOKS --work WORK [--out localllm/pocket]

The head is one layer behind a join of a hidden state with the next token's embedding, as in the
next-token layers of DeepSeek V3 (section 2.2 of its report) and Qwen3.5, whose tensor names it has.
It has an output head of its own for the likeliest tokens only, since the model's would be most of
its cost. It learns pocket's distributions over books, conversations and what pocket writes itself
(written.py), also from what it has computed itself in place of hidden states, as it has to when it
drafts several tokens (EAGLE-3, Li et al. 2025, section 3.2).

`train.py` trains it as its last stage; this program trains it alone, for the pocket in the package.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from network import MLP, Network, SelfAttention, Shape, rotary_tables, rotate
from train import POCKET_FOLDER, Course, Phase, Rows, Stage, start_from_pocket
from written import LONG, LONGEST, SHORT, Writing, written_rows

HEAD = Stage("head", (Phase(4000, 512, 1, 1),), 2e-3, 2e-3, decay_share=0.6)
# A head that has only seen short rows drafts worse behind long texts; one that has seen long rows
# last, worse behind short ones.
ALL = Stage("head-all", (Phase(2400, 512, 1, 1),), 1e-3, 1e-3, decay_share=1.0, warmup_steps=20)
NUM_DRAFTED_TOKENS = 2048
# How many tokens it learns to draft from one hidden state, each with its weight in the loss.
DEPTH_WEIGHTS = (1.0, 0.7, 0.5)
# Rows of generated conversations that are counted to find the likeliest tokens.
COUNTED_STEPS = 200


class HeadAttention(SelfAttention):
    """Attention of drafted positions over those with true hidden states, and the drafted before."""

    def drafts(self, x: Tensor, depth: int, earlier: list[tuple[Tensor, Tensor]]) -> Tensor:
        """`x`: [batch, seq, hidden], of which row i stands at position i + `depth` and sees the
        first of `earlier` up to i, and of each other one row i; adds its own keys and values.
        """
        batch, seq, _ = x.shape
        head_dim, groups = self.shape.head_dim, self.shape.num_heads // self.shape.num_kv_heads
        cos, sin = (table[depth:] for table in rotary_tables(self.shape, seq + depth))
        q = self.q_norm(self.q_proj(x).view(batch, seq, -1, head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, seq, -1, head_dim)).transpose(1, 2)
        v = self.v_proj(x).view(batch, seq, -1, head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        earlier.append((k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
        (first_k, first_v), *own = earlier
        scores = q @ first_k.transpose(-1, -2)
        hidden = torch.ones(seq, seq, dtype=torch.bool).triu(1)
        parts = [scores.masked_fill(hidden, float("-inf"))]
        parts += [(q * k).sum(-1, keepdim=True) for k, _ in own]
        weights = (torch.cat(parts, -1).float() * head_dim**-0.5).softmax(-1).to(v.dtype)
        out = weights[..., :seq] @ first_v
        for i, (_, v) in enumerate(own):
            out = out + weights[..., seq + i, None] * v
        return self.o_proj(out.transpose(1, 2).reshape(batch, seq, -1))


class HeadLayer(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = HeadAttention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def drafts(self, x: Tensor, depth: int, earlier: list[tuple[Tensor, Tensor]]) -> Tensor:
        """See HeadAttention."""
        x = x + self.self_attn.drafts(self.input_layernorm(x), depth, earlier)
        return x + self.mlp(self.post_attention_layernorm(x))


class Head(nn.Module):
    """The head of a network, for the tokens `token_ids` of its vocabulary."""

    def __init__(self, target: Network, token_ids: Sequence[int]) -> None:
        super().__init__()
        shape = self.shape = target.shape
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.pre_fc_norm_embedding = nn.RMSNorm(width, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(width, eps=eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([HeadLayer(shape)])
        self.norm = nn.RMSNorm(width, eps=eps)
        self.lm_head = nn.Linear(width, len(token_ids), bias=False)
        self.register_buffer("token_ids", torch.tensor(token_ids))
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(parameter, std=0.01)
        with torch.no_grad():
            # It begins as one that passes the hidden state on, and knows the model's own head.
            self.fc.weight[:, width:].add_(torch.eye(width))
            self.norm.weight.copy_(target.model.norm.weight)
            self.lm_head.weight.copy_(target.model.embed_tokens.weight[self.token_ids])

    def drafted(self, target: Network, rows: Tensor, hidden: Tensor) -> list[Tensor]:
        """The logits for each depth, [batch, seq - 1 - depth, drafted tokens]: row i of depth d is
        for the token at i + d + 2. `rows`: int64 [batch, seq]; `hidden`: the target's [batch, seq,
        hidden].
        """
        found = []
        earlier: list[tuple[Tensor, Tensor]] = []
        num_rows = rows.shape[1] - len(DEPTH_WEIGHTS)
        x = hidden[:, :num_rows]
        for depth in range(len(DEPTH_WEIGHTS)):
            tokens = rows[:, depth + 1 : depth + 1 + num_rows]
            embedded = self.pre_fc_norm_embedding(target.model.embed_tokens(tokens))
            x = self.fc(torch.cat([embedded, self.pre_fc_norm_hidden(x)], -1))
            x = self.norm(self.layers[0].drafts(x, depth, earlier))
            found.append(self.lm_head(x))
        return found

    def loss(self, target: Network, rows: Tensor) -> Tensor:
        """The weighted mean over depths of the cross-entropy under the target's distribution, as
        far as it lies on the drafted tokens. `rows`: int64 [batch, seq].
        """
        with torch.no_grad():
            hidden = target.hidden(rows)
            logits = F.linear(hidden, target.model.embed_tokens.weight).float()
            wanted = logits.softmax(-1)[..., self.token_ids]
        total = torch.zeros(())
        for depth, logits in enumerate(self.drafted(target, rows, hidden)):
            own = wanted[:, depth + 1 : depth + 1 + logits.shape[1]]
            crossed = -(own * logits.float().log_softmax(-1)).sum(-1).mean()
            total = total + DEPTH_WEIGHTS[depth] * crossed
        return total / sum(DEPTH_WEIGHTS)

    @torch.no_grad()
    def agreement(self, target: Network, rows: Tensor) -> list[float]:
        """For each depth, how often its likeliest token is the target's. `rows`: as for `loss`."""
        hidden = target.hidden(rows)
        wanted = F.linear(hidden, target.model.embed_tokens.weight).argmax(-1)
        shares = []
        for depth, logits in enumerate(self.drafted(target, rows, hidden)):
            own = wanted[:, depth + 1 : depth + 1 + logits.shape[1]]
            shares.append((self.token_ids[logits.argmax(-1)] == own).float().mean().item())
        return shares


def likeliest_tokens(course: Course, count: int) -> list[int]:
    """The ids of the most frequent tokens of books and answers, ascending."""
    rows = course.rows(HEAD)
    counts = np.zeros(course.tokenizer.get_vocab_size(), dtype=np.int64)
    for step in range(COUNTED_STEPS):
        targets = rows.at(step)[1].numpy()
        counts += np.bincount(targets[targets >= 0], minlength=len(counts))
    for passage in course.corpus.training:
        counts += np.bincount(passage, minlength=len(counts))
    return sorted(np.argsort(-counts, kind="stable")[:count].tolist())


@dataclass(frozen=True, slots=True)
class Mixture:
    """Steps of `num_written` rows that the model has written, and others as long as they are."""

    others: Rows
    written: np.ndarray
    num_written: int

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """See Rows."""
        rows, targets = self.others.at(step)
        rng = np.random.default_rng((7, step))
        own = self.written[rng.choice(len(self.written), self.num_written, replace=False)]
        both = [torch.cat([each, torch.from_numpy(own)]) for each in (rows, targets)]
        return both[0], both[1]


@dataclass(frozen=True, slots=True)
class InTurn:
    """A step of each source in turn; one that is named twice gives each of its steps twice."""

    sources: Sequence[Rows]

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """See Rows."""
        return self.sources[step % len(self.sources)].at(step // len(self.sources))


@dataclass(frozen=True, slots=True)
class HeadCourse(Course):
    """A course with rows that the model in `folder` has written."""

    folder: Path

    def rows(self, stage: Stage) -> Rows:
        """See Course."""
        short = self._mixture(stage, SHORT, 3)
        if stage is HEAD:
            return short
        # A step of short rows before each one of long rows.
        long = self._mixture(_of_length(stage, LONG), LONG, 2)
        longest = self._mixture(_of_length(stage, LONGEST), LONGEST, 1)
        return InTurn((short, long, short, longest))

    def _mixture(self, stage: Stage, writing: Writing, num_written: int) -> Rows:
        written = written_rows(writing, self.folder, self.corpus, self.work)
        return Mixture(Course.rows(self, stage), written, num_written)


def _of_length(stage: Stage, writing: Writing) -> Stage:
    """The stage with rows of books only, as long as those of a writing."""
    return replace(stage, phases=(Phase(stage.num_steps, writing.row_tokens - 1, 1),))


def train_head(target: Network, course: Course, folder: Path) -> Head:
    """A head for `target`, whose checkpoint is in `folder`; continues where it was stopped."""
    target.requires_grad_(False)
    head = Head(target, likeliest_tokens(course, NUM_DRAFTED_TOKENS))
    parts = (course.corpus, course.topics, course.tokenizer, course.work, course.seed)
    own = HeadCourse(*parts, folder)
    for stage in (HEAD, ALL):
        own.run(stage, head, lambda rows, _: head.loss(target, rows))
    return head


def agreement_on_held_out(head: Head, target: Network, course: Course) -> list[float]:
    """`Head.agreement` over part of the books that nothing was trained on."""
    stream = np.concatenate(course.corpus.held_out).astype(np.int64)
    rows = torch.from_numpy(stream[: 64 * 512].reshape(64, 512))
    found = [head.agreement(target, each) for each in rows.split(8)]
    return [sum(each) / len(found) for each in zip(*found, strict=True)]


def write_head(head: Head, shares: Sequence[float], folder: Path) -> None:
    """Add the head to the checkpoint in `folder`, whose other tensors stay as they are; `shares`:
    its agreement with the target, by depth.
    """
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: each for name, each in tensors.items() if not name.startswith("mtp.")}
    for name, tensor in head.state_dict().items():
        is_ids = name == "token_ids"
        stored = tensor.detach().to(torch.int32 if is_ids else torch.bfloat16)
        tensors[f"mtp.{name}"] = stored.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    parameters = sum(parameter.numel() for parameter in head.parameters())
    agreed = ", ".join(f"{each:.0%}" for each in shares)
    card = [
        line
        for line in (folder / "README.md").read_text().splitlines()
        if not line.startswith("| head |")
    ]
    card.insert(
        next(i for i, line in enumerate(card) if line.startswith("| questions |")),
        f"| head | {parameters:,} parameters more, which draft the next tokens out of the "
        f"{NUM_DRAFTED_TOKENS:,} most frequent ones: in books that nothing was trained on, its "
        f"likeliest token is pocket's for {agreed} of the first, second and third tokens ahead |",
    )
    (folder / "README.md").write_text("\n".join(card) + "\n")


def main() -> None:
    """Train, measure, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--books", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=POCKET_FOLDER)
    args = parser.parse_args()
    target, course = start_from_pocket(args.books, args.work)
    head = train_head(target, course, POCKET_FOLDER)
    write_head(head, agreement_on_held_out(head, target, course), args.out)


if __name__ == "__main__":
    main()
