"""Compare a mixture of experts with a dense model that has as many active parameters, alternating.

    python tools/bench/sparse_against_dense.py [--weights int4] [-n 32] [-r 8] [--batch 1 4 16]

Both have random weights and the same attention; the dense feed-forward is as wide as the experts
that a row takes. The sparse shape is that of OLMoE 1B-7B with Qwen3's attention: 6.9 billion
weights, 1.3 active.

Beside it, the limit of a step: the larger of reading the weights of the experts that the same
prompts take, as fast as the dense model reads its own at batch 1, and of multiplying, for which the
dense model's step of as many rows stands.
"""

import argparse
import random
import statistics
import sys
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from localllm.bench.compare import ratio_row
from localllm.bench.speed import run_decode, run_prefill
from localllm.cost.rates import ModelWork
from localllm.engine.config import EngineConfig
from localllm.engine.engine import Engine
from localllm.engine.loading import LoadedDecoder, build_decoder, build_engine, select_device
from localllm.model.families.table import architecture_of
from localllm.model.random_weights import RandomWeights
from localllm_kernels.route import Routing

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


@dataclass(frozen=True, slots=True)
class Shape:
    """An engine with random weights of a shape, and the work of its steps; `decoder` is its model,
    `config` its settings.
    """

    engine: Engine
    work: ModelWork
    decoder: LoadedDecoder
    config: EngineConfig

    def bytes_of_step(self, prompts: list[list[int]], count: int) -> float:
        """Bytes of weights that a step reads, on average over `count` steps after the prompts."""
        taken: list[int] = []

        def recorded(logits: Tensor, how: Routing) -> tuple[Tensor, Tensor]:
            chosen, factors = model.ops.route(logits, how)
            taken.append(len(chosen.unique()))
            return chosen, factors

        model = self.decoder.model
        # Block by block, so that the choice is seen.
        seen = replace(model, fused=None, ops=replace(model.ops, route=recorded))
        engine = build_engine(
            replace(self.decoder, model=seen), self.config, frozenset(), "counted"
        )
        run_decode(engine.beside(), prompts, count)
        share, size = min(self.work.stored.items())
        assert share < 1
        rest = self.work.weight_bytes(1) - share * size
        return rest + statistics.mean(taken) / NUM_EXPERTS * size


def open_shape(config: dict[str, Any], args: argparse.Namespace) -> Shape:
    """Draw it."""
    engine_config = EngineConfig(max_num_seqs=max(args.batch), max_model_len=1024)
    architecture = architecture_of(config)
    source = RandomWeights(architecture, args.weights, select_device(engine_config), 0)
    decoder = build_decoder(source, source.resident_bytes, architecture, engine_config)
    engine = build_engine(decoder, engine_config, frozenset(), "random")
    work = ModelWork.of(architecture, source.linear_bytes, lambda width: 2 * width)
    return Shape(engine.beside(), work, decoder, engine_config)


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
    shapes = open_shape(SPARSE, args), open_shape(DENSE, args)
    sparse, dense = shapes
    sys.stdout.write(
        f"active weights: sparse {sparse.work.num_weights / 1e9:.2f}, dense "
        f"{dense.work.num_weights / 1e9:.2f} billion\n"
    )
    prompts = {batch: [[rng.randrange(50_000)] for _ in range(batch)] for batch in args.batch}
    tests = [("pp", args.p, 1), *(("tg", args.n, batch) for batch in args.batch)]
    found: dict[tuple[str, int, int], list[tuple[float, float]]] = {test: [] for test in tests}
    for repeat in range(args.r + 1):  # the first warms up
        for test in tests:
            kind, count, batch = test
            pair = []
            for shape in shapes:
                if kind == "pp":
                    ids = [rng.randrange(50_000) for _ in range(count)]
                    pair.append(count / run_prefill(shape.engine, ids).seconds)
                else:
                    steps = run_decode(shape.engine, prompts[batch], count)
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
    alone = statistics.median(pair[1] for pair in found["tg", args.n, 1])
    bytes_per_s = dense.work.weight_bytes(1) * alone
    for batch in args.batch:
        own, other = (
            statistics.median(pair[i] for pair in found["tg", args.n, batch]) for i in (0, 1)
        )
        read = sparse.bytes_of_step(prompts[batch], args.n)
        limit_s = max(read / bytes_per_s, batch / other)
        sys.stdout.write(
            f"batch {batch}: {read / 1e9:.2f} GB a step; {limit_s * own / batch:.2f} of the limit\n"
        )


if __name__ == "__main__":
    main()
