"""The parts of a decoder layer; every tensor arrives as an argument or is a weight."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from localllm.model.config import ModelConfig
from localllm.model.inputs import ForwardBatch
from localllm.model.linear import Projection
from localllm_kernels import Ops
from localllm_kernels.fused_decoder import DecoderParts, LayerParts
from localllm_kernels.kv_cache import KVCache

# The linears of a layer in the order in which they compute; those of one group read one input.
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
OUTPUT = ("self_attn.o_proj",)
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
DOWN = ("mlp.down_proj",)


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Root-mean-square norm with a weight of the normed width."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The norms on each query and key head (Qwen3)."""

    query: RMSNorm
    key: RMSNorm


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of the batch's positions, float32 [num_tokens, head_dim / 2]."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention over the paged cache; query, key and value come from one product."""

    qkv_proj: Projection
    o_proj: Projection
    norms: HeadNorms | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None

    def __call__(
        self, x: Tensor, rotation: Rotation, batch: ForwardBatch, cache: KVCache, ops: Ops
    ) -> Tensor:
        """`x`: [num_tokens, hidden] -> the same shape; writes new keys and values to `cache`."""
        return self.o_proj(self.attend(x, rotation, batch, cache, ops))

    def attend(
        self, x: Tensor, rotation: Rotation, batch: ForwardBatch, cache: KVCache, ops: Ops
    ) -> Tensor:
        """The heads' outputs side by side, [num_tokens, num_heads · head_dim]."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv = self.qkv_proj(x).view(x.shape[0], heads + 2 * kv_heads, self.head_dim)
        norms = self.norms
        query = ops.rotate_and_store(
            qkv,
            rotation.cos,
            rotation.sin,
            cache,
            batch.slot_mapping,
            query_norm=None if norms is None else norms.query.weight,
            key_norm=None if norms is None else norms.key.weight,
            eps=0.0 if norms is None else norms.query.eps,
        )
        attended = ops.paged_attention(
            query,
            cache,
            block_tables=batch.block_tables,
            cu_seqlens_q=batch.cu_seqlens_q,
            seq_lens=batch.seq_lens,
            max_query_len=batch.max_query_len,
            scale=self.head_dim**-0.5,
            window=self.window,
        )
        return attended.flatten(1)


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """Feed-forward with a SiLU gate; gate and up come from one product."""

    gate_up_proj: Projection
    down_proj: Projection

    def __call__(self, x: Tensor, ops: Ops) -> Tensor:
        """`x`: [num_tokens, hidden] -> the same shape."""
        return self.down_proj(self.activate(x, ops))

    def activate(self, x: Tensor, ops: Ops) -> Tensor:
        """The inner values, [num_tokens, intermediate]."""
        return ops.silu_mul(self.gate_up_proj(x))


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    input_norm: RMSNorm
    attention: Attention
    post_attention_norm: RMSNorm
    mlp: GatedMLP


def build_layer(
    config: ModelConfig,
    window: int | None,
    *,
    norm_weight: Callable[[str], Tensor],
    linear: Callable[[tuple[str, ...]], Projection],
    has_head_norms: bool,
) -> DecoderLayer:
    """A layer from its parts, which are asked for by their names within the layer."""

    def norm(name: str) -> RMSNorm:
        return RMSNorm(norm_weight(name), config.rms_norm_eps)

    return DecoderLayer(
        input_norm=norm("input_layernorm"),
        attention=Attention(
            qkv_proj=linear(QKV),
            o_proj=linear(OUTPUT),
            norms=HeadNorms(norm("self_attn.q_norm"), norm("self_attn.k_norm"))
            if has_head_norms
            else None,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            window=window,
        ),
        post_attention_norm=norm("post_attention_layernorm"),
        mlp=GatedMLP(gate_up_proj=linear(GATE_UP), down_proj=linear(DOWN)),
    )


def decoder_parts(layers: Sequence[DecoderLayer], last_norm: RMSNorm) -> DecoderParts:
    """What a fused decoder is made of, from the layers and the norm behind them."""
    attention = layers[0].attention
    return DecoderParts(
        layers=[_layer_parts(layer) for layer in layers],
        last_norm=last_norm.weight,
        eps=last_norm.eps,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
    )


def _layer_parts(layer: DecoderLayer) -> LayerParts:
    attention, mlp = layer.attention, layer.mlp
    norms = attention.norms
    return LayerParts(
        input_norm=layer.input_norm.weight,
        post_attention_norm=layer.post_attention_norm.weight,
        query_norm=None if norms is None else norms.query.weight,
        key_norm=None if norms is None else norms.key.weight,
        qkv=attention.qkv_proj,
        output=attention.o_proj,
        gate_up=mlp.gate_up_proj,
        down=mlp.down_proj,
        window=attention.window,
    )
