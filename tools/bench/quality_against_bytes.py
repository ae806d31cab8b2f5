"""What each weight method and each type of cache costs in quality, beside its bytes and its speed.

    python tools/bench/quality_against_bytes.py MODEL [MODEL ...] --text BOOK [--text BOOK]
        --work FOLDER [--ggufs FOLDER --llama-quantize PROGRAM] [--rounds 3] [--chars 12000]

MODEL: a checkpoint folder. Every method makes a copy of it in WORK; GGUF's types come from
NAME.gguf in the folder of `--ggufs`, the same model unquantized. Each copy, and each type of cache,
is compared with the model itself in float32. Speeds are of decoding, all rows of a table in turns;
behind 1,024 tokens for caches, since `pocket` has 2,048 positions. A stopped run goes on where it
was; the tables are printed in the end.
"""

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from localllm.bench.environment import describe_environment
from localllm.engine.chosen_device import KV_DTYPES
from localllm.model.families.table import read_architecture
from localllm.model.safetensors_header import read_header
from localllm.model.weight_files import find_weight_files
from localllm_kernels.attention.kv_cache import row_bytes

METHODS = {
    "int8": ["--method", "int8"],
    "fp8": ["--method", "fp8"],
    "gptq, 4 bits, groups of 32": ["--group-size", "32"],
    "gptq, 4 bits": [],
    "awq+gptq, 4 bits": ["--method", "awq+gptq"],
    "rtn, 4 bits": ["--method", "rtn"],
    "mxfp4": ["--method", "mxfp4"],
    "nvfp4": ["--method", "nvfp4"],
    "trellis, 3 bits": ["--bits", "3"],
}
GGUF_TYPES = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0", "Q3_K_M")
CACHES = ("bf16", "int8", "fp8", "int4")
_DEPTH = "1024"
# What pocket was trained with.
_WINDOW = "512"


@dataclass(frozen=True)
class Row:
    """A copy of a model, or the model itself with a type of cache."""

    model: Path
    name: str
    copy: Path
    flags: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """What its figures are kept under."""
        return f"{self.model.name}: {self.name}"


def localllm(*arguments: str) -> None:
    """Run it; it must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "localllm", *arguments], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"localllm {' '.join(arguments)} failed:\n{done.stderr}")


def weight_rows(model: Path, args: argparse.Namespace) -> list[Row]:
    """All copies of a model, which are made if they do not exist."""
    rows = []
    for name, flags in METHODS.items():
        copy = args.work / f"{model.name}-{name.replace(', ', '-').replace(' ', '-')}"
        if not (copy / "config.json").exists():
            localllm("quantize", str(model), str(copy), "--no-verify", *flags)
        rows.append(Row(model, name, copy))
    if args.ggufs is not None:
        for kind in GGUF_TYPES:
            copy = args.work / f"{model.name}-{kind}.gguf"
            if not copy.exists():
                source = args.ggufs / f"{model.name}.gguf"
                made = [str(args.llama_quantize), str(source), str(copy), kind]
                subprocess.run(made, capture_output=True, check=True)
            rows.append(Row(model, kind, copy))
    return rows


def cache_rows(model: Path) -> list[Row]:
    """The model with every type of cache."""
    return [Row(model, f"cache in {kind}", model, ("--kv-cache-dtype", kind)) for kind in CACHES]


def num_weights(model: Path) -> int:
    """Of a checkpoint that is not quantized."""
    headers = (read_header(path) for path in find_weight_files(model))
    return sum(prod(info.shape) for header in headers for info in header.values())


def bytes_of(copy: Path) -> int:
    """Of the files with weights."""
    return sum(
        path.stat().st_size for path in ([copy] if copy.is_file() else find_weight_files(copy))
    )


def quality(row: Row, args: argparse.Namespace) -> dict[str, float]:
    """The row against its model, on the beginnings of the texts."""
    told = args.work / "text.txt"
    told.write_text("".join(path.read_text()[: args.chars] for path in args.text))
    command = [sys.executable, "-m", "localllm", "eval", str(row.copy), "--against", str(row.model)]
    command += ["--text", str(told), "--ctx", _WINDOW, "--dtype", "float32", "--json", *row.flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    against = found["against"]
    return {
        "perplexity": found["perplexity"],
        "of the model": against["perplexity"],
        "KL": against["kl_mean"],
        "tokens": found["tokens"],
    }


def speed(row: Row, work: Path) -> float:
    """Tokens a second of decoding."""
    report, depth = work / "speed.json", _DEPTH if row.flags else "0"
    tests = ["-p", "0", "-n", "48", "--depth", depth, "-r", "1", "-c", "2048", *row.flags]
    localllm("bench", str(row.copy), *tests, "--json", str(report))
    results = json.loads(report.read_text())["results"]
    return next(each["tokens_per_s"]["median"] for each in results if "tokens_per_s" in each)


def size(row: Row) -> float:
    """Bits of a weight, all that the files hold shared out; or bytes of the cache for a token."""
    if not row.flags:
        return 8 * bytes_of(row.copy) / num_weights(row.model)
    kind = KV_DTYPES.get(row.flags[-1], torch.bfloat16)
    return read_architecture(row.model).token_bytes(partial(row_bytes, dtype=kind))


def table(rows: list[Row], found: dict[str, Any]) -> str:
    """Of one model."""
    unit = "bytes a token" if rows[0].flags else "bits a weight"
    lines = [
        f"| {rows[0].model.name} | {unit} | perplexity | KL mean | tokens/s |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        each = found[row.key]
        more = 100 * (each["perplexity"] / each["of the model"] - 1)
        lines.append(
            f"| {row.name} | {each['size']:,.4g} | {each['perplexity']:.3f} ({more:+.2f} %) "
            f"| {each['KL']:.4f} | {statistics.median(each['speeds']):.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Make the copies, measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--ggufs", type=Path)
    parser.add_argument("--llama-quantize", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chars", type=int, default=12_000)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    kept = args.work / "quality.json"
    told: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {"rows": {}}
    told["environment"] = describe_environment(None)
    found = told["rows"]

    def keep() -> None:
        kept.write_text(json.dumps(told, indent=2) + "\n")

    tables = []
    for model in args.models:
        for rows in (weight_rows(model, args), cache_rows(model)):
            for row in rows:
                if row.key not in found:
                    found[row.key] = {"size": size(row), **quality(row, args), "speeds": []}
                    keep()
            tables.append(rows)
    for rows in tables:
        for done in range(args.rounds):
            for row in rows:
                if len(found[row.key]["speeds"]) == done:
                    found[row.key]["speeds"].append(speed(row, args.work))
                    keep()
    sys.stdout.write("\n".join(table(rows, found) for rows in tables))


if __name__ == "__main__":
    main()
