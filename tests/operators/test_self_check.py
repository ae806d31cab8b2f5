"""What the self-check makes of operators that are wrong, crash, hang or are slow, and that what it
found is kept and followed.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest
import torch
from blocks import random_blocks, random_e4m3
from every_family import small_config
from guards import needs_interpreter
from torch import Tensor

from localllm.engine.config import EngineConfig
from localllm.engine.loaded_decoder import build_decoder
from localllm.engine.loading import build_engine
from localllm.engine.scoring import WindowScorer
from localllm.model.families.table import architecture_of
from localllm.model.packed.weight import PackedWeight
from localllm.model.random_weights import RandomWeights, WeightKind
from localllm.model.weights import load_model
from localllm.operators import choice as operator_choice
from localllm.operators.case import Setting, Sizes, distance, unit_of
from localllm.operators.cases import operator_cases
from localllm.operators.check import CheckRequest
from localllm.operators.choice import describe_finding, find_verdict
from localllm.operators.listener import Listener
from localllm.operators.product_cases import product_cases
from localllm.operators.recurrence_cases import recurrences
from localllm.operators.self_check import CheckError, Patience, check_operators
from localllm.operators.verdict import Outcome, Verdict, VerdictFile
from localllm_kernels import TORCH_OPS, Ops
from localllm_kernels.attention.four_bits import FOUR_BITS
from localllm_kernels.compiling.choice import Choice, Piece
from localllm_kernels.compiling.launch import Workspace
from localllm_kernels.experts.route import route_reference
from localllm_kernels.linears import CodedWeight
from localllm_kernels.products import gpu_linears
from localllm_kernels.products.block_matmul import block_matmul
from localllm_kernels.products.block_weight import PackedBlocks
from localllm_kernels.recurrence.recurrence import recurrence_reference
from localllm_kernels.recurrence.short_conv import short_conv_reference
from localllm_kernels.triton_ops import triton_ops

FAULTY = Path(__file__).with_name("faulty_operators.py")
PATIENT = Patience(begin=120, compile=120, run=60)


def request(kind: str = "int8", dtype: torch.dtype = torch.float32) -> CheckRequest:
    raw = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    architecture = architecture_of(raw)
    drawn = RandomWeights(architecture, kind, torch.device("cpu"))  # type: ignore[arg-type]
    return CheckRequest(drawn, Sizes(architecture, dtype, dtype, 16), {}, False)


def check(fault: str, patience: Patience = PATIENT, num_compilers: int = 0) -> Verdict:
    command = (sys.executable, str(FAULTY), fault)
    told: list[str] = []
    outcomes = check_operators(request(), told.append, command, patience, num_compilers)
    assert {each.partition(":")[0] for each in told} == {each.piece for each in outcomes}
    return Verdict("machine", "shape", outcomes)


@pytest.mark.parametrize(
    ("fault", "state"),
    [
        pytest.param("none", "good", marks=pytest.mark.slow),
        ("wrong", "wrong"),
        ("crashing", "crashed"),
        pytest.param("raising", "crashed", marks=pytest.mark.slow),
        pytest.param("memory", "unchecked", marks=pytest.mark.slow),
        ("slow", "slower"),
    ],
)
def test_what_is_at_fault_is_left_to_torch_and_nothing_else(fault: str, state: str) -> None:
    verdict = check(fault)
    found = {finding.piece: finding for finding in verdict.findings()}
    assert {piece for piece, each in found.items() if each.state != "good"} == (
        set() if fault == "none" else {Piece.GATE}
    )
    assert found[Piece.GATE].state == state
    assert set(found) >= {Piece.NORMS, Piece.ROTATION, Piece.FEW_QUERIES, Piece.INT8}
    is_kept = fault in ("none", "memory")
    assert verdict.choice() == Choice(frozenset() if is_kept else frozenset([Piece.GATE]))
    text = describe_finding(found[Piece.GATE])
    assert text.startswith(f"gate: {state}")
    assert ("so torch computes them" in text) == (not is_kept)


def test_a_kernel_that_never_ends_is_ended() -> None:
    verdict = check("hanging", replace(PATIENT, compile=3))
    [hung] = [each for each in verdict.outcomes if each.state != "good"]
    assert (hung.piece, hung.state, hung.why) == (Piece.GATE, "hung", "does not answer")
    # Everything else was checked by the process behind it.
    assert {each.piece for each in verdict.outcomes} >= {Piece.ROTATION, Piece.INT8}


@pytest.mark.slow
def test_processes_that_compile_first_change_nothing() -> None:
    assert check("none", num_compilers=2) == check("none")


def test_a_process_that_cannot_check_is_told() -> None:
    with pytest.raises(CheckError, match="No such file"):
        check_operators(request(), print, ("/no/such/program",))
    with pytest.raises(CheckError, match="exited with status 1: no torch"):
        check_operators(request(), print, (sys.executable, "-c", "raise SystemExit('no torch')"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """A GPU's name, and what its check says, counted."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    state = SimpleNamespace(name="NVIDIA Test 1", checks=0, outcomes=())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (8 << 30, 8 << 30))

    def check(request: CheckRequest, tell: object, **more: object) -> tuple[Outcome, ...]:
        state.checks += 1
        return tuple(state.outcomes)

    monkeypatch.setattr(operator_choice, "check_operators", check)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: state.name)
    return state


def outcome(piece: Piece, state: str = "good", rows: int = 1, times: float = 2.0) -> Outcome:
    return Outcome(piece, "a case", rows, state, "", 1e-5, times * 1e-5)  # type: ignore[arg-type]


def test_a_verdict_is_found_once_and_kept(gpu: SimpleNamespace, tmp_path: Path) -> None:
    gpu.outcomes = [outcome(Piece.NORMS), outcome(Piece.GATE, "wrong")]
    lines: list[str] = []
    listener = Listener(lines.append)
    first = find_verdict(request(), listener)
    assert first is not None
    assert first.choice() == Choice(frozenset([Piece.GATE]))
    assert "--no-self-check" in lines[0]
    assert "torch computes gate (wrong)" in lines[1]
    lines.clear()
    assert find_verdict(request(), listener) == first
    assert lines == ["torch computes gate (wrong) (localllm doctor shows why)"]
    assert gpu.checks == 1
    # Another shape, another GPU and another wish are others.
    find_verdict(request("int4"), listener)
    find_verdict(replace(request(), deterministic=True), listener)
    gpu.name = "NVIDIA Test 2"
    find_verdict(request(), listener)
    assert gpu.checks == 4
    assert len(VerdictFile.all()) == 4
    find_verdict(request(), listener, anew=True)
    assert gpu.checks == 5


def test_what_memory_did_not_suffice_for_is_checked_again(gpu: SimpleNamespace) -> None:
    gpu.outcomes = [outcome(Piece.NORMS), replace(outcome(Piece.GATE, "unchecked"), own_s=0.0)]
    lines: list[str] = []
    for count in (1, 2):
        verdict = find_verdict(request(), Listener(lines.append))
        assert verdict is not None
        assert verdict.choice() == Choice()
        assert "unchecked: gate" in lines[-1]
        assert gpu.checks == count


def test_a_file_that_is_not_sound_is_written_anew(gpu: SimpleNamespace) -> None:
    gpu.outcomes = [outcome(Piece.NORMS)]
    find_verdict(request(), Listener())
    [file] = VerdictFile.all()
    for text in ("", "{}", "[]", json.dumps({"machine": 1, "shape": 2, "outcomes": [{}]})):
        file.path.write_text(text)
        assert file.read() is None
        assert find_verdict(request(), Listener()) is not None


def test_fragments_are_taken_as_far_as_they_are_right_and_faster() -> None:
    def choice(*outcomes: Outcome) -> Choice:
        return Verdict("", "", outcomes).choice()

    def fragments(rows: int, state: str = "good", times: float = 1.5) -> Outcome:
        return outcome(Piece.FRAGMENTS, state, rows, times)

    assert choice(outcome(Piece.INT4)) == Choice()

    def rows(first: int, last: int) -> Choice:
        return Choice(fragment_rows=range(first, last + 1))

    assert choice(fragments(1), fragments(8), fragments(16, times=0.9)) == rows(1, 8)
    assert choice(fragments(1), fragments(8, "wrong"), fragments(16)) == rows(1, 1)
    # Two to seven rows are computed as eight are.
    slow = fragments(1, times=0.5)
    assert choice(slow, fragments(8), fragments(16)) == rows(2, 16)
    assert choice(slow, fragments(8), fragments(16, times=0.9), fragments(32)) == rows(2, 8)
    assert choice(slow, fragments(8, times=0.9)) == Choice()
    assert choice(fragments(1, "wrong"), fragments(8)) == Choice()
    found = Verdict("", "", (slow, fragments(8), fragments(16)))
    assert [each.why for each in found.findings()] == ["2 to 16 rows"]
    # A crash settles the piece, so other places may not have been tried.
    assert choice(fragments(1), fragments(8, "crashed")) == Choice()
    assert choice(fragments(1, "unchecked"), fragments(8)) == Choice()
    for state, times, is_taken in (
        ("good", 1.2, True),
        ("good", 1.0, False),
        ("wrong", 2.0, False),
        ("unchecked", 2.0, False),
    ):
        found = outcome(Piece.KEY_FRAGMENTS, state, times=times)
        if state == "unchecked":
            found = replace(found, own_s=0.0, plain_s=0.0)
        assert choice(outcome(Piece.FEW_QUERIES), found) == Choice(key_fragments=is_taken)


@needs_interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.float32, marks=pytest.mark.slow)]
)
def test_kernels_that_are_right_pass(dtype: torch.dtype) -> None:
    asked = request("int4", dtype)
    assert isinstance(asked.weights, RandomWeights)
    cases = operator_cases(
        asked.weights,
        asked.sizes,
        torch.device("cpu"),
        lambda choice: triton_ops("cpu", choice=choice),
    )
    for case in cases:
        # Of fragments, see tests/kernels/test_int4_matmul.py, which takes minutes.
        if case.rows <= 16 and case.piece is not Piece.FRAGMENTS:
            assert case.distance() < 0.6, case.name


@needs_interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", ["bf16", "int4", "mxfp4"])
def test_experts_and_their_choice_are_checked(kind: WeightKind) -> None:
    architecture = architecture_of(small_config("Glm4MoeForCausalLM"))
    drawn = RandomWeights(architecture, kind, torch.device("cpu"))
    sizes = Sizes(architecture, torch.float16, torch.float16, 16)

    def tables(is_wrong: bool) -> Callable[[Choice], Ops]:
        def table(choice: Choice) -> Ops:
            ops = triton_ops("cpu", choice=choice)
            route = lambda logits, how: route_reference(-logits, how)  # noqa: E731
            return replace(ops, route=route) if is_wrong else ops

        return table

    wanted = (Piece.EXPERTS, Piece.ROUTE)
    for is_wrong in (False, True):
        seen = {}
        for case in operator_cases(drawn, sizes, torch.device("cpu"), tables(is_wrong)):
            if case.piece in wanted and case.rows <= 16:
                seen[case.piece] = case.distance()
        assert set(seen) == set(wanted)
        assert seen[Piece.EXPERTS] < 0.6
        assert (seen[Piece.ROUTE] > 1) == is_wrong


@dataclass(frozen=True, slots=True)
class RandomBlocks(RandomWeights):
    """Linears in blocks, some of another type than those with which they become one product."""

    def quantized(self, linear: str, device: torch.device) -> PackedWeight:
        shape = RandomWeights.quantized(self, linear, device).shape
        torch.manual_seed(crc32(linear.encode()))
        name = "Q8_0" if "v_proj" in linear or "down_proj" in linear else "Q5_0"
        return random_blocks(name, *shape)


@needs_interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("is_wrong", [False, True])
def test_products_with_blocks_are_checked(is_wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of attention, and of experts, which have a kernel of their own."""
    architecture, cpu = architecture_of(small_config("Glm4MoeForCausalLM")), torch.device("cpu")
    source = RandomBlocks(architecture, "int8", cpu)

    def faulty(x: Tensor, weight: PackedBlocks, workspace: Workspace) -> Tensor:
        out = block_matmul(x, weight, workspace)
        out[:, -1] = 0
        return out

    if is_wrong:
        monkeypatch.setattr(gpu_linears, "block_matmul", faulty)
    own = triton_ops("cpu")
    on = Setting(Sizes(architecture, torch.float16, torch.float16, 16), cpu, own)
    found = dict[Piece, list[float]]()
    for case in product_cases(on, on, source):
        if case.rows <= 16:
            assert case.piece is not None
            found.setdefault(case.piece, []).append(case.distance())
    assert set(found) == {Piece.BLOCKS, Piece.EXPERTS}
    assert max(found[Piece.EXPERTS]) < 0.6
    if is_wrong:
        assert min(found[Piece.BLOCKS]) > 1
    else:
        assert max(found[Piece.BLOCKS]) < 0.6


@needs_interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("kind", "most_rows", "kv_dtypes"),
    [
        ("bf16", 16, (torch.float16, torch.int8, FOUR_BITS)),
        pytest.param("int4", 1, (torch.int8,), marks=pytest.mark.slow),
        pytest.param("int4", 1, (torch.float16,), marks=pytest.mark.slow),
    ],
)
def test_latent_attention_is_checked(
    kind: WeightKind, most_rows: int, kv_dtypes: tuple[torch.dtype, ...]
) -> None:
    """Rows that are keys and values, and a product between the first one and the last one; of few
    rows where Triton's interpreter takes long.
    """
    architecture = architecture_of(small_config("Glm4MoeLiteForCausalLM"))
    drawn, seen = RandomWeights(architecture, kind, torch.device("cpu")), set()
    for kv_dtype in kv_dtypes:
        sizes = Sizes(architecture, torch.float16, kv_dtype, 16)
        cases = operator_cases(
            drawn, sizes, torch.device("cpu"), lambda choice: triton_ops("cpu", choice=choice)
        )
        for case in cases:
            if case.rows <= most_rows:
                assert case.distance() < 0.6, case.name
                seen.add(case.piece)
    assert {Piece.ROTATION, Piece.FEW_QUERIES} <= seen
    assert (Piece.INT4 in seen) == (kind == "int4")


def test_rotations_of_latent_attention_are_those_that_the_model_makes() -> None:
    """A key and a value that share memory are equal, as programs write them in any order."""
    architecture = architecture_of(small_config("Glm4MoeLiteForCausalLM"))
    drawn, device = RandomWeights(architecture, "bf16", torch.device("cpu")), torch.device("cpu")
    calls: set[tuple[object, ...]] = set()

    def watched(qkv: Tensor, cos: Tensor, sin: Tensor, cache: Any, *args: Any, **how: Any) -> Any:
        is_still = bool((cos == 1).all() and (sin == 0).all())
        calls.add((*qkv.shape[1:], cache is None, is_still, how.get("query_norm") is None))
        return TORCH_OPS.rotate_and_store(qkv, cos, sin, cache, *args, **how)

    ops = replace(TORCH_OPS, rotate_and_store=watched)
    model = load_model(
        drawn, architecture, max_model_len=64, dtype=torch.float32, device=device, ops=ops
    )
    list(WindowScorer(model, 64).logits(list(range(40))))
    made = set(calls)
    assert made == {(5, 16, True, False, True), (1, 48, False, True, True)}
    calls.clear()
    sizes = Sizes(architecture, torch.float32, torch.float32, 16)
    for case in operator_cases(drawn, sizes, device, lambda choice: ops):
        if case.piece is Piece.ROTATION:
            assert case.distance() == 0
    assert calls == made


@needs_interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("family", ["Gemma2ForCausalLM", "Gemma4ForCausalLM"])
def test_what_a_family_adds_is_checked(family: str) -> None:
    """Caps and GELU; keys of other layers, normed values, weights of norms in float32."""
    architecture = architecture_of(small_config(family))
    drawn = RandomWeights(architecture, "bf16", torch.device("cpu"))
    sizes = Sizes(architecture, torch.float16, torch.float16, 16)
    found = operator_cases(
        drawn, sizes, torch.device("cpu"), lambda choice: triton_ops("cpu", choice=choice)
    )
    names = set()
    for case in found:
        names.add(case.name)
        if case.rows <= 16:
            assert case.distance() < 0.6, case.name
    assert {"gate, gelu", "norm, its weight in float32"} <= names
    assert ("rotation of queries alone" in names) == (family == "Gemma4ForCausalLM")


@needs_interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("Qwen3_5ForCausalLM", "delta rule"),
        ("GraniteMoeHybridForCausalLM", "Mamba-2"),
        ("Lfm2ForCausalLM", "short convolution"),
    ],
)
def test_recurrences_are_checked(family: str, name: str) -> None:
    sizes = Sizes(architecture_of(small_config(family)), torch.float16, torch.float16, 16)
    for ops, is_right in ((triton_ops("cpu"), True), (wrong_recurrences(), False)):
        found = list(recurrences(Setting(sizes, torch.device("cpu"), ops)))
        assert {case.name for case in found} == {name}
        assert all((case.distance() < 0.6) == is_right for case in found)


def wrong_recurrences() -> Ops:
    """They see other inputs."""
    return replace(
        TORCH_OPS,
        recurrence=lambda rows, *given: recurrence_reference(
            replace(rows, inputs=-rows.inputs), *given
        ),
        short_conv=lambda rows, *given: short_conv_reference(rows + 1, *given),
    )


def test_what_torch_computes_stands_in_the_keys_of_cached_prefixes() -> None:
    asked = request()
    assert isinstance(asked.weights, RandomWeights)
    config = EngineConfig(device="cpu", backend="torch", max_model_len=64, max_num_seqs=1)
    sizes, drawn = asked.sizes, asked.weights
    loaded = build_decoder(drawn, drawn.resident_bytes, sizes.architecture, config)
    roots = set()
    for choice in (Choice(), Choice(frozenset([Piece.GATE])), Choice(fragment_rows=range(1, 9))):
        model = replace(loaded.model, ops=replace(loaded.model.ops, choice=choice))
        engine = build_engine(replace(loaded, model=model), config, frozenset(), "weights")
        roots.add(engine.scheduler.config.cache_root)
    assert len(roots) == 3


@pytest.mark.parametrize("piece", list(Piece))
def test_a_table_without_a_piece_has_torchs(piece: Piece) -> None:
    ops, whole = triton_ops("cpu", choice=Choice(frozenset([piece]))), triton_ops("cpu")
    names = {
        Piece.NORMS: ("rms_norm", "add_rms_norm"),
        Piece.ROTATION: ("rotate_and_store",),
        Piece.GATE: ("gate",),
        Piece.ROUTE: ("route",),
        Piece.RECURRENCES: ("short_conv", "recurrence"),
    }
    pieces = ("rms_norm", "add_rms_norm", "rotate_and_store", "gate", "route")
    for name in (*pieces, "short_conv", "recurrence"):
        of = TORCH_OPS if name in names.get(piece, ()) else whole
        assert getattr(ops, name) is getattr(of, name)
    assert (ops.sample is whole.sample) == (piece is not Piece.SAMPLING)
    assert ops.sample is not None
    assert ops.linears is not None
    codes, scales = torch.ones(16, 64, dtype=torch.uint8), torch.ones(16, 1)
    weights = {
        Piece.INT4: CodedWeight("int4", codes, scales),
        Piece.INT8: CodedWeight("int8", codes.view(torch.int8), scales),
        Piece.FP8: CodedWeight("fp8", codes.view(torch.float8_e4m3fn), scales, block=(1, 64)),
        Piece.MXFP4: CodedWeight("mxfp4", codes, codes[:, ::32]),
        Piece.NVFP4: CodedWeight("nvfp4", codes, random_e4m3(16, 4), factors=torch.ones(16)),
        Piece.TRELLIS3: CodedWeight("trellis3", codes[:, :24], scales),
        Piece.BLOCKS: random_blocks("Q5_0", 16, 64).coded(),
    }
    for kind, weight in weights.items():
        assert (ops.linears.packed(weight, None, torch.float32) is None) == (piece is kind)
    assert (ops.linears.of_experts is ops.linears) == (piece is Piece.EXPERTS)
    assert str(ops.choice) != str(whole.choice)


def test_distances() -> None:
    exact = torch.randn(4, 4096, dtype=torch.float64)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        unit = unit_of(dtype)
        assert distance(exact.to(dtype), exact, unit) < 0.2
        wrong = exact.clone()
        wrong[2, 7] += 15 * unit * (wrong[2, 7].abs() + 1.1)
        assert distance(wrong, exact, unit) > 1
    assert distance(exact[:, :-1], exact, 1e-3) == float("inf")
    assert distance(torch.full_like(exact, torch.nan), exact, 1e-3) == float("inf")


def test_it_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert EngineConfig().self_check
    monkeypatch.setenv("LOCALLLM_SELF_CHECK", "0")
    assert not EngineConfig().self_check
    assert EngineConfig(self_check=True).self_check
