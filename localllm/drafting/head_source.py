"""The head that drafts for a model, before it is loaded: where it is, and the memory it takes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localllm.drafting.head_drafter import max_waiting_rows
from localllm.errors import CheckpointError, RequestError
from localllm.model.mtp import find_mtp

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from localllm.drafting.speculation_config import SpeculationConfig
    from localllm.model.architecture import Architecture
    from localllm.model.blocks.block import RowBytes
    from localllm.model.found_head import FoundHead

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeadMemory:
    """Bytes of a head: its weights, what it keeps of each token, and what waits for its steps.

    `num_models`: the models whose steps are captured, the target included.
    """

    weights_bytes: int = 0
    token_bytes: int = 0
    waiting_bytes: int = 0
    num_models: int = 1


NO_HEAD = HeadMemory()


def find_head(
    files: Sequence[Path], target: Architecture, config: SpeculationConfig
) -> FoundHead | None:
    """The head in the files of a model, if `config` wants one. Without one that can be read the
    model works as well, so that is an error only where `config` needs it.

    Raises: CheckpointError, as `check_weights`; RequestError where there must be one.
    """
    if not config.has("head"):
        return None
    try:
        found = find_mtp(files, target)
    except CheckpointError as error:
        if config.needs("head"):
            raise
        logger.warning("the model's head for further tokens is not used: %s", error)
        return None
    if found is None and config.needs("head"):
        raise RequestError(
            "this model has no head that drafts",
            param="spec",
            hint="--spec auto, which uses what there is",
        )
    return found


def is_named(config: SpeculationConfig, *, has_draft: bool) -> bool:
    """Whether `config` asks for a head or an assistant by name, so that the model is not wanted
    without it; `has_draft`: what "draft:" names is a model of its own.
    """
    names_assistant = config.draft_model is not None and not has_draft
    return config.needs("head") or config.eagle_head is not None or names_assistant


def head_memory(
    head: FoundHead | None, item_bytes: int, row_bytes: RowBytes, block_size: int
) -> HeadMemory:
    """The memory of a head; `item_bytes`: of an unquantized value; `row_bytes`: of cached rows."""
    if head is None:
        return NO_HEAD
    if head.reads_target:
        return HeadMemory(head.weights.resident_bytes(item_bytes), num_models=2)
    width = head.states_width
    # Its entry, and its share of the hidden states that are kept of a block's last token.
    token_bytes = head.architecture.token_bytes(row_bytes) + -(-width * item_bytes // block_size)
    return HeadMemory(
        head.weights.resident_bytes(item_bytes),
        token_bytes,
        max_waiting_rows(4 * width) * width * item_bytes,
        num_models=2,
    )
