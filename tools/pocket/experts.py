"""Train a mixture of experts from `pocket`, and write its checkpoint: `quantize` is tried with it.

    python tools/pocket/experts.py --books BOOKS --work WORK --out FOLDER

Each feed-forward becomes eight experts, of which a token takes two. An expert begins as a random
half of the feed-forward's neurons, with twice their outputs: so two experts, averaged, are about
what the feed-forward was, and the training is short (Komatsuzaki et al. 2022, "Sparse Upcycling",
for the idea). A balancing loss keeps all experts in use (Fedus et al. 2021, "Switch Transformers",
section 2.2). The checkpoint has the layout of Qwen3 with experts.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from export import write_checkpoint
from network import MLP, Network, Shape
from train import Phase, Stage, facts_of, start_from_pocket

NUM_EXPERTS, TOP_K, INNER = 8, 2, 384
BALANCE = 0.01  # the weight of the balancing loss
EXPERTS = Stage("experts", (Phase(450, 512, 2, 2),), 1e-3, 1.5e-3, decay_share=0.9)


class Experts(nn.Module):
    """Experts in place of a feed-forward; every expert computes every token, which is simplest."""

    def __init__(self, mlp: MLP, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden_size, NUM_EXPERTS, bias=False)
        nn.init.normal_(self.gate.weight, std=0.02)
        self.experts = nn.ModuleList(half_of(mlp, shape) for _ in range(NUM_EXPERTS))
        self.imbalance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        """`x`: [batch, seq, hidden]; sets `imbalance`, which is 1 if all are used alike."""
        shares = self.gate(x).float().softmax(-1)
        best = shares.topk(TOP_K, dim=-1)
        factors = best.values / best.values.sum(-1, keepdim=True)
        is_taken = F.one_hot(best.indices, NUM_EXPERTS).to(shares.dtype)
        self.imbalance = (
            NUM_EXPERTS / TOP_K * (is_taken.sum(-2).mean((0, 1)) * shares.mean((0, 1))).sum()
        )
        of_experts = (is_taken * factors[..., None]).sum(-2).to(x.dtype)
        outputs = [expert(x) * of_experts[..., i, None] for i, expert in enumerate(self.experts)]
        return torch.stack(outputs).sum(0)


def half_of(mlp: MLP, shape: Shape) -> MLP:
    """An expert with half of the neurons of `mlp`, drawn at random, and twice their outputs."""
    chosen = torch.randperm(shape.intermediate_size)[:INNER]
    half = MLP(Shape(intermediate_size=INNER))
    with torch.no_grad():
        half.gate_proj.weight.copy_(mlp.gate_proj.weight[chosen])
        half.up_proj.weight.copy_(mlp.up_proj.weight[chosen])
        half.down_proj.weight.copy_(2 * mlp.down_proj.weight[:, chosen])
    return half


def loss_of(network: Network, rows: Tensor, targets: Tensor) -> Tensor:
    """The next-token loss and the balancing loss."""
    loss = network.loss(rows, targets)
    return loss + BALANCE * sum(layer.mlp.imbalance for layer in network.model.layers)


def main() -> None:
    """Read the books, train, export."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--books", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    network, course = start_from_pocket(args.books, args.work)
    for layer in network.model.layers:
        layer.mlp = Experts(layer.mlp, network.shape)
    course.run(EXPERTS, network, lambda rows, targets: loss_of(network, rows, targets))
    facts = facts_of("pocket-experts", network, course, EXPERTS)
    own = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": INNER,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    write_checkpoint(network, course.tokenizer, facts, args.out, own)


if __name__ == "__main__":
    main()
