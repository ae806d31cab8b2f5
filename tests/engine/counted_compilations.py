"""Counts what Triton would compile, without a GPU and without compiling: an engine on a driver that
is none, in a process where kernels are not interpreted.

    python counted_compilations.py KIND-ROWS-SEQS

KIND: of the weights, bf16, int4, int8, fp8 or mxfp4, behind "experts+" of a model with experts;
ROWS: the most that take fragments; SEQS: requests in a batch. Prints in JSON how many kernels were
compiled while the engine worked ahead and how many pieces that took, and those that its requests
still had to have.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import triton
from drafting import eager
from engines import VOCAB_SIZE, add
from torch import Tensor
from triton.backends.compiler import GPUTarget

from localllm.drafting.ngram import NgramDrafter
from localllm.engine.device_runner import DeviceRunner
from localllm.engine.engine import Engine
from localllm.model.families.table import architecture_of
from localllm.model.paged_kv_cache import PagedKVCache
from localllm.model.random_weights import RandomWeights
from localllm.model.weights import load_model
from localllm.schedule.block_group import BlockGroup
from localllm.schedule.block_pool import BlockPool
from localllm.schedule.request_check import EngineLimits
from localllm.schedule.sampling_params import SamplingParams
from localllm.schedule.scheduler import Scheduler, SchedulerConfig
from localllm.text.grammar import Grammar
from localllm_kernels.triton_ops import triton_ops

CONTEXT = 4096
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
SAID = 5  # the token that every step samples

_Result = TypeVar("_Result")


class NoDriver:
    """An H100 on which nothing happens."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class NoDevice:
    """Copies at once, and captures by launching."""

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def upload(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    download = upload

    def mark(self) -> Callable[[], None]:
        return lambda: None

    def capture(self, call: Callable[[], _Result]) -> tuple[Callable[[], None], _Result]:
        return lambda: None, call()

    def time(self, call: Callable[[], None]) -> float:
        return 1.0

    def release_memory(self) -> None:
        pass


def compile_nothing(noted: list[str]) -> None:
    """Have every compilation noted, and every launch do nothing but sample `SAID`."""

    def compiled(source: Any, target: GPUTarget, options: dict[str, Any]) -> Any:
        names = source.fn.arg_names
        values = {names[path[0]]: value for path, value in source.constants.items()}
        special = {names[path[0]]: kind for path, kind in source.attrs.items() if kind}
        noted.append(f"{source.fn.__name__} {values} {special} {options['num_warps']}")

        def run(*launch: Any) -> None:
            bound = dict(zip(names, launch[9:], strict=True))
            if "ids_ptr" in bound:
                bound["ids_ptr"].fill_(SAID)

        return SimpleNamespace(
            run=run, function=None, packed_metadata=None, launch_metadata=lambda *_: None
        )

    triton.compiler.compile = compiled
    triton.runtime.driver.set_active(NoDriver())


def make_engine(kind: str, fragment_rows: int, max_num_seqs: int) -> Engine:
    raw = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": CONTEXT,
    }
    if kind.startswith("experts"):
        kind = kind.removeprefix("experts+")
        raw |= {"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS}
    architecture = architecture_of(raw)
    device = torch.device("cpu")
    drawn = RandomWeights(architecture, kind, device)  # type: ignore[arg-type]
    ops = triton_ops("cpu")
    workspace = ops.linears.workspace  # type: ignore[union-attr]
    workspace.num_processors, workspace.capability = 132, 90
    workspace.overlaps = True
    workspace.fragment_rows = range(1, fragment_rows + 1)
    model = load_model(
        drawn,
        architecture,
        max_model_len=CONTEXT,
        dtype=torch.bfloat16,
        device=device,
        ops=ops,
    )
    scheduling = SchedulerConfig(16, max_num_seqs, 2048, True, b"root")
    cache = PagedKVCache.allocate(architecture, [2000], 16, torch.bfloat16, device)
    runner = DeviceRunner(model, cache, NoDevice(), scheduling, CONTEXT)
    limits = EngineLimits(VOCAB_SIZE, CONTEXT, CONTEXT, frozenset())
    speculator = eager(NgramDrafter(2, 8), 15)
    return Engine(
        runner, Scheduler(scheduling, [BlockGroup(BlockPool(2000), 16)]), limits, speculator
    )


def main() -> None:
    [case] = sys.argv[1:]
    kind, rows, seqs = case.split("-")
    with torch.inference_mode():
        count(kind, int(rows), int(seqs))


def count(kind: str, fragment_rows: int, max_num_seqs: int) -> None:
    noted: list[str] = []
    compile_nothing(noted)
    engine = make_engine(kind, fragment_rows, max_num_seqs)
    pieces, most = 0, 0
    while True:
        before = len(noted)
        if not engine.work_ahead():
            break
        pieces, most = pieces + 1, max(most, len(noted) - before)
    warm = len(noted)
    report: dict[str, Any] = {"warm": warm, "pieces": pieces, "most": most, "late": []}

    def run(what: str, *requests: tuple[int, SamplingParams]) -> None:
        before = len(noted)
        for i, (length, params) in enumerate(requests):
            prompt = [(7 * j + 13 * i + length) % 250 + 1 for j in range(length)]
            add(engine, prompt, params)
        while engine.has_unfinished():
            engine.step()
        report["late"] += [f"{what}: {each}" for each in noted[before:]]

    short = SamplingParams(temperature=0.7, max_tokens=4, ignore_eos=True)
    lengths = [*range(1, 66), 100, 127, 128, 129, 191, 192, 193, 255, 256, 300, 511, 512, 513]
    for length in (*lengths, 1000, 1024, 2047, 2048, 2049, 3000):
        run(f"{length} tokens", (length, short))
    for count in (2, 3, 5, 16, 17, 33, 64):
        run(f"{count} at once", *[(10 + 3 * i, short) for i in range(count)])
    penalties = SamplingParams(repetition_penalty=1.2, max_tokens=4, ignore_eos=True)
    biases = SamplingParams(logit_bias={3: 1.0}, max_tokens=4, ignore_eos=True)
    both = SamplingParams(
        repetition_penalty=1.2, logit_bias={3: 1.0, 9: 2.0}, max_tokens=9, ignore_eos=True
    )
    longer = SamplingParams(max_tokens=30, ignore_eos=True, logprobs=2)
    run("penalties", (20, penalties))
    run("biases", (20, biases))
    run("both", (20, both), (33, short))
    run("a grammar", (20, replace(both, grammar=Grammar("regex", "[ab]{9}"))))
    run("drafts", (40, longer))
    run("drafts of several", (40, longer), (50, both), (60, short))
    run("long beside short", (3000, short), (40, longer), (700, both))
    sys.stdout.write(f"{json.dumps(report)}\n")


if __name__ == "__main__":
    main()
