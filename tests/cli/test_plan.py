"""`localllm plan`: the same arithmetic as loading, for machines that are not here."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from assistants import TARGET, write_assistant
from eagles import write_eagle3
from in_turns import in_turns

from localllm.answer.opening import open_model
from localllm.bench.subject import open_subject
from localllm.cost.gpus import GPUS, find_gpu
from localllm.cost.planning import Machine, machine_with, plan_model, shape_of
from localllm.drafting.speculation_config import SpeculationConfig
from localllm.engine.config import EngineConfig
from localllm.errors import ExitCode
from localllm.hub.catalog import load_catalog, resolve_model
from localllm.model.families.table import read_architecture

Run = Callable[..., Any]
NGRAMS = SpeculationConfig(drafter="ngram")


def test_a_plan_needs_no_network_and_tells_all_parts(localllm: Run) -> None:
    outcome = localllm("plan", "qwen3-8b", "--gpu", "rtx-4060", "--json")
    assert outcome.code == 0, outcome.err
    plan = json.loads(outcome.out)
    assert plan["weights"] == "int4"
    assert 8.1e9 < plan["parameters"] < 8.3e9
    # 36 layers, 8 heads of 128, keys and values, two bytes.
    assert plan["kv_bytes_per_1k_tokens"] == 1024 * 36 * 2 * 8 * 128 * 2
    parts = ("weights_bytes", "activations_bytes", "graphs_bytes")
    taken = sum(plan[part] for part in parts) + plan["cached_tokens"] * 36 * 2 * 8 * 128 * 2
    assert taken <= plan["usable_bytes"]
    assert 2048 < plan["context"] < plan["model_context"] == 40960
    assert 10 < plan["decode_tokens_per_s"] < 272e9 / plan["weights_bytes"]
    assert plan["fits"]


def test_what_does_not_fit_is_exit_code_6_and_names_one_flag(localllm: Run) -> None:
    for arguments, remedy in (
        (("llama-3.1-8b", "--gpu", "rtx-4060", "--weights", "bf16"), "--weights int4"),
        (("qwen3-8b", "--vram", "8GiB", "--ctx", "32k"), "--ctx "),
        (("qwen2.5-32b", "--vram", "12GiB"), "a smaller model: "),
    ):
        outcome = localllm("plan", *arguments)
        assert outcome.code == ExitCode.MEMORY
        assert f"try: {remedy}" in outcome.out


@pytest.mark.parametrize(
    ("model", "vram"),
    in_turns(["qwen3-8b", "qwen2.5-14b", "llama-3.2-3b"], ["6GiB", "8GiB", "12GiB"]),
)
def test_the_remedy_is_one(localllm: Run, model: str, vram: str) -> None:
    arguments = ["plan", model, "--vram", vram, "--weights", "bf16", "--json"]
    plan = json.loads(localllm(*arguments).out)
    if plan["fits"]:
        return
    if plan["remedy"].startswith("a smaller model: "):
        arguments[1] = plan["remedy"].removeprefix("a smaller model: ")
        arguments[4:6] = []
    else:
        # The last of a flag counts.
        arguments += plan["remedy"].split()
    assert json.loads(localllm(*arguments).out)["fits"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        # Sizes are decimal; one that the user wrote, or a maker, is repeated as written.
        (("qwen3-8b", "--vram", "8GiB"), "qwen3-8b on a GPU with 8GiB (8.6 GB) free\n"),
        (("--vram", "16g"), "on a GPU with 16g (17.2 GB) free\n"),
        # A display and the driver take memory, of a small card the larger share.
        (
            ("qwen3-8b", "--gpu", "rtx-4060"),
            "RTX 4060 with 8 GiB, of which 7.5 GB are assumed free beside a display\n",
        ),
        # Where a copy in 4 bits comes from, and what runs it.
        # Of which the embedding and the head, in 16 bits, are 2.5 GB.
        (
            ("qwen3-8b", "--vram", "8GiB"),
            "next: localllm chat Qwen/Qwen3-8B-AWQ  (fetches its publisher's int4, 6.1 GB)",
        ),
        (("qwen3-8b", "--vram", "8GiB"), "or:   localllm quantize qwen3-8b  (fetches 16.4 GB"),
        (("smollm2-135m", "--vram", "8GiB"), "next: localllm quantize smollm2-135m --method int8"),
        (("gpt-oss-20b", "--vram", "24GiB"), "next: localllm chat gpt-oss-20b  (fetches"),
        (
            ("qwen3-0.6b", "--weights", "bf16", "--vram", "8GiB"),
            "next: localllm chat qwen3-0.6b  (fetches 1.2 GB)",
        ),
        (
            ("pocket", "--vram", "1GiB", "--ctx", "1k", "--kv-cache-dtype", "int8"),
            "next: localllm chat pocket --ctx 1024 --kv-cache-dtype int8\n",
        ),
    ],
)
def test_a_plan_says_what_it_takes_as_free_and_what_comes_next(
    localllm: Run, arguments: tuple[str, ...], told: str
) -> None:
    outcome = localllm("plan", *arguments)
    assert outcome.code == 0, outcome.out
    assert told in outcome.out


def test_the_catalogue_is_listed_with_what_fits(localllm: Run) -> None:
    outcome = localllm("plan", "--gpu", "4070", "--json")
    plans = [json.loads(line) for line in outcome.out.splitlines()]
    assert {plan["model"] for plan in plans} == set(load_catalog())
    by_name = {plan["model"]: plan["fits"] for plan in plans}
    assert by_name["qwen3-8b"]
    assert not by_name["qwen3-32b"]


@pytest.mark.slow
def test_the_catalogue_is_a_table(localllm: Run) -> None:
    table = localllm("plan", "--gpu", "4070").out
    assert "qwen3-32b" in table
    assert "does not fit" in table


def test_a_plan_is_what_loading_takes(make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint(torch_dtype="bfloat16")
    loaded = open_model(str(folder), EngineConfig(max_num_seqs=2))
    engine = loaded.text_engine.engine
    source = resolve_model(str(folder))
    plan = plan_model(shape_of(source, None), machine_with(1 << 32), EngineConfig(max_num_seqs=2))
    assert plan.memory.max_model_len == loaded.context.length
    assert plan.cached_tokens == engine.scheduler.num_usable_blocks * 16


@pytest.mark.parametrize("kind", ["EAGLE", "assistant", "draft model"])
def test_a_plan_counts_what_drafts_as_loading_does(
    kind: str, make_checkpoint: Callable[..., Path], tmp_path: Path, localllm: Run
) -> None:
    folder, other = make_checkpoint(num_hidden_layers=7), tmp_path / "other"
    if kind == "EAGLE":
        write_eagle3(other, read_architecture(folder))
    elif kind == "assistant":
        folder = make_checkpoint("Gemma4ForCausalLM", **TARGET)
        write_assistant(other, 48)
    else:
        other = make_checkpoint(num_hidden_layers=2)
    spec = f"{'eagle' if kind == 'EAGLE' else 'draft'}:{other}"
    config = EngineConfig(
        max_model_len=128, max_num_seqs=2, speculation=SpeculationConfig(drafter=spec)
    )
    source, free = resolve_model(str(folder)), 1 << 32
    machine = Machine("test", "cpu", free, free, None, None)
    planned = plan_model(shape_of(source, None, config.speculation), machine, config).memory
    loaded = open_subject(str(folder), config, 128).decoder.plan
    assert replace(loaded, free_bytes=0, budget_bytes=0) == replace(
        planned, free_bytes=0, budget_bytes=0
    )
    alone = plan_model(shape_of(source, None), machine, replace(config, speculation=NGRAMS)).memory
    of_weights, of_token = (
        planned.weights_bytes - alone.weights_bytes,
        planned.token_bytes - alone.token_bytes,
    )
    # Two layers of a draft model, or one of a head and a part of the three states that it takes.
    entry = 2 * 2 * 16 * 4
    token_bytes = {"draft model": 2 * entry, "EAGLE": entry + 3 * 48 * 4 // 16, "assistant": 0}
    assert of_token == token_bytes[kind]
    small_bytes = sum(file.stat().st_size for file in other.glob("*.safetensors"))
    if kind == "draft model":
        # Loaded before, in what is then no longer free.
        assert of_weights == 0
        assert 0.9 * small_bytes < free - planned.free_bytes < small_bytes
    else:
        assert 0.5 * small_bytes < of_weights < 1.1 * small_bytes
    outcome = localllm("plan", str(folder), "--spec", spec, "--vram", "4GiB")
    assert outcome.code == 0, outcome.err
    told = {"EAGLE": ", and an EAGLE head", "assistant": ", and its assistant"}
    assert told.get(kind, f"  {other}") in outcome.out


@pytest.mark.parametrize(
    ("spelt", "name"),
    [
        ("4090", "rtx-4090"),
        ("RTX 4060", "rtx-4060"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("rtx-4060-ti", "rtx-4060-ti-8gb"),
        ("A100", "a100-40gb-pcie"),
        ("A100-80GB", "a100-80gb-sxm"),
        ("h100", "h100-pcie"),
    ],
)
def test_a_gpu_is_found_however_it_is_spelt(spelt: str, name: str) -> None:
    assert find_gpu(spelt) == GPUS[name]


def test_wrong_arguments_are_exit_code_2(localllm: Run) -> None:
    assert localllm("plan", "qwen3-8b", "--gpu", "rtx-9999").code == ExitCode.USAGE
    assert localllm("plan", "qwen3-8b", "--gpu", "4090", "--vram", "8GiB").code == ExitCode.USAGE
    outcome = localllm("plan", "qwen3-8b", "--gpu", "4090", "--gpu", "3090")
    assert outcome.code == ExitCode.USAGE
    assert "localllm runs a model on one GPU" in outcome.err
    assert localllm("plan", "qwen3-8b", "--vram", "much").code == ExitCode.USAGE
    assert localllm("plan", "qwen3-8b", "--vram", "8GiB", "--weights", "int3").code == 2
    assert localllm("plan", "qwen9", "--vram", "8GiB").code == ExitCode.MODEL
    outcome = localllm("plan", "--vram", "8GiB", "--spec", "draft:qwen3-0.6b")
    assert outcome.code == ExitCode.USAGE
    assert "is for one model" in outcome.err
    outcome = localllm("plan", "qwen3-8b", "--vram", "8GiB", "--spec", "head")
    assert outcome.code == ExitCode.USAGE
    assert "localllm pull qwen3-8b" in outcome.err
    assert localllm("plan", "--gpu", "list").out.count("GB/s") == len(GPUS)


def test_experts_stay_in_host_memory_where_the_gpu_is_too_small(localllm: Run) -> None:
    outcome = localllm("plan", "qwen3-30b-a3b", "--gpu", "rtx-4060")
    assert outcome.code == 0
    assert "host memory" in outcome.out
    assert "of a layer are on the GPU at a time" in outcome.out

    def planned(*flags: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            localllm("plan", "qwen3-30b-a3b", "--gpu", "rtx-4090", "--json", *flags).out
        )
        return found

    whole, some, fewest = (
        planned(),
        planned("--expert-memory", "4GiB"),
        planned("--expert-memory", "0"),
    )
    in_3_bits = planned("--weights", "trellis3", "--expert-memory", "4GiB")
    assert some["expert_slots"] < in_3_bits["expert_slots"] < 128
    assert whole["expert_slots"] is None
    assert (whole["host_bytes"], fewest["expert_slots"]) == (0, 1)
    assert 20 < some["expert_slots"] < 60
    for speed in ("decode_tokens_per_s", "prefill_tokens_per_s"):
        assert whole[speed] > some[speed] > fewest[speed]
    refused = localllm("plan", "qwen3-30b-a3b", "--device", "cpu", "--expert-memory", "1GiB")
    assert refused.code == ExitCode.USAGE
    assert localllm("plan", "pocket", "--expert-memory", "much").code == ExitCode.USAGE


def test_a_token_reads_its_experts_only(localllm: Run) -> None:
    """30 billion weights, of which a token reads 3, answer faster than 14 of which it reads all."""

    def speed(model: str) -> int:
        outcome = localllm("plan", model, "--gpu", "rtx-4090")
        assert outcome.code == 0
        [line] = [line for line in outcome.out.splitlines() if "answers" in line]
        return int(line.split()[1].replace(",", ""))

    assert speed("qwen3-30b-a3b") > 2 * speed("qwen3-14b")


def test_a_prompt_that_fills_the_context_takes_longer_by_its_depth(localllm: Run) -> None:
    def planned(context: int) -> dict[str, Any]:
        flags = ("--gpu", "rtx-4090", "-c", str(context), "--json")
        found: dict[str, Any] = json.loads(localllm("plan", "qwen3-0.6b", *flags).out)
        return found

    short, long = planned(1024), planned(32768)
    assert short["context_prefill_s"] == pytest.approx(1024 / short["prefill_tokens_per_s"])
    # 0.44 billion weights of its layers are multiplied for each token, and 16 heads of 128 over 28
    # layers with each key before it.
    each, depth = 2 * 0.44e9, 4 * 16 * 128 * 28
    expected = 32 * (each + depth * 16384) / (each + depth * 512)
    times = long["context_prefill_s"] / short["context_prefill_s"]
    assert times == pytest.approx(expected, rel=0.03)
