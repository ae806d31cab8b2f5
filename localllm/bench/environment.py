"""Where a measurement was made: what a reader must know to repeat it."""

import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from localllm.user.version import __version__

_LIBRARIES = ("torch", "triton", "numpy", "transformers", "safetensors")


def describe_environment(device: torch.device | None) -> dict[str, Any]:
    """Machine, versions and commit; `device` is None if the measured model runs elsewhere."""
    versions = {"localllm": __version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    described: dict[str, Any] = {
        "processor": processor_name(),
        "system": platform.platform(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions,
    }
    if device is not None:
        described["device"] = described["processor"]
        if device.type == "cuda":
            described["device"] = torch.cuda.get_device_name(device)
        described["threads"] = torch.get_num_threads()
    commit = _commit()
    if commit is not None:
        described["commit"] = commit
    return described


def processor_name() -> str:
    """The processor, with the vector instructions that decide its speed."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    lines = [line.partition(":") for line in text.splitlines()]
    fields = {name.strip(): value.strip() for name, _, value in lines}
    flags = set(fields.get("flags", "").split())
    known = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
    return ", ".join(
        [fields.get("model name", platform.machine()), *(f for f in known if f in flags)]
    )


def _commit() -> str | None:
    """The commit of this checkout, marked if it has changes; None outside a checkout."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
