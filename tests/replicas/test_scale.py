"""Numbers of replicas, what each gets of this machine."""

import pytest

from localllm.engine.config import EngineConfig
from localllm.errors import RequestError
from localllm.replicas.scale import Scale, cores_here, shared


def test_a_number_or_a_range() -> None:
    assert Scale.parse("2") == Scale(2, 2)
    assert Scale.parse("1:4") == Scale(1, 4)
    assert Scale.parse("1").is_one
    assert str(Scale(1, 4)) == "1 to 4"


@pytest.mark.parametrize("text", ["0", "x", "", "4:1", "1:2:3", "-1", "65", "9" * 5000, "²"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(RequestError) as refused:
        Scale.parse(text)
    assert refused.value.param == "replicas"
    assert "--replicas 2" in refused.value.hint


def test_replicas_on_a_cpu_share_its_cores_and_memory() -> None:
    config = shared(EngineConfig(), Scale(2, 2), has_gpus=False)
    assert config.threads == max(1, cores_here() // 2)
    assert config.gpu_memory_utilization == pytest.approx(0.45)
    assert shared(EngineConfig(threads=3), Scale(2, 2), has_gpus=False).threads == 3
    assert shared(EngineConfig(), Scale(2, 2), has_gpus=True) == EngineConfig()
