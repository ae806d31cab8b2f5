"""The recipe of a quantization: method, grid, file format."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from localllm.errors import RequestError
from localllm.model.architecture import HEAD, TABLE
from localllm.model.packed import mxfp4, nvfp4
from localllm.model.packed.fp8_schemes import Fp8
from localllm.model.packed.int4_schemes import Awq, Gptq, PackedInt4
from localllm.model.packed.int8_schemes import PackedInt8, PlainInt8
from localllm.model.packed.mxfp4_schemes import PackedMxfp4
from localllm.model.packed.nvfp4_schemes import PackedNvfp4
from localllm.model.packed.scheme import Scheme
from localllm.model.packed.trellis_schemes import Trellis
from localllm.model.quantization_config import OWN_FORMAT
from localllm.quantize.float_grid import PowerGrids, ScaledGrids
from localllm.quantize.grid import GridKind
from localllm.quantize.integer_grid import IntegerGrids

Method = Literal["rtn", "awq", "gptq", "awq+gptq", "int8", "fp8", "mxfp4", "nvfp4", "trellis"]
METHODS: tuple[Method, ...] = get_args(Method)
FileFormat = Literal["compressed-tensors", "awq", "gptq", "fp8"]
FILE_FORMATS: tuple[FileFormat, ...] = ("compressed-tensors", "awq", "gptq", "fp8")
GROUP_SIZES = (32, 64, 128)
FP8_BLOCK = (128, 128)
EndType = Literal["keep", "int8", "int4"]
EMBEDDING_TYPES: tuple[EndType, ...] = ("keep", "int8")
HEAD_TYPES: tuple[EndType, ...] = get_args(EndType)
# Inputs that share a scale of an int4 head: few, since its error reaches every token.
_HEAD_GROUP = 32
# The layouts of compressed-tensors that are not integers in words.
_LAYOUTS = {
    "fp8": "float-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "nvfp4": "nvfp4-pack-quantized",
    "trellis": "trellis",
}
# Methods that round without regard to inputs, those whose weights are not int4, and what the
# scales of 4-bit floats are.
_PLAIN = ("rtn", "int8", "fp8")
_FLOATS = {"mxfp4": "a power of two for each 32", "nvfp4": "a float of 8 bits for each 16"}
_NOT_INT4 = ("int8", "fp8", "trellis", *_FLOATS)


@dataclass(frozen=True, slots=True)
class EndFormat:
    """How files hold an embedding or a head: whole numbers, with a scale for each row or group."""

    scheme: PackedInt4 | PlainInt8
    bits: int
    group_size: int | None = None

    @property
    def layout(self) -> str:
        """What compressed-tensors calls it."""
        return "int-quantized" if isinstance(self.scheme, PlainInt8) else "pack-quantized"

    def group(self, stored_name: str) -> dict[str, Any]:
        """The group of a config.json that says so of a linear."""
        strategy = "channel" if self.group_size is None else "group"
        weights = _weights(self.bits, "int", strategy, self.group_size, True)
        return _group([f"re:.*{re.escape(stored_name)}$"], weights)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the linears of the layers are quantized, and the embedding and the head if requested.

    Raises: RequestError for parts that do not go together.
    """

    method: Method = "gptq"
    group_size: int = 128
    symmetric: bool = True
    file_format: FileFormat = "compressed-tensors"
    embedding: EndType = "keep"
    head: EndType = "keep"

    def __post_init__(self) -> None:
        for name, known in (
            ("method", METHODS),
            ("file_format", FILE_FORMATS),
            ("group_size", GROUP_SIZES),
            ("embedding", EMBEDDING_TYPES),
            ("head", HEAD_TYPES),
        ):
            if getattr(self, name) not in known:
                raise RequestError(
                    f"{name} must be one of {', '.join(map(str, known))}, "
                    f"found {getattr(self, name)!r:.40}",
                    param=name,
                )
        problem = self._contradiction()
        if problem:
            raise RequestError(problem, param="file_format", hint="--format compressed-tensors")

    def _contradiction(self) -> str:
        if self.file_format in ("awq", "gptq") and not self.is_int4:
            return f"the {self.file_format} format holds int4 weights, not {self.method}"
        if self.file_format == "fp8" and self.method != "fp8":
            return f"the fp8 format cannot hold {self.method}"
        if self.file_format == "awq" and self.symmetric:
            return "the awq format is asymmetric only (--asym)"
        if (self.embedding, self.head) != ("keep", "keep") and not holds_ends(self.file_format):
            what = "embedding" if self.head == "keep" else "head"
            return f"the {self.file_format} format cannot hold a quantized {what}"
        return ""

    @property
    def is_int4(self) -> bool:
        """Whether weights are int4."""
        return self.method not in _NOT_INT4

    @property
    def uses_inputs(self) -> bool:
        """Whether the method uses the linears' inputs, and so needs calibration text."""
        return self.method not in _PLAIN

    @property
    def feeds_back(self) -> bool:
        """Whether the error of each rounded input is fed back to those after it, as GPTQ does."""
        return "gptq" in self.method or self.method in ("trellis", *_FLOATS)

    @property
    def grids(self) -> GridKind:
        """What weights of 4 bits are rounded to."""
        if self.method == "mxfp4":
            return PowerGrids()
        if self.method == "nvfp4":
            return ScaledGrids()
        return IntegerGrids(self.group_size, self.symmetric)

    @property
    def summary(self) -> str:
        """A short description."""
        if self.method in _FLOATS:
            return f"{self.method}, {_FLOATS[self.method]}"
        if self.method == "trellis":
            return "trellis, 3 bits, a scale per row"
        if not self.is_int4:
            return f"{self.method}, {'blocks' if self.file_format == 'fp8' else 'a scale per row'}"
        kind = "symmetric" if self.symmetric else "asymmetric"
        return f"{self.method}, 4 bits, groups of {self.group_size}, {kind}"

    @property
    def format_name(self) -> str:
        """What reports call the file format."""
        own = self.method == "trellis"
        return "localllm's own format" if own else f"the {self.file_format} format"

    @property
    def scheme(self) -> Scheme:
        """The scheme that a linear is written in."""
        if self.method == "int8":
            return PackedInt8()
        if self.method == "mxfp4":
            return PackedMxfp4()
        if self.method == "nvfp4":
            return PackedNvfp4()
        if self.method == "trellis":
            return Trellis()
        if self.method == "fp8":
            by_block = self.file_format == "fp8"
            return Fp8("weight_scale_inv", FP8_BLOCK) if by_block else Fp8("weight_scale", None)
        if self.file_format == "awq":
            return Awq(self.group_size)
        if self.file_format == "gptq":
            # The first version of the format cannot hold every zero.
            return Gptq(self.group_size, is_v2=not self.symmetric)
        return PackedInt4(self.group_size, self.symmetric)

    def ends(self, *, is_tied: bool) -> dict[str, EndFormat]:
        """The formats of the embedding and the head, those that are quantized, by their names as
        linears. A tied head of the embedding's type is the embedding.
        """
        found = {}
        # Plain bytes: a process maps a table of them, and reads the rows of the tokens in use.
        int8 = EndFormat(PlainInt8(), 8)
        if self.embedding != "keep":
            found[TABLE] = int8
        if self.head == "int4":
            found[HEAD] = EndFormat(PackedInt4(_HEAD_GROUP, symmetric=True), 4, _HEAD_GROUP)
        elif self.head == "int8" and not (is_tied and self.embedding == "int8"):
            found[HEAD] = int8
        return found

    def is_stored_once(self, *, is_tied: bool) -> bool:
        """Whether the quantized embedding is also the head."""
        ends = self.ends(is_tied=is_tied)
        return is_tied and TABLE in ends and HEAD not in ends

    def quantization_config(
        self, skipped: list[str], ends: Mapping[str, EndFormat]
    ) -> dict[str, Any]:
        """The config.json entry; `skipped`: the linears that are not quantized; `ends`: see there,
        by their names in files.
        """
        if self.file_format == "awq":
            return {
                "quant_method": "awq",
                "bits": 4,
                "group_size": self.group_size,
                "zero_point": True,
                "version": "gemm",
                "modules_to_not_convert": skipped,
            }
        if self.file_format == "gptq":
            return {
                "quant_method": "gptq",
                "bits": 4,
                "group_size": self.group_size,
                "desc_act": False,
                "sym": self.symmetric,
                "checkpoint_format": "gptq" if self.symmetric else "gptq_v2",
                "lm_head": False,
                "meta": {"quantizer": ["localllm"]},
            }
        if self.file_format == "fp8":
            return {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": list(FP8_BLOCK),
                "ignored_layers": skipped,
                "modules_to_not_convert": skipped,
            }
        return self._compressed_tensors_config(skipped, ends)

    def _compressed_tensors_config(
        self, skipped: list[str], ends: Mapping[str, EndFormat]
    ) -> dict[str, Any]:
        layout = _LAYOUTS.get(self.method, "pack-quantized")
        layouts = [layout, *(end.layout for end in ends.values())]
        parts = [self._linear_group(), *(end.group(name) for name, end in ends.items())]
        is_mixed = len(set(layouts)) > 1
        if is_mixed:
            parts = [{**part, "format": own} for part, own in zip(parts, layouts, strict=True)]
        groups = {f"group_{i}": part for i, part in enumerate(parts)}
        return {
            "quant_method": OWN_FORMAT if self.method == "trellis" else "compressed-tensors",
            "format": "mixed-precision" if is_mixed else layout,
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": skipped,
            "kv_cache_scheme": None,
        }

    def _linear_group(self) -> dict[str, Any]:
        if self.is_int4:
            weights = _weights(4, "int", "group", self.group_size, self.symmetric)
            return _group(["Linear"], weights)
        if self.method == "int8":
            return _group(["Linear"], _weights(8, "int", "channel", None, True))
        if self.method == "mxfp4":
            weights = _weights(4, "float", "group", mxfp4.GROUP_SIZE, True)
            return _group(["Linear"], {**weights, "scale_dtype": "torch.uint8"})
        if self.method == "nvfp4":
            weights = _weights(4, "float", "tensor_group", nvfp4.GROUP_SIZE, True)
            return _group(["Linear"], {**weights, "scale_dtype": "torch.float8_e4m3fn"})
        if self.method == "trellis":
            return _group(["Linear"], _weights(3, "trellis", "channel", None, True))
        # Engines that load it quantize the activations too, with one scale per token.
        activations = {**_weights(8, "float", "token", None, True), "dynamic": True}
        return _group(["Linear"], _weights(8, "float", "channel", None, True), activations)


def holds_ends(file_format: FileFormat) -> bool:
    """Whether a format can hold a quantized embedding or head."""
    return file_format == "compressed-tensors"


def _group(
    targets: list[str], weights: dict[str, Any], activations: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
    }


def _weights(
    bits: int, kind: str, strategy: str, group_size: int | None, symmetric: bool
) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": kind,
        "symmetric": symmetric,
        "strategy": strategy,
        "group_size": group_size,
        "dynamic": False,
    }
