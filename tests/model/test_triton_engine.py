"""The whole engine on the Triton kernels, interpreted: the tokens of the torch operators."""

from dataclasses import replace

import pytest
import torch
from engines import WITH_SINKS, Limits, load_tiny_model, make_engine, run, run_alone
from guards import needs_interpreter
from interpreter import product_of_rows_alike
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

from localllm.model.decoder import DecoderModel
from localllm.model.fused.choose import fuse_layers
from localllm.model.fused.gpu import GpuDecoder
from localllm.quantize.recipe import Recipe
from localllm.schedule.sampling_params import SamplingParams
from localllm_kernels.attention.four_bits import FOUR_BITS, OWN_KEYS
from localllm_kernels.compiling.choice import FUSED, Choice, Piece

pytestmark = needs_interpreter

INT4 = Recipe("rtn", group_size=32)
INT4_ASYMMETRIC = Recipe("rtn", group_size=32, symmetric=False)
SAMPLED = SamplingParams(
    temperature=0.8,
    top_k=20,
    top_p=0.9,
    repetition_penalty=1.2,
    frequency_penalty=0.3,
    seed=3,
    max_tokens=4,
    ignore_eos=True,
    logprobs=2,
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def generate(
    model: DecoderModel, kv_dtype: torch.dtype | None, budget: int
) -> dict[int, list[int | None]]:
    """Prompts in chunks beside decoding ones; the second half finds the first one's blocks."""
    limits = Limits(block_size=8, max_num_batched_tokens=budget, enable_prefix_caching=True)
    engine = make_engine(model, limits, kv_dtype)
    tokens: dict[int, list[int | None]] = {}
    for lengths in ((1, budget + 5), (budget - 4, budget + 5)):
        for length in lengths:
            prompt = [(7 * i) % 250 + 1 for i in range(length)]
            engine.add_request(prompt, SAMPLED if length % 2 else GREEDY)
        while engine.has_unfinished():
            for event in engine.step():
                tokens.setdefault(event.request_id, []).append(event.token_id)
    return tokens


@pytest.mark.parametrize(
    ("architecture", "window", "recipe", "kv_dtype"),
    [
        pytest.param("Qwen3ForCausalLM", None, None, None, marks=pytest.mark.slow),
        pytest.param("Qwen3ForCausalLM", None, INT4, torch.int8, marks=pytest.mark.slow),
        pytest.param("Qwen2ForCausalLM", None, INT4_ASYMMETRIC, None, marks=pytest.mark.slow),
        ("MistralForCausalLM", 12, INT4, torch.float8_e4m3fn),
        pytest.param(
            "Qwen3ForCausalLM", None, Recipe("int8", head="int8"), None, marks=pytest.mark.slow
        ),
        pytest.param("Gemma4ForCausalLM", 12, None, None, marks=pytest.mark.slow),
        pytest.param("Gemma2ForCausalLM", 12, None, torch.int8, marks=pytest.mark.slow),
        pytest.param(WITH_SINKS, 12, None, None, marks=pytest.mark.slow),
        ("Qwen3MoeForCausalLM", None, None, None),
        pytest.param("Qwen3MoeForCausalLM", None, INT4, None, marks=pytest.mark.slow),
        pytest.param("Qwen3MoeForCausalLM", None, Recipe("mxfp4"), None, marks=pytest.mark.slow),
        pytest.param("Qwen3ForCausalLM", None, Recipe("nvfp4"), None, marks=pytest.mark.slow),
        pytest.param("Qwen3ForCausalLM", None, Recipe("trellis"), None, marks=pytest.mark.slow),
        pytest.param("Qwen3MoeForCausalLM", None, Recipe("trellis"), None, marks=pytest.mark.slow),
        ("Glm4MoeLiteForCausalLM", None, None, None),
        pytest.param("DeepseekV3ForCausalLM", None, INT4, torch.int8, marks=pytest.mark.slow),
    ],
    ids=[
        *("plain", "int4 and int8 cache", "int4 with biases", "int4, window, fp8 cache", "int8"),
        *("keys of other layers", "caps, int8 cache", "sinks"),
        *("experts", "int4 experts", "mxfp4 experts", "nvfp4", "trellis", "trellis experts"),
        *("latent attention", "int4 latent attention, rows in 8 bits"),
    ],
)
@pytest.mark.parametrize("budget", [12, pytest.param(24, marks=pytest.mark.slow)])
def test_it_gives_the_tokens_of_the_torch_operators(
    architecture: str,
    window: int | None,
    recipe: Recipe | None,
    kv_dtype: torch.dtype | None,
    budget: int,
) -> None:
    dtype = torch.float32
    reference = load_tiny_model(architecture, window, dtype, recipe, backend="torch")
    model = load_tiny_model(architecture, window, dtype, recipe, backend="triton")
    assert model.ops.traits.name == "triton"
    is_fused = recipe in (INT4, INT4_ASYMMETRIC) and not model.architecture.has_experts
    assert isinstance(model.fused, GpuDecoder) == is_fused
    assert generate(model, kv_dtype, budget) == generate(reference, kv_dtype, budget)


@pytest.mark.parametrize(
    ("architecture", "window", "recipe"),
    [
        ("Qwen3ForCausalLM", None, INT4),
        pytest.param("Gemma2ForCausalLM", 70, None, marks=pytest.mark.slow),
        pytest.param("DeepseekV3ForCausalLM", None, None, marks=pytest.mark.slow),
    ],
    ids=["fused", "caps and a window", "latents"],
)
def test_keys_in_4_bits_give_the_tokens_of_the_torch_operators(
    architecture: str, window: int | None, recipe: Recipe | None
) -> None:
    """Behind a stretch of keys, whose codes are read then."""
    found = []
    for backend in ("torch", "triton"):
        model = load_tiny_model(architecture, window, torch.float32, recipe, backend=backend)
        engine = make_engine(model, Limits(max_num_batched_tokens=40), FOUR_BITS)
        engine.add_request([(7 * i) % 250 + 1 for i in range(OWN_KEYS + 6)], GREEDY)
        tokens = []
        while engine.has_unfinished():
            tokens += [event.token_id for event in engine.step()]
        found.append(tokens)
    assert found[0] == found[1]
    assert len(found[0]) == GREEDY.max_tokens


@pytest.mark.parametrize(
    ("architecture", "window", "recipe", "kv_dtype"),
    [
        pytest.param("Qwen3ForCausalLM", None, None, None, marks=pytest.mark.slow),
        ("MistralForCausalLM", 12, INT4, torch.int8),
        pytest.param("Qwen3MoeForCausalLM", None, None, None, marks=pytest.mark.slow),
    ],
    ids=["plain", "int4, window, int8 cache", "experts"],
)
def test_what_is_deterministic_has_the_same_bits_in_any_batch_and_chunks(
    architecture: str,
    window: int | None,
    recipe: Recipe | None,
    kv_dtype: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(InterpreterBuilder, "create_dot", product_of_rows_alike)
    model = load_tiny_model(architecture, window, torch.float32, recipe, "triton", True)
    assert model.fused is None
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    wanted = [([(7 * i) % 250 + 1 for i in range(length)], params) for length in (1, 23)]
    limits = Limits(block_size=8, max_num_batched_tokens=17, enable_prefix_caching=True)
    answers = run(make_engine(model, limits, kv_dtype), wanted)
    for i, request in enumerate(wanted):
        [alone] = run_alone(model, *request, kv_dtype)
        assert answers[i, 0].token_ids == alone.token_ids
        assert answers[i, 0].logits == alone.logits


@pytest.mark.parametrize("num_tokens", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("recipe", [None, INT4, Recipe("int8", embedding="int8", head="int8")])
def test_rows_are_in_the_precision_of_the_model(recipe: Recipe | None, num_tokens: int) -> None:
    model = load_tiny_model("Qwen2ForCausalLM", None, torch.float16, recipe, backend="triton")
    assert model.norm.weight.dtype == torch.float16
    request = ([3, 4, 5], replace(GREEDY, max_tokens=num_tokens))
    [answer] = run_alone(model, *request)
    reference = load_tiny_model("Qwen2ForCausalLM", None, torch.float32, recipe)
    [expected] = run_alone(reference, *request)
    for own, theirs in zip(answer.logits, expected.logits, strict=True):
        found, wanted = (
            torch.frombuffer(bytearray(each), dtype=torch.float32) for each in (own, theirs)
        )
        torch.testing.assert_close(found, wanted, atol=0.05, rtol=0.02)


def test_a_decode_step_in_4_bits_takes_six_launches_a_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[str] = []
    run = GridExecutor.__call__

    def counted(executor: GridExecutor, *args: object, **kwargs: object) -> object:
        launched.append(executor.fn.__name__)
        return run(executor, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", counted)
    model = load_tiny_model("Qwen3ForCausalLM", None, torch.float32, INT4, backend="triton")
    engine = make_engine(model, Limits())
    for length in (3, 9):
        engine.add_request(list(range(1, length)), GREEDY)
    engine.step()  # the prompts
    launched.clear()
    engine.step()
    layer = [
        "_tile_kernel",
        "_rotate_and_store_kernel",
        "_decode_kernel",
        *3 * ["_tile_kernel"],
    ]
    assert launched == [*model.architecture.num_layers * layer, "_rms_norm_kernel"]


def test_what_torch_computes_in_place_of_a_kernel_is_not_computed_in_one_with_others() -> None:
    model = load_tiny_model("Qwen3ForCausalLM", None, torch.float32, INT4, backend="triton")
    for piece in Piece:
        ops = replace(model.ops, choice=Choice(frozenset([piece])))
        found = fuse_layers(model.architecture, model.layers, model.norm, ops)
        assert (found is None) == (piece in FUSED), piece
