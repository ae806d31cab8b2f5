"""Compare a mixture of experts with a dense model that has as many active parameters, alternating.

    python tools/bench/sparse_against_dense.py [--weights int4] [-n 32] [-r 8] [--batch 1 4 16]

Both have random weights and the same attention; the dense feed-forward is as wide as the experts
that a row takes. The sparse shape is that of OLMoE 1B-7B with Qwen3's attention: 6.9 billion
weights, of which 1.08 in the layers are active.

Then the experts of a layer alone, see `by_chance`.
"""

import argparse
import random
import statistics
import sys
import time
from typing import Any

import torch

from localllm.bench.compare import ratio_row
from localllm.bench.speed import run_decode, run_prefill
from localllm.cost.rates import ModelWork
from localllm.engine.chosen_device import select_device
from localllm.engine.chosen_operators import library_folder
from localllm.engine.config import EngineConfig
from localllm.engine.engine import Engine
from localllm.engine.loaded_decoder import build_decoder
from localllm.engine.loading import build_engine
from localllm.model.families.table import architecture_of
from localllm.model.linear import Projection, packed_linear
from localllm.model.packed.table import PACKED_TYPES
from localllm.model.random_weights import RandomWeights
from localllm_kernels import cpu_ops

SHAPE: dict[str, Any] = {
    "vocab_size": 50304,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
INNER, NUM_EXPERTS, TOP_K = 1024, 64, 8
DENSE = {**SHAPE, "architectures": ["Qwen3ForCausalLM"], "intermediate_size": TOP_K * INNER}
SPARSE = {
    **SHAPE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "intermediate_size": TOP_K * INNER,
    "moe_intermediate_size": INNER,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": TOP_K,
    "norm_topk_prob": True,
}


def open_shape(config: dict[str, Any], args: argparse.Namespace) -> tuple[Engine, float]:
    """An engine with random weights of that shape, and how many weights compute a token."""
    engine_config = EngineConfig(max_num_seqs=max(args.batch), max_model_len=1024)
    architecture = architecture_of(config)
    source = RandomWeights(architecture, args.weights, select_device(engine_config), 0)
    decoder = build_decoder(source, source.resident_bytes, architecture, engine_config)
    engine = build_engine(decoder, engine_config, frozenset(), "random")
    work = ModelWork.of(architecture, source.linear_bytes, lambda width: 2 * width)
    return engine.beside(), work.num_weights


def main() -> None:
    """Alternate, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", default="int4")
    parser.add_argument("-p", type=int, default=256)
    parser.add_argument("-n", type=int, default=32)
    parser.add_argument("-r", type=int, default=8)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 4, 16])
    args = parser.parse_args()
    rng = random.Random(0)
    sparse, sparse_weights = open_shape(SPARSE, args)
    dense, dense_weights = open_shape(DENSE, args)
    sys.stdout.write(
        f"active weights: sparse {sparse_weights / 1e9:.2f}, "
        f"dense {dense_weights / 1e9:.2f} billion\n"
    )
    prompts = {batch: [[rng.randrange(50_000)] for _ in range(batch)] for batch in args.batch}
    tests = [("pp", args.p, 1), *(("tg", args.n, batch) for batch in args.batch)]
    found: dict[tuple[str, int, int], list[tuple[float, float]]] = {test: [] for test in tests}
    for repeat in range(args.r + 1):  # the first warms up
        for test in tests:
            kind, count, batch = test
            pair = []
            for engine in (sparse, dense):
                if kind == "pp":
                    ids = [rng.randrange(50_000) for _ in range(count)]
                    pair.append(count / run_prefill(engine, ids).seconds)
                else:
                    steps = run_decode(engine, prompts[batch], count)
                    pair.append(batch / statistics.mean(steps))
            if repeat:
                found[test].append((pair[0], pair[1]))
    for (kind, count, batch), pairs in found.items():
        row = ratio_row(f"{kind}{count}", batch, pairs, "dense")
        own, other, times = (
            row.found[name] for name in ("tokens_per_s", "their_tokens_per_s", "times")
        )
        sys.stdout.write(
            f"{kind}{count} batch {batch}: sparse {own.median:.1f}, dense {other.median:.1f} "
            f"tokens/s; {times.median:.2f} times ({times.min:.2f} to {times.max:.2f})\n"
        )
    by_chance(args)


def by_chance(args: argparse.Namespace) -> None:
    """The experts of a layer alone, for rows that choose by chance, as rows of random weights do
    not; and the limit: the larger of reading the weights of distinct experts as fast as one row's
    are read, and of a dense product with as many rows. Layers take turns, so that no weight is in a
    cache.
    """
    linears = cpu_ops(library_folder()).linears
    assert linears is not None
    generator = torch.Generator().manual_seed(0)

    def product(width_out: int, width_in: int) -> Projection:
        weight = PACKED_TYPES[args.weights].draw((width_out, width_in), generator)
        return packed_linear(weight, None, torch.bfloat16, linears)

    hidden, num_layers = SHAPE["hidden_size"], 6
    layers = []
    for _ in range(num_layers):
        gate_up = [product(2 * INNER, hidden) for _ in range(NUM_EXPERTS)]
        down = [product(hidden, INNER) for _ in range(NUM_EXPERTS)]
        layers.append(linears.experts(gate_up, down, "silu"))
    wide = [
        (product(2 * TOP_K * INNER, hidden), product(hidden, TOP_K * INNER))
        for _ in range(num_layers)
    ]
    expert_bytes = PACKED_TYPES[args.weights].stored_bytes((3 * INNER, hidden))
    found: dict[int, list[tuple[float, int, float]]] = {batch: [] for batch in args.batch}
    for repeat in range(3 * args.r + 1):  # the first warms up
        for batch in args.batch:
            for experts, (first, last) in zip(layers, wide, strict=True):
                assert experts is not None
                x = torch.randn(batch, hidden, generator=generator)
                inner = torch.randn(batch, TOP_K * INNER, generator=generator)
                chosen = torch.stack(
                    [torch.randperm(NUM_EXPERTS, generator=generator)[:TOP_K] for _ in range(batch)]
                ).int()
                factors = torch.full((batch, TOP_K), 1 / TOP_K)
                began = time.perf_counter()
                experts(x, chosen, factors, lambda rows: rows)
                middle = time.perf_counter()
                first(x), last(inner)
                ended = time.perf_counter()
                distinct = len(set(chosen.flatten().tolist()))
                if repeat:
                    found[batch].append((middle - began, distinct, ended - middle))
    alone = [distinct * expert_bytes / seconds for seconds, distinct, _ in found[args.batch[0]]]
    bytes_per_s = statistics.median(alone)
    for batch, times in found.items():
        shares = [
            max(distinct * expert_bytes / bytes_per_s, dense_s) / seconds
            for seconds, distinct, dense_s in times
        ]
        low, middle_share, high = statistics.quantiles(shares, n=4)
        sys.stdout.write(
            f"by chance, {batch} rows: {statistics.mean(each[1] for each in times):.0f} experts, "
            f"{middle_share:.2f} of the limit ({low:.2f} to {high:.2f}: half of the runs)\n"
        )


if __name__ == "__main__":
    main()
