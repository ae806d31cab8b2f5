"""From `quantization_config` in a config.json to the scheme of each linear."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from localllm.errors import brief
from localllm.model.packed.block_schemes import BLOCK_SCHEMES
from localllm.model.packed.fp8_schemes import Fp8
from localllm.model.packed.int4_schemes import Awq, Gptq, PackedInt4
from localllm.model.packed.int8_schemes import PackedInt8, PlainInt8
from localllm.model.packed.mxfp4_schemes import BlocksMxfp4, PackedMxfp4
from localllm.model.packed.nvfp4 import GROUP_SIZE
from localllm.model.packed.nvfp4_schemes import GgufNvfp4, ModelOptNvfp4, PackedNvfp4
from localllm.model.packed.scheme import Scheme
from localllm.model.packed.trellis_schemes import Trellis
from localllm.model.quantization_fields import broken, check_quantization_fields, refused

# The method of localllm's own formats; the rest is as compressed-tensors has it.
OWN_FORMAT = "localllm"
SchemesOf = Callable[[str], tuple[Scheme, ...]]
# Layouts that say nothing about the files.
_UNSAID = (None, "dense", "fakequant", "mixed-precision")


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantization that a checkpoint's config describes.

    `schemes_of` maps a linear's name to the schemes that its files may have. Whether that linear
    really is quantized is seen from its tensors: the lists of skipped modules are matched by
    prefix, by substring or by pattern, depending on the tool that wrote them.
    """

    method: str
    schemes_of: SchemesOf


def read_quantization(raw: Any) -> Quantization | None:
    """The quantization of a checkpoint, None if it is not quantized.

    Raises: CheckpointError for an invalid field, UnsupportedModelError for an unknown method, bit
    width or layout, and as `check_quantization_fields`.
    """
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise broken(f"quantization_config must be an object, found {brief(raw)}")
    method = raw.get("quant_method")
    reader = FORMATS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise refused(
            f"the quantization method {brief(method)} is not supported; "
            f"supported: {', '.join(FORMATS)}"
        )
    check_quantization_fields(raw)
    return Quantization(str(method), reader(raw))


def _choice(raw: Mapping[str, Any], name: str, known: tuple[Any, ...], default: Any) -> Any:
    value = raw.get(name)
    value = default if value is None else _number(value)
    if value not in known:
        raise refused(f"{name} {brief(value)} is not supported; supported: {known}")
    return value


def _number(value: Any) -> Any:
    """A value, with the number of one that is written as a string."""
    is_written = isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,9}", value) is not None
    return int(value) if is_written else value


def _group_size(raw: Mapping[str, Any], name: str = "group_size") -> int | None:
    """The group size, None for one group per row (written as -1 or null)."""
    value = _number(raw.get(name))
    if value is None or value == -1:
        return None
    if type(value) is not int or not 1 <= value <= 1 << 20:
        raise broken(f"{name} must be a whole number of at least 1, or -1, found {brief(value)}")
    return value


def _everywhere(*schemes: Scheme) -> SchemesOf:
    return lambda name: schemes


def _read_awq(raw: Mapping[str, Any]) -> SchemesOf:
    # AutoAWQ's own file calls them otherwise.
    _choice(raw, "bits", (4,), _number(raw.get("w_bit")) or 4)
    _choice(raw, "version", ("gemm", "GEMM"), "gemm")
    _choice(raw, "zero_point", (True,), True)
    name = "group_size" if raw.get("group_size") is not None else "q_group_size"
    return _everywhere(Awq(_group_size(raw, name)))


def _read_gptq(raw: Mapping[str, Any]) -> SchemesOf:
    layout = raw.get("checkpoint_format") or raw.get("format") or "gptq"
    if layout not in ("gptq", "gptq_v2") or raw.get("is_marlin_format"):
        raise refused(f"checkpoint_format {brief(layout)} is not supported")
    _choice(raw, "pack_dtype", ("int32",), "int32")
    _choice(raw, "bits", (4,), 4)
    own = Gptq(_group_size(raw), is_v2=layout == "gptq_v2")
    rules = raw.get("dynamic") or {}
    if not isinstance(rules, Mapping):
        raise broken(f"dynamic must be an object, found {brief(rules)}")
    return lambda name: _by_rule(rules, name, own)


def _by_rule(rules: Mapping[str, Any], name: str, own: Gptq) -> tuple[Scheme, ...]:
    """How GPTQModel quantized a linear: by its first rule that fits; "-:" leaves one out."""
    for pattern, changes in rules.items():
        if not _fits(re.sub("^[-+]:", "", pattern), name):
            continue
        if pattern.startswith("-:"):
            return ()
        if not isinstance(changes, Mapping):
            raise broken(f"dynamic: a rule must be an object, found {brief(changes)}")
        if _number(changes.get("bits", 4)) != 4:
            raise refused(f"{name} in {brief(changes['bits'])} bits is not supported; supported: 4")
        size = _group_size(changes) if "group_size" in changes else own.group_size
        return (Gptq(size, own.is_v2),)
    return (own,)


def _read_auto_round(raw: Mapping[str, Any]) -> SchemesOf:
    """AutoRound's way to say which of the two layouts a linear has."""
    layout = raw.get("packing_format")
    _choice(raw, "data_type", ("int",), "int")
    _choice(raw, "bits", (4,), 4)
    size, known = _group_size(raw), str(layout)
    if known.endswith("gptq"):
        return _everywhere(Gptq(size, is_v2=False))
    if known.endswith("awq"):
        return _everywhere(Awq(size))
    raise refused(f"packing_format {brief(layout)} is not supported; known: auto_round:auto_gptq")


def _read_fp8(raw: Mapping[str, Any]) -> SchemesOf:
    block = raw.get("weight_block_size")
    if block is None:
        # Either name, by the tool that wrote it.
        return _everywhere(Fp8("weight_scale", None), Fp8("weight_scale_inv", None))
    return _everywhere(Fp8("weight_scale_inv", _block(block)))


def _read_modelopt(raw: Mapping[str, Any]) -> SchemesOf:
    inner = raw.get("quantization")
    found = inner if isinstance(inner, Mapping) else raw
    known = ("FP8", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")
    algorithm = _choice(found, "quant_algo", known, None)
    fp8, nvfp4 = Fp8("weight_scale", None), ModelOptNvfp4()
    if algorithm == "MIXED_PRECISION":
        # Each linear's tensors say which of the two it is.
        return _everywhere(nvfp4, fp8)
    return _everywhere(fp8 if algorithm == "FP8" else nvfp4)


def _block(value: Any) -> tuple[int, int]:
    if isinstance(value, str):
        value = [_number(size) for size in value.split("x")]
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(size) is int and 1 <= size <= 1 << 20 for size in value)
    ):
        raise broken(f"a block of scales must be two whole numbers, found {brief(value)}")
    return value[0], value[1]


def _read_compressed_tensors(raw: Mapping[str, Any]) -> SchemesOf:
    groups = raw.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise broken("config_groups must be an object with at least one group")
    rules: list[tuple[list[str], tuple[Scheme, ...]]] = []
    for group in groups.values():
        if not isinstance(group, Mapping):
            raise broken(f"a group must be an object, found {brief(group)}")
        weights, targets = group.get("weights"), group.get("targets")
        targets = [targets] if isinstance(targets, str) else targets
        if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
            raise broken(f"a group has no targets: {brief(group)}")
        if weights is None and group.get("input_activations") is not None:
            continue  # only the inputs of these are rounded, elsewhere
        if not isinstance(weights, Mapping):
            raise broken(f"a group has no weights: {brief(group)}")
        layout = group.get("format") or raw.get("format")
        rules.append((targets, _compressed_schemes(layout, weights)))
    return lambda name: _first_match(rules, name)


def _first_match(
    rules: list[tuple[list[str], tuple[Scheme, ...]]], name: str
) -> tuple[Scheme, ...]:
    # A rule for this name takes precedence over one for all linears.
    for targets, schemes in rules:
        if any(_names(target, name) for target in targets):
            return schemes
    for targets, schemes in rules:
        if "Linear" in targets:
            return schemes
    return ()


def _names(target: str, name: str) -> bool:
    is_pattern = target.startswith("re:")
    return _fits(target.removeprefix("re:"), name) if is_pattern else target == name


def _fits(pattern: str, name: str) -> bool:
    """Whether a pattern fits the beginning of a name."""
    needed = re.sub(r"\.\*\$?$", "", pattern)  # what may follow costs no time
    is_nested = re.search(r"[*+?}][*+?{]|\([^)]*[*+{][^)]*\)[*+{]", needed)
    if is_nested or len(re.findall(r"[*+{]", needed)) > 3:
        # An untrusted pattern: many or nested repeats may take very long to match.
        raise refused(f"the pattern {brief(pattern)} is not supported")
    try:
        return re.match(pattern, name) is not None
    except re.error as error:
        raise broken(f"broken pattern {brief(pattern)}: {error}") from error


def _compressed_schemes(layout: Any, weights: Mapping[str, Any]) -> tuple[Scheme, ...]:
    """The schemes of a group; several where the config does not say how the values are stored."""
    kind, bits = weights.get("type", "int"), _number(weights.get("num_bits"))
    strategy, symmetric = weights.get("strategy"), weights.get("symmetric", True)
    strategy = strategy or ("group" if weights.get("group_size") else "tensor")

    def stored_as(*layouts: str) -> bool:
        return layout in _UNSAID or layout in layouts

    match kind, bits, strategy:
        case "int", 4, "group" | "channel" if stored_as("pack-quantized"):
            size = _group_size(weights) if strategy == "group" else None
            return (PackedInt4(size, bool(symmetric)),)
        case "int", 8, "channel" if symmetric:
            known = (("pack-quantized", PackedInt8()), ("int-quantized", PlainInt8()))
            if stored_as(*(name for name, _ in known)):
                return tuple(scheme for name, scheme in known if stored_as(name))
        case "float", 4, "group" if layout == "mxfp4-pack-quantized":
            if _group_size(weights) == 32:
                return (PackedMxfp4(),)
        case "float", 4, "tensor_group" if stored_as("nvfp4-pack-quantized"):
            if _group_size(weights) == GROUP_SIZE:
                return (PackedNvfp4(),)
        case "trellis", 3, "channel":
            return (Trellis(),)
        case "float", 8, "tensor" | "channel" if stored_as("float-quantized", "naive-quantized"):
            return (Fp8("weight_scale", None),)
        case "float", 8, "block" if stored_as("float-quantized", "naive-quantized"):
            return (Fp8("weight_scale", _block(weights.get("block_structure"))),)
    described = ", ".join(brief(part) for part in (layout, kind, bits, strategy))
    raise refused(
        f"compressed-tensors as {described}{'' if symmetric else ', asymmetric'} is not supported"
    )


FORMATS: dict[str, Callable[[Mapping[str, Any]], SchemesOf]] = {
    "compressed-tensors": _read_compressed_tensors,
    OWN_FORMAT: _read_compressed_tensors,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "auto-round": _read_auto_round,
    "fp8": _read_fp8,
    "fbgemm_fp8": lambda raw: _everywhere(Fp8("weight_scale", None)),
    "modelopt": _read_modelopt,
    "mxfp4": lambda raw: _everywhere(BlocksMxfp4()),
    "gguf": lambda raw: _everywhere(GgufNvfp4(), *BLOCK_SCHEMES),
}
