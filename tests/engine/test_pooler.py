"""Embeddings are the same whatever else is computed; see tests/server/test_embeddings.py too."""

from collections.abc import Sequence

import numpy as np
import pytest
from engines import Limits, checked_step, load_tiny_model, make_engine

from localllm.engine.engine import Engine
from localllm.errors import RequestError
from localllm.model.decoder import DecoderModel
from localllm.schedule.sampling_params import Pooling, SamplingParams

EMBEDS = SamplingParams(max_tokens=9, ignore_eos=True, pooling=Pooling("embedding"))
ANSWERS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def engine_of(model: DecoderModel, **limits: object) -> Engine:
    return make_engine(model, Limits(pools=True, **limits))  # type: ignore[arg-type]


def prompt(length: int) -> list[int]:
    return [(7 * i) % 250 + 1 for i in range(length)]


def embeddings(engine: Engine, lengths: Sequence[int]) -> dict[int, np.ndarray]:
    wanted = {engine.add_request(prompt(length), EMBEDS): length for length in lengths}
    found = {}
    while engine.has_unfinished():
        for event in checked_step(engine):
            assert event.error is None
            if event.request_id in wanted:
                assert event.finish_reason == "length"
                assert event.pooled is not None
                found[wanted[event.request_id]] = np.frombuffer(event.pooled, np.float32)
            else:
                assert event.pooled is None
    return found


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3_5ForCausalLM"])
@pytest.mark.parametrize("overlaps", [False, True])
def test_they_are_the_same_alone_in_chunks_from_the_cache_and_beside_others(
    architecture: str, overlaps: bool
) -> None:
    model = load_tiny_model(architecture)
    alone = {n: embeddings(engine_of(model), [n])[n] for n in (1, 17, 40)}
    assert len({each.tobytes() for each in alone.values()}) == 3
    engine = engine_of(
        model, max_num_batched_tokens=11, enable_prefix_caching=True, overlaps=overlaps
    )
    engine.add_request(prompt(30), ANSWERS)
    for _ in range(2):
        found = embeddings(engine, [40, 17, 1])
        for length, expected in alone.items():
            assert np.array_equal(found[length], expected)


def test_an_engine_that_was_not_told_to_refuses() -> None:
    engine = make_engine(load_tiny_model("Qwen3ForCausalLM"), Limits())
    with pytest.raises(RequestError, match="no embeddings"):
        engine.add_request(prompt(3), EMBEDS)
