"""`localllm show`: describe a checkpoint."""

from typing import Annotated, Any

import typer

from localllm.cli.draw.columns import aligned
from localllm.cli.draw.output import json_line, note, show_controls, write_stdout
from localllm.cli.flags.common import JsonObject, Model
from localllm.errors import CheckpointError, TemplateError
from localllm.hub.catalog import BUILT_IN_MODELS, load_catalog, resolve_model
from localllm.text.prompt import Conversation

EXAMPLE = (
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is a token?"},
    {"role": "assistant", "content": "A piece of a word."},
    {"role": "user", "content": "And a tokenizer?"},
)


def show(
    model: Model,
    template: Annotated[
        bool, typer.Option("--template", help="Render an example with the chat template.")
    ] = False,
    json_output: JsonObject = False,
) -> None:
    """Describe a model: architecture, sizes, quantization, context, template.

    For a model that is not on this machine, only the small files are fetched.
    """
    from localllm.hub.card import read_card
    from localllm.hub.download import fetch_model, find_snapshot

    source = resolve_model(model)
    is_fetched = source.repo is None or find_snapshot(source.repo, source.revision) is not None
    if not is_fetched and source.tag is None:
        note(f"{model} is not on this machine; fetching its small files", dim=True)
    card = read_card(source, fetch_model(source, with_weights=False))
    if template:
        if card.tokenizer is None:
            raise CheckpointError(
                "the tokenizer cannot be read", where="; ".join(card.problems)[:300]
            )
        write_stdout(_render_example(card.tokenizer, model))
    elif json_output:
        write_stdout(json_line(_fields(card)))
    else:
        rows = [(name, _text(value)) for name, value in _fields(card).items()]
        write_stdout(show_controls("\n".join(aligned(rows))) + "\n")


def _render_example(tokenizer: Any, name: str) -> str:
    """The example as the model reads it; without a system prompt if the template takes none."""
    if not tokenizer.has_chat_template:
        raise TemplateError(
            f"{name} has no chat template",
            where="it is a base model, which continues text",
            hint="localllm show without --template",
        )
    try:
        text = tokenizer.render_chat(Conversation(EXAMPLE))
    except TemplateError:
        text = tokenizer.render_chat(Conversation(EXAMPLE[1:]))
    return show_controls(text).rstrip("\n") + "\n"


def _fields(card: Any) -> dict[str, Any]:
    """The fields to print, in order, for both the table and the JSON object."""
    config, tokenizer, weights = card.config, card.tokenizer, card.weights
    kind = "folder" if card.place.is_dir() else "file"
    fields: dict[str, Any] = {"model": card.name, kind: card.place}
    if card.program is not None:
        fields["downloaded_by"] = card.program
    entry = load_catalog().get(card.name)
    if entry is not None or card.name in BUILT_IN_MODELS:
        fields["licence"] = entry.licence if entry is not None else "apache-2.0"
    names = config.get("architectures")
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    fields["architecture"] = ", ".join(names) if names and is_list else "unknown"
    if weights is not None:
        fields["parameters"] = weights.num_parameters
        fields["weights_bytes"] = weights.num_bytes
        fields["dtypes"] = dict(weights.bytes_by_dtype)
    fields["quantization"] = card.quantization
    fields |= _sizes_of(config) if card.architecture is None else _sizes(card.architecture)
    if tokenizer is not None:
        fields["template"] = "yes" if tokenizer.has_chat_template else "none: a base model"
        if tokenizer.can_think:
            markers = tokenizer.markers
            fields["thinking"] = "yes" if markers is None else f"{markers.opens}…{markers.closes}"
    if card.sampling:
        fields["sampling"] = dict(card.sampling)
    if card.problems:
        fields["problems"] = list(card.problems)
    return fields


def _sizes(architecture: Any) -> dict[str, Any]:
    """The sizes of a model; several of a kind where its layers differ."""
    blocks = architecture.attentions()
    windows = dict.fromkeys(block.window for block in blocks if block.window is not None)

    def of_all(name: str) -> Any:
        found = list(dict.fromkeys(getattr(block, name) for block in blocks))
        return found[0] if len(found) == 1 else found

    fields: dict[str, Any] = {
        "layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "heads": of_all("num_heads"),
        "kv_heads": of_all("num_kv_heads"),
        "head_dim": of_all("head_dim"),
        "vocabulary": architecture.vocab_size,
        "context": architecture.max_position_embeddings,
    }
    if windows:
        fields["sliding_window"] = next(iter(windows)) if len(windows) == 1 else list(windows)
    if architecture.has_tower:
        fields["images"] = "not read"
    fields["kv_bytes_per_1k_tokens"] = 1024 * architecture.token_bytes(lambda n: 2 * n)
    if architecture.recurrent_groups:
        fields["state_bytes_per_request"] = architecture.slot_bytes()
    return fields


def _sizes_of(config: Any) -> dict[str, Any]:
    """What the config of a model that cannot be loaded says itself."""
    names = {
        "layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "vocabulary": "vocab_size",
        "context": "max_position_embeddings",
        "sliding_window": "sliding_window",
    }
    found = {name: config.get(key) for name, key in names.items()}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, (int, float, str)) and len(str(value)) < 80
    }


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(part)}" for name, part in value.items())
    if isinstance(value, list):
        return "; ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)
