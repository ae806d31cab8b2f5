"""The replicas of a model as a deployment of Ray Serve."""

from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from localllm.engine.config import EngineConfig
from localllm.replicas.replica import Replica
from localllm.replicas.router import PrefixRouter
from localllm.replicas.scale import Scale

NAME = "Engine"
_HEALTH_S, _REPORT_S = 2.0, 1.0


@dataclass(frozen=True, slots=True)
class Machine:
    """What a replica takes of the machine that it runs on."""

    num_cpus: float
    num_gpus: float = 0


def engines_of(
    model: str,
    config: EngineConfig,
    told: str,
    scale: Scale,
    machine: Machine,
    *,
    most_requests: int,
    grace_s: float,
) -> Application:
    """The deployment; `told`: see Ask. A replica that is ended has `grace_s` for its answers."""
    options: dict[str, Any] = {"num_replicas": scale.fewest}
    if scale.fewest < scale.most:
        # A batch is full before another engine helps.
        options = {
            "autoscaling_config": {
                "min_replicas": scale.fewest,
                "max_replicas": scale.most,
                "target_ongoing_requests": config.max_num_seqs,
            }
        }
    deployment = serve.deployment(Replica).options(
        name=NAME,
        max_ongoing_requests=most_requests,
        ray_actor_options={"num_cpus": machine.num_cpus, "num_gpus": machine.num_gpus},
        graceful_shutdown_timeout_s=grace_s,
        health_check_period_s=_HEALTH_S,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter, request_routing_stats_period_s=_REPORT_S
        ),
        **options,
    )
    return deployment.bind(model, config, most_requests, told)
