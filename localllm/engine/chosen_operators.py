"""The operators of a model on its device: chosen, checked and tuned."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from localllm.engine.chosen_device import dtypes_of
from localllm.engine.config import EngineConfig
from localllm.errors import BackendError
from localllm.files.private_files import private_folder
from localllm.model.architecture import Architecture
from localllm.model.random_weights import RandomWeights
from localllm.model.weight_check import WeightMap
from localllm.operators.listener import Listener
from localllm.operators.tuning_file import TuningFile
from localllm.user.places import cache_folder
from localllm_kernels import Ops, select_ops
from localllm_kernels.compiling.choice import ALL_OWN, Choice
from localllm_kernels.compiling.tunings import Tunings

if TYPE_CHECKING:
    from localllm.operators.check import CheckRequest


@dataclass(frozen=True, slots=True)
class ChosenOperators:
    """A table of operators, and the configurations of its kernels; None if nothing is tuned."""

    ops: Ops
    tunings: Tunings | None


def operators_for(
    weights: WeightMap | RandomWeights,
    architecture: Architecture,
    config: EngineConfig,
    device: torch.device,
    listener: Listener,
) -> ChosenOperators:
    """The operators of a model with these weights. Raises: BackendError."""
    is_tuned = device.type == "cuda" and not config.deterministic
    tunings = tuning_file(device).read() if is_tuned else None

    def choose() -> Choice:
        if not config.self_check:
            return ALL_OWN
        from localllm.operators.choice import choose_operators

        return choose_operators(check_request(weights, architecture, config), listener)

    try:
        ops = select_ops(
            device.type,
            config.backend,
            dtypes_of(architecture, config)[0],
            library_folder=library_folder(),
            deterministic=config.deterministic,
            tunings=tunings,
            choose=choose,
        )
    except ValueError as error:
        raise BackendError(str(error), hint="--backend torch") from error
    return ChosenOperators(ops, tunings)


def check_request(
    weights: WeightMap | RandomWeights,
    architecture: Architecture,
    config: EngineConfig,
) -> "CheckRequest":
    """What the self-check of such a model on this GPU covers."""
    # The cases import the kernels, which only a GPU needs.
    from localllm.operators.case import Sizes
    from localllm.operators.check import CheckRequest

    sizes = Sizes(architecture, *dtypes_of(architecture, config), config.block_size)
    tunings = tuning_file(torch.device("cuda")).read()
    found = {} if config.deterministic else tunings.found
    return CheckRequest(weights, sizes, found, config.deterministic)


def tuning_file(device: torch.device) -> TuningFile:
    """Where the configurations that are found for a device are kept."""
    return TuningFile.of(torch.cuda.get_device_name(device))


def library_folder() -> Path | None:
    """Where compiled CPU kernels are kept; None if there is no usable folder."""
    return private_folder(cache_folder("kernels"), "kernels are compiled again at each start")
