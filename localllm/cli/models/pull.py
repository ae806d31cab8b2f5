"""`localllm pull`: download a model, or bring it up to date."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.cli.draw.output import note, show_controls, write_stdout
from localllm.cli.draw.words import size
from localllm.cli.flags import common
from localllm.cli.models.warm import offer_to_warm
from localllm.errors import DownloadError, ExitCode, LocalLLMError, RequestError
from localllm.hub.catalog import BUILT_IN_MODELS, ModelSource, load_catalog, resolve_model

if TYPE_CHECKING:
    from localllm.hub.snapshot import HubSnapshot


def pull(
    model: Annotated[str, common.model("Alias or org/name[@revision][:tag].")],
    int4: Annotated[
        bool, typer.Option("--int4", help="The publisher's own 4-bit version, if there is one.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be fetched.")
    ] = False,
) -> None:
    """Download a model into the hub's cache, or bring it up to date. A tag chooses one of the GGUF
    files of a repository: `org/name:Q4_K_M`.

    A stopped download resumes where it was, every file is checked against its hash, and the folder
    is printed.
    """
    if model in BUILT_IN_MODELS:
        note(f"{model} is built in; there is nothing to fetch")
        return
    source = choose_source(model, int4=int4)
    here = source.file or source.folder
    if here is not None:
        note(show_controls(f"{model} is on this machine; there is nothing to fetch"))
        write_stdout(f"{here}\n")
        return
    try:
        snapshot = _look_up(source, dry_run)
    except DownloadError as error:
        here = _whole_copy(source)
        if error.exit_code != ExitCode.NETWORK or here is None:
            raise
        note(f"{model} is here; the hub cannot be reached to check for a newer version")
        write_stdout(f"{here}\n")
        return
    if snapshot.files:
        note(describe_snapshot(snapshot), dim=True)
        other = describe_gguf(snapshot)
        if other is not None:
            note(show_controls(other), dim=True)
    if dry_run:
        _print_files(snapshot)
        return
    folder = fetch_shown(source, refresh=True)
    write_stdout(f"{folder}\n")
    note(f"localllm chat {source.name}", dim=True)
    offer_to_warm(source.name)


def _look_up(source: ModelSource, dry_run: bool) -> "HubSnapshot":
    """The snapshot that the hub has. Raises: DownloadError, CheckpointError."""
    from localllm.hub.download import check_runnable, hub_errors, repo_name
    from localllm.hub.snapshot import look_up

    assert source.repo is not None
    with hub_errors(repo_name(source), source.repo):
        snapshot = look_up(source.repo, source.revision, tag=source.tag)
        if dry_run:  # else checked right before the weights are fetched
            check_runnable(snapshot)
    return snapshot


def _whole_copy(source: ModelSource) -> Path | None:
    """The model's folder on this machine, if all of its files are there."""
    from localllm.hub.download import find_here

    return find_here(source)


def _print_files(snapshot: "HubSnapshot") -> None:
    from localllm.hub.download import check_disk

    check_disk(snapshot)
    for file in snapshot.files:
        mark = "to fetch" if file in snapshot.missing else "here"
        fetched = snapshot.partial_bytes.get(file.name, 0)
        told = f" ({size(fetched)} of it here)" if fetched else ""
        write_stdout(f"{size(file.num_bytes):>9}  {mark:8}  {file.name}{told}\n")


def fetch_shown(source: ModelSource, *, refresh: bool = False) -> Path:
    """`fetch_model`, with its progress on the terminal."""
    from localllm.cli.models.download_progress import TerminalProgress
    from localllm.hub.download import fetch_model

    return fetch_model(source, progress=TerminalProgress(), refresh=refresh)


def choose_source(model: str, *, int4: bool) -> ModelSource:
    """What a name stands for. Raises: CatalogError; RequestError for no 4-bit version."""
    source = resolve_model(model)
    if not int4:
        return source
    entry = load_catalog().get(model)
    if entry is None or entry.int4 is None:
        raise RequestError(
            f"the catalogue has no 4-bit repository of {model} from its publisher",
            param="int4",
            hint=f"localllm pull {model}, then localllm quantize {model}",
        )
    return ModelSource(entry.int4, repo=entry.int4, chat_template=entry.chat_template)


def describe_snapshot(snapshot: "HubSnapshot") -> str:
    """One line on the size of a snapshot and how much of it is missing here."""
    origin = snapshot.origin
    what = f"{origin.repo} at {origin.commit[:12]}: {size(snapshot.num_bytes)}"
    if not snapshot.missing:
        return f"{what}, all of it here"
    if snapshot.missing_bytes == snapshot.num_bytes:
        return f"{what} to fetch"
    return f"{what}, {size(snapshot.missing_bytes)} to fetch"


def gguf_beside(source: ModelSource) -> str | None:
    """What is said of GGUF models in a repository whose safetensors would be fetched; None if there
    are none, and if the hub does not answer: the download will say why.
    """
    from localllm.hub.download import hub_errors
    from localllm.hub.snapshot import look_up

    if source.repo is None or source.tag is not None:
        return None
    try:
        with hub_errors(source.repo, source.repo):
            return describe_gguf(look_up(source.repo, source.revision))
    except LocalLLMError:
        return None


def describe_gguf(snapshot: "HubSnapshot") -> str | None:
    """One line on the GGUF models of a repository whose safetensors are wanted: the sizes of both,
    and which is better here; None if there are none.
    """
    from localllm.hub.quantized_files import models_among, tag_of, usual

    models = models_among(snapshot.gguf)
    if snapshot.gguf_file is not None or not models:
        return None
    name = usual(models)[0]
    repo, others = snapshot.origin.repo, len(models) - 1
    also = f" ({others} other {'size' if others == 1 else 'sizes'} too)" if others else ""
    share = models[name] / max(1, snapshot.num_bytes)
    # Decode takes as long as its bytes, on a CPU and on a GPU.
    if share < 1:
        better = f"for this machine the GGUF is better: a token reads {share:.0%} of the bytes"
    else:
        better = "for this machine the safetensors are better: a token reads fewer bytes"
    return (
        f"there is also a GGUF: {repo}:{tag_of(name)}, {size(models[name])}{also}; "
        f"its safetensors have {size(snapshot.num_bytes)}; {better}"
    )
