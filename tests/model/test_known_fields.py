"""Every field of config.json is used, known to change nothing, or named."""

import dataclasses
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from class_configs import KINDS, SAID, whole_config
from every_family import EVERY_FAMILY, small_config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from localllm.errors import UnsupportedModelError
from localllm.model.config_fields import ConfigFields
from localllm.model.families import table
from localllm.model.families.known_fields import is_harmless
from localllm.model.families.table import FAMILIES, architecture_of, read_architecture

# What modeling files of transformers ask of a config besides the fields of a text model: parts
# beside it, and what a class has under another name.
NOT_FIELDS = re.compile(
    "get_text_config|rms_norm_eps|norm_eps|layer_types|layers_block_type|num_(local_)?experts|"
    "_rope_type_labels|standardize"
)
# Of the towers in the same files, by what they begin with.
TOWER = re.compile(
    "patch_size|in_channels|num_heads|num_position_embeddings|temporal_patch_size|depth|"
    "out_hidden_size|kv_sharing_modes|output_proj_dims|attention_(chunk|context|invalid|logit).*|"
    "conv_kernel_size|subsampling_.*|gradient_clipping|residual_weight|pooling_kernel_size|"
    "position_embedding_size|use_clipped_linears|model_patch_size"
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """By class, the names that its reader has asked for."""
    found: dict[str, set[str]] = {}

    def noting(name: str, read: Callable[[ConfigFields], Any]) -> Callable[[ConfigFields], Any]:
        def read_and_note(fields: ConfigFields) -> Any:
            architecture = read(fields)
            found.setdefault(name, set()).update(fields.read)
            return architecture

        return read_and_note

    readers = {name: noting(name, read) for name, read in FAMILIES.items()}
    monkeypatch.setattr(table, "FAMILIES", readers)
    return found


def test_whatever_a_class_of_transformers_asks_for_is_known(asked: dict[str, set[str]]) -> None:
    for family in EVERY_FAMILY:
        architecture_of(small_config(family))
    unknown = {}
    for family, kind in KINDS.items():
        architecture_of(whole_config(family, **SAID.get(family, {})))
        config = CONFIG_MAPPING[kind]
        source = Path(inspect.getfile(getattr(transformers, family))).read_text()
        names = {field.name for field in dataclasses.fields(config)}
        names |= set(re.findall(r"\bconfig\.(\w+)", source)) | set(config.attribute_map)
        left = {name for name in names - asked[family] if not is_harmless(name, family)}
        left = {
            name for name in left if not re.fullmatch(f"{NOT_FIELDS.pattern}|{TOWER.pattern}", name)
        }
        if left:
            unknown[family] = sorted(left)
    assert not unknown


@pytest.mark.parametrize("family", FAMILIES)
def test_no_field_that_transformers_writes_is_called_unknown(family: str) -> None:
    config = CONFIG_MAPPING[KINDS[family]](**SAID.get(family, {}))
    written = {**json.loads(config.to_json_string()), "architectures": [family]}
    assert architecture_of(written).unknown_fields == ()


@pytest.mark.parametrize(
    ("changes", "unknown"),
    [
        ({"attention_sharpening": 3.5}, ("attention_sharpening",)),
        ({"logits_scaling": 8.0, "note": None, "use_more": False}, ("logits_scaling",)),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "wobble": 3}},
            ("rope_scaling.wobble",),
        ),
        ({"is_llama_config": True, "rope_interleaved": False, "compression_ratio": 1.0}, ()),
        ({"_note": 1, "hidden_dropout": 0.1, "unsloth_fixed": True, "pad_token_id": 3}, ()),
    ],
)
def test_a_field_that_nobody_knows_is_named(
    changes: dict[str, Any], unknown: tuple[str, ...]
) -> None:
    raw = {**small_config("LlamaForCausalLM"), **changes}
    assert architecture_of(raw).unknown_fields == unknown


# What published files hold besides the fields of the class.
PUBLISHED: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {
        "is_llama_config": True,
        "rope_interleaved": False,
        "transformers.js_config": {"dtype": "q4"},
        "pretraining_tp": 2,
        "unsloth_fixed": True,
    },
    "Phi3ForCausalLM": {
        "embd_pdrop": 0.1,
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "lm_head_bias": False,
    },
    "GptOssForCausalLM": {"experts_per_token": 4, "initial_context_length": 4096},
    "DeepseekV3ForCausalLM": {
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 1,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "topk_method": "noaux_tc",
    },
    "GraniteMoeHybridForCausalLM": {
        "init_method": "mup",
        "mamba_chunk_size": 256,
        "normalization_function": "rmsnorm",
    },
    "Qwen3_5ForCausalLM": {
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "rope_parameters": {"mrope_interleaved": True, "mrope_section": [2, 1, 1]},
    },
    "NemotronHForCausalLM": {
        "hybrid_override_pattern": "ME*-M",
        "mamba_hidden_act": "silu",
        "rescale_prenorm_residual": True,
        "time_step_floor": 0.0001,
        "use_mamba_kernels": True,
    },
    "Lfm2ForCausalLM": {"block_dim": 64, "conv_dim_out": 64, "theta": 1e6, "use_pos_enc": True},
    "SmolLM3ForCausalLM": {"max_window_layers": 28, "no_rope_layer_interval": 4},
    "Gemma2ForCausalLM": {"cache_implementation": "hybrid", "sliding_window_size": 24},
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_no_field_of_a_published_file_is_called_unknown(family: str) -> None:
    usual = architecture_of(small_config(family)).unknown_fields
    found = architecture_of({**small_config(family), **PUBLISHED[family]})
    assert set(found.unknown_fields) <= set(usual)


def test_what_is_unknown_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    raw = {**small_config("LlamaForCausalLM"), "wobble": 2, "note": "of mine"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    read_architecture(tmp_path)
    [record] = caplog.records
    assert record.getMessage().endswith("localllm does not know are ignored: 'wobble', 'note'")


@pytest.mark.parametrize(
    ("family", "changes", "name"),
    [
        ("LlamaForCausalLM", {"per_layer_config": {"1": {"head_dim": 8}}}, "per_layer_config"),
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, "hidden_act"),
        ("DeepseekV3ForCausalLM", {"scoring_func": "softmax"}, "scoring_func"),
        ("Glm4MoeForCausalLM", {"topk_method": "greedy"}, "topk_method"),
        ("Qwen3_5ForCausalLM", {"attn_output_gate": False}, "attn_output_gate"),
        ("NemotronHForCausalLM", {"mamba_hidden_act": "relu"}, "mamba_hidden_act"),
        ("GptOssForCausalLM", {"swiglu_limit": 5.0}, "swiglu_limit"),
        ("OlmoeForCausalLM", {"clip_qkv": 8.0}, "clip_qkv"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional"),
        ("Qwen3ForCausalLM", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "spiral", "factor": 2.0}}, "spiral"),
    ],
)
def test_what_changes_the_arithmetic_is_refused_by_name(
    family: str, changes: dict[str, Any], name: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=name):
        architecture_of({**small_config(family), **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "swish"},
        {"torch_dtype": "float"},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
        {"per_layer_config": {}},
    ],
)
def test_other_spellings_of_the_same_read_the_same(changes: dict[str, Any]) -> None:
    raw = small_config("LlamaForCausalLM")
    found = architecture_of({**raw, **changes})
    assert (found, found.unknown_fields) == (architecture_of(raw), ())
