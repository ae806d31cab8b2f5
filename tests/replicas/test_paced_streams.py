"""Streams through Ray, of replicas whose engines make 50 tokens a second, whatever the machine."""

import asyncio
import logging
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from localllm.replicas.scale import prepare_ray

pytestmark = pytest.mark.scale
# Before Ray is imported, which reads it then.
prepare_ray()
pytest.importorskip("ray", reason="pip install 'localllm[ray]'")

import ray  # noqa: E402
from ray import serve  # noqa: E402

from localllm.answer.completion import TextEvent  # noqa: E402
from localllm.attach.engine_client import RequestStream  # noqa: E402
from localllm.attach.messages import ModelInfo, Stats  # noqa: E402
from localllm.engine.config import EngineConfig  # noqa: E402
from localllm.replicas import deployment  # noqa: E402
from localllm.replicas.client import ReplicasClient  # noqa: E402
from localllm.replicas.replica import Replica  # noqa: E402
from localllm.replicas.scale import Scale  # noqa: E402
from localllm.schedule.sampling_params import SamplingParams  # noqa: E402
from localllm.text.prompt import Prompt  # noqa: E402

logger = logging.getLogger(__name__)
TOKENS_PER_S, TOKENS = 50, 150


class PacedEngine:
    """Ends nothing early and never fails."""

    state = "ready"
    stats = Stats()
    num_restarts = 0
    info = ModelInfo("paced", 4096, "", 1, None, 0.0)

    def submit(self, prompt: Prompt, params: SamplingParams, salt: bytes) -> RequestStream:
        stream = RequestStream(self, 0, 1)  # type: ignore[arg-type]
        self.writing = asyncio.create_task(self._write(stream, params.max_tokens))
        return stream

    def forget(self, stream: RequestStream) -> None:
        pass

    async def _write(self, stream: RequestStream, count: int) -> None:
        began = time.monotonic()
        for i in range(count):
            await asyncio.sleep(max(0.0, began + i / TOKENS_PER_S - time.monotonic()))
            end = "length" if i == count - 1 else None
            stream.events.put_nowait(
                TextEvent(0, "word ", "", None, end, None, 0, 0, time.monotonic())  # type: ignore
            )


class PacedReplica(Replica):
    async def __init__(self, model: str, config: Any, most_requests: int, told: str) -> None:
        self._told = told
        self._name = serve.get_replica_context().replica_id.unique_id
        self._engine = PacedEngine()  # type: ignore[assignment]

    async def __del__(self) -> None:
        pass


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Starts two replicas, as `localllm serve --replicas 2` does."""
    monkeypatch.setattr(deployment, "Replica", PacedReplica)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init(address="local", num_cpus=2, include_dashboard=False)
    serve.start(proxy_location="Disabled")
    engines = deployment.engines_of(
        "paced",
        EngineConfig(),
        "paced",
        Scale(2, 2),
        deployment.Machine(1),
        most_requests=64,
        grace_s=1,
    )
    yield lambda: serve.run(engines, name="paced", route_prefix=None)
    serve.shutdown()
    ray.shutdown()


@pytest.mark.parametrize("at_once", [1, 8])
def test_paced_streams_keep_their_pace(paced: Any, at_once: int) -> None:
    async def ask(client: ReplicasClient, i: int) -> float:
        """Tokens a second between the first and the last."""
        stream = client.submit(Prompt((i,) * 40), SamplingParams(max_tokens=TOKENS))
        came = [time.monotonic() async for _ in stream]
        assert len(came) == TOKENS
        return (TOKENS - 1) / (came[-1] - came[0])

    async def run() -> list[float]:
        client = ReplicasClient(paced, "paced", 64)
        await client.start()
        await asyncio.gather(*(ask(client, i) for i in range(at_once)))
        rates = await asyncio.gather(*(ask(client, i) for i in range(at_once)))
        await client.stop()
        return rates

    with ThreadPoolExecutor(1) as pool:
        rates = pool.submit(asyncio.run, run()).result()
    logger.info("%d at once: %.1f to %.1f tokens/s", at_once, min(rates), max(rates))
    assert min(rates) >= 0.9 * TOKENS_PER_S
