"""The checkpoint to quantize: opened, checked against the recipe, and its size."""

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from localllm.drafting.head_source import find_head
from localllm.drafting.speculation_config import SpeculationConfig
from localllm.errors import RequestError, UnsupportedModelError
from localllm.files.json_file import read_json_object
from localllm.hub.catalog import resolve_model
from localllm.hub.checkpoint import Checkpoint, open_checkpoint
from localllm.hub.download import fetch_model
from localllm.model.architecture import EMBEDDING, HEAD, Architecture
from localllm.model.families.table import read_architecture
from localllm.model.found_head import FoundHead
from localllm.model.packed.scheme import SCALE_DTYPES
from localllm.model.tensor_info import ITEM_BYTES, TensorInfo
from localllm.model.weight_check import WeightMap, check_weights
from localllm.model.weight_files import find_weight_files
from localllm.quantize.gguf_source import is_gguf_source, read_gguf_source
from localllm.quantize.recipe import GROUP_SIZES, Recipe


@dataclass(frozen=True, slots=True)
class CheckedFolder:
    """A checkpoint whose headers have been checked against its config."""

    folder: Path
    architecture: Architecture
    weights: WeightMap
    head: FoundHead | None = None

    @classmethod
    def open(cls, folder: Path) -> "CheckedFolder":
        """Check the checkpoint in `folder`. Raises: CheckpointError."""
        architecture = read_architecture(folder)
        files = find_weight_files(folder)
        if is_gguf_source(architecture):
            config = read_json_object(folder / "config.json")
            return cls(folder, *read_gguf_source(architecture, files, config))
        weights = check_weights(files, architecture)
        return cls(
            folder, architecture, weights, find_head(files, architecture, SpeculationConfig())
        )

    @property
    def num_bytes(self) -> int:
        """Size of the weight files."""
        return sum(path.stat().st_size for path in find_weight_files(self.folder))


def open_unquantized(name: str, recipe: Recipe) -> tuple[Checkpoint, CheckedFolder]:
    """The checkpoint to quantize, checked against the recipe.

    Raises: as opening a model does; UnsupportedModelError for one that is quantized already;
    RequestError for a width that the recipe does not fit.
    """
    checkpoint = open_checkpoint(name)
    source = CheckedFolder.open(checkpoint.folder)
    if source.architecture.quantization is not None:
        method = source.architecture.quantization.get("quant_method")
        raise UnsupportedModelError(
            f"{name} is quantized already ({method})",
            where=str(checkpoint.folder),
            hint="quantize the checkpoint that it was made from",
        )
    misfit = _misfit(source.architecture, recipe)
    if misfit:
        raise RequestError(
            f"{misfit[0]} cannot be quantized this way: {misfit[1]}",
            param="group_size",
            hint=_fitting_flags(source.architecture, recipe),
        )
    return checkpoint, source


def find_architecture(name: str) -> Architecture:
    """The architecture of a model, whose weights need not be here. Raises: as opening a model."""
    return read_architecture(fetch_model(resolve_model(name), with_weights=False))


def fit_groups(name: str, recipe: Recipe) -> tuple[Recipe, str]:
    """The recipe with the largest groups that divide every width of the model, and why they are
    not larger; as it is where none do, or where its weights have no groups.

    Raises: as opening a model does.
    """
    if not recipe.is_int4:
        return recipe, ""
    architecture = find_architecture(name)
    why = ""
    for size in reversed(GROUP_SIZES):
        candidate = replace(recipe, group_size=size)
        misfit = _misfit(architecture, candidate)
        if misfit is None:
            return candidate, why
        why = why or f"{misfit[0]}: {misfit[1]}"
    return recipe, ""


def _misfit(architecture: Architecture, recipe: Recipe) -> tuple[str, str] | None:
    """The first linear that cannot be written this way, and why."""
    scheme = recipe.scheme
    for linear, shape in architecture.quantized().items():
        try:
            scheme.stored(*shape)
        except ValueError as error:
            return linear, str(error)
    return None


def _fitting_flags(architecture: Architecture, recipe: Recipe) -> str:
    """The flags of the nearest recipe that fits every linear."""
    candidates: list[tuple[str, Recipe]] = []
    if recipe.is_int4:
        candidates += [
            (f"--group-size {size}", replace(recipe, group_size=size))
            for size in reversed(GROUP_SIZES)
        ]
        candidates += [
            (f"--format compressed-tensors --group-size {size}", Recipe("rtn", size))
            for size in reversed(GROUP_SIZES)
        ]
    candidates.append(("--method int8", Recipe("int8")))
    for flags, candidate in candidates:
        if _misfit(architecture, candidate) is None:
            return flags
    return "--method fp8"


def result_bytes(source: CheckedFolder, recipe: Recipe) -> int:
    """Bytes of the result's tensors, known before anything is computed."""
    linears = {f"{name}.weight": shape for name, shape in source.architecture.quantized().items()}
    total = 0
    for name, info in source.weights.plain.items():
        if name in linears:
            total += _stored_bytes(source, recipe, linears[name])
        elif name != f"{HEAD}.weight" or not recipe.int8_head:
            total += written_bytes(info)
    if recipe.int8_head:
        architecture = source.architecture
        shape = architecture.vocab_size, architecture.hidden_size
        total += _stored_bytes(source, Recipe("int8"), shape)
    return total


@dataclass(frozen=True, slots=True)
class Kept:
    """The embedding and the head, as far as they are written as they are."""

    num_bytes: int
    dtype: str
    is_tied: bool
    has_int8_head: bool

    @classmethod
    def of(cls, source: CheckedFolder, recipe: Recipe) -> "Kept":
        """What a recipe leaves as it is."""
        names = (EMBEDDING,) if recipe.int8_head else (EMBEDDING, f"{HEAD}.weight")
        found = (source.weights.plain.get(name) for name in names)
        architecture = source.architecture
        return cls(
            sum(written_bytes(info) for info in found if info is not None),
            architecture.dtype,
            architecture.tie_word_embeddings,
            recipe.int8_head,
        )

    @property
    def summary(self) -> str:
        """What stays, why, and what would make it smaller."""
        size = f"{self.num_bytes / 1e6:,.1f} MB"
        why = "these formats hold no quantized embedding"
        if self.has_int8_head:
            return f"{size} are the embedding in {self.dtype}: {why}"
        if self.is_tied:
            return (
                f"{size} are the embedding in {self.dtype}, which is also the head: {why}; "
                "--head int8 adds a head of half that size, which is faster"
            )
        return (
            f"{size} are the embedding and the head in {self.dtype}: {why}, and the head costs "
            "most in quality; --head int8 halves the head"
        )


def written_bytes(info: TensorInfo) -> int:
    """Bytes of a tensor that stays as it is; blocks of GGUF are written in 16 bits."""
    return info.num_bytes if info.dtype in ITEM_BYTES else 2 * prod(info.shape)


def _stored_bytes(source: CheckedFolder, recipe: Recipe, shape: tuple[int, int]) -> int:
    """Bytes of one linear as it is written."""
    total = 0
    scale_bytes = 4 if recipe.method == "fp8" or source.architecture.dtype == "float32" else 2
    for suffix, stored in recipe.scheme.stored(*shape).items():
        if stored.is_optional and suffix != "g_idx":
            continue
        is_scale = stored.dtypes == SCALE_DTYPES
        total += prod(stored.shapes[0]) * (
            scale_bytes if is_scale else ITEM_BYTES[stored.dtypes[0]]
        )
    return total
