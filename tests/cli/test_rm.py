"""`rm` deletes what it names, and no more."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.utils._cache_manager as cache_manager
import pytest

from localllm.errors import ExitCode

Run = Callable[..., Any]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLDER = "89abcdef0123456789abcdef0123456789abcdef"


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A function that puts a repository into the hub's cache, as a download leaves it."""
    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(cache_manager, "HF_HUB_CACHE", str(cache))

    def put_repository(
        repo: str, *, kind: str = "models", commit: str = COMMIT, ref: str = "main"
    ) -> Path:
        root = cache / f"{kind}--{repo.replace('/', '--')}"
        snapshot = root / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for folder in ("blobs", "refs"):
            (root / folder).mkdir(exist_ok=True)
        (root / "refs" / ref).write_text(commit)
        (root / "blobs" / "shared").write_bytes(b"x" * 1000)
        (root / "blobs" / commit).write_bytes(b"x" * 2000)
        (snapshot / "config.json").symlink_to("../../blobs/shared")
        (snapshot / "model.safetensors").symlink_to(f"../../blobs/{commit}")
        return root

    return put_repository


def test_mirrors_that_share_a_commit_are_told_apart(
    localllm: Run, put: Callable[..., Path]
) -> None:
    first, second, third = (put(f"{owner}/same") for owner in ("one", "two", "three"))
    data = put("one/same", kind="datasets")
    outcome = localllm("rm", "one/same", "two/same", "--yes")
    assert outcome.code == 0, outcome.err
    assert not first.exists()
    assert not second.exists()
    assert third.exists()
    assert data.exists()
    assert f"one/same: one/same, 3 kB, {first}" in outcome.err
    assert "deleted one/same; freed 3 kB\ndeleted two/same; freed 3 kB\n" in outcome.err


def test_a_model_that_is_named_twice_is_deleted_and_counted_once(
    localllm: Run, put: Callable[..., Path]
) -> None:
    root = put("Qwen/Qwen3-0.6B")
    outcome = localllm("rm", "qwen3-0.6b", "Qwen/Qwen3-0.6B", "--yes")
    assert outcome.code == 0, outcome.err
    assert outcome.err.count("deleted") == 1
    assert not root.exists()


def test_nothing_is_deleted_where_one_of_the_names_is_unknown(
    localllm: Run, put: Callable[..., Path]
) -> None:
    root = put("one/same")
    assert localllm("rm", "one/same", "two/other", "--yes").code == ExitCode.MODEL
    assert root.exists()


def test_a_revision_is_deleted_alone_and_files_that_others_use_stay(
    localllm: Run, put: Callable[..., Path]
) -> None:
    put("one/same")
    root = put("one/same", commit=OLDER, ref="v1")
    other = put("two/same", commit=OLDER, ref="v1")
    outcome = localllm("rm", "one/same@v1", "--yes")
    assert outcome.code == 0, outcome.err
    assert f"one/same@v1: one/same@{OLDER[:12]}, 2 kB" in outcome.err
    assert not (root / "snapshots" / OLDER).exists()
    assert (root / "snapshots" / COMMIT / "config.json").exists()
    assert (other / "snapshots" / OLDER).exists()
    assert localllm("rm", "one/same@v1", "--yes").code == ExitCode.MODEL


@pytest.mark.parametrize("leftover", ["refs", "blobs"])
def test_what_the_client_cannot_read_is_listed_and_can_be_deleted(
    localllm: Run, put: Callable[..., Path], leftover: str
) -> None:
    root = put("one/sound").with_name("models--one--odd")
    (root / leftover).mkdir(parents=True)
    (root / leftover / "main").write_text(COMMIT)
    listed = localllm("ls")
    assert "one/odd" in listed.out
    assert listed.err == ""
    assert localllm("rm", "one/odd", "--yes").code == 0
    assert not root.exists()


def test_a_deletion_that_left_something_is_not_called_one(
    localllm: Run, put: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's client logs what it cannot delete, and goes on."""
    root = put("one/same")
    monkeypatch.setattr(cache_manager, "_try_delete_path", lambda path, path_type: None)
    outcome = localllm("rm", "one/same", "--yes")
    assert outcome.code == ExitCode.DISK
    assert "one/same is not deleted" in outcome.err
    assert str(root) in outcome.err
    assert "freed" not in outcome.err


def test_a_name_that_nothing_has_is_not_here(localllm: Callable[..., Any]) -> None:
    outcome = localllm("rm", "nothing-here")
    assert outcome.code == ExitCode.MODEL
    assert "nothing-here is not on this machine" in outcome.err
    assert "localllm ls" in outcome.err
