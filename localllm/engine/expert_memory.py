"""How much of a GPU's memory a model's experts get, where it is too small for all of them."""

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, replace
from typing import Protocol

from localllm.engine.config import EngineConfig
from localllm.engine.memory import MemoryPlan
from localllm.errors import GpuMemoryError, RequestError
from localllm.model.architecture import Architecture
from localllm_kernels.compiling.traits import Traits, WeightLayout

# The context that comes before experts, unless one is asked for.
_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """`count`: experts of a layer, in the layer that has the most; `one_bytes`: of one expert of
    every layer together; `layouts`: of their linears, None for plain ones.
    """

    count: int
    one_bytes: int
    layouts: Set[WeightLayout | None]

    @property
    def num_bytes(self) -> int:
        """Of all experts of all layers."""
        return self.count * self.one_bytes


def expert_sizes(
    architecture: Architecture,
    linear_bytes: Callable[[str], int],
    layouts: Callable[[Iterable[str]], Set[WeightLayout | None]],
) -> ExpertSizes | None:
    """None if there are no experts; `linear_bytes`: bytes of a linear by name; `layouts`: of
    linears by their names.
    """
    mixtures = list(architecture.experts())
    if not mixtures:
        return None
    names = [
        f"{layer}.{name}"
        for layer, spec in mixtures
        for group in spec.expert_at(0).products
        for name in group.names
    ]
    count = max(spec.router.num_experts for _, spec in mixtures)
    return ExpertSizes(count, sum(map(linear_bytes, names)), layouts(names))


class Planner(Protocol):
    """Divides the memory; see plan_memory."""

    def __call__(
        self, weights_bytes: int, config: EngineConfig, *, is_captured: bool
    ) -> MemoryPlan:
        """`weights_bytes`: of the weights on the device; `is_captured`: whether steps are captured
        where the device can.
        """


def plan_experts(
    plan: Planner,
    weights_bytes: int,
    sizes: ExpertSizes | None,
    config: EngineConfig,
    architecture: Architecture,
    traits: Traits,
) -> MemoryPlan:
    """The plan, with the experts of a layer that have a slot on the device.

    `sizes`: None if there are no experts; `traits`: of the operators, which say whether experts can
    stay in host memory.

    Raises: GpuMemoryError as `plan`; RequestError for memory of experts that cannot stay elsewhere.
    """
    layouts = frozenset((None,)) if sizes is None else sizes.layouts
    staying = {
        "plain" if each is None else each.kind for each in layouts if not traits.moves_experts(each)
    }
    if staying and config.expert_memory_bytes is not None:
        raise RequestError(
            "--expert-memory is for a GPU with localllm's kernels; here experts are in one memory "
            "with everything else"
            if not traits.moves_experts(None)
            else f"--expert-memory: no kernel takes experts in {', '.join(sorted(staying))} from "
            "host memory",
            param="expert_memory",
        )
    if sizes is None or staying:
        return plan(weights_bytes, config, is_captured=True)
    return _place(plan, weights_bytes, sizes, config, architecture.max_position_embeddings)


def _place(
    plan: Planner,
    weights_bytes: int,
    sizes: ExpertSizes,
    config: EngineConfig,
    max_positions: int,
) -> MemoryPlan:
    """All other weights, and a context of 4,096 tokens or the one that is asked for, come before
    experts.
    """
    dense_bytes = weights_bytes - sizes.num_bytes

    def with_slots(count: int, config: EngineConfig) -> MemoryPlan:
        is_whole = count == sizes.count
        # The host looks at the choice of experts, which no captured step can.
        found = plan(dense_bytes + count * sizes.one_bytes, config, is_captured=is_whole)
        if is_whole:
            return found
        return replace(found, expert_slots=count, host_bytes=sizes.num_bytes)

    wanted_bytes = config.expert_memory_bytes
    if wanted_bytes is not None:
        return with_slots(min(max(1, wanted_bytes // sizes.one_bytes), sizes.count), config)
    context = config.max_model_len or min(_CONTEXT, max_positions)
    with_context = replace(config, max_model_len=context)
    try:
        with_slots(sizes.count, with_context)
        return with_slots(sizes.count, config)
    except GpuMemoryError as error:
        too_large = error
    low, high = 0, sizes.count
    while high - low > 1:
        middle = (low + high) // 2
        try:
            with_slots(middle, with_context)
            low = middle
        except GpuMemoryError:
            high = middle
    if low == 0:
        raise too_large
    return with_slots(low, config)
