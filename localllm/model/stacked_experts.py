"""Files with one tensor for all experts of a layer: its parts, by the names of single experts."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from localllm.model.architecture import Architecture
from localllm.model.blocks.experts import ExpertsSpec, StackedNames
from localllm.model.tensor_info import Part, TensorInfo

# What follows the name of a stacked linear in files, and that of an expert's here.
_ENDINGS = {
    "": "weight",
    ".weight": "weight",
    "_bias": "bias",
    "_blocks": "blocks",
    "_scales": "scales",
}


def unstack(found: Mapping[str, TensorInfo], architecture: Architecture) -> dict[str, TensorInfo]:
    """The tensors with those of single experts in place of stacked ones.

    A tensor whose shape does not fit is left as it is, to be refused when the others are checked.
    """
    own = dict(found)
    for layer, spec in architecture.experts():
        if spec.stacked is not None:
            for stored, parts in _parts(found, f"{layer}.", spec, spec.stacked):
                del own[stored]
                own |= parts
    return own


def _parts(
    found: Mapping[str, TensorInfo], prefix: str, spec: ExpertsSpec, stacked: StackedNames
) -> Iterator[tuple[str, dict[str, TensorInfo]]]:
    """Stacked tensors by name, with their parts."""
    inner, hidden = spec.expert.inner_size, spec.expert.hidden_size
    # The first row of gate and of up, and the distance to the next.
    pair = ((0, 2), (1, 2)) if stacked.is_interleaved else ((0, 1), (inner, 1))
    for base, rows, width_out in (
        (stacked.gate_up, pair, 2 * inner),
        (stacked.down, ((0, 1),), hidden),
    ):
        for ending, suffix in _ENDINGS.items():
            info = found.get(f"{prefix}{base}{ending}")
            is_transposed = stacked.is_transposed and suffix == "weight"
            if info is not None and _fits(info, spec.router.num_experts, width_out, is_transposed):
                yield (
                    f"{prefix}{base}{ending}",
                    _split(info, spec, prefix, suffix, rows, is_transposed),
                )


def _fits(info: TensorInfo, count: int, width_out: int, is_transposed: bool) -> bool:
    axis = 2 if is_transposed else 1
    return len(info.shape) > axis and (info.shape[0], info.shape[axis]) == (count, width_out)


def _split(
    info: TensorInfo,
    spec: ExpertsSpec,
    prefix: str,
    suffix: str,
    rows: tuple[tuple[int, int], ...],
    is_transposed: bool,
) -> dict[str, TensorInfo]:
    width_out, *rest = (info.shape[2], info.shape[1]) if is_transposed else info.shape[1:]
    count = width_out // len(rows)
    found = {}
    for number in range(spec.router.num_experts):
        names = spec.expert_at(number).names
        own = names[:2] if len(rows) == 2 else names[2:]
        for name, (first, step) in zip(own, rows, strict=True):
            part = Part(info.shape[1:], number, first, step, count, is_transposed)
            found[f"{prefix}{name}.{suffix}"] = replace(info, shape=(count, *rest), part=part)
    return found
