"""A model in the shape of one of the catalogue, with random Q4_0 weights, as a GGUF file.

What `llama-quantize` makes of a checkpoint as Q4_0: linears in Q4_0, the embedding, which is the
head too where they are tied, in Q6_K, norms in float32.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter

from localllm.model.config import ModelConfig

Bytes = npt.NDArray[np.uint8]
_SCALE = np.float16(0.01)


def write_gguf(path: Path, config: ModelConfig, seed: int = 0) -> None:
    """Write it; for Qwen3 and Llama without a stretched context."""
    name = {"Qwen3ForCausalLM": "qwen3", "LlamaForCausalLM": "llama"}[config.architecture]
    writer = GGUFWriter(path, name)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_tokenizer_model("no_vocab")
    rng = np.random.default_rng(seed)
    for tensor, values, kind in _tensors(config, rng):
        writer.add_tensor(tensor, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(
    config: ModelConfig, rng: np.random.Generator
) -> Iterator[tuple[str, npt.NDArray[np.generic], GGMLQuantizationType]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    q4, q6, f32 = GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q6_K, GGMLQuantizationType.F32
    yield "token_embd.weight", _q6_k(rng, config.vocab_size, hidden), q6
    if not config.tie_word_embeddings:
        yield "output.weight", _q6_k(rng, config.vocab_size, hidden), q6
    yield "output_norm.weight", np.ones(hidden, np.float32), f32
    linears = {
        "attn_q": (q_width, hidden),
        "attn_k": (kv_width, hidden),
        "attn_v": (kv_width, hidden),
        "attn_output": (hidden, q_width),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    norms = {"attn_norm": hidden, "ffn_norm": hidden}
    if config.architecture == "Qwen3ForCausalLM":
        norms |= {"attn_q_norm": config.head_dim, "attn_k_norm": config.head_dim}
    for i in range(config.num_layers):
        for name, (width_out, width_in) in linears.items():
            yield f"blk.{i}.{name}.weight", _q4_0(rng, width_out, width_in), q4
        for name, width in norms.items():
            yield f"blk.{i}.{name}.weight", np.ones(width, np.float32), f32


def _q4_0(rng: np.random.Generator, rows: int, columns: int) -> Bytes:
    """Blocks of 32 values: a float16 scale and 16 bytes."""
    blocks = rng.integers(0, 256, (rows, columns // 32, 18), np.uint8)
    blocks[..., :2] = np.frombuffer(_SCALE.tobytes(), np.uint8)
    return blocks.reshape(rows, -1)


def _q6_k(rng: np.random.Generator, rows: int, columns: int) -> Bytes:
    """Blocks of 256 values: 192 bytes of codes, 16 int8 scales, a float16 scale of those."""
    blocks = rng.integers(0, 256, (rows, columns // 256, 210), np.uint8)
    blocks[..., 192:208] &= 15
    blocks[..., 208:] = np.frombuffer(np.float16(0.001).tobytes(), np.uint8)
    return blocks.reshape(rows, -1)
