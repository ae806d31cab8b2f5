"""How many replicas, and what each may use of a machine; without Ray."""

import os
import secrets
from dataclasses import dataclass, replace
from importlib.util import find_spec

from localllm.engine.config import EngineConfig
from localllm.engine.threads import usable_cores
from localllm.errors import RequestError

MOST_REPLICAS = 64


@dataclass(frozen=True, slots=True)
class Scale:
    """At least and at most so many replicas; Ray chooses between them by the requests that wait."""

    fewest: int = 1
    most: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.fewest <= self.most <= MOST_REPLICAS:
            raise RequestError(
                f"{self.fewest}:{self.most} is not a number of replicas",
                param="replicas",
                hint=f"--replicas 2, or a range such as 1:4, up to {MOST_REPLICAS}",
            )

    @property
    def is_one(self) -> bool:
        """Whether there is one engine, which needs no Ray."""
        return self.most == 1

    def __str__(self) -> str:
        return str(self.most) if self.fewest == self.most else f"{self.fewest} to {self.most}"

    @classmethod
    def parse(cls, text: str) -> "Scale":
        """`2`, or `1:4`. Raises: RequestError."""
        parts = text.split(":")
        if len(parts) > 2 or not all(part.isascii() and part.isdigit() for part in parts):
            raise RequestError(
                f"{text!r:.100} is not a number of replicas",
                param="replicas",
                hint="--replicas 2, or a range such as 1:4",
            )
        return cls(int(parts[0][:9]), int(parts[-1][:9]))


def require_ray() -> None:
    """Raises: RequestError if Ray is not installed."""
    if find_spec("ray") is None:
        raise RequestError(
            "replicas need Ray, which is not installed",
            param="replicas",
            hint="pip install 'localllm[ray]'",
        )


def prepare_ray() -> None:
    """Let Ray be silent, not tell its makers that it is used, and take requests only with a token
    that nobody else has. It reads this when it is imported.
    """
    os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"] = "token", secrets.token_hex(32)
    for name, value in (
        ("RAY_USAGE_STATS_ENABLED", "0"),
        ("RAY_COLOR_PREFIX", "0"),
        ("GRPC_ENABLE_FORK_SUPPORT", "0"),
    ):
        os.environ.setdefault(name, value)


def cores_here() -> int:
    """Cores that this process may use."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    return usable_cores(os.sched_getaffinity(0))


def shared(config: EngineConfig, scale: Scale, *, has_gpus: bool) -> EngineConfig:
    """The settings of each replica where all run on this machine: with a GPU each, or with a share
    of the cores and of the memory.
    """
    if has_gpus:
        return config
    return replace(
        config,
        threads=config.threads or max(1, cores_here() // scale.most),
        gpu_memory_utilization=config.gpu_memory_utilization / scale.most,
    )
