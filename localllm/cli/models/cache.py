"""`localllm cache`: data that is kept because it takes time to make again."""

from typing import Annotated

import typer

from localllm.cli.draw.output import json_line, note, write_stdout
from localllm.cli.draw.terminal import may_delete
from localllm.cli.draw.words import size
from localllm.cli.flags import suggestions
from localllm.cli.flags.common import Everything, JsonLines, Yes
from localllm.cli.flags.engine_flags import PrefixCacheFlags
from localllm.cli.flags.groups import only, takes_flags
from localllm.errors import RequestError

cache = typer.Typer(
    invoke_without_command=True,
    help="List and delete cached data: quantized models, prompts' keys and values, tunings, "
    "kernels.",
)


Place = Annotated[PrefixCacheFlags, only("cache_dir")]


@cache.callback()
@takes_flags
def _alone(context: typer.Context, place: Place) -> None:
    if context.invoked_subcommand is None:
        _show_kinds(place.cache_dir, json_output=False)


@cache.command("ls", hidden=True)
@cache.command("list")
@takes_flags
def list_(json_output: JsonLines = False, *, place: Place) -> None:
    """List the kinds of cached data, with sizes and folders."""
    _show_kinds(place.cache_dir, json_output)


def _show_kinds(cache_dir: str | None, json_output: bool) -> None:
    from localllm.user.cache_kinds import cache_kinds

    for kind in cache_kinds(cache_dir):
        if json_output:
            fields = {"kind": kind.name, "bytes": kind.num_bytes(), "folder": str(kind.folder)}
            write_stdout(json_line(fields))
        else:
            row = f"{kind.name:12} {size(kind.num_bytes()):>9}  {kind.meaning}"
            write_stdout(f"{row}\n{'':22}  {kind.folder}\n")
    if not json_output:
        note("downloaded models are in the hub's cache: localllm ls, localllm rm", dim=True)


@cache.command()
@takes_flags
def clear(
    kinds: Annotated[
        list[str] | None,
        typer.Argument(
            help="Kinds: quantized, prefixes, tunings, self-checks, kernels, gguf, gguf-headers, "
            "downloads.",
            autocompletion=suggestions.cache_kinds,
        ),
    ] = None,
    everything: Everything = False,
    yes: Yes = False,
    *,
    place: Place,
) -> None:
    """Delete cached data by kind."""
    from localllm.user.cache_kinds import cache_kinds

    known = {kind.name: kind for kind in cache_kinds(place.cache_dir)}
    if bool(kinds) == everything:
        raise RequestError("give either kinds or --all", hint=f"one or more of {', '.join(known)}")
    for name in kinds or ():
        if name not in known:
            raise RequestError(
                f"there is no kind {name!r:.40}", param="kinds", hint=f"one of {', '.join(known)}"
            )
    chosen = [known[name] for name in kinds or known]
    freed = size(sum(kind.num_bytes() for kind in chosen))
    names = ", ".join(kind.name for kind in chosen)
    if not may_delete(names, yes, freed):
        return
    for kind in chosen:
        kind.clear()
    note(f"deleted {names}; freed {freed}")
