"""The states of an engine between two steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from localllm.drafting.speculator import PlannedStep
from localllm.errors import DeviceError
from localllm.schedule.request import TokenEvent
from localllm.schedule.runner import Launched
from localllm.schedule.scheduler import ScheduledBatch


class InFlight(NamedTuple):
    """A batch that is being computed. `planned`: what the speculator remembers of it."""

    batch: ScheduledBatch
    launched: Launched
    began_s: float
    planned: PlannedStep | None


@dataclass(frozen=True, slots=True)
class Settled:
    """All steps so far succeeded; if they overlap, the newest batch may be in flight."""

    in_flight: InFlight | None = None


@dataclass(frozen=True, slots=True)
class Unsettled:
    """The last step failed when it was launched. State that it may have left half-written is
    rebuilt from known ids, so the batch before it must be collected first.

    `events`: events of the failed step that have not been returned yet.
    """

    in_flight: InFlight | None
    events: Sequence[TokenEvent]


@dataclass(frozen=True, slots=True)
class Lost:
    """The device is lost, and every call raises `error`."""

    error: DeviceError


EngineState = Settled | Unsettled | Lost
