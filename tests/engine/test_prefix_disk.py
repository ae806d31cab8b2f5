"""Blocks of prefixes that outlive a process, and what may happen to them meanwhile."""

import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from localllm.engine.prefix_disk import PrefixDisk
from localllm.model.paged_kv_cache import PagedKVCache, empty_cache
from localllm.schedule.block_pool import BlockPool
from localllm.schedule.shared_count import shared_count

KEYS = [bytes([i]) * 32 for i in range(8)]
CPU = torch.device("cpu")


class Kept:
    """A cache whose blocks hold random values, and a disk for them."""

    def __init__(
        self, folder: Path, dtype: torch.dtype = torch.float32, limit_bytes: int = 1 << 30
    ) -> None:
        stack = empty_cache((2, 9, 2, 4, 6), dtype, CPU)
        self.cache = PagedKVCache((stack,), ((0, 0), (0, 1)))
        for part in self.parts():
            bits = torch.randint(0, 100, part.shape, dtype=torch.uint8)
            part.copy_(bits.to(part.dtype))
        self.pool = BlockPool(9)
        self.disk = PrefixDisk(folder, limit_bytes, self.cache, [self.pool])

    def parts(self) -> list[torch.Tensor]:
        [own] = self.cache.stacks
        parts = (own.key, own.value, own.key_scales, own.value_scales)
        return [part for part in parts if part is not None]

    def save(self, keys: list[bytes]) -> list[int]:
        """Have a prefix saved; its blocks."""
        blocks = self.pool.allocate(len(keys))
        for block_id, key in zip(blocks, keys, strict=True):
            self.pool.register(block_id, key)
        self.offer(keys)
        return blocks

    def offer(self, keys: list[bytes]) -> None:
        """Have saved what is in memory of a prefix."""
        self.disk.offer(keys)
        while self.disk.save_next():
            pass

    def bits(self, block_id: int) -> bytes:
        return self.cache.read_block(0, block_id).numpy().tobytes()


def blocks_in(folder: Path) -> list[Path]:
    """The files of whole blocks."""
    return [path for path in folder.iterdir() if len(path.name) == 64]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_a_block_comes_back_with_its_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    first, second = Kept(tmp_path, dtype), Kept(tmp_path, dtype)
    blocks = first.save(KEYS[:3])
    others = [second.bits(i) for i in range(9)]
    for block_id, key in zip((7, 2, 5), KEYS, strict=False):
        assert second.disk.load(key, 0, block_id)
    for there, here in zip((7, 2, 5), blocks, strict=True):
        assert second.bits(there) == first.bits(here) != others[there]
    for untouched in (0, 1, 3, 4, 6, 8):
        assert second.bits(untouched) == others[untouched]
    assert not second.disk.load(KEYS[3], 0, 1)
    assert len(first.bits(1)) == first.cache.block_bytes(0)


def test_what_is_on_disk_is_not_written_again(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.save(KEYS[:2])
    written = {path.name: path.stat().st_ino for path in blocks_in(tmp_path)}
    assert len(written) == 2
    kept.offer(KEYS[:2])
    assert {path.name: path.stat().st_ino for path in blocks_in(tmp_path)} == written


@pytest.mark.parametrize("damage", ["flipped", "short", "empty", "long", "another's"])
def test_a_damaged_block_is_never_used(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Kept(tmp_path)
    kept.save(KEYS[:2])
    path = tmp_path / KEYS[0].hex()
    content = path.read_bytes()
    changed = {
        "flipped": content[:-1] + bytes([content[-1] ^ 1]),
        "short": content[:-1],
        "empty": b"",
        "long": content + b"\0",
        "another's": (tmp_path / KEYS[1].hex()).read_bytes(),
    }
    path.write_bytes(changed[damage])
    before = kept.bits(5)
    assert not kept.disk.load(KEYS[0], 0, 5)
    assert kept.bits(5) == before
    assert "damaged" in caplog.text
    assert not path.exists()
    assert kept.disk.load(KEYS[1], 0, 5)


def test_what_is_unused_for_longest_is_deleted_the_ends_first(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    kept = Kept(folder)
    size = kept.cache.block_bytes(0) + 32
    old, new = KEYS[:4], KEYS[4:7]
    kept.save(old)
    for depth, key in enumerate(old):
        at = 1_000_000 - depth
        os.utime(folder / key.hex(), (at, at))
    (folder / "notes").write_text("not ours")
    crashed = folder / "x.part"
    crashed.write_bytes(b"half")
    os.utime(crashed, (1_000_000, 1_000_000))
    # Six are over the limit, and nine tenths of it hold five.
    small = Kept(folder, limit_bytes=int(5.6 * size))
    small.save(new)
    names = {path.name for path in folder.iterdir()} - {"bytes"}
    assert names == {key.hex() for key in (*old[:2], *new)} | {"notes"}
    # A prefix that is used again is the newest, whenever it was written.
    small.offer(old[:2])
    ages = sorted((path.stat().st_mtime_ns, path.name) for path in blocks_in(folder))
    assert [name for _, name in ages[-2:]] == [old[1].hex(), old[0].hex()]


def test_a_block_that_is_given_away_before_it_is_saved_is_left_out(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "kept")
    blocks = kept.pool.allocate(2)
    for block_id, key in zip(blocks, KEYS, strict=False):
        kept.pool.register(block_id, key)
    kept.pool.free(blocks)
    kept.pool.allocate(7)  # the six empty ones, and the older of the two
    kept.offer(KEYS[:2])
    assert [path.name for path in blocks_in(tmp_path / "kept")] == [KEYS[1].hex()]


def test_a_folder_that_takes_nothing_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "file"
    place.write_text("in the way")
    kept = Kept(place / "folder")
    kept.save(KEYS[:3])
    kept.disk.offer(KEYS[3:5])
    assert not kept.disk.save_next()
    assert not kept.disk.load(KEYS[0], 0, 1)
    assert caplog.text.count("not kept on disk") == 1


def test_others_do_not_read_them(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "folder"
    Kept(folder).save(KEYS[:1])
    assert folder.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())


def test_the_umask_does_not_matter(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = tmp_path / "folder"
        Kept(folder).save(KEYS[:1])
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_another_user_s_folder_is_neither_read_nor_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    mine = Kept(folder)
    mine.save(KEYS[:2])
    written = {path.name for path in folder.iterdir()}
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    theirs = Kept(folder)
    assert not theirs.disk.load(KEYS[0], 0, 1)
    theirs.save(KEYS[2:4])
    assert {path.name for path in folder.iterdir()} == written
    assert caplog.text.count("belongs to another user") == 1


@pytest.mark.parametrize("is_open", [True, False])
def test_a_block_that_others_may_have_written_is_computed(tmp_path: Path, is_open: bool) -> None:
    kept = Kept(tmp_path / "folder")
    kept.save(KEYS[:1])
    path = tmp_path / "folder" / KEYS[0].hex()
    path.chmod(0o666 if is_open else 0o600)
    assert kept.disk.load(KEYS[0], 0, 5) is not is_open


def test_of_what_is_larger_than_the_limit_the_beginning_is_kept(tmp_path: Path) -> None:
    size = Kept(tmp_path / "any").cache.block_bytes(0) + 32
    folder = tmp_path / "kept"
    kept = Kept(folder, limit_bytes=4 * size)
    kept.save(KEYS[:8])
    kept_keys = {path.name for path in blocks_in(folder)}
    assert kept_keys == {key.hex() for key in KEYS[:3]}
    written = {path.name: path.stat().st_ino for path in blocks_in(folder)}
    kept.offer(KEYS[:8])
    assert {path.name: path.stat().st_ino for path in blocks_in(folder)} == written


def bytes_of(folder: Path) -> int:
    """Of all that is in it, but for the count."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.name != "bytes")


def test_the_limit_holds_for_all_engines_in_a_folder_together(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    size = Kept(folder).cache.block_bytes(0) + 32
    engines = [Kept(folder, limit_bytes=6 * size) for _ in range(4)]
    for turn in range(5):
        for number, engine in enumerate(engines):
            engine.save([bytes([number, turn]) * 16])
            assert bytes_of(folder) <= 6 * size
    # The newest are there, of whichever engine.
    assert {path.name for path in blocks_in(folder)} >= {
        (bytes([number, 4]) * 16).hex() for number in range(4)
    }


def test_the_limit_holds_while_engines_write_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    size = Kept(folder).cache.block_bytes(0) + 32
    engines = [Kept(folder, limit_bytes=6 * size) for _ in range(4)]
    most = []

    def work(number: int) -> None:
        for turn in range(20):
            key = bytes([number, turn]) * 16
            block = engines[number].save([key])
            most.append(bytes_of_changing(folder))
            engines[number].pool.free(block)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) <= 6 * size
    assert len(blocks_in(folder)) >= 4


def bytes_of_changing(folder: Path) -> int:
    """Of files, at one moment or another, that others write and delete meanwhile."""
    total = 0
    for path in blocks_in(folder):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def test_a_process_that_was_killed_leaves_nothing_that_counts_for_ever(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    kept = Kept(folder, limit_bytes=4 * (Kept(folder).cache.block_bytes(0) + 32))
    size = kept.cache.block_bytes(0) + 32
    kept.save(KEYS[:1])
    # Killed while it wrote, having counted what it would write.
    (folder / "tmpabc.part").write_bytes(bytes(size - 1))
    (folder / "bytes").write_text(str(1000 * size))
    for key in KEYS[1:5]:
        kept.save([key])
        assert bytes_of(folder) <= 4 * size
    assert not list(folder.glob("*.part"))
    assert len(blocks_in(folder)) == 3
    # A count that nobody can read is made anew.
    for text in ("", "-1", "many", "9" * 30):
        (folder / "bytes").write_text(text)
        kept.pool.free(kept.save([KEYS[5]]))
        assert bytes_of(folder) <= 4 * size
        assert int((folder / "bytes").read_text()) == bytes_of(folder)
        (folder / KEYS[5].hex()).unlink()


def test_a_process_that_is_stopped_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localllm.schedule.shared_count._PATIENCE_S", 0.01)
    folder = tmp_path / "kept"
    kept = Kept(folder)
    with shared_count(folder / "bytes"):
        kept.save(KEYS[:3])
    assert blocks_in(folder) == []
    kept.offer(KEYS[:3])
    assert len(blocks_in(folder)) == 3


def test_a_folder_that_was_deleted_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    kept = Kept(folder)
    kept.save(KEYS[:2])
    shutil.rmtree(folder)
    kept.offer(KEYS[:2])
    assert len(blocks_in(folder)) == 2
    assert folder.stat().st_mode & 0o777 == 0o700


def test_of_many_that_wait_the_newest_are_saved(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "kept")
    for i in range(1000):
        kept.disk.offer([bytes([i % 256, i // 256]) * 16])
    num_calls = 0
    while kept.disk.save_next():
        num_calls += 1
    assert num_calls < 100
