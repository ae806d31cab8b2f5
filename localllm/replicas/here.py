"""Replicas on this machine, for `localllm serve --replicas`: in a Ray of their own, behind the same
front as a single engine.
"""

import logging
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from localllm.errors import BackendError, LocalLLMError
from localllm.hub.checkpoint import Checkpoint
from localllm.replicas.client import ReplicasClient
from localllm.replicas.deployment import Machine, engines_of
from localllm.replicas.scale import Scale, cores_here, shared

_APPLICATION = "localllm"
_OBJECT_STORE_BYTES = 128 << 20
_TRIES, _PAUSE_S = 20, 0.1


def replicas_here(
    found: Checkpoint, scale: Scale, most_requests: int, grace_s: float
) -> ReplicasClient:
    """Replicas of a model, each with a GPU, or with a share of the cores and of the memory. Each
    takes up to `most_requests`.
    """
    num_gpus = _count_gpus() if found.engine_config.device != "cpu" else 0
    if 0 < num_gpus < scale.most:
        raise BackendError(
            f"{scale.most} replicas need a GPU each, and there are {num_gpus}",
            hint=f"--replicas {num_gpus}, or --device cpu",
        )
    config = shared(found.engine_config, scale, has_gpus=num_gpus > 0)
    folder = str(found.folder.resolve())
    # Private, and short: the names of sockets within it have at most 107 bytes.
    folder_of_ray = tempfile.TemporaryDirectory(prefix="ll-ray-", ignore_cleanup_errors=True)
    machine = Machine(cores_here() / scale.most, 1 if num_gpus else 0)

    def deploy() -> DeploymentHandle[Any]:
        logging.getLogger("ray.serve").addFilter(lambda record: record.levelno >= logging.WARNING)
        ray.init(
            _temp_dir=folder_of_ray.name,
            address="local",
            _node_ip_address="127.0.0.1",
            num_cpus=cores_here(),
            num_gpus=num_gpus,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            logging_level=logging.ERROR,
        )
        quiet = LoggingConfig(log_level="WARNING")
        serve.start(proxy_location="Disabled", logging_config=quiet)
        engines = engines_of(
            folder,
            config,
            folder,
            scale,
            machine,
            most_requests=most_requests,
            grace_s=grace_s,
        )
        try:
            return serve.run(engines, name=_APPLICATION, route_prefix=None, logging_config=quiet)
        except RuntimeError as error:
            raise LocalLLMError(
                "the replicas cannot be started",
                where=str(error)[:500],
                hint="localllm chat with the same model and flags shows more",
            ) from error

    def end() -> None:
        if ray.is_initialized():
            serve.shutdown()
            ray.shutdown()
        for _ in range(_TRIES):  # Ray's processes write until they have ended
            shutil.rmtree(folder_of_ray.name, ignore_errors=True)
            if not Path(folder_of_ray.name).exists():
                return
            time.sleep(_PAUSE_S)

    return ReplicasClient(deploy, folder, scale.most * most_requests, end)


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count()
