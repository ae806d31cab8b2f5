"""Compile the C sources for this processor, once, and load the library."""

import ctypes
import hashlib
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from localllm_kernels.cpu.structs import DECLARATIONS

_SOURCES = sorted(Path(__file__).parent.glob("*.c"))
_HEADERS = sorted(Path(__file__).parent.glob("*.h"))
# Products and sums are fused only where the sources say so: a row's bits must not depend on how the
# compiler treats the code around it.
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-pthread", "-fPIC", "-Wno-psabi")
TIMEOUT_S = 120


class BuildError(Exception):
    """There is no compiler, or it failed."""


def load_library(folder: Path | None = None) -> ctypes.CDLL:
    """The library for this processor, compiled if it is not in `folder`.

    Nobody else may be able to write to `folder`. None: the library is compiled once, for this
    process alone. Raises: BuildError.
    """
    compiler = find_compiler()
    if not compiler:
        raise BuildError("there is no C compiler")
    if folder is None:
        return _compile_for_this_process(tuple(compiler), _FLAGS)
    library = folder / f"cpu-{_fingerprint(compiler)}.so"
    if not _is_own(library):
        _compile(compiler, library)
    return _load(library)


@cache
def _compile_for_this_process(compiler: tuple[str, ...], flags: tuple[str, ...]) -> ctypes.CDLL:
    """The library from a new folder that nobody else can write to, deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix="localllm-kernels-") as folder:
        library = Path(folder) / "cpu.so"
        _compile([*compiler], library)
        return _load(library)


def _load(library: Path) -> ctypes.CDLL:
    try:
        loaded = ctypes.CDLL(str(library))
    except OSError as error:
        raise BuildError(f"the compiled library cannot be loaded: {error}") from error
    DECLARATIONS.bind(loaded)
    return loaded


def _is_own(library: Path) -> bool:
    """Whether it exists, and only this user can have written it: its code will run."""
    try:
        status = library.lstat()
    except OSError:
        return False
    is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    return is_own and not status.st_mode & 0o022


def find_compiler() -> list[str]:
    """The command of a C compiler: CC, else the first one found; empty if there is none."""
    command = shlex.split(os.environ.get("CC", ""))
    for candidate in [command] if command else [["cc"], ["gcc"], ["clang"]]:
        path = shutil.which(candidate[0])
        if path is not None:
            return [path, *candidate[1:]]
    return []


def digest_of_sources() -> str:
    """Of everything that the bits of results depend on but the processor."""
    digest = hashlib.sha256()
    for path in [*_SOURCES, *_HEADERS]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _fingerprint(compiler: list[str]) -> str:
    """Digest of everything that the library depends on: sources, compiler, flags, processor."""
    digest = hashlib.sha256(digest_of_sources().encode())
    status = Path(compiler[0]).stat()
    parts = (compiler, status.st_size, status.st_mtime_ns, _FLAGS)
    digest.update(repr(parts).encode())
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        digest.update(
            next(line for line in lines if line.startswith(("flags", "Features"))).encode()
        )
    except (OSError, StopIteration):
        digest.update(" ".join(os.uname()).encode())
    return digest.hexdigest()[:16]


def _compile(compiler: list[str], library: Path) -> None:
    try:
        _compile_in(library.parent, compiler, library)
    except OSError as error:
        raise BuildError(f"the compiled library cannot be kept: {error}") from error


def _compile_in(cache: Path, compiler: list[str], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        objects = [Path(folder) / f"{source.stem}.o" for source in _SOURCES]
        started = [
            subprocess.Popen(
                [*compiler, *_FLAGS, "-c", str(source), "-o", str(target)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for source, target in zip(_SOURCES, objects, strict=True)
        ]
        for process in started:
            _finish(process)
        linked = Path(folder) / library.name
        command = [*compiler, "-shared", "-pthread", *map(str, objects), "-lm", "-o", str(linked)]
        _finish(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        linked.chmod(0o700)  # whatever the umask says
        # Atomic, even if two processes compile at once.
        linked.replace(library)


def _finish(process: "subprocess.Popen[str]") -> None:
    try:
        _, errors = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        process.kill()
        raise BuildError(f"the C compiler timed out after {TIMEOUT_S} s") from error
    if process.returncode != 0:
        raise BuildError(f"the C compiler failed: {errors.strip()[-400:]}")
