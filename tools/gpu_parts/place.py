"""Where a part runs, and where it writes what it has measured so far."""

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
    """A GPU at full size, or a CPU to try the script. `out`: the file of a part, which is written
    after every result, so that a part that is killed leaves what it has.
    """

    on_cpu: bool
    out: Path | None = None
    found: dict[str, Any] = field(default_factory=dict)

    def keep(self, name: str, value: Any) -> None:
        """Record one more result of a part."""
        self.found[name] = value
        if self.out is not None:
            self.out.write_text(json.dumps(self.found))

    def size(self, full: int, tiny: int) -> int:
        """`full` on a GPU, `tiny` on a CPU."""
        return tiny if self.on_cpu else full

    def config(self, **options: Any) -> Any:
        """An EngineConfig for the device, without the self-check of kernels."""
        from localllm.engine.config import EngineConfig

        options = {"self_check": False, **options}
        if self.on_cpu:
            return EngineConfig(device="cpu", backend="torch", **options)
        return EngineConfig(device="cuda", **options)

    def open(self, alias: str, kind: Any, longest: int, **options: Any) -> Any:
        """A subject with random weights; on a CPU the built-in model instead.

        The large model in 4 bits uses the operators that a user's model would: the part "checked"
        has found them.
        """
        from localllm.bench.subject import open_random, open_subject

        is_checked = (alias, kind) == (LARGE, "int4") and "kv_cache_dtype" not in options
        options = {"self_check": is_checked, **options}
        config = self.config(**options)
        if self.on_cpu:
            return open_subject("pocket", config, min(longest, 2000))
        return open_random(alias, kind, config, longest, seed=0)

    def run(self, subject: Any, *suites: Any) -> None:
        """Run suites of `bench`, and record every row as it comes."""
        self.keep("memory", asdict(subject.decoder.plan))

        def progress(what: str) -> None:
            say(what)
            self.keep("rows", rows_of(*suites))

        for suite in suites:
            suite.run(progress)
            progress("done")
            if suite.limits is not None:
                self.keep("limits", asdict(suite.limits))


# A part records its results; an exception is its error.
Part = Callable[[Place], None]


def rows_of(*suites: Any) -> list[dict[str, Any]]:
    """The results of suites, as JSON."""
    return [result.as_json() for suite in suites for result in suite.results()]


def say(what: str) -> None:
    """Print a line on stderr."""
    sys.stderr.write(f"{what}\n")
