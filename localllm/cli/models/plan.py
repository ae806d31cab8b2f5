"""`localllm plan`: whether a model fits, and how fast it will be."""

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.cli.draw.columns import aligned
from localllm.cli.draw.output import json_line, note, show_controls, write_stdout
from localllm.cli.draw.words import duration, size
from localllm.cli.flags import common, suggestions
from localllm.cli.flags.common import JsonLines
from localllm.cli.flags.engine_flags import WEIGHT_KINDS, DraftFlags, EngineFlags
from localllm.cli.flags.groups import Flags, flag, one_of, only, takes_flags
from localllm.cli.flags.values import parse_size
from localllm.cli.models.pull import gguf_beside
from localllm.errors import ExitCode, RequestError
from localllm.hub.catalog import resolve_model
from localllm.user.settings import default_model

if TYPE_CHECKING:
    from localllm.cost.planning import Machine, ModelPlan
    from localllm.engine.config import EngineConfig

# A name, a value, and what it means.
_Row = tuple[str, str, str]
# The flags of `quantize` that make weights of a kind; others are fetched as they are.
_MADE_BY = {
    "int4": "",
    "int8": " --method int8",
    "fp8": " --method fp8",
    "mxfp4": " --method mxfp4",
    "nvfp4": " --method nvfp4",
    "trellis3": " --bits 3",
}
# Heads, by what their kind is called.
_DRAFTING = {"head": "a head that drafts", "EAGLE": "an EAGLE head", "assistant": "its assistant"}


@dataclass(frozen=True, slots=True)
class MachineFlags(Flags):
    """The machine to plan for; without a flag, this one."""

    gpus: list[str] | None = flag(
        None,
        "--gpu",
        help="A GPU by name, such as rtx-4060; `list` shows all.",
        suggest=suggestions.gpus,
    )
    vram: str | None = flag(help="Free memory of a GPU, such as 8GiB.")

    def named_gpu(self) -> str | None:
        """The GPU by name, or `list`. Raises: RequestError for several, or with --vram."""
        gpu = self.gpus[0] if self.gpus else None
        if self.gpus and len(self.gpus) > 1:
            raise RequestError(
                f"expected one GPU, found {len(self.gpus)}",
                param="gpu",
                hint="one command for each; localllm runs a model on one GPU",
            )
        if gpu not in (None, "list") and self.vram is not None:
            raise RequestError(
                "--gpu and --vram cannot be combined",
                param="vram",
                hint="leave out --vram; the memory of a named GPU is known",
            )
        return gpu

    def find(self, engine: "EngineConfig") -> "Machine":
        """The named GPU, or one with the given memory, or this machine."""
        from localllm.cost.gpus import find_gpu
        from localllm.cost.planning import machine_of, machine_with, this_machine

        gpu = self.named_gpu()
        if gpu is not None:
            return machine_of(find_gpu(gpu))
        if self.vram is not None:
            return machine_with(parse_size(self.vram, "vram"), self.vram.strip())
        return this_machine(engine)


EngineOfPlan = Annotated[
    EngineFlags,
    only(
        "ctx",
        "kv_cache_dtype",
        "state_dtype",
        "max_num_seqs",
        "gpu_memory_utilization",
        "reserve",
        "device",
        "expert_memory",
    ),
]


@takes_flags
def plan(
    model: Annotated[
        str | None,
        common.model("Alias, org/name, folder or GGUF file; without one, the whole catalogue."),
    ] = None,
    *,
    machine: MachineFlags,
    weights: Annotated[
        str | None,
        typer.Option(
            "--weights",
            help="Format of the weights; by default what the catalogue suggests.",
            metavar="|".join(WEIGHT_KINDS),
            autocompletion=one_of(*WEIGHT_KINDS),
        ),
    ] = None,
    engine: EngineOfPlan,
    drafts: Annotated[DraftFlags, only("spec")],
    json_output: JsonLines = False,
) -> int:
    """Predict whether a model fits, its context length and its speed, without downloading it.

    The plan is for this machine, for a GPU by name (--gpu), or for one with so much free memory
    (--vram); it needs no GPU. Exits with 6 if the model does not fit, and names the flag that would
    change that.
    """
    if machine.named_gpu() == "list":
        _list_gpus()
        return ExitCode.OK
    config = engine.config(default_max_num_seqs=1, speculation=drafts.config())
    found = machine.find(config)
    name = model or default_model()
    fits = (
        _plan_catalog(found, config, json_output)
        if name is None
        else _plan_model(name, weights, found, config, json_output)
    )
    return ExitCode.OK if fits else ExitCode.MEMORY


def _plan_catalog(machine: "Machine", engine: "EngineConfig", json_output: bool) -> bool:
    """Print a plan for each model of the catalogue; return whether any fits."""
    from localllm.cost.planning import plan_catalog

    speculation = engine.speculation
    if speculation.eagle_head or speculation.draft_model or speculation.needs("head"):
        raise RequestError(
            f"--spec {speculation.drafter:.60} is for one model, not for the whole catalogue",
            param="spec",
            hint="localllm plan MODEL --spec ...",
        )
    plans = plan_catalog(machine, engine)
    if json_output:
        for each in plans:
            write_stdout(json_line(each.as_json()))
    else:
        write_stdout(show_controls(catalog_table(machine, plans)))
    return any(each.fits for each in plans)


def _plan_model(
    name: str, weights: str | None, machine: "Machine", engine: "EngineConfig", json_output: bool
) -> bool:
    """Print the plan of one model; return whether it fits."""
    from localllm.cost.planning import plan_model, shape_of

    source = resolve_model(name)
    shape = shape_of(source, weights, engine.speculation)
    found = plan_model(shape, machine, engine)
    if json_output:
        write_stdout(json.dumps(found.as_json(), indent=2) + "\n")
        return found.fits
    write_stdout(show_controls(plan_table(found, engine)))
    # The hub was asked for other shapes than those of the catalogue.
    has_asked = not found.shape.is_here and found.shape.entry is None
    beside = gguf_beside(source) if has_asked else None
    if beside is not None:
        note(show_controls(beside), dim=True)
    return found.fits


# Types of KV caches that are compared.
_COMPARED = ("bf16", "int8", "int4")


def plan_table(plan: "ModelPlan", engine: "EngineConfig") -> str:
    """A plan as text for a terminal or a pipe."""
    rows = [*_memory_rows(plan), *(_promise_rows(plan) if plan.fits else ())]
    if plan.without_kernel:
        kinds = ", ".join(plan.without_kernel)
        rows.append(("no kernel", kinds, "weights are dequantized for each product: slow"))
    lines = [f"{plan.shape.name} on {plan.machine.summary}"]
    lines += [f"  {line}" for line in aligned(rows, right={1})]
    if plan.fits:
        lines += ["it fits", *next_steps(plan, engine)]
    else:
        lines += [f"no: {plan.problem}", f"  try: {plan.remedy}"]
    return "\n".join(lines) + "\n"


def next_steps(plan: "ModelPlan", engine: "EngineConfig") -> list[str]:
    """The commands that run what was planned, and where its weights come from."""
    shape, entry = plan.shape, plan.shape.entry
    flags = "" if engine.max_model_len is None else f" --ctx {engine.max_model_len}"
    if engine.kv_cache_dtype != "auto":
        flags += f" --kv-cache-dtype {engine.kv_cache_dtype}"
    name, taken = shlex.quote(shape.name), size(shape.weights_bytes)
    if shape.is_here:
        return [f"  next: localllm chat {name}{flags}"]
    if shape.kind not in _MADE_BY:
        return [f"  next: localllm chat {name}{flags}  (fetches {taken})"]
    steps = []
    if shape.kind == "int4" and entry is not None and entry.int4 is not None:
        published = f"fetches its publisher's int4, {size(shape.published_bytes)}"
        steps.append(f"  next: localllm chat {entry.int4}{flags}  ({published})")
    is_here = resolve_model(shape.name).repo is None
    source = "" if is_here else f"fetches {size(2 * shape.num_parameters)} and "
    made = f"localllm quantize {name}{_MADE_BY[shape.kind]}  ({source}makes {shape.kind} of it)"
    return [*steps, f"  {'or:  ' if steps else 'next:'} {made}"]


def _memory_rows(plan: "ModelPlan") -> list[_Row]:
    """The rows that say what takes memory."""
    shape, memory = plan.shape, plan.memory
    weights = f"{shape.num_parameters / 1e9:.2f} billion, {shape.kind}"
    if shape.head is not None:
        weights += f", and {_DRAFTING[shape.head.kind]}"
    rows = [
        ("weights", size(memory.weights_bytes), weights),
        ("activations", size(memory.activations_bytes), "while a step is computed"),
    ]
    if shape.draft is not None:
        rows.insert(1, ("draft model", size(shape.draft_bytes), shape.draft.name))
    if memory.expert_slots is not None:
        told = f"all experts; {memory.expert_slots} of a layer are on the GPU at a time"
        rows.insert(1, ("host memory", size(memory.host_bytes), told))
    if memory.graphs_bytes:
        rows.append(("graphs", size(memory.graphs_bytes), "captured steps"))
    if memory.states_bytes:
        rows.append(("states", size(memory.states_bytes), "of recurrent layers"))
    others = ", ".join(
        f"{name} {size(taken)}" for name, taken in plan.cached_1k.items() if name in _COMPARED
    )
    per_1k = f"{size(1024 * plan.kv_token_bytes)} for 1,024 tokens ({others})"
    rows.append(("KV cache", size(memory.kv_bytes), per_1k))
    total, budget = (
        size(each + shape.draft_bytes) for each in (memory.needed_bytes, memory.budget_bytes)
    )
    rows.append(("total", total, f"of {budget} that may be used"))
    if plan.resident_bytes:
        told = "with Python, torch, and one conversation as long as the context"
        rows.append(("resident", size(plan.resident_bytes), told))
    return rows


def _promise_rows(plan: "ModelPlan") -> Iterator[_Row]:
    """The rows that say what a model that fits can do."""
    longest = plan.shape.architecture.max_position_embeddings
    told = f"tokens at most; the model supports {longest:,}"
    yield ("context", f"{plan.memory.max_model_len:,}", told)
    if plan.chats_at_once > 1:
        yield ("chats at once", f"{plan.chats_at_once}", "with 4,096 tokens each")
    if plan.decode_tokens_per_s is not None:
        yield ("answers", _speed(plan.decode_tokens_per_s), "tokens a second, predicted")
    if plan.prefill_tokens_per_s is not None:
        context = plan.memory.max_model_len
        whole_s = plan.prompt_s(context) or 0.0
        told = f"tokens a second, predicted; a prompt of {context:,} in {duration(whole_s)}"
        yield ("reads", _speed(plan.prefill_tokens_per_s), told)


def _speed(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f}" if tokens_per_s >= 10 else f"{tokens_per_s:.1f}"


def catalog_table(machine: "Machine", plans: "list[ModelPlan]") -> str:
    """The catalogue as a table that says what fits."""
    header = ("MODEL", "WEIGHTS", "", "CONTEXT", "ANSWERS", "")
    rows = [header]
    for plan in plans:
        fits, speed = plan.fits, plan.decode_tokens_per_s
        rows.append(
            (
                plan.shape.name,
                plan.shape.kind,
                size(plan.memory.weights_bytes),
                f"{plan.memory.max_model_len:,}" if fits else "-",
                f"{_speed(speed)} tok/s" if fits and speed is not None else "",
                "" if fits else "does not fit",
            )
        )
    lines = [f"on {machine.summary}", *aligned(rows, right={2, 3, 4})]
    return "\n".join(lines) + "\n"


def _list_gpus() -> None:
    from localllm.cost.gpus import GPUS

    width = max(map(len, GPUS))
    for name, card in GPUS.items():
        rate = f"{card.bandwidth_bytes_per_s / 1e9:,.0f} GB/s"
        write_stdout(f"{name:{width}}  {size(card.memory_bytes):>8}  {rate:>10}\n")
    note("localllm plan MODEL --gpu NAME", dim=True)
