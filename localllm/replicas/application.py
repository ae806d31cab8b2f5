"""The application for a cluster of Ray, for `serve run` and configuration files; see
docs/scaling.md.

A front takes what Ray's proxies receive: it is the same as that of `localllm serve`, with its
guards, and asks the replicas.
"""

import hashlib
import json
import os
from dataclasses import fields
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from localllm.drafting.speculation_config import SpeculationConfig
from localllm.engine.config import EngineConfig
from localllm.errors import RequestError
from localllm.hub.checkpoint import open_checkpoint
from localllm.replicas.client import ReplicasClient
from localllm.replicas.deployment import Machine, engines_of
from localllm.replicas.scale import Scale
from localllm.server.answering import ServedModel
from localllm.server.app import create_app
from localllm.server.guard import LOOPBACK_NAMES, Access
from localllm.server.kept_responses import responses_here
from localllm.server.limits import LIMITS
from localllm.server.served_name import ServedName, name_for_clients
from localllm.text.prompt_writer import PromptWriter

KEY_VARIABLE = "LOCALLLM_API_KEY"


class Args(BaseModel):
    """The arguments of the application.

    `engine`: fields of EngineConfig; `api_keys`: or one in the environment of Ray's processes;
    `needs_key`: False where only this machine reaches Ray's proxies.
    """

    model_config = ConfigDict(extra="forbid")
    model: str
    replicas: str | int = 1
    num_cpus: float = 1
    num_gpus: float = 0
    engine: dict[str, Any] = Field(default_factory=dict)
    served_model_name: str | None = None
    api_keys: list[str] = Field(default_factory=list)
    needs_key: bool = True
    allowed_hosts: list[str] = Field(default_factory=list)
    allowed_origins: list[str] = Field(default_factory=list)
    grace_s: float = 30


def build(args: Args) -> Application:
    """The front and the replicas. Raises: RequestError for arguments that cannot be used."""
    config = _config(args)
    key = os.environ.get(KEY_VARIABLE)
    keys = args.api_keys or ([key] if key else [])
    if (args.needs_key or args.allowed_hosts) and not keys:
        raise RequestError(
            "there is no key",
            param="api_keys",
            hint="api_keys, or needs_key: false where http_options.host is 127.0.0.1",
        )
    # What the tokens of a request and the keys of its prompt depend on.
    told = hashlib.sha256(json.dumps([args.model, args.engine], sort_keys=True).encode())
    engines = engines_of(
        args.model,
        config,
        told.hexdigest(),
        Scale.parse(str(args.replicas)),
        Machine(args.num_cpus, args.num_gpus),
        most_requests=LIMITS.requests,
        grace_s=args.grace_s,
    )
    access = Access(
        keys, (*LOOPBACK_NAMES, *map(str.lower, args.allowed_hosts)), args.allowed_origins
    )
    front = serve.deployment(Front).options(
        name="Front",
        max_ongoing_requests=LIMITS.connections,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=args.grace_s,
    )
    return front.bind(engines, args, config, told.hexdigest(), access)


def _config(args: Args) -> EngineConfig:
    """Raises: RequestError."""
    given = args.engine
    if not args.num_gpus:
        given = {"threads": max(1, int(args.num_cpus)), **given}
    known = {each.name for each in fields(EngineConfig)} - {"speculation"}
    unknown = sorted(set(given) - known)
    if unknown:
        raise RequestError(
            f"there is no setting {unknown[0]!r:.100} of an engine",
            param="engine",
            hint=f"one of {', '.join(sorted(known))}",
        )
    return EngineConfig(**{"max_num_seqs": 16, "speculation": SpeculationConfig(), **given})


Scope = dict[str, Any]


class _Asgi:
    """The ASGI application of a front: Ray copies it before there is an API, so it looks for it."""

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await serve.get_replica_context().servable_object.api(scope, receive, send)
            return
        while True:  # there is nothing to do at start and end
            kind = (await receive())["type"]
            await send({"type": f"{kind}.complete"})
            if kind == "lifespan.shutdown":
                return


@serve.ingress(_Asgi())
class Front:
    """The HTTP side, in an actor of its own."""

    async def __init__(  # type: ignore[misc]
        self,
        engines: DeploymentHandle[Any],
        args: Args,
        config: EngineConfig,
        told: str,
        access: Access,
    ) -> None:
        found = open_checkpoint(args.model, config)
        self._client = ReplicasClient(lambda: engines, told, LIMITS.requests * 4)
        info = await self._client.start()
        writer = PromptWriter(found.tokenizer, info.context)
        name = ServedName(args.served_model_name or name_for_clients(found.name, found.folder))
        served = ServedModel.of(found, name, writer)
        self.api = create_app(self._client, served, access, responses_here())
