"""A checkpoint's card: what its files say about it, without loading a weight."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from localllm.errors import LocalLLMError
from localllm.files.json_file import read_json_object
from localllm.hub.catalog import ModelSource
from localllm.hub.generation_config import read_generation_config
from localllm.hub.quantized_files import label_of
from localllm.hub.stores import find_stored
from localllm.model.architecture import Architecture
from localllm.model.families.table import read_architecture
from localllm.model.tensor_files import read_headers
from localllm.model.tower import has_tower, text_tensors
from localllm.model.weight_check import check_weights
from localllm.model.weight_files import find_weight_files, is_gguf_folder
from localllm.text.tokenizer import Tokenizer
from localllm.untrusted.tokenizers import open_tokenizer

_LONGEST_FORMAT = 30
# Tensors of packed weights: each element holds 32 bits of them.
_PACKED_SUFFIXES = ("qweight", "weight_packed")


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights on disk: parameters, bytes, and the bytes of each dtype."""

    num_parameters: int
    num_bytes: int
    bytes_by_dtype: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Card:
    """What `localllm show` prints. A part that could not be read is None; `problems` says why.

    `place`: the folder, or the GGUF file, that `program` has downloaded, None for this one.
    """

    name: str
    place: Path
    program: str | None
    quantization: str
    config: Mapping[str, Any]
    architecture: Architecture | None
    weights: Weights | None
    tokenizer: Tokenizer | None
    sampling: Mapping[str, Any]
    problems: tuple[str, ...]


def read_card(source: ModelSource, folder: Path) -> Card:
    """The card of the checkpoint in `folder`.

    A part that is broken or missing is named in `problems`. Raises: CheckpointError if
    `config.json` cannot be read.
    """
    config = read_json_object(folder / "config.json")
    problems: list[str] = []

    def attempt(read: Any) -> Any:
        try:
            return read()
        except LocalLLMError as error:
            problems.append(error.message)
            return None

    architecture = attempt(lambda: read_architecture(folder))
    tokenizer = attempt(lambda: open_tokenizer(folder, source.chat_template))
    weights = attempt(lambda: read_weights(folder, has_tower(config), _bits(config)))
    if weights is not None and architecture is not None:
        checked = attempt(lambda: check_weights(find_weight_files(folder), architecture))
        if checked is not None:  # packed tensors alone do not say how many numbers they stand for
            weights = replace(weights, num_parameters=architecture.num_parameters)
    defaults = attempt(lambda: read_generation_config(folder))
    file = _gguf_file(folder, attempt)
    stored = [each for each in find_stored() if file is not None and _is_same(each.file, file)]
    return Card(
        name=source.name,
        place=file or folder,
        program=stored[0].program if stored else None,
        quantization=describe_quantization(config)
        if file is None
        else _describe_gguf((source.name, file.name), weights),
        config=config,
        architecture=architecture,
        weights=weights,
        tokenizer=tokenizer,
        sampling=defaults.sampling if defaults is not None else {},
        problems=tuple(problems),
    )


def _gguf_file(folder: Path, attempt: Callable[[Any], Any]) -> Path | None:
    """The first file of the GGUF model that a folder stands for."""
    if not is_gguf_folder(folder):
        return None
    files = attempt(lambda: find_weight_files(folder))
    return files[0] if files else None


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # one has just been deleted
        return False


def _describe_gguf(names: Sequence[str], weights: Weights | None) -> str:
    """How a GGUF model is quantized, as names tell, or else the type of most of its bytes."""
    label = next(filter(None, map(label_of, names)), None)
    if label is not None:
        return f"GGUF {label}"
    return "GGUF" if weights is None else f"GGUF, mostly {next(iter(weights.bytes_by_dtype))}"


def read_weights(folder: Path, is_beside_tower: bool = False, packed_bits: int = 4) -> Weights:
    """Counts from the headers of the weight files, of the text model alone if there is a tower;
    `packed_bits`: of a packed weight.

    Raises: CheckpointError.
    """
    files = find_weight_files(folder)
    num_parameters = 0
    by_dtype: Counter[str] = Counter()
    found = read_headers(files)
    for name, tensor in (text_tensors(found) if is_beside_tower else found).items():
        by_dtype[tensor.dtype] += tensor.num_bytes
        if name.endswith(("scales", "qzeros", "g_idx", "weight_scale", "zero_point", "_shape")):
            continue  # these belong to a quantized weight and are not parameters
        num_values = 32 // packed_bits if name.endswith(_PACKED_SUFFIXES) else 1
        num_parameters += prod(tensor.shape) * num_values
    num_bytes = sum(path.stat().st_size for path in files)
    return Weights(num_parameters, num_bytes, dict(by_dtype.most_common()))


def describe_quantization(config: Mapping[str, Any]) -> str:
    """Method, bits and group of a quantized checkpoint, or "none"."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return "none"
    parts = [str(quantization.get("quant_method", "unknown"))]
    fields = {**quantization, **_group_weights(quantization)}
    for key, unit in (("bits", "bits"), ("num_bits", "bits"), ("group_size", "per group")):
        if fields.get(key) is not None:
            parts.append(f"{fields[key]} {unit}")
    if fields.get("format") is not None:
        parts.append(str(fields["format"]))
    return ", ".join(parts)


def describe_format(config: Mapping[str, Any]) -> str:
    """How the weights are stored, in a word or two: "bf16", "awq int4"."""
    quantization = config.get("quantization_config")
    if isinstance(quantization, Mapping):
        method = str(quantization.get("quant_method", "unknown"))
        fields = {**quantization, **_group_weights(quantization)}
        bits = fields.get("bits") or fields.get("num_bits")
        return (method if bits is None else f"{method} int{bits}")[:_LONGEST_FORMAT]
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "unknown")
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(dtype, dtype)[
        :_LONGEST_FORMAT
    ]


def _bits(config: Mapping[str, Any]) -> int:
    """Bits of a packed weight, four where the config does not say."""
    quantization = config.get("quantization_config")
    fields = quantization if isinstance(quantization, Mapping) else {}
    bits = fields.get("bits") or _group_weights(fields).get("num_bits")
    return bits if bits in (2, 4, 8) else 4


def _group_weights(quantization: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of compressed-tensors for the weights of its first group, and their layout if
    that is the group's own.
    """
    groups = quantization.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    if not isinstance(first, Mapping) or not isinstance(weights := first.get("weights"), Mapping):
        return {}
    return {**weights, "format": first["format"]} if first.get("format") else weights
