"""How much of a step is spent in Python rather than in the model.

Python's part depends on the number of layers and requests, not on widths. So a hollow model, with
as many layers but hardly any width, takes only a little longer than Python alone.
"""

from collections.abc import Callable

from localllm.bench.results import Result, Spread, Suite, of_pairs
from localllm.bench.speed import run_decode
from localllm.bench.subject import Subject
from localllm.engine.config import EngineConfig
from localllm.engine.engine import Engine
from localllm.engine.loaded_decoder import build_decoder
from localllm.engine.loading import build_engine
from localllm.model.families.table import architecture_of
from localllm.model.random_weights import RandomWeights, WeightKind

HOLLOW_WIDTH = 128
# Fields of config.json.
_HOLLOW = {
    "vocab_size": 256,
    "hidden_size": HOLLOW_WIDTH,
    "intermediate_size": HOLLOW_WIDTH,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "quantization_config": None,
}
NUM_STEPS = 32


class PythonShareSuite(Suite):
    """Decode steps of a model and of its hollow twin, alternating."""

    def __init__(
        self, subject: Subject, config: EngineConfig, batches: tuple[int, ...], repeats: int
    ) -> None:
        self._subject, self._batches, self._repeats = subject, batches, repeats
        self._config = config
        self._found: dict[int, list[tuple[float, float]]] = {}

    def run(self, progress: Callable[[str], None]) -> None:
        hollow = build_hollow(self._subject, self._config)
        for _ in range(self._repeats):
            for batch in self._batches:
                progress(f"Python's share, batch {batch}")
                prompts = [[i] for i in range(batch)]
                python_s, step_s = (
                    Spread.of(run_decode(engine, prompts, NUM_STEPS)).median
                    for engine in (hollow, self._subject.engine)
                )
                self._found.setdefault(batch, []).append((python_s, step_s))

    def results(self) -> list[Result]:
        rows = []
        for batch, pairs in self._found.items():
            found = of_pairs(pairs, "python_s", "step_s", "share_of_step")
            verdict = f"at most {found['share_of_step'].median:.1%} of a step is Python"
            test = f"Python's share, batch {batch}"
            rows.append(Result("python", test, {"batch": batch}, found, verdict))
        return rows


def build_hollow(subject: Subject, config: EngineConfig) -> Engine:
    """An engine with a hollow model that has as many layers and the same kind of weights."""
    architecture = architecture_of({**subject.config_json, **_HOLLOW})
    kind: WeightKind = "int4" if subject.arithmetic == "int8" else "bf16"
    source = RandomWeights(architecture, kind, subject.device)
    decoder = build_decoder(source, source.resident_bytes, architecture, config)
    return build_engine(decoder, config, frozenset(), "hollow").beside()
