"""The network that is trained: a Qwen3-shaped decoder in plain torch, one dense sequence a row.

It shares no code with the engine on purpose: the checkpoint is the only thing that passes between
them, and a test compares the engine's logits with those of transformers on that checkpoint.
Module names are those of the checkpoint format, so `state_dict()` is the file.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the decoder; every linear's input width is a multiple of 128."""

    vocab_size: int = 6144
    hidden_size: int = 256
    intermediate_size: int = 768
    num_layers: int = 8
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    max_positions: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


class SelfAttention(nn.Module):
    """Causal grouped-query attention with a norm on each query and key head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden_size, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)
        self.k_norm = nn.RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x`: [batch, seq, hidden]; `cos`, `sin`: [seq, head_dim]."""
        batch, seq, _ = x.shape
        head_dim = self.shape.head_dim
        q = self.q_norm(self.q_proj(x).view(batch, seq, -1, head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, seq, -1, head_dim)).transpose(1, 2)
        v = self.v_proj(x).view(batch, seq, -1, head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        groups = self.shape.num_heads // self.shape.num_kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, seq, -1))


class MLP(nn.Module):
    """SiLU-gated feed-forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`x`: [batch, seq, hidden]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = SelfAttention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x`: [batch, seq, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    """Embedding, layers and final norm (the checkpoint's `model.`)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)


class Network(nn.Module):
    """The whole decoder; the head is the embedding table."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Backbone(shape)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * shape.num_layers) ** 0.5)

    def logits(self, inputs: Tensor) -> Tensor:
        """Next-token logits [batch, seq, vocab_size] of `inputs`: int64 [batch, seq]."""
        return F.linear(self.hidden(inputs), self.model.embed_tokens.weight)

    def hidden(self, inputs: Tensor) -> Tensor:
        """Hidden states after the final norm [batch, seq, hidden]; `inputs`: int64 [batch, seq]."""
        cos, sin = rotary_tables(self.shape, inputs.shape[1])
        x = self.model.embed_tokens(inputs)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return self.model.norm(x)

    def loss(self, rows: Tensor, targets: Tensor | None = None) -> Tensor:
        """Mean next-token cross-entropy (nats) of `rows`: int64 [batch, seq + 1].

        `targets`, of the same shape, holds -100 where a token of `rows` is not to be predicted.
        """
        logits = self.logits(rows[:, :-1])
        targets = rows if targets is None else targets
        return F.cross_entropy(logits.float().flatten(0, 1), targets[:, 1:].flatten())


def rotary_tables(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, head_dim], the half-split layout of the Llama checkpoints."""
    inv_freq = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    angles = torch.outer(torch.arange(length).float(), inv_freq).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of `x`: [batch, heads, seq, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
