"""Bounds on what the sizes of a config make together, each of which may be within its own."""

from math import prod

from localllm.errors import CheckpointError
from localllm.model.architecture import Architecture
from localllm.model.blocks.experts import ExpertsSpec
from localllm.model.blocks.experts_beside import ExpertsBesideSpec
from localllm.model.blocks.latent_experts import LatentExpertsSpec

# The largest known model has 90,000 linears of two trillion values.
MAX_LINEARS, MAX_VALUES = 200_000, 8_000_000_000_000
_WITH_EXPERTS = (ExpertsSpec, ExpertsBesideSpec, LatentExpertsSpec)


def check_sizes(architecture: Architecture, where: str) -> None:
    """Count the weights before anything names or counts each. Raises: CheckpointError."""
    num_linears, num_values = 0, 2 * architecture.vocab_size * architecture.hidden_size
    if architecture.per_layer is not None:
        tables = architecture.per_layer.tensors(architecture.hidden_size, architecture.num_layers)
        num_values += sum(map(prod, tables.values()))
    for _, spec in architecture.experts():
        count, expert = spec.router.num_experts, spec.expert
        num_linears += count * len(expert.names)
        num_values += count * len(expert.names) * expert.hidden_size * expert.inner_size
    for block, count in architecture.blocks().items():
        if not isinstance(block, _WITH_EXPERTS):
            groups = block.products
            num_linears += count * sum(len(group.linears) for group in groups)
            num_values += count * sum(group.width_out * group.width_in for group in groups)
    for what, number, most, name in (
        ("linears", num_linears, MAX_LINEARS, f"{MAX_LINEARS:,}"),
        ("values", num_values, MAX_VALUES, "8 trillion"),
    ):
        if number > most:
            raise CheckpointError(
                f"the sizes make {number:,} {what} together; the limit is {name}",
                where=where,
                hint="config.json is broken: no model is that large",
            )
