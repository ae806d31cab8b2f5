"""Where a part runs, and where it writes what it has measured so far."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SMALL, MIDDLE, LARGE = "qwen3-0.6b", "llama-3.2-1b", "llama-3.1-8b"
# Sizes of a model whose kernels are interpreted: widths that are multiples of a group.
TINY = {
    "num_hidden_layers": 1,
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
}


@dataclass(frozen=True)
class Place:
    """A GPU at full size, or a CPU to rehearse on with tiny models. `out`: the file of a part,
    which is written after every result, so that a part that is killed leaves what it has.
    """

    rehearses: bool
    out: Path | None = None
    found: dict[str, Any] = field(default_factory=dict)

    def keep(self, name: str, value: Any) -> None:
        """Record one more result of a part."""
        self.found[name] = value
        if self.out is not None:
            self.out.write_text(json.dumps(self.found))

    def cannot(self, what: str) -> None:
        """Record what a rehearsal leaves out."""
        self.keep("not_rehearsed", what)

    @property
    def flags(self) -> list[str]:
        """Those of the script, for a process of a part."""
        return ["--rehearse"] if self.rehearses else []

    def size(self, full: int, tiny: int) -> int:
        """`full` on a GPU, `tiny` on a CPU."""
        return tiny if self.rehearses else full

    def config(self, **options: Any) -> Any:
        """An EngineConfig for the device, without the self-check of kernels."""
        from localllm.engine.config import EngineConfig

        options = {"self_check": False, **options}
        if self.rehearses:
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
        if self.rehearses:
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
