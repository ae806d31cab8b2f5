"""What a user sees who starts a conversation without a model: what fits here, and how to get it."""

from functools import partial

from localllm.catalog import load_catalog
from localllm.cli.output import note, show_controls
from localllm.cli.words import size
from localllm.config import EngineConfig

_SHOWN = 4


def welcome(engine: EngineConfig) -> None:
    """A few lines on stderr."""
    from localllm.planning import pick, plan_catalog, this_machine

    tell = partial(note, dim=True)
    machine = this_machine(engine, measures=False)
    plans = plan_catalog(machine, engine)
    best = pick(plans, load_catalog())
    tell("no model given, so pocket answers: tiny, built in, and a demonstration only")
    if best is None:
        tell(f"{machine.name} has {size(machine.free_bytes)} free, too little for a real model")
        return
    fitting = [plan for plan in plans if plan.fits]
    names = [plan.shape.name for plan in reversed(fitting)][:_SHOWN]
    tell(
        show_controls(
            f"{machine.name} has {size(machine.free_bytes)} free; of {len(plans)} models"
            f" {len(fitting)} fit: {', '.join(names)} and smaller (localllm plan lists them)"
        )
    )
    tell(f"a good one to begin with: localllm chat {best.shape.name}")
