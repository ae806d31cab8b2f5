"""Predicts decode steps on GPUs that are not at hand, as a Markdown table.

    PYTHONPATH=.:kernels python tools/bench/predict_step.py

Copy bandwidth and arithmetic are shares of the makers' figures: 90 % and 80 % of an H200's
4.8 TB/s and of an H100's 3.35 TB/s, both 989 TFLOP/s; 92 % and 85 % of an RTX 4090's 1,008 GB/s
and 165 TFLOP/s. Instructions per 4-bit weight are from
`python -m localllm_kernels.compiling.machine_code`, as many as could be issued while the
busiest pipe works, with Triton 3.7.1.
"""

import sys
from functools import partial

import torch

from localllm.cost.rates import ModelWork
from localllm.cost.step_model import AT_THE_LIMIT, WITH_CARE, Gpu, predict_decode
from localllm.hub.catalog_shape import catalog_shape
from localllm.model.random_weights import RandomWeights, WeightKind
from localllm_kernels.attention.kv_cache import row_bytes

# A multiprocessor issues for 128 threads a clock.
GPUS = (
    Gpu("H200", 0.90 * 4.8e12, 0.80 * 989e12, 128 * 132 * 1.83e9),
    Gpu("H100", 0.90 * 3.35e12, 0.80 * 989e12, 128 * 132 * 1.83e9),
    Gpu("RTX 4090", 0.92 * 1.008e12, 0.85 * 165e12, 128 * 128 * 2.52e9),
)


def _with(norm: float, residual: float) -> dict[str, float]:
    return {"qkv": norm, "gate and up": norm, "output": residual, "down": residual}


# Per weight, on Hopper (H) and Ada (R): by plain cores, and by fragments for one row and sixteen.
ROW = {"H": _with(5.80, 4.73), "R": _with(6.86, 5.69)}
FRAGMENTS = {"H": _with(2.49, 2.09), "R": _with(8.0, 6.0)}
SIXTEEN = {"H": _with(3.35, 3.35), "R": _with(12.0, 12.0)}
CASES: tuple[tuple[str, WeightKind, str, dict[str, dict[str, float]] | None, int], ...] = (
    ("llama-3.1-8b", "bf16", "", None, 1),
    ("llama-3.1-8b", "int4", " by fragments", FRAGMENTS, 1),
    ("llama-3.1-8b", "int4", " by plain cores", ROW, 1),
    ("llama-3.1-8b", "int4", " by fragments", SIXTEEN, 16),
    ("llama-3.2-1b", "bf16", "", None, 1),
    ("llama-3.2-1b", "int4", " by fragments", FRAGMENTS, 1),
    ("qwen3-0.6b", "bf16", "", None, 1),
    ("qwen3-0.6b", "int4", " by fragments", FRAGMENTS, 1),
)
CONTEXT = 1024
HEADER = "| shape | weights | batch | launches | " + " | ".join(
    f"{gpu.name}: tokens/s at the limit | with care | share of copy" for gpu in GPUS
)


def main() -> None:
    """Print the table."""
    lines = [f"{HEADER} |", "|---" * (4 + 3 * len(GPUS)) + "|"]
    for alias, kind, way, counted, batch in CASES:
        architecture, _ = catalog_shape(alias)
        drawn = RandomWeights(architecture, kind, torch.device("cpu"), 0)
        kept = partial(row_bytes, dtype=torch.bfloat16)
        work = ModelWork.of(architecture, drawn.linear_bytes, kept)
        cells, launches = [], 0
        for gpu in GPUS:
            best, careful = (
                predict_decode(
                    work,
                    drawn.linear_bytes,
                    gpu,
                    care,
                    is_fused=kind == "int4",
                    batch=batch,
                    context=CONTEXT,
                    instructions=None if counted is None else counted[gpu.name[0]],
                )
                for care in (AT_THE_LIMIT, WITH_CARE)
            )
            launches = best.launches
            copied_s = work.decode_bytes([CONTEXT] * batch) / gpu.copy_bytes_per_s
            cells += [
                f"{batch / best.seconds:.0f}",
                f"{batch / careful.seconds:.0f}",
                f"{copied_s / careful.seconds:.0%} to {copied_s / best.seconds:.0%}",
            ]
        lines.append(f"| {alias} | {kind}{way} | {batch} | {launches} | {' | '.join(cells)} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
