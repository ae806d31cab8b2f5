"""Where an engine stands between two steps."""

from collections.abc import Sequence
from dataclasses import dataclass

from localllm.engine.request import TokenEvent
from localllm.engine.runner import Launched
from localllm.engine.scheduler import ScheduledBatch
from localllm.errors import DeviceError


@dataclass(frozen=True, slots=True)
class InFlight:
    """A batch that is being computed.

    `has_waited`: its step began with a wait for the one before; `is_watched`: by who drafts.
    """

    batch: ScheduledBatch
    launched: Launched
    began_s: float
    has_waited: bool
    is_watched: bool


@dataclass(frozen=True, slots=True)
class Settled:
    """All steps so far went well; where they overlap the newest may be in flight."""

    in_flight: InFlight | None = None


@dataclass(frozen=True, slots=True)
class Unsettled:
    """The last step failed when it was started. What it may have left half done is made anew, from
    known ids: so the batch before it comes first. `events`: of the step that failed.
    """

    in_flight: InFlight | None
    events: Sequence[TokenEvent]


@dataclass(frozen=True, slots=True)
class Lost:
    """The device is lost, and every call says so."""

    error: DeviceError


EngineState = Settled | Unsettled | Lost
