"""The engine on a GPU: graphs, overlapping steps and one path, as they are compiled."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from localllm.engine.config import EngineConfig
from localllm.engine.device_runner import DeviceRunner
from localllm.engine.engine import Engine
from localllm.engine.loaded_decoder import build_decoder
from localllm.engine.loading import build_engine
from localllm.errors import ExitCode
from localllm.hub.catalog_shape import catalog_shape
from localllm.model.families.table import architecture_of
from localllm.model.random_weights import RandomWeights, WeightKind
from localllm.schedule.sampling_params import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU here"),
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(
    temperature=0.8,
    top_k=40,
    top_p=0.9,
    repetition_penalty=1.2,
    frequency_penalty=0.3,
    seed=5,
    max_tokens=40,
    ignore_eos=True,
)


def make(kind: WeightKind = "int4", **options: object) -> Engine:
    """A small model of 0.6B's kind, with the same weights each time."""
    _, raw = catalog_shape("qwen3-0.6b")
    small = architecture_of({**raw, "num_hidden_layers": 4, "vocab_size": 8192})
    # The self-check, which may leave operators to torch, has tests of its own.
    options = {"self_check": False, **options}
    engine_config = EngineConfig(device="cuda", max_num_seqs=16, max_model_len=2048, **options)  # type: ignore[arg-type]
    source = RandomWeights(small, kind, torch.device("cuda"), 0)
    decoder = build_decoder(source, source.resident_bytes, small, engine_config)
    return build_engine(decoder, engine_config, frozenset(), "small")


def prompt(length: int, start: int = 1) -> list[int]:
    return [(7 * i + start) % 8000 for i in range(length)]


def generate(engine: Engine, requests: list[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    ids = [engine.add_request(*request) for request in requests]
    found: dict[int, list[int]] = {request_id: [] for request_id in ids}
    while engine.has_unfinished():
        for event in engine.step():
            assert event.error is None
            if event.token_id is not None:
                found[event.request_id].append(event.token_id)
    return list(found.values())


REQUESTS = [(prompt(n, n), p) for n, p in ((1, GREEDY), (300, SAMPLED), (70, GREEDY), (9, SAMPLED))]


@contextmanager
def no_graphs(engine: Engine) -> Iterator[None]:
    runner = engine._runner
    assert isinstance(runner, DeviceRunner)
    runner._captures = False
    yield
    assert not runner._graphs


@pytest.mark.parametrize("kind", ["bf16", "int4", "int8", "fp8"])
def test_replayed_steps_give_the_tokens_of_launched_ones(kind: WeightKind) -> None:
    engine, launched = make(kind), make(kind)
    found = generate(engine, REQUESTS)
    assert isinstance(engine._runner, DeviceRunner)
    assert engine._runner._graphs
    with no_graphs(launched):
        assert generate(launched, REQUESTS) == found


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("kind", ["bf16", "int4"])
def test_what_is_deterministic_is_the_same_alone(kind: WeightKind, kv_cache_dtype: str) -> None:
    options = {"deterministic": True, "kv_cache_dtype": kv_cache_dtype}
    together = generate(make(kind, max_num_batched_tokens=64, **options), REQUESTS)
    for request, tokens in zip(REQUESTS, together, strict=True):
        assert generate(make(kind, **options), [request]) == [tokens]


def test_what_is_captured_ahead_changes_nothing() -> None:
    engine = make()
    for _ in range(30):
        if not engine.work_ahead():
            break
    assert generate(engine, REQUESTS) == generate(make(), REQUESTS)


def test_out_of_memory_ends_requests_and_not_the_engine() -> None:
    expected = generate(make("bf16"), REQUESTS)
    engine = make("bf16")
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(free - (1 << 20), dtype=torch.uint8, device="cuda")
    for request in REQUESTS:
        engine.add_request(*request)
    errors = []
    while engine.has_unfinished():
        errors += [event.error for event in engine.step() if event.error is not None]
    assert errors, "the test must press"
    assert {error.exit_code for error in errors} == {ExitCode.MEMORY}
    del hog
    torch.cuda.empty_cache()
    assert generate(engine, REQUESTS) == expected
