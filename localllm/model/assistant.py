"""Gemma 4's assistants: small models that draft for a large one, and read its keys and values.

An assistant has no keys and values of its own. Its layers attend to those of its target's last full
and last windowed layer that have any, of the tokens before the newest. It is narrower than its
target, whose embedding and hidden state it takes; see join.py. All tokens of a draft stand at the
place of the newest one, behind the same keys.

Sources: transformers' `Gemma4AssistantForCausalLM` and its candidate generator. That one lets the
first draft after a rejected one see the rejected token's keys, and windowed layers two tokens more;
here an assistant sees what its target's next token does, but the newest.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from localllm.errors import RequestError
from localllm.files.json_file import read_json_object
from localllm.model.architecture import HEAD, Architecture
from localllm.model.blocks.attention import AttentionSpec
from localllm.model.config_fields import ConfigFields
from localllm.model.families.table import architecture_of
from localllm.model.found_head import FoundHead, HeadLayout
from localllm.model.join import (
    BACK,
    CLUSTER_TOKENS,
    CLUSTERS,
    JOIN,
    ClusterSpec,
    DraftedAs,
    JoinSpec,
)
from localllm.model.layer import LayerPlan, Place
from localllm.model.tensor_files import read_headers
from localllm.model.weight_check import check_tensors
from localllm.model.weight_files import find_weight_files

_LAYOUT = HeadLayout(
    (
        ("pre_projection.", f"{JOIN}."),
        ("post_projection.", f"{BACK}."),
        ("masked_embedding.centroids.", f"{CLUSTERS}."),
        ("masked_embedding.token_ordering", CLUSTER_TOKENS),
        ("model.embed_tokens.", f"{HEAD}."),
        ("lm_head.", f"{HEAD}."),  # the same
        ("model.", "model."),
    )
)
_MODELS = {
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
}
_Sources = Mapping[bool, tuple[int, AttentionSpec]]


def find_assistant(name: str, folder: Path, target_name: str, target: Architecture) -> FoundHead:
    """The assistant `name` in a folder, checked, for a model.

    Raises: CheckpointError, UnsupportedModelError; RequestError if it is of another model.
    """
    where = str(folder / "config.json")
    fields = ConfigFields(read_json_object(folder / "config.json"), where)
    base = _as_model(fields)
    sources = _sources(target)
    reason = _why_not(fields, base, target, sources)
    if reason is not None:
        raise RequestError(
            f"{name} cannot draft for {target_name}: {reason}",
            param="spec",
            hint="the model that its page names",
        )
    join = JoinSpec(
        None,
        None,
        num_drafted=base.vocab_size,
        drafted_as=DraftedAs.ALL,
        clusters=_read_clusters(fields, base.vocab_size),
        width=target.hidden_size,
    )
    architecture = replace(
        base,
        layers=tuple(_reading(plan, sources) for plan in base.layers),
        tie_word_embeddings=True,
        embedding_scale=target.embedding_scale,
        logit_cap=None,
        join=join,
    )
    found = _LAYOUT.renamed(read_headers(find_weight_files(folder)))
    weights = check_tensors(found, architecture, _LAYOUT.stored_name)
    taps = (target.num_layers,)
    return FoundHead("assistant", architecture, weights, _LAYOUT, taps, base.num_layers)


def _as_model(fields: ConfigFields) -> Architecture:
    inner = fields.raw.get("text_config")
    if not isinstance(inner, dict):
        fields.fail("text_config", "an object")
    kind = inner.get("model_type")
    if kind not in _MODELS:
        fields.fail("text_config.model_type", " or ".join(_MODELS))
    model = {
        "dtype": fields.raw.get("dtype"),
        "hidden_size_per_layer_input": 0,
        **inner,
        "architectures": [_MODELS[kind]],
        "num_kv_shared_layers": 0,
        "quantization_config": fields.raw.get("quantization_config"),
    }
    return architecture_of(model, fields.where)


def _read_clusters(fields: ConfigFields, vocab_size: int) -> ClusterSpec | None:
    if not fields.flag("use_ordered_embeddings"):
        return None
    number = fields.integer("num_centroids", 1, vocab_size, default=2048)
    if vocab_size % number:
        fields.fail("num_centroids", f"a divisor of the {vocab_size:,} tokens")
    return ClusterSpec(number, fields.integer("centroid_intermediate_top_k", 1, number, default=32))


def _sources(target: Architecture) -> _Sources:
    """The target's last windowed attention with keys of its own, and its last full one, each with
    the index of its layer, by whether it is windowed.
    """
    found: dict[bool, tuple[int, AttentionSpec]] = {}
    for i, plan in enumerate(target.layers):
        for place in plan.places:
            match place.block:
                case AttentionSpec(reads=None) as attention:
                    found[attention.window is not None] = (i, attention)
    return found


def _why_not(
    fields: ConfigFields, assistant: Architecture, target: Architecture, sources: _Sources
) -> str | None:
    """What shows that it is another model's assistant; None if nothing does."""
    width = fields.integer("backbone_hidden_size", 1, 1 << 20, default=1536)
    if width != target.hidden_size:
        return f"it is for a model that is {width:,} wide, not {target.hidden_size:,}"
    if assistant.vocab_size != target.vocab_size:
        return f"it has {assistant.vocab_size:,} tokens, the model {target.vocab_size:,}"
    for own in assistant.blocks_of(AttentionSpec):
        found = sources.get(own.window is not None)
        kind = "full" if own.window is None else "windowed"
        if found is None:
            return f"the model has no {kind} layers"
        heads, theirs = _keys(own), _keys(found[1])
        if heads != theirs:
            return f"its {kind} layers read {heads} of keys, those of the model have {theirs}"
        if found[1].window == 1:
            return "the model's windowed layers see one token"
    return None


def _keys(attention: AttentionSpec) -> str:
    return f"{attention.num_kv_heads} heads of {attention.head_dim}"


def _reading(plan: LayerPlan, sources: _Sources) -> LayerPlan:
    """A layer that reads keys and values of the target."""
    return replace(plan, places=tuple(_reading_place(place, sources) for place in plan.places))


def _reading_place(place: Place, sources: _Sources) -> Place:
    if not isinstance(place.block, AttentionSpec):
        return place
    layer, source = sources[place.block.window is not None]
    # The newest token is in its window, too, but has no keys yet.
    window = None if source.window is None else source.window - 1
    return replace(place, block=replace(place.block, reads=layer, window=window))
