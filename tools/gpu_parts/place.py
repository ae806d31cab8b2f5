"""Where a part runs, and where it leaves what it has measured so far."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SMALL, MIDDLE, LARGE = "qwen3-0.6b", "llama-3.2-1b", "llama-3.1-8b"


@dataclass(frozen=True)
class Place:
    """On a GPU at full size, or on a CPU to see whether the script holds. `out`: the file of a
    part, which is written at every find, so that one that is ended leaves what it has.
    """

    on_cpu: bool
    out: Path | None = None
    found: dict[str, Any] = field(default_factory=dict)

    def keep(self, name: str, value: Any) -> None:
        """One thing more that a part has found."""
        self.found[name] = value
        if self.out is not None:
            self.out.write_text(json.dumps(self.found))

    def size(self, full: int, tiny: int) -> int:
        """The one that goes with the place."""
        return tiny if self.on_cpu else full

    def config(self, **options: Any) -> Any:
        """An EngineConfig for the device. Each part times what it names, and no check of kernels:
        that is one of its own.
        """
        from localllm.engine.config import EngineConfig

        options = {"self_check": False, **options}
        if self.on_cpu:
            return EngineConfig(device="cpu", backend="torch", **options)
        return EngineConfig(device="cuda", **options)

    def open(self, alias: str, kind: Any, longest: int, **options: Any) -> Any:
        """A subject with random weights; on a CPU the built-in model in its place."""
        from localllm.bench.subject import open_random, open_subject

        config = self.config(**options)
        if self.on_cpu:
            return open_subject("pocket", config, min(longest, 2000))
        return open_random(alias, kind, config, longest, seed=0)

    def run(self, subject: Any, *suites: Any) -> None:
        """Measure suites of `bench`, and keep every row as it comes."""
        self.keep("memory", asdict(subject.decoder.plan))

        def progress(what: str) -> None:
            say(what)
            self.keep("rows", rows_of(*suites))

        for suite in suites:
            suite.run(progress)
            progress("done")
            if suite.limits is not None:
                self.keep("limits", asdict(suite.limits))


# A part keeps what it finds; what it raises is its error.
Part = Callable[[Place], None]


def rows_of(*suites: Any) -> list[dict[str, Any]]:
    """What suites have found, as JSON."""
    return [result.as_json() for suite in suites for result in suite.results()]


def say(what: str) -> None:
    """On stderr."""
    sys.stderr.write(f"{what}\n")
