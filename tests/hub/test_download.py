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
from typing import Any

import pytest
from fake_hub import Fault, Hub, running_hub, serve_hub, use_hub

from localllm.errors import CheckpointError, DownloadError, ExitCode
from localllm.hub import transfer
from localllm.hub.catalog import ModelSource
from localllm.hub.download import _check_links, fetch_model, find_snapshot
from localllm.hub.embedding_files import is_for_embeddings
from localllm.hub.snapshot import look_up
from localllm.hub.verified import VerifiedFiles
from localllm.text.template_files import read_chat_templates

ROOT = Path(__file__).parents[2]
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
        ({"architectures": ["DeepseekV4ForCausalLM"]}, "DeepseekV4ForCausalLM"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
    ],
)
def test_what_cannot_run_is_refused_before_its_weights_are_fetched(
    make_checkpoint: Callable[..., Path],
    edit_json: Callable[..., None],
    command: Callable[..., tuple[int, str, str]],
    changes: dict[str, object],
    reason: str,
) -> None:
    folder = make_checkpoint()
    edit_json(folder / "config.json", **changes)
    with running_hub(Hub({REPO: folder})) as hub:
        for words in (("pull", REPO, "--dry-run"), ("pull", REPO), ("chat", REPO, "Hello")):
            code, out, errors = command(hub, *words)
            assert code == ExitCode.CHECKPOINT, errors
            assert reason in errors
            assert "/config.json" not in errors  # a copy that is gone
            assert out == ""
    assert hub.sent_bytes["model.safetensors"] == 0
    assert REPO not in command(hub, "ls")[1]


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["mmproj-F16.gguf", "README.md"], "GGUF"),
        (["config.json", "pytorch_model.bin"], "pickles"),
        (["adapter_config.json", "adapter_model.safetensors"], "it is an adapter (LoRA)"),
        (["params.json", "consolidated.safetensors"], "Mistral's own layout"),
        (["onnx/model.onnx", "config.json"], "ONNX"),
        (["config.json"], "no weights"),
        (["model.safetensors"], "no config.json"),
    ],
)
def test_repositories_of_other_files_are_refused_and_leave_nothing(
    tmp_path: Path,
    command: Callable[..., tuple[int, str, str]],
    names: list[str],
    reason: str,
) -> None:
    folder = tmp_path / "repository"
    folder.mkdir()
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    with running_hub(Hub({REPO: folder})) as hub:
        for words in (("pull", REPO, "--dry-run"), ("chat", REPO, "Hello")):
            code, out, errors = command(hub, *words)
            assert code == ExitCode.CHECKPOINT, errors
            assert reason in errors
            assert "0 B" not in errors
            assert out == ""
        listed = command(hub, "ls")
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
def hub(
    make_checkpoint: Callable[..., Path], hub_home: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Hub]:
    """A hub with one model, whose weights are larger than a piece that is sent at once."""
    folder = make_checkpoint(vocab_size=4096, hidden_size=64)
    with running_hub(Hub({REPO: folder})) as hub:
        use_hub(hub, monkeypatch)
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


def test_of_subfolders_only_settings_of_modules_and_templates_are_fetched(hub: Hub) -> None:
    told = hub.folders[REPO]
    extra = "additional_chat_templates/tool_use.jinja"
    for name in (
        *("1_Pooling/config.json", "1_Pooling/model.safetensors"),
        *("onnx/config.json", extra, "other/tool_use.jinja"),
    ):
        (told / name).parent.mkdir(exist_ok=True)
        (told / name).write_text('{"pooling_mode": "lasttoken"}')
    modules = [{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    (told / "modules.json").write_text(json.dumps(modules))
    folder = fetch_model(SOURCE)
    assert is_for_embeddings(folder)  # though the file is a link to a blob
    assert not (folder / "onnx").exists()
    assert not (folder / "other").exists()
    assert read_chat_templates(folder)["tool_use"] == (told / extra).read_text()
    assert [each.name for each in (folder / "1_Pooling").iterdir()] == ["config.json"]


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
    # Looked at once before the others are fetched, and fetched twice.
    hub.faults["config.json"] = [Fault(times=3, flip=True)]
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
    hub.faults[WEIGHTS] = [Fault(pause_s=0.004)]
    process = subprocess.Popen(
        [sys.executable, "-m", "localllm", "pull", REPO],
        env=environment(hub.endpoint, tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + 60
    while hub.sent_bytes[WEIGHTS] < 22_000_000 and time.monotonic() < end:
        time.sleep(0.01)
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
    hub.faults[WEIGHTS] = [Fault(pause_s=0.04)]
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

    def full(path: Path, digest: str) -> str:
        if path.stat().st_size > 1 << 20:  # the weights, all of which have come
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, digest)

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
    monkeypatch.setattr("localllm.hub.download.hash_file", pytest.fail)
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


def tell_of(name: str, **fields: Any) -> Callable[[dict[str, Any]], None]:
    """A lie about a file."""

    def lie(answer: dict[str, Any]) -> None:
        [file] = [each for each in answer["siblings"] if each["rfilename"] == name]
        file.update(fields)

    return lie


def tell_of_weights(sha256: object) -> Callable[[dict[str, Any]], None]:
    return tell_of(WEIGHTS, lfs={"sha256": sha256, "size": 1, "pointerSize": 1})


def written(place: Path) -> set[str]:
    """Files and folders but for the repository's own in the cache, and what we note of them."""
    found = {str(path.relative_to(place)) for path in place.rglob("*")}
    own = ("hf/hub/models--tester--tiny-model", "home/localllm/downloads", "hf/hub/.locks")
    return {name for name in found if not name.startswith(own)} - {"hf", "hf/hub"}


_HEX = "0123456789abcdef"
LIES = {
    "a hash that leaves the cache": tell_of_weights("../../../../escaped"),
    "a hash that is an absolute path": tell_of_weights("/tmp/localllm-escaped"),
    "a hash of other digits": tell_of_weights("g" * 64),
    "a hash in capitals": tell_of_weights(_HEX.upper() * 4),
    "a hash that is too short": tell_of_weights(_HEX * 3 + _HEX[:-1]),
    "a hash with a line behind it": tell_of_weights(_HEX * 4 + "\n"),
    "a hash that is a number": tell_of_weights(7),
    "no hash": tell_of_weights(""),
    "git's hash that leaves the cache": tell_of("config.json", blobId="../../../../escaped"),
    "no hash of git's": tell_of("config.json", blobId=None),
    "a commit that leaves the cache": lambda answer: answer.update(sha="../../../../escaped"),
    "a commit that is a branch": lambda answer: answer.update(sha="main"),
    "a commit that is too long": lambda answer: answer.update(sha="a" * 41),
    "no commit": lambda answer: answer.update(sha=None),
    "backslashes": tell_of("generation_config.json", rfilename="..\\..\\escaped.json"),
    "NUL": tell_of("generation_config.json", rfilename="a\0b.json"),
    "a line's end": tell_of("generation_config.json", rfilename="a\nb.json"),
    "a terminal's controls": tell_of("generation_config.json", rfilename="\x1b[2Jb.json"),
    "a name that is too long": tell_of("generation_config.json", rfilename="x" * 300 + ".json"),
    "a size below zero": tell_of("config.json", size=-1),
    "a size that is a text": tell_of("config.json", size="../x"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_hub_s_words_become_no_path(hub: Hub, tmp_path: Path, lie: str) -> None:
    (hub.folders[REPO] / "generation_config.json").write_text("{}")
    before = written(tmp_path)
    hub.lie = LIES[lie]
    with pytest.raises(DownloadError, match="makes no sense") as caught:
        fetch_model(SOURCE)
    assert caught.value.exit_code == ExitCode.NETWORK
    assert written(tmp_path) == before
    assert not Path("/tmp/localllm-escaped").exists()
    hub.lie = lambda answer: None
    assert_is_whole(hub, fetch_model(SOURCE))


@pytest.mark.parametrize("name", ["../../../../escaped.json", "/tmp/localllm-escaped.json"])
def test_files_of_a_hub_s_folders_are_left_alone(hub: Hub, tmp_path: Path, name: str) -> None:
    (hub.folders[REPO] / "generation_config.json").write_text("{}")
    before = written(tmp_path)
    hub.lie = tell_of("generation_config.json", rfilename=name)
    folder = fetch_model(SOURCE)
    assert not (folder / "generation_config.json").exists()
    assert written(tmp_path) == before
    assert not Path("/tmp/localllm-escaped.json").exists()


@pytest.mark.parametrize(
    "headers",
    [
        {"ETag": '"../../../../escaped"'},
        {"X-Linked-Etag": '"/tmp/localllm-escaped"'},
        {"X-Repo-Commit": "../../../../escaped"},
        {"X-Linked-Size": "7"},
    ],
    ids=str,
)
def test_a_hub_s_headers_become_no_path(hub: Hub, tmp_path: Path, headers: dict[str, str]) -> None:
    before = written(tmp_path)
    hub.lying_headers = headers
    assert_is_whole(hub, fetch_model(SOURCE))
    assert written(tmp_path) == before
    assert not Path("/tmp/localllm-escaped").exists()


def test_a_file_is_not_fetched_beyond_its_size(hub: Hub) -> None:
    file = hub.folders[REPO] / WEIGHTS
    listed = file.stat().st_size // 2
    hub.lie = tell_of(WEIGHTS, size=listed)
    with pytest.raises(DownloadError, match="more bytes than the hub's list says"):
        fetch_model(SOURCE)
    (partial,) = find_partials()
    assert partial.stat().st_size <= listed


def find_partials() -> list[Path]:
    from huggingface_hub import constants

    return list(Path(constants.HF_HUB_CACHE).rglob("*partial"))


def test_the_commit_of_a_branch_in_the_cache_is_no_path(hub: Hub, hub_home: Path) -> None:
    folder = fetch_model(SOURCE)
    root = folder.parents[1]
    elsewhere = hub_home / "elsewhere"
    elsewhere.mkdir()
    assert find_snapshot(REPO, None) == folder
    for text in ("../../../elsewhere", str(elsewhere), "", "main"):
        (root / "refs" / "main").write_text(text)
        assert find_snapshot(REPO, None) is None
    with pytest.raises(DownloadError, match="not a revision"):
        find_snapshot(REPO, "../../x")


def test_the_hub_s_client_sees_the_same_cache(hub: Hub, hub_home: Path) -> None:
    from huggingface_hub import scan_cache_dir, snapshot_download

    folder = fetch_model(ModelSource(REPO, repo=REPO, revision="main"))
    [repo] = scan_cache_dir(hub_home / "hub").repos
    [revision] = repo.revisions
    assert revision.refs == {"main"}
    assert {file.file_name for file in revision.files} == {path.name for path in folder.iterdir()}
    found = snapshot_download(REPO, local_files_only=True, cache_dir=hub_home / "hub")
    assert Path(found) == folder


def test_a_disk_without_links_has_the_files_themselves(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    folder = fetch_model(SOURCE)
    assert_is_whole(hub, folder)
    hub.sent.clear()
    assert fetch_model(SOURCE, refresh=True) == folder
    assert not [name for name in hub.sent if name]
