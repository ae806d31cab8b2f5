"""Where a checkpoint says how it is quantized, and which fields of that are known.

Whether a linear is quantized is seen from its tensors, and how from the fields that
quantization_config.py reads. The other fields say how the weights were made, or how other programs
compute with them. A field that nobody knows is named in a warning, like those of config.json; one
that speaks of a rotation, of zeros left out or of an adapter is refused.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from localllm.errors import CheckpointError, UnsupportedModelError, brief
from localllm.files.json_file import read_json_object
from localllm.files.model_file import has_file

WHERE = "config.json: quantization_config"
# Files beside a config.json that does not say it, and the method of those that name none. Source:
# `get_config_filenames` of vLLM's quantization methods.
_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
_OLDER_FIELD = "compression_config"
_OTHER_METHODS = {"compressed_tensors": "compressed-tensors", "intel/auto-round": "auto-round"}
_NAMES = (
    "quant_method method version format bits w_bit group_size q_group_size zero_point sym desc_act "
    "checkpoint_format is_marlin_format pack_dtype dynamic weight_block_size config_groups "
    "quantization_status transform_config sparsity_config packing_format data_type extra_config "
    "quantization quant_algo quantized_layers "
    # Which linears are quantized.
    "ignore ignored_layers modules_to_not_convert modules_in_block_to_quantize exclude_modules "
    "lm_head block_name_to_quantize to_quant_block_names module_name_preceding_first_block "
    "quant_nontext_module quant_lm_head "
    # How the weights were found.
    "damp_percent damp_auto_increment static_groups true_sequential mse act_group_aware fail_safe "
    "parallel_packing tokenizer dataset model_name_or_path model_file_base_name meta producer "
    "batch_size cache_block_outputs model_seqlen seqlen nsamples iters lr minmax_lr amp device "
    "autoround_version auto_round_version low_gpu_mem_usage low_cpu_mem_usage scale_dtype sampler "
    "gradient_accumulate_steps enable_quanted_input enable_minmax_tuning enable_norm_bias_tuning "
    "super_bits super_group_size global_compression_ratio observer desc_order pad_token_id "
    # Inputs and keys in few bits, which are not rounded here.
    "activation_scheme activation_scale_ub act_bits act_group_size act_sym act_dynamic "
    "act_data_type kv_cache_scheme kv_cache_quant_algo scale_fmt fmt act_per_tensor "
    "weight_per_tensor "
    # Kernels of other programs.
    "backend use_exllama exllama_config disable_exllama max_input_length use_cuda_fp16 do_fuse "
    "fuse_max_seq_len modules_to_fuse dequantize quantizer"
)
_GROUP_NAMES = "weights input_activations output_activations targets format"
_WEIGHT_NAMES = (
    "num_bits type strategy symmetric group_size block_structure dynamic actorder observer "
    "observer_kwargs scale_dtype zp_dtype"
)
_CHANGES = re.compile(r".*(transform|rotat|hadamard|spars|adapter|lora).*")
# Rotations of weights are in the weights of the files; the others act while a model computes.
# Source: `TransformLocation` of compressed-tensors 0.20, and vLLM's, which applies only these.
_IN_WEIGHTS = ("weight_input", "weight_output")


def with_quantization(raw: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A config.json with its `quantization_config`, from wherever the checkpoint says it.

    Raises: CheckpointError for a broken file.
    """
    whole = dict(raw)
    given = raw.get("quantization_config")
    if isinstance(given, Mapping):
        whole["quantization_config"] = {**given, "quant_method": _method(given)}
    if given is not None:
        return whole
    if isinstance(raw.get("quantization"), Mapping):
        raise refused("quantization in MLX's format is not supported")
    older = raw.get(_OLDER_FIELD)
    if isinstance(older, Mapping) and older.get("config_groups"):
        whole["quantization_config"] = {"quant_method": "compressed-tensors", **older}
        return whole
    for name, method in _FILES.items():
        if has_file(folder / name):
            found = read_json_object(folder / name)
            whole["quantization_config"] = {"quant_method": method, **found}
            return whole
    return whole


def _method(raw: Mapping[str, Any]) -> Any:
    """The method by its usual name, also where a config does not say it."""
    said = raw.get("quant_method")
    if isinstance(said, str):
        return _OTHER_METHODS.get(said.lower(), said.lower())
    if raw.get("config_groups") is not None:
        return "compressed-tensors"
    producer = raw.get("producer")
    is_modelopt = isinstance(producer, Mapping) and producer.get("name") == "modelopt"
    return "modelopt" if is_modelopt else said


def check_quantization_fields(raw: Any) -> tuple[str, ...]:
    """The names of fields of a `quantization_config` that nobody knows.

    Raises: UnsupportedModelError for one that changes what the weights mean.
    """
    if not isinstance(raw, Mapping):
        return ()
    _check_rotations(raw.get("transform_config"))
    _check_zeros(raw.get("sparsity_config"))
    unknown = tuple(_unknown(raw, _NAMES, "quantization_config"))
    groups = raw.get("config_groups")
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        if isinstance(group, Mapping):
            where = f"quantization_config.{name}"
            unknown += tuple(_unknown(group, _GROUP_NAMES, where))
            if isinstance(group.get("weights"), Mapping):
                unknown += tuple(_unknown(group["weights"], _WEIGHT_NAMES, f"{where}.weights"))
    for name in unknown:
        if _CHANGES.fullmatch(name.lower()):
            raise refused(f"{name} is not supported")
    return unknown


def _unknown(raw: Mapping[str, Any], names: str, where: str) -> Iterator[str]:
    known = set(names.split())
    for name, value in raw.items():
        if name not in known and value not in (None, False, 0, "", [], {}, "none"):
            yield f"{where}.{name}"


def _check_rotations(config: Any) -> None:
    groups = config.get("config_groups", {}) if isinstance(config, Mapping) else config
    if groups is None:
        return
    if not isinstance(groups, Mapping):
        raise broken(f"transform_config must be an object, found {brief(config)}")
    for name, group in groups.items():
        applied = group.get("apply") if isinstance(group, Mapping) else None
        if not isinstance(applied, list):
            raise broken(f"transform_config.{name} must be an object, found {brief(group)}")
        for each in applied:
            place = each.get("location") if isinstance(each, Mapping) else None
            if place not in _IN_WEIGHTS:
                raise refused(
                    f"transform_config.{name} rotates values while the model computes "
                    f"(location {brief(place)}), which is not supported"
                )


def _check_zeros(config: Any) -> None:
    if config is None:
        return
    if not isinstance(config, Mapping):
        raise broken(f"sparsity_config must be an object, found {brief(config)}")
    if config.get("format") not in (None, "dense"):
        raise refused(
            f"sparsity_config.format {brief(config['format'])} is not supported; supported: dense"
        )


def broken(message: str) -> CheckpointError:
    """The error for a value that is none of those that a field can have."""
    return CheckpointError(message, where=WHERE)


def refused(message: str) -> UnsupportedModelError:
    """The error for a way of quantizing that is not supported."""
    return UnsupportedModelError(
        message,
        where=WHERE,
        hint="`localllm quantize` on the unquantized checkpoint, or vLLM for this one",
    )
