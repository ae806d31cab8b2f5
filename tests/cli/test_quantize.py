"""`localllm quantize` as it is typed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import tiny_config, write_checkpoint

from localllm.cli.quantize.progress import Clock
from localllm.errors import ExitCode
from localllm.quantize.estimate import StageSeconds

Run = Callable[..., Any]
KEPT_ENDS = ("--embedding", "keep")
SMALL = ("--group-size", "32", "--calib-samples", "8", "--calib-seqlen", "32")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config(
        "LlamaForCausalLM", hidden_size=64, intermediate_size=96, num_hidden_layers=3
    )
    return write_checkpoint(tmp_path_factory.mktemp("models") / "source", config)


def test_it_writes_its_own_calibration_and_prints_a_table(
    localllm: Run, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    outcome = localllm("quantize", str(source), str(out), *SMALL)
    assert outcome.code == 0, outcome.err
    for word in ("size", "perplexity", "KL divergence, mean", "same likeliest", "largest output"):
        assert word in outcome.out
    assert f"localllm chat {out}" in outcome.out
    assert "layers 3/3" in outcome.err
    assert " left\n" in outcome.err
    assert "MB are the embedding and the head in int8\n" in outcome.out
    report = json.loads((out / "localllm_quant.json").read_text())
    assert report["calibration"]["source"] == "written by the model, seed 0"
    assert report["calibration"]["windows"] == 8
    assert report["peak_bytes"] > 0
    # Left out, in all places, where noise is larger than the difference.
    is_measured = report["decode_tokens_per_s"] is not None
    assert ("decode, tokens/s" in outcome.out) == is_measured
    assert ("decode, tokens/s" in (out / "README.md").read_text()) == is_measured
    assert "gptq, 4 bits, groups of 32" in (out / "README.md").read_text()
    again = localllm("chat", str(out), "--raw", "-n", "4", "hello")
    assert again.code == 0


def test_json_and_a_text_of_one_s_own(localllm: Run, source: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("All work and no play makes Jack a dull boy. " * 40)
    out = tmp_path / "out"
    arguments = ("quantize", str(source), str(out), "--calib-text", str(text), "--json", *SMALL)
    outcome = localllm(*arguments, "--method", "gptq", "--format", "gptq")
    assert outcome.code == 0, outcome.err
    report = json.loads(outcome.out)
    assert report["recipe"]["symmetric"] is True
    assert report["calibration"]["source"] == "text.txt"
    assert report["quality"]["against"]["kl_mean"] > 0
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["checkpoint_format"] == "gptq"


def test_thresholds(localllm: Run, source: Path, tmp_path: Path) -> None:
    for i, (flag, value, code) in enumerate(
        [
            ("--max-kl", "1e-9", ExitCode.QUALITY),
            ("--max-ppl-increase", "-50", ExitCode.QUALITY),
            ("--max-kl", "100", ExitCode.OK),
        ]
    ):
        out = tmp_path / f"out{i}"
        outcome = localllm(
            "quantize", str(source), str(out), *SMALL, "--method", "rtn", flag, value
        )
        assert outcome.code == code
        assert out.exists()
        assert (" over " in outcome.err) == (code == ExitCode.QUALITY)
        # Of a model with random weights much is lost, which is said also if it is allowed.
        assert ("warning: the result is much worse" in outcome.err) == (code == ExitCode.OK)
        assert "try: --method gptq" in outcome.err


def test_a_dry_run_does_nothing(localllm: Run, source: Path, tmp_path: Path) -> None:
    before = sorted([*tmp_path.rglob("*"), *source.parent.rglob("*")])
    outcome = localllm("quantize", str(source), str(tmp_path / "out"), *SMALL, "--dry-run")
    assert outcome.code == 0
    assert "weights after" in outcome.out
    assert "time, about" in outcome.out
    as_json = localllm(
        "quantize", str(source), str(tmp_path / "out"), *SMALL, "--dry-run", "--json"
    )
    plan = json.loads(as_json.out)
    assert plan["result_bytes"] < plan["source_bytes"]
    assert sorted([*tmp_path.rglob("*"), *source.parent.rglob("*")]) == before


def test_a_dry_run_counts_what_was_asked_for(localllm: Run, source: Path, tmp_path: Path) -> None:
    """The embedding and the head in fewer bits, as they are by default, and no measurement."""

    def planned(*flags: str) -> Any:
        arguments = ("quantize", str(source), str(tmp_path / "out"), *SMALL, "--dry-run", "--json")
        outcome = localllm(*arguments, *flags)
        assert outcome.code == 0, outcome.err
        return json.loads(outcome.out)

    small, kept, least = (
        planned("--method", "rtn", *flags) for flags in ((), KEPT_ENDS, ("--head", "int4"))
    )
    values = json.loads((source / "config.json").read_text())["vocab_size"] * 64
    sizes = [each["ends"]["num_bytes"] for each in (small, kept, least)]
    assert sizes[1] == 2 * 4 * values
    assert 2 * values < sizes[0] < 2.2 * values  # bytes, and a scale for each row
    assert 1.5 * values < sizes[2] < 1.9 * values
    assert kept["result_bytes"] - small["result_bytes"] == sizes[1] - sizes[0]
    # No text is written and nothing is loaded twice.
    unmeasured = planned("--method", "rtn", "--no-verify")["seconds"]
    assert unmeasured < 2 < 10 < small["seconds"]


def test_without_a_group_size_the_largest_that_fits_is_taken(
    localllm: Run, source: Path, tmp_path: Path
) -> None:
    """Widths of 64 and 96, which 128 and 64 do not divide."""
    small = ("--calib-samples", "8", "--calib-seqlen", "32", "--no-verify", "--json")
    outcome = localllm("quantize", str(source), str(tmp_path / "out"), "--method", "rtn", *small)
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["recipe"]["group_size"] == 32
    assert "groups of 32, the largest that fit (model.layers.0." in outcome.err
    quiet = localllm("quantize", "pocket", str(tmp_path / "p"), "--dry-run", *small)
    assert "groups of 128" not in quiet.err
    asked = localllm("quantize", str(source), str(tmp_path / "n"), "--group-size", "64", *small)
    assert asked.code == ExitCode.USAGE
    assert "try: --group-size 32" in asked.err


def test_a_head_in_4_bits_has_a_stage_of_its_own(
    localllm: Run, source: Path, tmp_path: Path
) -> None:
    flags = (*SMALL, "--head", "int4", "--no-verify")
    outcome = localllm("quantize", str(source), str(tmp_path / "out"), *flags)
    assert outcome.code == 0, outcome.err
    assert "\nhead 288/288, about" in outcome.err


def test_the_time_left_follows_the_steps_that_were_done() -> None:
    now = [0.0]
    clock = Clock(StageSeconds(text=0.0, layers=10.0, head=0.0, measuring=20.0), lambda: now[0])
    clock.note("layers", 0, 5)
    assert clock.left_s() == 30
    now[0] = 7.0
    assert clock.left_s() == 23
    clock.note("layers", 1, 5)  # it may have loaded something first: nothing is learnt from it
    assert clock.left_s() == 30
    now[0] = 9.0
    clock.note("layers", 2, 5)
    assert clock.left_s() == 3 * 2 + 20
    clock.note("layers", 5, 5)
    clock.note("measuring", 2, 2)
    assert clock.left_s() == 0
    assert str(clock) == "about 1.0 s left"


def test_without_a_folder_it_goes_to_the_cache(
    localllm: Run, source: Path, user_directories: Path
) -> None:
    outcome = localllm("quantize", str(source), *SMALL, "--method", "rtn", "--no-verify")
    assert outcome.code == 0, outcome.err
    made = user_directories / "localllm" / "quantized" / "source-rtn-g32"
    assert (made / "config.json").exists()
    assert str(made) in outcome.out
    assert f"\n{made.name} " in localllm("ls").out
    card = json.loads(localllm("show", str(made), "--json").out)
    assert card["quantization"] == "compressed-tensors, 4 bits, 32 per group, pack-quantized"
    plain = json.loads(localllm("show", str(source), "--json").out)
    assert card["parameters"] == plain["parameters"]


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--bits", "8"), "4 bits"),
        (("--bits", "3", "--method", "awq"), "4 bits"),
        (("--bits", "3", "--method", "gptq"), "leave out --method"),
        (("--bits", "3", "--group-size", "32"), "leave out --group-size"),
        (("--bits", "3", "--asym"), "a scale for each row"),
        (("--bits", "4", "--method", "trellis"), "3 bits"),
        (("--head", "int2"), "keep, int8 or int4"),
        (("--embedding", "int4"), "keep or int8"),
        (("--format", "gptq", "--head", "int4"), "cannot hold a quantized head"),
        (("--method", "hqq"), "method must be one of"),
        (("--format", "awq", "--sym"), "asymmetric"),
        (("--no-verify", "--max-kl", "1"), "need the measurement"),
        (("--group-size", "128"), "128"),
        (("--calib-samples", "0"), "calib-samples"),
        (("--calib-seqlen", "100000"), "context"),
        (("--calib-text", "nowhere.txt"), "nowhere.txt"),
    ],
)
def test_flags_that_make_no_sense(
    localllm: Run, source: Path, tmp_path: Path, flags: tuple[str, ...], word: str
) -> None:
    out = tmp_path / "out"
    outcome = localllm("quantize", str(source), str(out), *SMALL, *flags)
    assert outcome.code in (ExitCode.USAGE, ExitCode.CONTEXT, ExitCode.FAILURE)
    assert word in outcome.err
    assert not out.exists()
    assert "Traceback" not in outcome.err


def start(source: Path, out: Path, *flags: str, before: str = "") -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    code = f"{before}from localllm.cli.main import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, "quantize", str(source), str(out), *SMALL, *flags],
        env={**os.environ, "PYTHONPATH": f"{root}:{root / 'kernels'}", "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )


@pytest.fixture(scope="module")
def whole(source: Path) -> Path:
    """What a run leaves that nobody ends."""
    out = source.with_name("whole")
    assert start(source, out, "--no-verify").wait(120) == 0
    return out


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_killed_run_leaves_nothing_that_looks_finished_and_is_resumed(
    source: Path, whole: Path, tmp_path: Path, sent: signal.Signals
) -> None:
    out = tmp_path / "out"
    # Behind the first layer it goes on so late that the signal comes first.
    late = (
        "import time, localllm.quantize.run as run; write = run.write_layer; "
        "run.write_layer = lambda *given: (write(*given), time.sleep(60)); "
    )
    process = start(source, out, "--no-verify", before=late)
    unfinished = out.with_name("out.unfinished")
    deadline = time.monotonic() + 100
    while not (unfinished / "layer-00000.safetensors").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(sent)
    _, err = process.communicate(timeout=60)
    expected = {signal.SIGINT: ExitCode.SIGINT, signal.SIGTERM: ExitCode.SIGTERM}
    assert process.returncode == expected.get(sent, -sent)
    assert ("--resume" in err) == (sent != signal.SIGKILL)
    assert not out.exists()
    assert start(source, out, "--no-verify", "--resume").wait(120) == 0
    for path in whole.glob("*.safetensors"):
        assert path.read_bytes() == (out / path.name).read_bytes()
    assert not unfinished.exists()


def test_a_disk_that_is_full_in_the_middle(source: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for it: the first layer cannot be written whole."""
    out = tmp_path / "out"
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192)); "
    process = start(source, out, "--no-verify", before=limit)
    _, err = process.communicate(timeout=120)
    assert process.returncode == ExitCode.DISK, err
    assert "cannot be written" in err
    assert "--resume" in err
    assert not out.exists()
    assert start(source, out, "--no-verify", "--resume").wait(120) == 0
