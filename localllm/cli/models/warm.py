"""`localllm warm`: prepare now what a first answer would otherwise wait for."""

import shlex
import sys
import time
from typing import Annotated

from localllm.cli.draw.output import is_terminal, note, show_controls
from localllm.cli.draw.status_line import StatusLine
from localllm.cli.draw.terminal import confirm
from localllm.cli.draw.words import duration
from localllm.cli.flags.common import OptionalModel
from localllm.cli.flags.engine_flags import EngineFlags
from localllm.cli.flags.groups import only, takes_flags
from localllm.engine.config import EngineConfig
from localllm.hub.recommendation import has_gpu_driver
from localllm.operators.listener import Listener
from localllm.user.settings import default_model

# Requests in a batch: a server's default, whose steps include those of a chat.
_NUM_SEQS = 16


@takes_flags
def warm(
    model: OptionalModel = None,
    *,
    engine: Annotated[
        EngineFlags, only("dtype", "kv_cache_dtype", "state_dtype", "deterministic", "self_check")
    ],
) -> None:
    """Check a GPU's kernels and compile all that a model needs, so that its first chat starts warm.

    Both happen once for each GPU and model shape; without this command they happen as the model is
    used. On a CPU there is almost nothing to prepare.
    """
    warm_up(model or default_model(), engine.config(_NUM_SEQS))


def warm_up(name: str | None, config: EngineConfig) -> None:
    """Load a model, and work ahead until no step has to wait for a kernel.

    Raises: as `open_model`.
    """
    from localllm.answer.drafters import find_drafters
    from localllm.answer.opening import load_text_engine
    from localllm.hub.checkpoint import open_checkpoint

    began_s = time.monotonic()
    found = open_checkpoint(name, config)
    shown = show_controls(found.name)
    doing = [""]

    def describe() -> str:
        now = f"; {doing[-1]}" if doing[-1] else ""
        return f"warming {shown}, {time.monotonic() - began_s:.0f} s{now}"

    with StatusLine(describe, 0.0) as line:
        listener = Listener(lambda text: line.say(lambda: note(text, dim=True)), doing.append)
        engine = load_text_engine(found, find_drafters(found), listener).engine
        pieces = 0
        while not engine.is_warm:
            engine.work_ahead()
            pieces += 1
            doing.append(f"kernels and steps, {pieces} so far")
    engine.finish()
    note(f"{shown} is warm after {duration(time.monotonic() - began_s)}", dim=True)


def offer_to_warm(name: str) -> None:
    """On a machine with a GPU, ask whether to warm a new model now, or say how to do it later."""
    if not has_gpu_driver():
        return
    command = f"localllm warm {shlex.quote(name)}"
    can_ask = is_terminal(sys.stdin) and is_terminal(sys.stderr)
    if not can_ask:
        note(f"{command} compiles its kernels before the first chat", dim=True)
    elif confirm("compile its kernels now (once, takes some minutes)? [Y/n] ", default=True):
        warm_up(name, EngineConfig(max_num_seqs=_NUM_SEQS))
    else:
        note(f"{command} does it later; otherwise the first chat does", dim=True)
