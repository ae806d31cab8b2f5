"""Heads for the next token but one that lie in a model's own checkpoint (multi-token prediction).

Such a head is one layer of the model's kind behind a join, with the model's embeddings and mostly
its output head. Its layer attends to entries of (hidden state i, token i + 1), each at the place
of token i + 1; there is none at the first place, which queries do not see.

Sources: the report on DeepSeek V3, section 2.2; transformers' `MtpModel`; the names of tensors in
the published files of Qwen3-Next, Qwen3.5, GLM-4.5 and DeepSeek V3.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from localllm.model.architecture import FINAL_NORM, HEAD, Architecture, layer_name
from localllm.model.blocks.attention import AttentionSpec
from localllm.model.blocks.latent_attention import LatentAttentionSpec
from localllm.model.found_head import EMBEDDING_NORM, HIDDEN_NORM, FoundHead, HeadLayout
from localllm.model.join import DRAFTED, JOIN, JoinSpec
from localllm.model.layer import LayerPlan
from localllm.model.stacked_experts import unstack
from localllm.model.stored_names import own_tensors
from localllm.model.tensor_files import read_headers
from localllm.model.tensor_info import TensorInfo
from localllm.model.weight_check import check_tensors

# Qwen3-Next and later Qwen, and pocket.
_APART = HeadLayout(
    (
        ("mtp.fc.", f"{JOIN}."),
        ("mtp.pre_fc_norm_embedding.", f"{EMBEDDING_NORM}."),
        ("mtp.pre_fc_norm_hidden.", f"{HIDDEN_NORM}."),
        ("mtp.norm.", f"{FINAL_NORM}."),
        ("mtp.lm_head.", f"{HEAD}."),
        ("mtp.token_ids", DRAFTED),
        ("mtp.layers.0.", f"{layer_name(0)}."),
    )
)


def _as_further_layer(number: int) -> HeadLayout:
    """GLM-4 with experts, and DeepSeek V3: one more layer behind the model's own."""
    layer = f"{layer_name(number)}."
    names = (
        (f"{layer}eh_proj.", f"{JOIN}."),
        (f"{layer}enorm.", f"{EMBEDDING_NORM}."),
        (f"{layer}hnorm.", f"{HIDDEN_NORM}."),
        (f"{layer}shared_head.norm.", f"{FINAL_NORM}."),
        # Copies of the model's own.
        (f"{layer}shared_head.head.", ""),
        (f"{layer}embed_tokens.", ""),
        (layer, f"{layer_name(0)}."),
    )
    return HeadLayout(names)


def mtp_architecture(target: Architecture, found: Mapping[str, TensorInfo]) -> Architecture | None:
    """The head with the tensors `found`; None for a model without full attention, and for one whose
    layers have inputs of their own, which a head has not.
    """
    plan = _last_full_attention(target.layers)
    if plan is None or target.per_layer is not None:
        return None
    first, second = (replace(target.norm, name=name) for name in (EMBEDDING_NORM, HIDDEN_NORM))
    ids = found.get(DRAFTED)
    join = JoinSpec(first, second, ids.shape[0] if ids is not None and ids.shape else None)
    return replace(
        target,
        norm=replace(target.norm, name=FINAL_NORM),
        layers=(plan,),
        tie_word_embeddings=True,
        has_tower=False,
        join=join,
    )


def find_mtp(files: Sequence[Path], target: Architecture) -> FoundHead | None:
    """The head in a model's files, checked, or None. Raises: as `check_weights`."""
    named = own_tensors(read_headers(list(files)), target)
    for layout in (_APART, _as_further_layer(target.num_layers)):
        if any(name.startswith(layout.stored_name(f"{JOIN}.")) for name in named):
            found = layout.renamed(named)
            architecture = mtp_architecture(target, found)
            if architecture is None:
                return None
            own = unstack(found, architecture)
            weights = check_tensors(own, architecture, layout.stored_name)
            last = target.num_layers  # behind the final norm, as its own
            return FoundHead("head", architecture, weights, layout, (last,), 1)
    return None


def _last_full_attention(layers: Sequence[LayerPlan]) -> LayerPlan | None:
    """The last layer that attends to all tokens, as it stands in a head."""
    for plan in reversed(layers):
        for i, place in enumerate(plan.places):
            match place.block:
                case AttentionSpec(window=None, reads=None) | LatentAttentionSpec() as attention:
                    own = replace(place, block=attention.hiding(1))
                    return replace(plan, places=(*plan.places[:i], own, *plan.places[i + 1 :]))
    return None
