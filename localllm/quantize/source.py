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
from localllm.model.architecture import EMBEDDING, HEAD, TABLE, Architecture
from localllm.model.families.table import read_architecture
from localllm.model.found_head import FoundHead
from localllm.model.packed.fp8_schemes import Fp8
from localllm.model.packed.scheme import SCALE_DTYPES, Scheme
from localllm.model.tensor_info import ITEM_BYTES, TensorInfo
from localllm.model.weight_check import WeightMap, check_weights
from localllm.model.weight_files import find_weight_files
from localllm.quantize.gguf_source import is_gguf_source, read_gguf_source
from localllm.quantize.recipe import GROUP_SIZES, FileFormat, Recipe, holds_ends


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
    asked = [(name, recipe.scheme, shape) for name, shape in architecture.quantized().items()]
    of_ends = architecture.vocab_size, architecture.hidden_size
    ends = recipe.ends(is_tied=architecture.tie_word_embeddings)
    asked += [(name, end.scheme, of_ends) for name, end in ends.items()]
    for linear, scheme, shape in asked:
        try:
            scheme.stored(*shape)
        except ValueError as error:
            return linear, str(error)
    return None


def _fitting_flags(architecture: Architecture, recipe: Recipe) -> str:
    """The flags of the nearest recipe that fits every linear."""
    candidates: list[tuple[str, Recipe]] = [("--head keep", replace(recipe, head="keep"))]
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
            total += _stored_bytes(source, recipe.scheme, linears[name])
        elif name not in (EMBEDDING, f"{HEAD}.weight"):
            total += written_bytes(info)
    return total + Ends.of(source, recipe).num_bytes


@dataclass(frozen=True, slots=True)
class Ends:
    """The embedding and the head as they are written: the bytes of both, and what they are in;
    `head` is None where it is the embedding.
    """

    num_bytes: int
    embedding: str
    head: str | None
    file_format: FileFormat

    @classmethod
    def of(cls, source: CheckedFolder, recipe: Recipe) -> "Ends":
        """Those that a recipe gives."""
        architecture = source.architecture
        shape = architecture.vocab_size, architecture.hidden_size
        is_tied = architecture.tie_word_embeddings
        formats = recipe.ends(is_tied=is_tied)
        kinds, num_bytes = {}, 0
        for name in (TABLE, HEAD):
            if name in formats:
                kinds[name] = f"int{formats[name].bits}"
                num_bytes += _stored_bytes(source, formats[name].scheme, shape)
            elif (info := source.weights.plain.get(f"{name}.weight")) is not None:
                kinds[name] = architecture.dtype
                num_bytes += written_bytes(info)
        if recipe.is_stored_once(is_tied=is_tied):
            num_bytes += _scale_bytes(source) * architecture.vocab_size  # again, for the head
        return cls(num_bytes, kinds[TABLE], kinds.get(HEAD), recipe.file_format)

    @property
    def summary(self) -> str:
        """How large they are, in what, and why they are no smaller if a format is the reason."""
        size = f"{self.num_bytes / 1e6:,.1f} MB are the embedding"
        if self.head is None:
            text = f"{size} in {self.embedding}, which is also the head"
        elif self.head == self.embedding:
            text = f"{size} and the head in {self.embedding}"
        else:
            text = f"{size} in {self.embedding} and the head in {self.head}"
        if holds_ends(self.file_format):
            return text
        return f"{text}: the {self.file_format} format holds them no smaller"


def written_bytes(info: TensorInfo) -> int:
    """Bytes of a tensor that stays as it is; blocks of GGUF are written in 16 bits."""
    return info.num_bytes if info.dtype in ITEM_BYTES else 2 * prod(info.shape)


def _scale_bytes(source: CheckedFolder) -> int:
    return 4 if source.architecture.dtype == "float32" else 2


def _stored_bytes(source: CheckedFolder, scheme: Scheme, shape: tuple[int, int]) -> int:
    """Bytes of one linear as it is written."""
    total = 0
    scale_bytes = 4 if isinstance(scheme, Fp8) else _scale_bytes(source)
    for suffix, stored in scheme.stored(*shape).items():
        if stored.is_optional and suffix != "g_idx":
            continue
        is_scale = stored.dtypes == SCALE_DTYPES
        total += prod(stored.shapes[0]) * (
            scale_bytes if is_scale else ITEM_BYTES[stored.dtypes[0]]
        )
    return total
