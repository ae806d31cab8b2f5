"""The checkpoint to quantize: opened, checked against the recipe, and its size."""

from dataclasses import dataclass
from math import prod
from pathlib import Path

from localllm.engine.head_source import find_head
from localllm.engine.speculation_config import SpeculationConfig
from localllm.errors import RequestError, UnsupportedModelError
from localllm.hub.checkpoint import Checkpoint, open_checkpoint
from localllm.model.architecture import Architecture
from localllm.model.families.table import read_architecture
from localllm.model.found_head import FoundHead
from localllm.model.packed.scheme import SCALE_DTYPES
from localllm.model.safetensors_header import ITEM_BYTES
from localllm.model.weight_check import WeightMap, check_weights
from localllm.model.weight_files import find_weight_files
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
    for linear, shape in source.architecture.quantized().items():
        try:
            recipe.scheme.stored(*shape)
        except ValueError as error:
            raise RequestError(
                f"{linear} cannot be quantized this way: {error}",
                param="group_size",
                hint=_other_group(recipe, shape),
            ) from error
    return checkpoint, source


def _other_group(recipe: Recipe, shape: tuple[int, int]) -> str:
    sizes = [size for size in GROUP_SIZES if shape[1] % size == 0]
    if recipe.is_int4 and sizes and sizes[-1] != recipe.group_size:
        return f"--group-size {sizes[-1]}"
    return "--method int8"


def result_bytes(source: CheckedFolder, recipe: Recipe) -> int:
    """Bytes of the result's tensors, known before anything is computed."""
    total = 0
    linears = {f"{name}.weight": shape for name, shape in source.architecture.quantized().items()}
    scale_bytes = 4 if recipe.method == "fp8" or source.architecture.dtype == "float32" else 2
    for name, info in source.weights.plain.items():
        if name not in linears:
            total += info.num_bytes
            continue
        for suffix, stored in recipe.scheme.stored(*linears[name]).items():
            if stored.is_optional and suffix != "g_idx":
                continue
            is_scale = stored.dtypes == SCALE_DTYPES
            total += prod(stored.shapes[0]) * (
                scale_bytes if is_scale else ITEM_BYTES[stored.dtypes[0]]
            )
    return total
