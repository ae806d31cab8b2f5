"""Writes a model with a shape from the catalogue and random Q4_0 weights as a GGUF file.

The types are those of `llama-quantize` for Q4_0: linears in Q4_0, the embedding (also the head, if
they are tied) in Q6_K, or in Q8_0 where its width is not a multiple of 256, norms in float32.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter

from localllm.model.architecture import Architecture
from localllm.model.blocks.attention import AttentionSpec
from localllm.model.blocks.delta_net import DeltaNetSpec
from localllm.model.blocks.gated_mlp import GatedMLPSpec

Bytes = npt.NDArray[np.uint8]
_SCALE = np.float16(0.01)


# What llama.cpp calls the tensors of a layer.
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
}
# Of Gemma 3, which has norms behind the blocks too, and of Qwen3.5.
_OWN_NAMES = {
    "Qwen3_5ForCausalLM": {"post_attention_layernorm": "post_attention_norm"},
    "Gemma3ForCausalLM": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
}
_KINDS = {
    "Qwen3ForCausalLM": "qwen3",
    "LlamaForCausalLM": "llama",
    "Gemma3ForCausalLM": "gemma3",
    "Qwen3_5ForCausalLM": "qwen35",
}


def write_gguf(path: Path, architecture: Architecture, seed: int = 0) -> None:
    """Write the file, for Qwen3, Qwen3.5 without experts, Gemma 3, and Llama, without a stretched
    context.
    """
    writer = GGUFWriter(path, _KINDS[architecture.name])
    writer.add_vocab_size(architecture.vocab_size)
    writer.add_context_length(architecture.max_position_embeddings)
    writer.add_embedding_length(architecture.hidden_size)
    writer.add_block_count(architecture.num_layers)
    # All are alike but for windows and rotations; llama.cpp knows which of Gemma's have a window.
    *windowed, attention = sorted(
        architecture.blocks_of(AttentionSpec), key=lambda each: each.window is None
    )
    for each in windowed:
        writer.add_sliding_window(each.window)
    for net in architecture.blocks_of(DeltaNetSpec):
        _add_delta_net(writer, net, attention.rope.rotary_width(attention.head_dim))
    [mlp] = architecture.blocks_of(GatedMLPSpec)
    writer.add_feed_forward_length(mlp.inner_size)
    writer.add_head_count(attention.num_heads)
    writer.add_head_count_kv(attention.num_kv_heads)
    writer.add_key_length(attention.head_dim)
    writer.add_value_length(attention.head_dim)
    writer.add_layer_norm_rms_eps(architecture.norm.eps)
    writer.add_rope_freq_base(attention.rope.theta)
    writer.add_tokenizer_model("no_vocab")
    rng = np.random.default_rng(seed)
    for tensor, values, kind in _tensors(architecture, rng):
        writer.add_tensor(tensor, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_delta_net(writer: GGUFWriter, net: DeltaNetSpec, rotary_width: int) -> None:
    writer.add_ssm_conv_kernel(net.taps)
    writer.add_ssm_state_size(net.key_width)
    writer.add_ssm_group_count(net.num_keys)
    writer.add_ssm_time_step_rank(net.num_values)
    writer.add_ssm_inner_size(net.num_values * net.value_width)
    writer.add_full_attention_interval(4)
    writer.add_rope_dimension_count(rotary_width)
    # Of text, all three kinds of positions are the same.
    writer.add_rope_dimension_sections([11, 11, 10, 0])


def _tensors(
    architecture: Architecture, rng: np.random.Generator
) -> Iterator[tuple[str, npt.NDArray[np.generic], GGMLQuantizationType]]:
    vocabulary = architecture.vocab_size, architecture.hidden_size
    q4, q6, f32 = GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q6_K, GGMLQuantizationType.F32
    draw, of_vocabulary = _q6_k, q6
    if architecture.hidden_size % 256:
        draw, of_vocabulary = _q8_0, GGMLQuantizationType.Q8_0
    yield "token_embd.weight", draw(rng, *vocabulary), of_vocabulary
    if not architecture.tie_word_embeddings:
        yield "output.weight", draw(rng, *vocabulary), of_vocabulary
    yield "output_norm.weight", np.ones(architecture.hidden_size, np.float32), f32
    names = _NAMES | _OWN_NAMES.get(architecture.name, {})
    for i, layer in enumerate(architecture.layers):
        for name, shape in layer.tensors().items():
            stem = name.removesuffix(".weight")
            theirs = f"blk.{i}.{names[stem]}" + (".weight" if stem != name else "")
            if stem.endswith("A_log"):
                yield theirs, np.full(shape, -0.1, np.float32), f32
            elif stem.endswith("conv1d"):
                yield theirs, np.full(shape, 0.1, np.float32)[:, 0], f32
            elif len(shape) == 2:
                yield theirs, _q4_0(rng, *shape), q4
            else:
                yield theirs, np.ones(shape, np.float32), f32


def _q4_0(rng: np.random.Generator, rows: int, columns: int) -> Bytes:
    """Blocks of 32 values: a float16 scale and 16 bytes."""
    blocks = rng.integers(0, 256, (rows, columns // 32, 18), np.uint8)
    blocks[..., :2] = np.frombuffer(_SCALE.tobytes(), np.uint8)
    return blocks.reshape(rows, -1)


def _q8_0(rng: np.random.Generator, rows: int, columns: int) -> Bytes:
    """Blocks of 32 values: a float16 scale and 32 bytes."""
    blocks = rng.integers(0, 256, (rows, columns // 32, 34), np.uint8)
    blocks[..., :2] = np.frombuffer(_SCALE.tobytes(), np.uint8)
    return blocks.reshape(rows, -1)


def _q6_k(rng: np.random.Generator, rows: int, columns: int) -> Bytes:
    """Blocks of 256 values: 192 bytes of codes, 16 int8 scales, a float16 scale of those."""
    blocks = rng.integers(0, 256, (rows, columns // 256, 210), np.uint8)
    blocks[..., 192:208] &= 15
    blocks[..., 208:] = np.frombuffer(np.float16(0.001).tobytes(), np.uint8)
    return blocks.reshape(rows, -1)
