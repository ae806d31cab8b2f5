"""`localllm limits`: the limits on what a client of the server may request."""

from localllm.cli.draw.columns import aligned
from localllm.cli.draw.output import json_line, write_stdout
from localllm.cli.flags.common import JsonObject
from localllm.server.limits import LIMITS


def limits(
    json_output: JsonObject = False,
) -> None:
    """Print the limits of `localllm serve` on what a client may request."""
    here = LIMITS.connections_here()
    rows = [(name, here if name == "connections" else value) for name, value in LIMITS.rows()]
    if json_output:
        write_stdout(json_line({name.replace(" ", "_"): value for name, value in rows}))
        return
    lines = aligned(((name, f"{value:,}") for name, value in rows), right={1})
    write_stdout("\n".join(lines) + "\n")
