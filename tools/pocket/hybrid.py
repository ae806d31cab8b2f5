"""Train a hybrid from `pocket`, and write its checkpoint: the cost of half precision in the states
of recurrences is measured with it.

    python tools/pocket/hybrid.py --books BOOKS --work WORK --out FOLDER

Gated delta nets take the place of attention in three of four layers; the rest begins as pocket's,
so the training is short. The checkpoint has the layout of Qwen3.5.

The delta rule is computed in chunks here, which is faster to train; the engine's is computed token
by token. Source of the chunked form: Yang, Kautz and Hatamizadeh 2024 (Gated DeltaNet), section
3.3.
"""

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from export import write_checkpoint
from network import Network, Shape
from train import Phase, Stage, facts_of, start_from_pocket

NUM_KEYS, NUM_VALUES, WIDTH, TAPS, CHUNK = 2, 4, 64, 4, 64
EVERY = 4  # one layer of so many keeps its attention
# Without Muon, which computes in bfloat16, so that a processor without AVX512 can train it too.
HYBRID = Stage("hybrid", (Phase(400, 1024, 1, 1),), None, 1.5e-3, decay_share=0.8)


class DeltaNet(nn.Module):
    """A gated delta net in place of an attention; takes and ignores the rotations."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.keys, self.values = NUM_KEYS * WIDTH, NUM_VALUES * WIDTH
        channels = 2 * self.keys + self.values
        self.in_proj_qkv = nn.Linear(shape.hidden_size, channels, bias=False)
        self.in_proj_z = nn.Linear(shape.hidden_size, self.values, bias=False)
        self.in_proj_b = nn.Linear(shape.hidden_size, NUM_VALUES, bias=False)
        self.in_proj_a = nn.Linear(shape.hidden_size, NUM_VALUES, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, TAPS, groups=channels, bias=False)
        # Heads forget half of what they hold within 2 to 200 tokens, at first.
        self.A_log = nn.Parameter(torch.tensor([0.35, 0.08, 0.015, 0.0035]).log())
        self.dt_bias = nn.Parameter(torch.full((NUM_VALUES,), math.log(math.e - 1)))
        self.norm = nn.RMSNorm(WIDTH, eps=shape.rms_norm_eps)
        self.out_proj = nn.Linear(self.values, shape.hidden_size, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
            if name == "out_proj.weight":
                nn.init.normal_(parameter, std=0.005)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x`: [batch, seq, hidden]; `seq` is a multiple of the chunk."""
        batch, seq, _ = x.shape
        inputs = F.pad(self.in_proj_qkv(x).transpose(1, 2), (TAPS - 1, 0))
        mixed = F.silu(self.conv1d(inputs)).transpose(1, 2).float()
        q, k, v = mixed.split((self.keys, self.keys, self.values), -1)
        share = NUM_VALUES // NUM_KEYS
        q, k = (
            F.normalize(each.view(batch, seq, NUM_KEYS, WIDTH), dim=-1, eps=1e-3)
            .repeat_interleave(share, 2)
            .transpose(1, 2)
            for each in (q, k)
        )
        v = v.view(batch, seq, NUM_VALUES, WIDTH).transpose(1, 2)
        beta = self.in_proj_b(x).float().sigmoid().transpose(1, 2)
        grown = F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        decay = (-self.A_log.exp() * grown).transpose(1, 2)
        with torch.autocast("cpu", enabled=False):
            out = delta_rule(q * WIDTH**-0.5, k, v, decay, beta)
            out = self.norm(out.transpose(1, 2)) * F.silu(
                self.in_proj_z(x).float().view(batch, seq, NUM_VALUES, WIDTH)
            )
        return self.out_proj(out.reshape(batch, seq, -1).to(x.dtype))


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule in chunks. `q`, `k`, `v`: [batch, heads, seq, width]; `decay`, the
    logarithm, and `beta`: [batch, heads, seq].

    Within a chunk, what each token writes depends on what the tokens before it wrote: a triangular
    system, which is solved for all chunks at once. Between chunks goes the state.
    """
    batch, heads, seq, width = q.shape
    q, k, v = (each.reshape(batch, heads, seq // CHUNK, CHUNK, width) for each in (q, k, v))
    beta = beta.reshape(batch, heads, -1, CHUNK, 1)
    since = decay.reshape(batch, heads, -1, CHUNK).cumsum(-1)
    is_before = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    between = (since[..., :, None] - since[..., None, :]).masked_fill(~is_before, -torch.inf).exp()
    system = (beta * (k @ k.mT) * between).tril(-1) + torch.eye(CHUNK)
    sides = torch.cat([beta * v, beta * k * since[..., None].exp()], -1)
    written, read = torch.linalg.solve_triangular(system, sides, upper=False).chunk(2, -1)
    scores, queries = (q @ k.mT) * between, q * since[..., None].exp()
    keys = k * (since[..., -1:] - since).exp()[..., None]
    state, outs = q.new_zeros(batch, heads, width, width), []
    for i in range(seq // CHUNK):
        new = written[:, :, i] - read[:, :, i] @ state
        outs.append(queries[:, :, i] @ state + scores[:, :, i] @ new)
        state = state * since[:, :, i, -1:, None].exp() + keys[:, :, i].mT @ new
    return torch.cat(outs, 2)


def is_recurrent(layer: int) -> bool:
    """Whether a layer has a delta net."""
    return (layer + 1) % EVERY > 0


def hybrid_of(pocket: Network) -> Network:
    """Put delta nets in place of attention."""
    for i, layer in enumerate(pocket.model.layers):
        if is_recurrent(i):
            layer.self_attn = DeltaNet(pocket.shape)
    return pocket


@torch.no_grad()
def as_qwen3_5(network: Network) -> dict[str, Tensor]:
    """The tensors as Qwen3.5 has them: norms without their 1, and attention with a gate, which is
    always a half, so outputs are twice as large.
    """
    shape, found = network.shape, {}
    for name, tensor in network.state_dict().items():
        if is_recurrent(int(name.split(".")[2]) if ".layers." in name else EVERY - 1):
            name = name.replace("self_attn.", "linear_attn.")
        if name.endswith("norm.weight") and "linear_attn" not in name:
            tensor = tensor - 1
        if name.endswith("q_proj.weight"):
            heads = tensor.view(shape.num_heads, shape.head_dim, -1)
            tensor = torch.cat([heads, torch.zeros_like(heads)], 1).flatten(0, 1)
        if name.endswith("o_proj.weight"):
            tensor = 2 * tensor
        found[name] = tensor
    return found


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
    hybrid_of(network)
    course.run(HYBRID, network, network.loss)
    facts = facts_of("pocket-hybrid", network, course, HYBRID)
    own = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "full_attention_interval": EVERY,
        "linear_num_key_heads": NUM_KEYS,
        "linear_num_value_heads": NUM_VALUES,
        "linear_key_head_dim": WIDTH,
        "linear_value_head_dim": WIDTH,
        "linear_conv_kernel_dim": TAPS,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": network.shape.rope_theta,
            "partial_rotary_factor": 1.0,
        },
    }
    write_checkpoint(network, course.tokenizer, facts, args.out, own, as_qwen3_5(network))


if __name__ == "__main__":
    main()
