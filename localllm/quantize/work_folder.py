"""The folder beside the output that holds an unfinished quantization.

Each layer is a file of its own, written under another name and renamed, so that every file is
complete. When all are there, the checkpoint is assembled in `out/`, synced, and renamed to its
place; nothing there looks finished before.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from localllm.errors import CheckpointError, DiskError, RequestError
from localllm.files.json_file import read_json_object
from localllm.model.safetensors_header import read_header

MAX_SHARD_BYTES = 4_000_000_000
_STATE = "state.json"


class WorkFolder:
    """Layers and state of one quantization; see `open_work_folder`."""

    def __init__(self, folder: Path, out: Path) -> None:
        self.folder, self._out = folder, out

    def begin(self, state: Mapping[str, Any], *, resume: bool) -> None:
        """Start over, or resume a run that was begun with the same `state`.

        Raises: RequestError if there is nothing to resume, or if the state was another one.
        """
        path = self.folder / _STATE
        if not resume:
            for old in self.folder.iterdir():
                if old.name != "lock":
                    shutil.rmtree(old) if old.is_dir() else old.unlink()
            _write_text(path, json.dumps(state, indent=2))
            return
        if not path.exists():
            raise RequestError(
                "there is nothing to resume", where=str(self.folder), hint="leave out --resume"
            )
        try:
            begun = read_json_object(path)
        except CheckpointError as error:
            raise RequestError(
                f"the unfinished run cannot be resumed: {error.message}",
                where=error.where,
                hint="leave out --resume to start over",
            ) from error
        changed = sorted(key for key in state if begun.get(key) != state[key])
        if changed:
            raise RequestError(
                f"the unfinished run was begun with a different {', '.join(changed)}",
                where=str(self.folder),
                hint="the same flags as before, or leave out --resume to start over",
            )

    def has(self, name: str) -> bool:
        """Whether the part `name` is written."""
        return self._part(name).exists()

    def write(self, name: str, tensors: Mapping[str, Tensor], notes: Mapping[str, Any]) -> None:
        """Write a part, whole or not at all; `notes` are stored with it."""
        path = self._part(name)
        aside = path.with_suffix(".tmp")
        contiguous = {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}
        _save(contiguous, aside, {"format": "pt", "notes": json.dumps(notes)})
        aside.rename(path)

    def read(self, name: str) -> dict[str, Tensor]:
        """The tensors of a part. Raises: DiskError for one that is damaged."""
        with self._open(name) as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118

    def notes(self, name: str) -> dict[str, Any]:
        """The notes stored with a part. Raises: DiskError for one that is damaged."""
        with self._open(name) as file:
            notes: dict[str, Any] = json.loads(file.metadata()["notes"])
            return notes

    def assemble(self, names: list[str]) -> Path:
        """Assemble the parts as shards with their index; returns the folder they are in."""
        out = self.folder / "out"
        if out.exists():
            shutil.rmtree(out)
        out.mkdir()
        shards = self._plan_shards(names)
        weight_map: dict[str, str] = {}
        num_bytes = 0
        for i, shard in enumerate(shards):
            file = "model.safetensors"
            if len(shards) > 1:
                file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
            tensors = {key: tensor for name in shard for key, tensor in self.read(name).items()}
            _save(tensors, out / file, {"format": "pt"})
            weight_map |= dict.fromkeys(sorted(tensors), file)
            num_bytes += sum(tensor.nbytes for tensor in tensors.values())
        if len(shards) > 1:
            index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
            _write_text(out / "model.safetensors.index.json", json.dumps(index, indent=2))
        return out

    def publish(self) -> None:
        """Move the assembled checkpoint to its place, and delete everything else."""
        _sync(self.folder / "out")
        (self.folder / "out").rename(self._out)
        _sync(self._out.parent)
        shutil.rmtree(self.folder)

    def _plan_shards(self, names: list[str]) -> list[list[str]]:
        shards: list[list[str]] = [[]]
        room = MAX_SHARD_BYTES
        for name in names:
            num_bytes = self._part(name).stat().st_size
            if num_bytes > room and shards[-1]:
                shards.append([])
                room = MAX_SHARD_BYTES
            shards[-1].append(name)
            room -= num_bytes
        return shards

    @contextmanager
    def _open(self, name: str) -> Iterator[Any]:
        path = self._part(name)
        try:
            read_header(path)
        except CheckpointError as error:
            raise DiskError(
                f"the unfinished run is damaged: {error.message}",
                where=str(path),
                hint="remove that file, then run the same command with --resume",
            ) from error
        with safe_open(path, framework="pt") as file:
            yield file

    def _part(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"


@contextmanager
def open_work_folder(out: Path) -> Iterator[WorkFolder]:
    """The work folder of `out`, locked against other processes while the `with` block runs.

    Raises: RequestError if `out` already exists, or if something else is in the folder's place;
    DiskError naming the process that holds the lock.
    """
    if out.exists():
        raise RequestError(
            f"{out} already exists",
            param="out",
            hint="another OUT, or remove it first",
        )
    folder = out.with_name(out.name + ".unfinished")
    lock_path = folder / "lock"
    # Its contents are deleted when a run starts over.
    if folder.is_symlink() or (os.path.lexists(lock_path) and not lock_path.is_file()):
        raise RequestError(
            f"{folder} is not the folder of an unfinished quantization",
            param="out",
            hint="another OUT, or remove it first",
        )
    folder.mkdir(parents=True, exist_ok=True)
    with lock_path.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            raise DiskError(
                f"another process is quantizing into {out.name}",
                where=f"process {lock.read().strip() or 'unknown'} holds {lock_path}",
                hint="wait for it, or give another OUT",
            ) from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield WorkFolder(folder, out)


def check_space(folder: Path, needed_bytes: int) -> None:
    """Raises: DiskError where the disk of `folder` has less than `needed_bytes` free."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise DiskError(
            f"not enough room on the disk: {needed_bytes / 1e9:.1f} GB are needed, "
            f"{free / 1e9:.1f} GB are free",
            where=str(existing),
            hint="free some space, or give an OUT on another disk",
        )


def _save(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    path.unlink(missing_ok=True)  # so that nothing is written through a link
    path.touch()
    mode = path.stat().st_mode  # the library narrows it to the owner
    try:
        save_file(tensors, path, metadata=metadata)
        path.chmod(mode)
    except SafetensorError as error:  # it wraps the system's errors
        raise DiskError(
            f"{path.name} cannot be written: {error!s:.200}",
            where=str(path.parent),
            hint="free some space, then run the same command with --resume",
        ) from error
    _sync(path)


def _write_text(path: Path, text: str) -> None:
    aside = path.with_suffix(".tmp")
    aside.unlink(missing_ok=True)
    aside.write_text(text + "\n", encoding="utf-8")
    _sync(aside)
    aside.rename(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
