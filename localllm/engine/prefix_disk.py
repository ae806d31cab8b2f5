"""Keeps keys and values of prefixes on disk, so they need not be computed again after a restart.

Each block is a file, and so is each snapshot of recurrences at the end of one (see snapshots.py).
A file is named by the block's key (see block_pool.py) and cache group, and so by everything that
its values depend on. It holds a digest of name and values, then the values. Several processes may
share a folder: a file is created by a rename and never changed, and only one process writes at a
time, under the lock of a shared count of all bytes. The least recently used files are deleted
first; the end of a prefix goes before its beginning, without which it is useless.

A failure here is never an error of a request: a block that cannot be read is computed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from localllm.files.private_files import PART_SUFFIX, new_private, open_private, private_folder
from localllm.model.paged_kv_cache import PagedKVCache
from localllm.schedule.block_pool import BlockPool
from localllm.schedule.prefix_cache import PrefixStore
from localllm.schedule.shared_count import BusyError, shared_count
from localllm.schedule.snapshots import Snapshots

logger = logging.getLogger(__name__)

_DIGEST_BYTES = hashlib.sha256().digest_size
_NAME = re.compile(r"[0-9a-f]{64}")
# When the limit is exceeded, files are deleted down to this share of it.
_KEPT_SHARE = 0.9
# The most prefixes that wait to be saved; the oldest are dropped.
_MAX_OFFERED = 64
# The file with the count of all bytes.
_COUNT = "bytes"
# The number of snapshots among the cache groups.
_STATES = 255
_WITHOUT = "prefixes are not kept on disk"


class PrefixDisk(PrefixStore):
    """Stores blocks of one cache in a folder, whose files take at most `limit_bytes` in all.

    Offered blocks wait for calls of `save_next`, which come while there are no requests.
    """

    def __init__(
        self,
        folder: Path,
        limit_bytes: int,
        kv_cache: PagedKVCache,
        pools: Sequence[BlockPool],
        snapshots: Snapshots | None = None,
    ) -> None:
        """`pools`: one for each of the cache's groups; `snapshots`: None for a model without
        recurrences.
        """
        # Keys and values reveal what was said in a conversation, and answers are computed from
        # them, so the folder must be private.
        is_own = private_folder(folder, _WITHOUT) is not None
        self._folder, self._limit_bytes = folder, limit_bytes
        self._kv_cache, self._pools, self._snapshots = kv_cache, pools, snapshots
        self._offered: deque[list[bytes]] = deque(maxlen=_MAX_OFFERED)
        # The prefix that is being saved, block by block and group by group; when that began, and
        # how many entries are done.
        self._entries: list[_Entry] = []
        self._began_ns = self._num_saved = 0
        self._has_counted = False
        self._is_readable = self._is_writable = is_own

    def has(self, key: bytes, group: int) -> bool:
        is_kept = group < len(self._pools)  # a group added for a draft model is not kept
        return self._is_readable and is_kept and self._path(_Entry.of(key, group, 0)).exists()

    def load(self, key: bytes, group: int, block_id: int) -> bool:
        values = self._read(_Entry.of(key, group, 0))
        if values is None:
            return False
        self._kv_cache.write_block(group, block_id, values)
        return True

    def has_state(self, key: bytes) -> bool:
        return self._is_readable and self._path(_Entry.of(key, _STATES, 0)).exists()

    def load_state(self, key: bytes) -> Tensor | None:
        return self._read(_Entry.of(key, _STATES, 0))

    def offer(self, keys: Sequence[bytes]) -> None:
        if self._is_writable:
            self._offered.append(list(keys))

    def save_next(self) -> bool:
        """Write the next block that is not on disk yet; False if nothing is waiting.

        After a failed write, logs one warning and writes no more.
        """
        while self._is_writable and (self._offered or self._num_saved < len(self._entries)):
            if self._num_saved == len(self._entries):
                self._begin(self._offered.popleft())
                return True  # a long prefix may have taken a while
            entry = self._entries[self._num_saved]
            self._num_saved += 1
            if self._path(entry).exists() or (values := self._held(entry)) is None:
                continue
            try:
                self._save(entry, values.numpy().data)
            except BusyError:
                self._num_saved = len(self._entries)  # the rest is useless without this block
            except OSError as error:
                self._is_writable = False
                logger.warning("%s: %s: %s", _WITHOUT, self._folder, error)
            return True
        self._offered.clear()
        return False

    def _begin(self, keys: list[bytes]) -> None:
        """Save this prefix next, as much of it as would fit into the empty folder."""
        left = int(_KEPT_SHARE * self._limit_bytes)
        self._entries = []
        for depth, key in enumerate(keys):
            groups = [*range(len(self._pools))]
            if self._snapshots is not None and self._snapshots.has(key):
                groups.append(_STATES)
            left -= sum(map(self._file_bytes, groups))
            if left < 0:
                break
            self._entries += [_Entry.of(key, group, depth) for group in groups]
        self._num_saved, self._began_ns = 0, time.time_ns()
        for entry in self._entries:
            self._touch(entry)

    def _held(self, entry: _Entry) -> Tensor | None:
        """What memory holds of an entry, uint8; None if nothing."""
        if entry.group == _STATES:
            assert self._snapshots is not None
            return self._snapshots.find(entry.key) if self._snapshots.has(entry.key) else None
        held = self._pools[entry.group].find(entry.key)
        return None if held is None else self._kv_cache.read_block(entry.group, held)

    def _read(self, entry: _Entry) -> Tensor | None:
        """What the disk holds of an entry, uint8; None if nothing, or if it is damaged."""
        path, file_bytes = self._path(entry), self._file_bytes(entry.group)
        if not self._is_readable:
            return None
        try:
            with open_private(path) as file:
                content = bytearray(file.read(file_bytes + 1))
        except OSError:
            return None
        values = memoryview(content)[_DIGEST_BYTES:]
        is_whole = len(content) == file_bytes
        if not is_whole or content[:_DIGEST_BYTES] != _digest(entry.name, values):
            logger.warning("deleted a damaged block of a prefix; it is computed again: %s", path)
            _delete(path)
            return None
        return torch.frombuffer(values, dtype=torch.uint8)

    def _file_bytes(self, group: int) -> int:
        is_state = group == _STATES
        kept = self._kv_cache.state_bytes if is_state else self._kv_cache.block_bytes(group)
        return _DIGEST_BYTES + kept

    def _save(self, entry: _Entry, values: memoryview) -> None:
        if private_folder(self._folder, _WITHOUT) is None:  # it may have been deleted
            self._is_writable = False
            return
        with shared_count(self._folder / _COUNT) as count:
            if self._path(entry).exists():  # by another process, just now
                return
            file_bytes = self._file_bytes(entry.group)
            before = count.read()
            if before is None or not self._has_counted:
                before = sum(size for _, size, _ in self._files())
            if before + file_bytes > self._limit_bytes:
                before = self._make_room(file_bytes)
            # Before the write: if the process is killed, the count is too high, until the next
            # `_make_room`.
            count.write(before + file_bytes)
            self._has_counted = True
            with new_private(self._path(entry)) as file:
                file.write(_digest(entry.name, values))
                file.write(values)
            self._touch(entry)

    def _make_room(self, file_bytes: int) -> int:
        """Delete unfinished files, since no other process is writing now, and the least recently
        used ones until `file_bytes` more fit; returns the bytes of the files that are left.
        """
        files = sorted(self._files())
        left = sum(size for _, size, _ in files)
        most = int(_KEPT_SHARE * self._limit_bytes) - file_bytes
        unfinished = [each for each in files if each[2].suffix]
        finished = [each for each in files if not each[2].suffix]
        for _, size, path in [*unfinished, *finished]:
            if left > most or path.suffix:
                _delete(path)
                left -= size
        return left

    def _files(self) -> list[tuple[float, int, Path]]:
        """Time of last use, size and path of each file."""
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if not _NAME.fullmatch(entry.name) and not entry.name.endswith(PART_SUFFIX):
                    continue
                try:
                    stat = entry.stat(follow_symlinks=False)
                except OSError:  # deleted meanwhile
                    continue
                found.append((stat.st_mtime, stat.st_size, Path(entry.path)))
        return found

    def _touch(self, entry: _Entry) -> None:
        """Mark an entry as used now; earlier blocks of its prefix get slightly later times."""
        at = self._began_ns - entry.depth * 1000
        try:
            os.utime(self._path(entry), ns=(at, at))
        except OSError:
            return  # not on disk

    def _path(self, entry: _Entry) -> Path:
        return self._folder / entry.name.hex()


@dataclass(frozen=True, slots=True)
class _Entry:
    """A block of a prefix in one cache group, or the snapshot at its end. `name`: its file's;
    `depth`: the block's index in the prefix.
    """

    key: bytes
    group: int
    depth: int
    name: bytes

    @classmethod
    def of(cls, key: bytes, group: int, depth: int) -> _Entry:
        name = hashlib.sha256(key + bytes([group])).digest() if group else key
        return cls(key, group, depth, name)


def _digest(name: bytes, values: memoryview) -> bytes:
    digest = hashlib.sha256(name)
    digest.update(values)
    return digest.digest()


def _delete(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        logger.debug("%s cannot be deleted", path, exc_info=True)
