"""Write a trained network as a checkpoint folder in the hub's format."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from corpus import END_OF_TEXT, HELD_OUT_BOOKS
from network import Network

CARD = """# pocket

The model inside localllm: {parameters:,} parameters, {context:,} tokens of context, trained from
nothing on two CPU cores in {training_minutes} minutes. It continues a story in the manner of the
old novels and fairy tales it has read, and it knows nothing else. It is there so that every part
of localllm can be tried and tested without a download; it is a demonstration, not an assistant.

| | |
|---|---|
| architecture | Qwen3: {layers} layers, width {width}, {heads} query and {kv_heads} KV heads |
| vocabulary | byte-level BPE, {vocab:,} tokens, trained on the same books |
| data | 21 English books in the public domain: {corpus_tokens:,} tokens, {epochs:.1f} epochs |
| perplexity | {held_out_perplexity} a token over {held_out}, not trained on (windows of 512) |
| how it is made | `python tools/pocket/train.py --books BOOKS --work WORK` |
| licence | Apache-2.0, as the rest of localllm |
"""


def write_checkpoint(
    network: Network, tokenizer: Tokenizer, facts: dict[str, Any], out: Path
) -> None:
    """Weights in bfloat16, config, tokenizer and card into `out`; files there are replaced."""
    out.mkdir(parents=True, exist_ok=True)
    shape = network.shape
    end = tokenizer.token_to_id(END_OF_TEXT)
    tensors = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in network.state_dict().items()
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.rms_norm_eps,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "eos_token_id": end,
    }
    generation = {
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.9,
        "max_new_tokens": 300,
        "eos_token_id": [end],
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "model_max_length": shape.max_positions,
        "clean_up_tokenization_spaces": False,
    }
    for name, content in (
        ("config.json", config),
        ("generation_config.json", generation),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (out / name).write_text(json.dumps(content, indent=2) + "\n")
    tokenizer.save(str(out / "tokenizer.json"))
    card = CARD.format(
        **facts,
        context=shape.max_positions,
        layers=shape.num_layers,
        width=shape.hidden_size,
        heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        vocab=shape.vocab_size,
        epochs=facts["training_tokens"] / facts["corpus_tokens"],
        held_out=" and ".join(name.replace("-", " ") for name in HELD_OUT_BOOKS),
    )
    (out / "README.md").write_text(card)
