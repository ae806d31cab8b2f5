"""Experts in host memory: the slots, the bits at any number of them, and the plan."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from drafting import oracle_speculator
from engines import Limits, checked_step, make_engine, run, run_alone
from every_family import small_config
from guards import needs_interpreter
from interpreter import product_of_rows_alike
from recording_device import RecordingDevice
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from localllm.engine.config import EngineConfig
from localllm.engine.expert_memory import ExpertSizes, expert_sizes, plan_experts
from localllm.engine.memory import MemoryPlan, plan_memory
from localllm.errors import ExitCode, GpuMemoryError, RequestError
from localllm.model.architecture import Architecture
from localllm.model.decoder import DecoderModel
from localllm.model.families.table import architecture_of
from localllm.model.random_weights import RandomWeights, WeightKind
from localllm.model.weights import load_model
from localllm.schedule.sampling_params import SamplingParams
from localllm_kernels import TORCH_OPS, Ops
from localllm_kernels.compiling.choice import Choice, Piece
from localllm_kernels.compiling.launch import Workspace
from localllm_kernels.compiling.traits import Traits, WeightLayout
from localllm_kernels.cpu.traits import C_TRAITS
from localllm_kernels.experts import gpu_experts, slotted_experts
from localllm_kernels.experts.product import Pairs, expert_product_reference
from localllm_kernels.experts.slotted_experts import SlotTable, SlottedExperts
from localllm_kernels.experts.stacked_weight import StackedWeight
from localllm_kernels.experts.sum import expert_sum_reference
from localllm_kernels.pointwise.gate import GateKind, gate_reference
from localllm_kernels.products.gpu_linears import GpuLinears
from localllm_kernels.products.traits import TRITON_TRAITS
from localllm_kernels.triton_ops import triton_ops

FAMILY = "Qwen3MoeForCausalLM"


def test_the_expert_that_was_not_used_for_longest_gives_way() -> None:
    table = SlotTable(3)
    assert table.take([5, 1]) == ({5: 0, 1: 1}, {5: 0, 1: 1})
    assert table.take([5, 2]) == ({5: 0, 2: 2}, {2: 2})
    assert table.take([7]) == ({7: 1}, {7: 1}), "1 was not used for longest"
    # Of those that are asked for, none gives way.
    assert table.take([2, 1, 7]) == ({2: 2, 1: 0, 7: 1}, {1: 0})
    assert (table.num_hits, table.num_misses) == (3, 5)


def test_rounds_begin_with_the_experts_that_are_there() -> None:
    table = SlotTable(2)
    table.take([3, 8])
    assert table.rounds([1, 3, 5, 8, 9]) == [[3, 8], [1, 5], [9]]
    assert table.rounds([]) == []


def test_a_table_that_forgets_copies_everything_again() -> None:
    table = SlotTable(2)
    table.take([3, 8])
    table.forget()
    assert table.take([8, 3]) == ({8: 0, 3: 1}, {8: 0, 3: 1})


@needs_interpreter
def test_a_copy_that_fails_leaves_no_expert_in_a_wrong_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [mixture, *_] = slotted(model_with(2, "bf16"))
    x = torch.randn(1, mixture.held.gate_up.width_in)
    chosen, factors = torch.tensor([[4, 1]], dtype=torch.int32), torch.ones(1, 2)
    gate = partial(gate_reference, kind="silu")
    expected = mixture(x, chosen, factors, gate)
    mixture(x, torch.tensor([[0, 5]], dtype=torch.int32), factors, gate)
    with monkeypatch.context() as patched:
        patched.setattr(SlottedExperts, "_copy", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            mixture(x, chosen, factors, gate)
    assert torch.equal(mixture(x, chosen, factors, gate), expected)


def model_with(
    slots: int | None, kind: WeightKind, *, deterministic: bool = True, ops: Ops | None = None
) -> DecoderModel:
    """`ops`: the interpreted kernels by default."""
    architecture = architecture_of(small_config(FAMILY))
    cpu = torch.device("cpu")
    return load_model(
        RandomWeights(architecture, kind, cpu),
        architecture,
        max_model_len=256,
        dtype=torch.float32,
        device=cpu,
        ops=ops or triton_ops("cpu", deterministic=deterministic),
        deterministic=deterministic,
        expert_slots=slots,
    )


def slotted(model: DecoderModel) -> list[SlottedExperts]:
    blocks = (sublayer.block for layer in model.layers for sublayer in layer.sublayers)
    found = (getattr(block, "experts", None) for block in blocks)
    return [each for each in found if isinstance(each, SlottedExperts)]


@pytest.mark.slow
@needs_interpreter
@pytest.mark.parametrize("kind", ["int4", "bf16", "mxfp4", "nvfp4", "trellis3"])
def test_tokens_and_bits_are_those_of_a_model_that_is_on_the_device(
    kind: WeightKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0, 25 and 100 % of six experts, in a batch with chunks, against all in their places."""
    monkeypatch.setattr(InterpreterBuilder, "create_dot", product_of_rows_alike)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    wanted = [([(7 * i) % 250 + 1 for i in range(length)], params) for length in (1, 19)]
    limits = Limits(block_size=8, max_num_batched_tokens=13, enable_prefix_caching=True)
    expected = run(make_engine(model_with(None, kind), limits), wanted)
    for slots in (1, 2, 6):
        model = model_with(slots, kind)
        assert model.looks
        experts = slotted(model)
        assert len(experts) == model.architecture.num_layers
        found = run(make_engine(model, limits), wanted)
        for key, answer in expected.items():
            assert found[key].token_ids == answer.token_ids
            assert found[key].logits == answer.logits
        tables = [each.table for each in experts]
        # The test must press.
        assert all((table.num_misses > slots) == (slots < 6) for table in tables)
        assert slots == 1 or all(table.num_hits for table in tables)


def experts_in_torch(monkeypatch: pytest.MonkeyPatch) -> Ops:
    """Operators of torch's, and experts whose pairs are multiplied by the kernel's reference."""

    def product(
        x: Tensor,
        weight: StackedWeight,
        pairs: Pairs,
        gate: GateKind | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        chosen = pairs.chosen if pairs.slots is None else pairs.slots[pairs.chosen.long()]
        found = expert_product_reference(x, weight, chosen.clamp(min=0), gate).to(x.dtype)
        if out is None:
            return found
        is_there = chosen.flatten() >= 0
        out[is_there] = found[is_there]
        return out

    for module in (gpu_experts, slotted_experts):
        monkeypatch.setattr(module, "expert_product", product)
        monkeypatch.setattr(module, "expert_sum", expert_sum_reference)
        monkeypatch.setattr(module, "tasks_of", lambda *_: None)
    workspace = Workspace(torch.device("cpu"))
    return replace(TORCH_OPS, linears=GpuLinears(workspace, Choice(frozenset([Piece.INT4]))))


@pytest.mark.parametrize(
    "backend", ["torch", pytest.param("triton", marks=[needs_interpreter, pytest.mark.slow])]
)
def test_drafts_preemption_and_cached_prefixes_do_not_change_the_text(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InterpreterBuilder, "create_dot", product_of_rows_alike)
    ops = None if backend == "triton" else experts_in_torch(monkeypatch)
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=7, ignore_eos=True)
    wanted = [([(7 * i) % 250 + 1 for i in range(length)], params) for length in (7, 18, 8)]
    model = model_with(None, "int4", ops=ops)
    alone = {len(ids): run_alone(model, ids, params)[0].token_ids for ids, _ in wanted}
    limits = Limits(
        block_size=8,
        num_blocks=6,
        max_num_batched_tokens=16,
        enable_prefix_caching=True,
        speculator=lambda: oracle_speculator(
            lambda request: alone[request.num_prompt_tokens], 0.3, 3
        ),
    )
    engine = make_engine(model_with(2, "int4", ops=ops), limits)
    num_drafted = num_cached = 0
    for _ in range(2):
        lengths = {engine.add_request(*request): len(request[0]) for request in wanted}
        found: dict[int, list[int]] = {length: [] for length in alone}
        while engine.has_unfinished():
            for event in checked_step(engine):
                assert event.error is None
                if event.token_id is not None:
                    found[lengths[event.request_id]].append(event.token_id)
                num_drafted += event.is_draft
                num_cached += event.num_cached_tokens or 0
        assert found == alone
    # The test must press.
    assert engine.scheduler.num_preemptions > 0
    assert num_drafted > 0
    assert num_cached > 0


@needs_interpreter
def test_a_step_that_looks_is_not_captured() -> None:
    device = RecordingDevice()
    engine = make_engine(model_with(2, "bf16", deterministic=False), Limits(device=device))
    engine.add_request([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    while engine.has_unfinished():
        assert all(event.error is None for event in checked_step(engine))
    assert not device.captured


SHAPE: Architecture = architecture_of(small_config(FAMILY))


def plan_for(
    free: int, weights_bytes: int, config: EngineConfig, *, is_captured: bool
) -> MemoryPlan:
    return plan_memory(
        SHAPE,
        config,
        max_num_batched_tokens=32,
        weights_bytes=weights_bytes,
        item_bytes=2,
        row_bytes=lambda width: 2 * width,
        free_bytes=free,
        graph_rows=4 if is_captured else 0,
    )


def place(
    config: EngineConfig,
    free: int,
    weights: int,
    sizes: ExpertSizes,
    traits: Traits = TRITON_TRAITS,
) -> MemoryPlan:
    plan = partial(plan_for, free)
    return plan_experts(plan, weights, sizes, config, SHAPE, traits)


CONFIG = EngineConfig(max_num_seqs=2)
DENSE, SIZES = 30_000_000, ExpertSizes(6, 20_000_000, {None})
WEIGHTS = DENSE + SIZES.num_bytes


def test_experts_get_what_everything_else_leaves() -> None:
    plan = place(CONFIG, 1 << 30, WEIGHTS, SIZES)
    assert plan.expert_slots is None
    assert (plan.weights_bytes, plan.host_bytes) == (WEIGHTS, 0)
    plan = place(CONFIG, 130_000_000, WEIGHTS, SIZES)
    slots = plan.expert_slots
    assert slots is not None
    assert 1 <= slots < 6
    assert plan.weights_bytes == DENSE + slots * SIZES.one_bytes
    assert plan.host_bytes == SIZES.num_bytes
    assert plan.weights_bytes + plan.kv_bytes + plan.activations_bytes <= plan.budget_bytes
    larger, short = plan.weights_bytes + SIZES.one_bytes, replace(CONFIG, max_model_len=512)
    with pytest.raises(GpuMemoryError):
        plan_for(130_000_000, larger, short, is_captured=False)
    with pytest.raises(GpuMemoryError):
        place(CONFIG, 45_000_000, WEIGHTS, SIZES)


@pytest.mark.parametrize(("wanted", "slots"), [(0, 1), (45_000_000, 2), (1 << 30, None)])
def test_experts_get_what_is_asked_for(wanted: int, slots: int | None) -> None:
    found = place(replace(CONFIG, expert_memory_bytes=wanted), 1 << 30, WEIGHTS, SIZES)
    assert found.expert_slots == slots


def test_where_all_memory_is_one_the_flag_is_refused() -> None:
    asked = replace(CONFIG, expert_memory_bytes=1 << 20)
    with pytest.raises(RequestError) as refused:
        place(asked, 1 << 30, WEIGHTS, SIZES, C_TRAITS)
    assert refused.value.exit_code == ExitCode.USAGE
    plan = place(CONFIG, 1 << 30, WEIGHTS, SIZES, C_TRAITS)
    assert plan.expert_slots is None


def test_experts_without_a_kernel_for_all_of_them_stay_on_the_device() -> None:
    sizes = replace(SIZES, layouts={WeightLayout("int4", 96, 48), None})
    with pytest.raises(RequestError, match="experts in int4 from"):
        place(replace(CONFIG, expert_memory_bytes=1 << 20), 1 << 30, WEIGHTS, sizes)
    assert place(CONFIG, 1 << 30, WEIGHTS, sizes).expert_slots is None
    assert place(CONFIG, 130_000_000, WEIGHTS, SIZES).expert_slots
    with pytest.raises(GpuMemoryError):
        place(CONFIG, 130_000_000, WEIGHTS, sizes)


def test_sizes_are_those_of_the_tensors(tmp_path: Path) -> None:
    drawn = RandomWeights(SHAPE, "bf16", torch.device("cpu"))
    sizes = expert_sizes(SHAPE, drawn.linear_bytes, drawn.layouts)
    assert sizes is not None
    names = [name for name in SHAPE.tensors() if ".experts." in name]
    total = sum(2 * torch.Size(SHAPE.tensors()[name]).numel() for name in names)
    assert (sizes.count, sizes.num_bytes, sizes.layouts) == (6, total, {None})
    dense = architecture_of(small_config("LlamaForCausalLM"))
    assert expert_sizes(dense, lambda name: 1, drawn.layouts) is None
