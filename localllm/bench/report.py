"""The report of a benchmark run, as one JSON file."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from localllm.bench.results import Result
from localllm.bench.subject import Subject
from localllm.cost.rates import Rates


def describe_model(subject: Subject) -> dict[str, Any]:
    """Describe the model that was measured."""
    return {
        "name": subject.name,
        "weights": subject.weights,
        "dtype": str(subject.decoder.dtype).removeprefix("torch."),
        "operators": subject.decoder.model.ops.traits.name,
        "weight_bytes": subject.work.weight_bytes(1),
        "num_weights": subject.work.num_weights,
    }


@dataclass(frozen=True, slots=True)
class Report:
    """The results of a run, with the machine and the model they were measured on."""

    environment: dict[str, Any]
    model: dict[str, Any]
    limits: Rates | None
    seed: int
    results: list[Result]

    def as_json(self) -> dict[str, Any]:
        """The contract of `bench --json`."""
        return {
            "environment": self.environment,
            "model": self.model,
            "limits": None if self.limits is None else asdict(self.limits),
            "seed": self.seed,
            "results": [result.as_json() for result in self.results],
        }

    def write(self, path: Path) -> None:
        """Write the report to `path`. Raises: OSError."""
        path.write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")
