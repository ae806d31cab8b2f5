"""Write a trained network as a checkpoint folder in the hub's format."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from corpus import END_OF_TEXT, HELD_OUT_BOOKS
from network import Network

CARDS = {
    "pocket": """# pocket

The model inside localllm: {parameters:,} parameters, {context:,} tokens of context, trained from
nothing on two CPU cores. It answers questions about localllm and about how inference works, makes
small talk, and tells stories; it knows nothing else, and it can be wrong. It is there so that
every part of localllm can be tried and tested without a download: it is a demonstration, not an
assistant. A real model is one command away: `localllm chat qwen3-0.6b`.

| | |
|---|---|
| architecture | Qwen3: {layers} layers, width {width}, {heads} query and {kv_heads} KV heads |
| vocabulary | byte-level BPE, {vocab:,} tokens, trained on the same texts |
| data | 21 English books in the public domain ({corpus_tokens:,} tokens), \
and generated conversations on {num_topics} topics; {training_tokens:,} tokens seen in all |
| perplexity | {perplexity:.1f} a token over {held_out}, not trained on (windows of 512) |
| questions | `python tools/pocket/score.py` asks it what it was not trained on |
| how it is made | `python tools/pocket/train.py --books BOOKS --work WORK` |
| licence | Apache-2.0, as the rest of localllm |
""",
    "pocket-draft": """# pocket-draft

The draft model of `pocket`: {parameters:,} parameters and the same vocabulary, trained to predict
what pocket would say. Alone it is of no use; it is there to guess pocket's next tokens.

| | |
|---|---|
| architecture | Qwen3: {layers} layers, width {width}, {heads} query and {kv_heads} KV heads |
| data | pocket's distributions over {training_tokens:,} tokens of the same texts |
| perplexity | {perplexity:.1f} a token over {held_out}, not trained on (windows of 512) |
| how it is made | together with pocket, by `tools/pocket/train.py` |
| licence | Apache-2.0, as the rest of localllm |
""",
    "pocket-experts": """# pocket-experts

`pocket` with eight experts in place of each feed-forward, {parameters:,} parameters, of which a
token takes two experts. `localllm quantize` is tried with it.

| | |
|---|---|
| architecture | Qwen3 with experts: {layers} layers, width {width} |
| perplexity | {perplexity:.1f} a token over {held_out}, not trained on (windows of 512) |
| how it is made | `python tools/pocket/experts.py --books BOOKS --work WORK --out FOLDER` |
| licence | Apache-2.0, as the rest of localllm |
""",
    "pocket-hybrid": """# pocket-hybrid

`pocket` with gated delta nets in place of attention in three of four layers, {parameters:,}
parameters. What its states lose in half precision is measured with it.

| | |
|---|---|
| architecture | Qwen3.5: {layers} layers, width {width} |
| perplexity | {perplexity:.1f} a token over {held_out}, not trained on (windows of 512) |
| how it is made | `python tools/pocket/hybrid.py --books BOOKS --work WORK --out FOLDER` |
| licence | Apache-2.0, as the rest of localllm |
""",
}
CHAT_TEMPLATE = """\
{% for message in messages -%}
    {{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{% if add_generation_prompt -%}
    {{ '<|im_start|>assistant\\n' }}
{%- endif %}
"""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts on the card that the network itself does not hold."""

    name: str
    corpus_tokens: int
    training_tokens: int
    perplexity: float
    num_topics: int


def write_checkpoint(
    network: Network,
    tokenizer: Tokenizer,
    facts: Facts,
    out: Path,
    own: Mapping[str, object] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Write bfloat16 weights, config, tokenizer and card to `out`; files there are replaced.

    `own`: what the config has besides the shape, or in place of it; `tensors`: the weights as the
    checkpoint's format has them, where that is not `network`'s own.
    """
    out.mkdir(parents=True, exist_ok=True)
    shape = network.shape
    ends = [tokenizer.token_to_id(token) for token in ("<|im_end|>", END_OF_TEXT)]
    stored = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in (tensors or network.state_dict()).items()
    }
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
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
        "eos_token_id": ends[0],
        **(own or {}),
    }
    generation = {
        "do_sample": True,
        "temperature": 0.3,
        "top_p": 0.9,
        "max_new_tokens": 300,
        "eos_token_id": ends,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
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
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    card = CARDS[facts.name].format(
        **asdict(facts),
        parameters=sum(parameter.numel() for parameter in network.parameters()),
        context=shape.max_positions,
        layers=shape.num_layers,
        width=shape.hidden_size,
        heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        vocab=shape.vocab_size,
        held_out=" and ".join(name.replace("-", " ") for name in HELD_OUT_BOOKS),
    )
    (out / "README.md").write_text(card)
