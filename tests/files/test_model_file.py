"""What stands in a model's folder in the place of a file is refused by name, and nothing waits."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from localllm.errors import CatalogError, CheckpointError, ExitCode
from localllm.files.model_file import follow_links, open_model_file, read_model_file
from localllm.hub.card import read_card
from localllm.hub.catalog import ModelSource, load_catalog
from localllm.hub.checkpoint import open_checkpoint
from localllm.model.weight_check import check_weights
from localllm.model.weight_files import find_weight_files, fingerprint
from localllm.user.places import config_file, user_catalog
from localllm.user.settings import read_settings

Make = Callable[..., Path]
SMALL_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "model.safetensors.index.json",
)
FILES = (*SMALL_FILES, "model.safetensors")


@pytest.fixture(autouse=True)
def _patience() -> Iterator[None]:
    """What waits for a named pipe waits for ever."""

    def stop(signum: int, frame: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    yield
    signal.alarm(0)


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    # The name of a socket has at most 108 bytes.
    place = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{place}/{path.name}")
    os.close(place)


def make_dangling_link(path: Path) -> None:
    path.symlink_to("nothing-there")


def make_ring(path: Path) -> None:
    path.symlink_to(path.name)


KINDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "pipe": (make_pipe, "a named pipe"),
    "socket": (make_socket, "a socket"),
    "folder": (Path.mkdir, "a folder"),
    "dangling link": (make_dangling_link, "a link to a file that does not exist"),
    "ring of links": (make_ring, "cannot be"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "a link out of the model's folder"),
}


def read_everything(folder: Path) -> None:
    """As a command does before it loads a weight."""
    found = open_checkpoint(str(folder))
    files = find_weight_files(folder)
    check_weights(files, found.architecture)
    fingerprint(folder, files)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_refused_by_name(make_checkpoint: Make, name: str, kind: str) -> None:
    folder = make_checkpoint()
    make, reason = KINDS[kind]
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    with pytest.raises(CheckpointError) as caught:
        read_everything(folder)
    assert name in caught.value.message
    assert reason in caught.value.message
    if name != "config.json":
        card = read_card(ModelSource("m", folder=folder), folder)
        assert any(name in problem for problem in card.problems)


@pytest.mark.parametrize("name", FILES)
def test_a_link_out_of_the_folder_is_refused(make_checkpoint: Make, name: str) -> None:
    folder, elsewhere = make_checkpoint(), make_checkpoint()
    (folder / name).unlink(missing_ok=True)
    (elsewhere / name).touch()
    (folder / name).symlink_to(f"../{elsewhere.name}/{name}")
    with pytest.raises(CheckpointError, match="link out of the model's folder") as caught:
        read_everything(folder)
    assert name in caught.value.message
    assert str(elsewhere) in caught.value.where


def test_a_shard_that_is_a_link_out_of_the_folder_is_refused(make_checkpoint: Make) -> None:
    folder, elsewhere = make_checkpoint(), make_checkpoint()
    index = '{"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}'
    (folder / "model.safetensors.index.json").write_text(index)
    shard = folder / "model-00001-of-00001.safetensors"
    shard.symlink_to(elsewhere / "model.safetensors")
    with pytest.raises(CheckpointError, match="link out of the model's folder"):
        read_everything(folder)


def test_links_within_a_folder_and_to_one_are_followed(make_checkpoint: Make) -> None:
    folder = make_checkpoint()
    (folder / "files").mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).rename(folder / "files" / name)
        (folder / name).symlink_to(f"files/{name}")
    read_everything(folder)
    other = folder.with_name("other-name")
    other.symlink_to(folder)
    read_everything(other)


def test_a_link_that_the_user_names_is_followed_and_one_of_a_snapshot_kept(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    blob = snapshot.parents[1] / "blobs" / "f00"
    blob.parent.mkdir()
    blob.write_bytes(b"GGUF")
    named = snapshot / "model.gguf"
    named.symlink_to("../../blobs/f00")
    own = tmp_path / "own"
    own.mkdir()
    (own / "first.gguf").symlink_to("second.gguf")
    (own / "second.gguf").symlink_to(f"../models--a--b/snapshots/{'c' * 40}/model.gguf")
    assert follow_links(own / "first.gguf").samefile(blob)
    assert follow_links(own / "first.gguf").name == "model.gguf"
    assert follow_links(named) == named
    (own / "loop.gguf").symlink_to("loop.gguf")
    with pytest.raises(CheckpointError, match="lead nowhere"):
        follow_links(own / "loop.gguf")


def test_a_snapshot_of_the_hub_s_cache_leads_to_its_blobs_and_nowhere_else(
    make_checkpoint: Make, tmp_path: Path
) -> None:
    folder = make_checkpoint()
    repository = tmp_path / "hub" / "models--a--b"
    snapshot, blobs = repository / "snapshots" / ("c" * 40), repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / f"{i:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{i:040x}")
    read_everything(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("{}")
    other = tmp_path / "hub" / "models--c--d" / "blobs"
    other.mkdir(parents=True)
    (other / "x").write_text("{}")
    for target in ("../../refs/main", "../../../models--c--d/blobs/x", "../../blobs/../refs/main"):
        (snapshot / "generation_config.json").unlink(missing_ok=True)
        (snapshot / "generation_config.json").symlink_to(target)
        with pytest.raises(CheckpointError, match="link out of the model's folder"):
            read_everything(snapshot)


def test_a_file_that_grows_without_end_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "chat_template.jinja"
    path.write_bytes(b"x" * 11)
    assert read_model_file(path, 11) == b"x" * 11
    with pytest.raises(CheckpointError, match="too large: 11 bytes, at most 10"):
        read_model_file(path, 10)


def test_a_file_that_may_not_be_read_is_exit_code_5(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").touch()
    monkeypatch.setattr(os, "open", lambda *arguments: (_ for _ in ()).throw(PermissionError))
    with pytest.raises(CheckpointError, match="is not readable") as caught:
        open_model_file(tmp_path / "config.json")
    assert caught.value.exit_code == ExitCode.DISK


@pytest.mark.parametrize("kind", ["pipe", "folder", "dangling link"])
@pytest.mark.parametrize("place", [config_file, user_catalog])
def test_the_user_s_own_files_are_opened_the_same_way(place: Callable[[], Path], kind: str) -> None:
    KINDS[kind][0](place())
    read: Callable[[], object] = read_settings if place is config_file else load_catalog
    with pytest.raises(CatalogError, match="cannot be read") as caught:
        read()
    assert caught.value.exit_code == ExitCode.USAGE
    assert str(place()) in caught.value.where
