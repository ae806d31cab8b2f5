"""From `quantization_config` in a config.json to the scheme of each linear."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from localllm.errors import CheckpointError, UnsupportedModelError, brief
from localllm.model.packed.fp8_schemes import Fp8
from localllm.model.packed.int4_schemes import Awq, Gptq, PackedInt4
from localllm.model.packed.int8_schemes import PackedInt8, PlainInt8
from localllm.model.packed.mxfp4_schemes import BlocksMxfp4, PackedMxfp4
from localllm.model.packed.scheme import Scheme

SchemesOf = Callable[[str], tuple[Scheme, ...]]
_WHERE = "config.json: quantization_config"


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
    width or layout.
    """
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise CheckpointError(
            f"quantization_config must be an object, found {brief(raw)}", where=_WHERE
        )
    method = raw.get("quant_method")
    reader = FORMATS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise _unsupported(
            f"the quantization method {brief(method)} is not supported; "
            f"supported: {', '.join(FORMATS)}"
        )
    return Quantization(str(method), reader(raw))


def _unsupported(message: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        message,
        where=_WHERE,
        hint="`localllm quantize` on the unquantized checkpoint, or vLLM for this one",
    )


def _choice(raw: Mapping[str, Any], name: str, known: tuple[Any, ...], default: Any) -> Any:
    value = raw.get(name, default)
    if value not in known:
        raise _unsupported(f"{name} {brief(value)} is not supported; supported: {known}")
    return value


def _group_size(raw: Mapping[str, Any]) -> int | None:
    """The group size, None for one group per row (written as -1 or null)."""
    value = raw.get("group_size")
    if value is None or value == -1:
        return None
    if type(value) is not int or not 1 <= value <= 1 << 20:
        raise CheckpointError(
            f"group_size must be a whole number of at least 1, or -1, found {brief(value)}",
            where=_WHERE,
        )
    return value


def _everywhere(*schemes: Scheme) -> SchemesOf:
    return lambda name: schemes


def _read_awq(raw: Mapping[str, Any]) -> SchemesOf:
    _choice(raw, "bits", (4,), 4)
    _choice(raw, "version", ("gemm", "GEMM"), "gemm")
    _choice(raw, "zero_point", (True,), True)
    return _everywhere(Awq(_group_size(raw)))


def _read_gptq(raw: Mapping[str, Any]) -> SchemesOf:
    _choice(raw, "bits", (4,), 4)
    layout = _choice(raw, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    return _everywhere(Gptq(_group_size(raw), is_v2=layout == "gptq_v2"))


def _read_fp8(raw: Mapping[str, Any]) -> SchemesOf:
    block = raw.get("weight_block_size")
    if block is None:
        # Either name, by the tool that wrote it.
        return _everywhere(Fp8("weight_scale", None), Fp8("weight_scale_inv", None))
    return _everywhere(Fp8("weight_scale_inv", _block(block)))


def _block(value: Any) -> tuple[int, int]:
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(size) is int and 1 <= size <= 1 << 20 for size in value)
    ):
        raise CheckpointError(
            f"a block of scales must be two whole numbers, found {brief(value)}", where=_WHERE
        )
    return value[0], value[1]


def _read_compressed_tensors(raw: Mapping[str, Any]) -> SchemesOf:
    _choice(raw, "quantization_status", ("compressed",), "compressed")
    groups = raw.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError(
            "config_groups must be an object with at least one group", where=_WHERE
        )
    rules: list[tuple[list[str], Scheme]] = []
    for group in groups.values():
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
            raise CheckpointError(f"a group has no weights: {brief(group)}", where=_WHERE)
        targets = group.get("targets")
        if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
            raise CheckpointError(f"a group has no targets: {brief(group)}", where=_WHERE)
        layout = group.get("format") or raw.get("format")
        rules.append((targets, _compressed_scheme(layout, group["weights"])))
    return lambda name: _first_match(rules, name)


def _first_match(rules: list[tuple[list[str], Scheme]], name: str) -> tuple[Scheme, ...]:
    # A rule for this name takes precedence over one for all linears.
    for targets, scheme in rules:
        if any(_names(target, name) for target in targets):
            return (scheme,)
    for targets, scheme in rules:
        if "Linear" in targets:
            return (scheme,)
    return ()


def _names(target: str, name: str) -> bool:
    if not target.startswith("re:"):
        return target == name
    pattern = target.removeprefix("re:")
    is_nested = re.search(r"[*+?}][*+?{]|\([^)]*[*+{][^)]*\)[*+{]", pattern)
    if is_nested or len(re.findall(r"[*+{]", pattern)) > 3:
        # An untrusted pattern: many or nested repeats may take very long to match.
        raise _unsupported(f"the pattern {brief(pattern)} is not supported")
    try:
        return re.match(pattern, name) is not None
    except re.error as error:
        raise CheckpointError(f"broken pattern {brief(pattern)}: {error}", where=_WHERE) from error


def _compressed_scheme(layout: Any, weights: Mapping[str, Any]) -> Scheme:
    kind = (layout, weights.get("type", "int"), weights.get("num_bits"), weights.get("strategy"))
    symmetric = weights.get("symmetric", True)
    if kind[:3] == ("pack-quantized", "int", 4) and kind[3] in ("group", "channel"):
        size = _group_size(weights) if kind[3] == "group" else None
        return PackedInt4(size, bool(symmetric))
    if kind == ("pack-quantized", "int", 8, "channel") and symmetric:
        return PackedInt8()
    if kind == ("int-quantized", "int", 8, "channel") and symmetric:
        return PlainInt8()
    if kind == ("mxfp4-pack-quantized", "float", 4, "group") and _group_size(weights) == 32:
        return PackedMxfp4()
    if kind[:3] in (("float-quantized", "float", 8), ("naive-quantized", "float", 8)):
        if kind[3] in ("tensor", "channel"):
            return Fp8("weight_scale", None)
        if kind[3] == "block":
            return Fp8("weight_scale", _block(weights.get("block_structure")))
    described = ", ".join(brief(part) for part in kind)
    raise _unsupported(
        f"compressed-tensors as {described}{'' if symmetric else ', asymmetric'} is not supported"
    )


FORMATS: dict[str, Callable[[Mapping[str, Any]], SchemesOf]] = {
    "compressed-tensors": _read_compressed_tensors,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "fp8": _read_fp8,
    "mxfp4": lambda raw: _everywhere(BlocksMxfp4()),
}
