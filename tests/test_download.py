"""Models from a hub, over loopback, through the command as a user runs it."""

import errno
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_hub import Fault, Hub, running_hub, serve_hub

from localllm import transfer
from localllm.catalog import ModelSource
from localllm.download import _check_links, fetch_model, find_snapshot, look_up
from localllm.errors import CheckpointError, DownloadError, ExitCode
from localllm.verified import VerifiedFiles

ROOT = Path(__file__).parents[1]
REPO = "tester/tiny-model"


def chat(endpoint: str, home: Path, *arguments: str, **environment: str) -> tuple[int, str, str]:
    return localllm(endpoint, home, "chat", *arguments, **environment)


def localllm(endpoint: str, home: Path, *arguments: str, **variables: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "localllm", *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=environment(endpoint, home) | variables,
    )
    return done.returncode, done.stdout, done.stderr


def environment(endpoint: str, home: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home / "hf"),
        "HF_HUB_DISABLE_XET": "1",
    }


def test_a_model_is_fetched_once_and_then_runs_without_a_network(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    arguments = (REPO, "Hello", "--greedy", "-n", "8")
    folder = make_checkpoint()
    # What must never be fetched.
    (folder / "modeling_tiny.py").write_text("raise SystemExit(99)")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with serve_hub(REPO, folder) as endpoint:
        code, first, errors = chat(endpoint, tmp_path, *arguments)
        assert code == 0, errors
    code, second, errors = chat("http://127.0.0.1:9", tmp_path, *arguments)
    assert code == 0, errors
    assert first == second
    fetched = {path.name for path in (tmp_path / "hf").rglob("*")}
    assert "model.safetensors" in fetched
    assert not fetched & {"modeling_tiny.py", "pytorch_model.bin"}
    code, third, _ = chat("http://127.0.0.1:9", tmp_path, *arguments, HF_HUB_OFFLINE="1")
    assert (code, third) == (0, first)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
    ],
)
def test_what_cannot_run_is_refused_before_its_weights_are_fetched(
    make_checkpoint: Callable[..., Path],
    edit_json: Callable[..., None],
    tmp_path: Path,
    changes: dict[str, object],
    reason: str,
) -> None:
    folder = make_checkpoint()
    edit_json(folder / "config.json", **changes)
    with running_hub(Hub({REPO: folder})) as hub:
        for words in (("pull", REPO, "--dry-run"), ("pull", REPO), ("chat", REPO, "Hello")):
            code, out, errors = localllm(hub.endpoint, tmp_path, *words)
            assert code == ExitCode.CHECKPOINT, errors
            assert reason in errors
            assert "/config.json" not in errors  # a copy that is gone
            assert out == ""
    assert hub.sent_bytes["model.safetensors"] == 0
    assert REPO not in localllm(hub.endpoint, tmp_path, "ls")[1]


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["model-Q4_K_M.gguf", "README.md"], "GGUF"),
        (["model.gguf", "config.json"], "GGUF"),
        (["config.json", "pytorch_model.bin"], "pickles"),
        (["config.json"], "no weights"),
        (["model.safetensors"], "no config.json"),
    ],
)
def test_repositories_of_other_files_are_refused_and_leave_nothing(
    tmp_path: Path, names: list[str], reason: str
) -> None:
    folder = tmp_path / "repository"
    folder.mkdir()
    for name in names:
        (folder / name).write_text("{}")
    with running_hub(Hub({REPO: folder})) as hub:
        for words in (("pull", REPO), ("pull", REPO, "--dry-run"), ("chat", REPO, "Hello")):
            code, out, errors = localllm(hub.endpoint, tmp_path, *words)
            assert code == ExitCode.CHECKPOINT, errors
            assert reason in errors
            assert "0 B" not in errors
            assert out == ""
        listed = localllm(hub.endpoint, tmp_path, "ls")
    assert REPO not in listed[1]
    assert listed[2] == ""


def test_a_card_needs_no_weights(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    with serve_hub(REPO, make_checkpoint()) as endpoint:
        code, out, errors = localllm(endpoint, tmp_path, "show", REPO, "--json")
    assert code == 0, errors
    card = json.loads(out)
    assert card["layers"] == 2
    assert "parameters" not in card
    assert not list((tmp_path / "hf").rglob("*.safetensors"))


def test_without_a_network_and_without_the_model_it_is_exit_code_4(tmp_path: Path) -> None:
    code, out, errors = chat("http://127.0.0.1:9", tmp_path, REPO, "Hello")
    assert code == ExitCode.NETWORK
    assert out == ""
    assert REPO in errors
    assert "Traceback" not in errors


def test_a_repository_that_is_not_there_is_exit_code_3(tmp_path: Path) -> None:
    with serve_hub("some/other", tmp_path) as endpoint:
        code, _, errors = chat(endpoint, tmp_path, REPO, "Hello")
    assert code == ExitCode.MODEL
    assert REPO in errors


def test_a_gated_repository_is_exit_code_3_and_names_the_way_in(tmp_path: Path) -> None:
    with serve_hub(REPO, tmp_path, gated=True) as endpoint:
        code, _, errors = chat(endpoint, tmp_path, REPO, "Hello", HF_TOKEN="hf_secret")
    assert code == ExitCode.MODEL
    assert "HF_TOKEN" in errors
    assert "hf_secret" not in errors


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert fetch_model(ModelSource("x", folder=tmp_path)) == tmp_path


def test_a_link_out_of_the_cache_is_refused(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "c"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "good").write_text("{}")
    (snapshot / "config.json").symlink_to(blobs / "good")
    _check_links(snapshot)
    (tmp_path / "secret").write_text("x")
    (snapshot / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        _check_links(snapshot)


@pytest.fixture
def hub_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own, for calls in this process."""
    home = tmp_path / "hf"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr("localllm.transfer._PAUSE_S", 0.01)
    # What has come of a piece of this size is lost in a cut; by default 10 MB.
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
    return home


@pytest.fixture
def hub(
    make_checkpoint: Callable[..., Path], hub_home: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Hub]:
    """A hub with one model, whose weights are larger than a piece that is sent at once."""
    folder = make_checkpoint(vocab_size=4096, hidden_size=64)
    with running_hub(Hub({REPO: folder})) as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        yield hub


SOURCE = ModelSource(REPO, repo=REPO)
WEIGHTS = "model.safetensors"


def assert_is_whole(hub: Hub, folder: Path) -> None:
    for path in hub.folders[REPO].iterdir():
        if path.suffix in (".json", ".safetensors"):
            assert (folder / path.name).read_bytes() == path.read_bytes()
    assert not list(folder.parents[1].glob("blobs/*partial*"))


def size_of_weights(hub: Hub) -> int:
    return (hub.folders[REPO] / WEIGHTS).stat().st_size


def test_what_is_here_is_used_without_asking(hub: Hub) -> None:
    folder = fetch_model(SOURCE)
    assert_is_whole(hub, folder)
    hub.sent.clear()
    assert fetch_model(SOURCE) == folder
    assert not hub.sent


@pytest.mark.parametrize(
    "fault",
    [
        Fault(cut_at=100_000),
        Fault(cut_at=0),
        Fault(times=3, cut_at=70_000),
        Fault(status=503, times=2),
        Fault(status=500),
        Fault(length=1000),
    ],
    ids=["cut", "cut at once", "cut thrice", "503 twice", "500", "too long"],
)
def test_a_download_gets_over(hub: Hub, fault: Fault) -> None:
    hub.faults[WEIGHTS] = [fault]
    folder = fetch_model(SOURCE)
    assert_is_whole(hub, folder)
    if fault.cut_at and fault.times == 0:
        # Nothing came twice.
        assert hub.sent_bytes[WEIGHTS] == size_of_weights(hub)


def test_a_byte_that_was_flipped_is_found_and_fetched_once_more(hub: Hub) -> None:
    hub.faults[WEIGHTS] = [Fault(flip=True)]
    folder = fetch_model(SOURCE)
    assert_is_whole(hub, folder)
    (damaged,) = folder.parents[1].glob("blobs/*.damaged")
    assert damaged.read_bytes() != (folder / WEIGHTS).read_bytes()


def test_what_is_damaged_twice_is_never_used(hub: Hub) -> None:
    hub.faults[WEIGHTS] = [Fault(flip=True, times=2)]
    with pytest.raises(DownloadError) as caught:
        fetch_model(SOURCE)
    assert caught.value.exit_code == ExitCode.DISK
    assert len(re.findall("[0-9a-f]{64}", caught.value.where)) >= 2
    assert find_snapshot(REPO, None) is None or not (find_snapshot(REPO, None) / WEIGHTS).exists()  # type: ignore[operator]
    assert_is_whole(hub, fetch_model(SOURCE))


def test_a_small_file_that_is_damaged_is_not_used(hub: Hub) -> None:
    hub.faults["config.json"] = [Fault(times=2, flip=True)]
    with pytest.raises(DownloadError, match=r"config\.json is damaged"):
        fetch_model(SOURCE)
    assert_is_whole(hub, fetch_model(SOURCE))


def test_a_download_that_fails_goes_on_where_it_stopped(hub: Hub) -> None:
    hub.faults[WEIGHTS] = [Fault(cut_at=70_000), Fault(status=500, times=20)]
    with pytest.raises(DownloadError) as caught:
        fetch_model(SOURCE)
    assert caught.value.exit_code == ExitCode.NETWORK
    hub.faults.clear()
    hub.sent_bytes.clear()
    snapshot = look_up(REPO, None)
    assert snapshot.partial_bytes[WEIGHTS] == 70_000
    assert snapshot.missing_bytes <= snapshot.num_bytes - 70_000
    assert_is_whole(hub, fetch_model(SOURCE))
    assert hub.sent_bytes[WEIGHTS] == size_of_weights(hub) - 70_000


def test_a_kill_costs_no_byte_twice(
    hub: Hub, tmp_path: Path, make_checkpoint: Callable[..., Path]
) -> None:
    hub.folders[REPO] = make_checkpoint(vocab_size=16384, hidden_size=256)
    hub.faults[WEIGHTS] = [Fault(pause_s=0.01)]
    process = subprocess.Popen(
        [sys.executable, "-m", "localllm", "pull", REPO],
        env=environment(hub.endpoint, tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + 60
    while hub.sent_bytes[WEIGHTS] < 22_000_000 and time.monotonic() < end:
        time.sleep(0.05)
    process.kill()
    process.wait()
    (partial,) = (tmp_path / "hf").rglob("*partial")
    kept = partial.stat().st_size
    assert kept >= 10_000_000
    time.sleep(0.3)  # what the hub still sends to nobody
    hub.sent_bytes.clear()
    code, _, errors = localllm(hub.endpoint, tmp_path, "pull", REPO)
    assert code == 0, errors
    assert hub.sent_bytes[WEIGHTS] == size_of_weights(hub) - kept


def test_two_at_once_fetch_it_once(hub: Hub, tmp_path: Path) -> None:
    hub.faults[WEIGHTS] = [Fault(pause_s=0.1)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "localllm", "pull", REPO],
            env=environment(hub.endpoint, tmp_path),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    assert hub.sent_bytes[WEIGHTS] == size_of_weights(hub)


def test_a_disk_that_is_too_small_is_said_before_the_first_byte(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=1_000_000))
    with pytest.raises(DownloadError, match=r"needs .* GB") as caught:
        fetch_model(SOURCE)
    assert caught.value.exit_code == ExitCode.DISK
    assert not hub.sent_bytes[WEIGHTS]


def test_a_disk_that_fills_up_keeps_what_came(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    real = transfer.hash_file

    def full(*arguments: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(transfer, "hash_file", full)
    with pytest.raises(DownloadError) as caught:
        fetch_model(SOURCE)
    assert caught.value.exit_code == ExitCode.DISK
    monkeypatch.setattr(transfer, "hash_file", real)
    hub.sent_bytes.clear()
    assert_is_whole(hub, fetch_model(SOURCE))
    assert not hub.sent_bytes[WEIGHTS]


def test_a_newer_revision_is_fetched_when_asked_for(hub: Hub) -> None:
    first = fetch_model(SOURCE)
    hub.commit = "f" * 40
    config = hub.folders[REPO] / "generation_config.json"
    config.write_text('{"temperature": 0.5}')
    hub.sent_bytes.clear()
    assert fetch_model(SOURCE) == first
    second = fetch_model(SOURCE, refresh=True)
    assert second != first
    assert_is_whole(hub, second)
    assert not hub.sent_bytes[WEIGHTS]


def test_without_the_hub_what_another_program_fetched_is_used(
    hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    folder = fetch_model(SOURCE)
    VerifiedFiles()._path.unlink()
    hub.faults["api"] = [Fault(status=503, times=100)]
    assert fetch_model(SOURCE) == folder
    assert "cannot be reached" in caplog.text
    (folder / WEIGHTS).unlink()
    with pytest.raises(DownloadError) as caught:
        fetch_model(SOURCE)
    assert caught.value.exit_code == ExitCode.NETWORK
    assert "safetensors" in caught.value.where


def test_a_card_first_and_the_weights_afterwards(hub: Hub) -> None:
    folder = fetch_model(SOURCE, with_weights=False)
    # One of two shards, as a download by another program may leave it.
    (folder / "model-00001-of-00002.safetensors").symlink_to(folder / "config.json")
    assert fetch_model(SOURCE) == folder
    assert (folder / WEIGHTS).exists()
    hub.sent.clear()
    assert fetch_model(SOURCE, with_weights=False) == fetch_model(SOURCE) == folder
    assert not hub.sent


def test_a_token_goes_to_the_hub_and_nowhere_else(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with running_hub(Hub(hub.folders)) as elsewhere:
        hub.elsewhere = elsewhere.endpoint
        assert_is_whole(hub, fetch_model(SOURCE))
    assert "Bearer hf_secret" in hub.tokens
    assert elsewhere.sent_bytes[WEIGHTS] == size_of_weights(hub)
    assert elsewhere.tokens == {""}


def test_files_are_hashed_once(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch_model(SOURCE)
    monkeypatch.setattr("localllm.download.hash_file", pytest.fail)
    fetch_model(SOURCE, refresh=True)


def test_what_another_program_fetched_is_checked_too(hub: Hub) -> None:
    folder = fetch_model(SOURCE)
    VerifiedFiles()._path.unlink()
    blob = (folder / WEIGHTS).resolve()
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    with pytest.raises(DownloadError, match="damaged"):
        fetch_model(SOURCE)
    assert_is_whole(hub, fetch_model(SOURCE))
