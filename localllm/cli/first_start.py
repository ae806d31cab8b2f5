"""What a user sees who starts a conversation without a model: what fits here, and how to get it."""

from functools import partial

from localllm.catalog import load_catalog
from localllm.cli.output import note, show_controls
from localllm.cli.words import size
from localllm.config import EngineConfig


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
    count, speed = sum(plan.fits for plan in plans), best.decode_tokens_per_s or 0.0
    where = f"{machine.name}, {size(machine.free_bytes)} free"
    tell(
        show_controls(f"{where}: {count} of the {len(plans)} models fit; localllm plan lists them")
    )
    tell(
        f"a good one to begin with: localllm chat {best.shape.name} "
        f"({size(best.memory.weights_bytes)}, about {speed:.0f} tokens a second)"
    )
