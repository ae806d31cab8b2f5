"""Plans for GGUF models of which only the headers were fetched from a hub."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_hub import Hub, running_hub, use_hub
from pocket_gguf import write_pocket

from localllm.errors import CheckpointError, ExitCode
from localllm.hub.catalog import resolve_model
from localllm.hub.download import fetch_model, find_here
from localllm.hub.headers_alone import HEADERS
from localllm.user.places import cache_folder

REPO, BOTH = "tester/pocket-GGUF", "tester/both"
FILE = "pocket-Q8_0.gguf"
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pocket(tmp_path_factory.mktemp("gguf") / FILE, "Q8_0")


@pytest.fixture
def hub(
    written: Path,
    tmp_path: Path,
    hub_home: Path,
    make_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Hub]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    alone, both = tmp_path / "alone", make_checkpoint()
    alone.mkdir()
    for folder in (alone, both):
        (folder / FILE).write_bytes(written.read_bytes())
    with running_hub(Hub({REPO: alone, BOTH: both})) as hub:
        use_hub(hub, monkeypatch)
        yield hub


def test_a_plan_needs_the_header_alone(hub: Hub, written: Path, command: Command) -> None:
    code, out, errors = command(hub, "plan", f"{REPO}:q8_0", "--ctx", "512")
    assert code == ExitCode.OK, errors
    assert "(fetches " in out
    [place] = cache_folder(HEADERS).glob(f"*/{FILE}")
    assert place.stat().st_size == written.stat().st_size
    assert place.stat().st_blocks * 512 < written.stat().st_size / 2
    _, here, _ = command(hub, "plan", str(written), "--ctx", "512", "--json")
    hub.sent_bytes.clear()
    code, there, errors = command(hub, "plan", f"{REPO}:Q8_0", "--ctx", "512", "--json")
    assert code == ExitCode.OK, errors
    plans = [json.loads(each) for each in (here, there)]
    for told in ("weights", "weights_bytes", "kv_bytes_per_1k_tokens", "model_context"):
        assert plans[0][told] == plans[1][told]
    assert not hub.sent_bytes.get(FILE)  # its header is kept
    assert find_here(resolve_model(f"{REPO}:Q8_0")) is None


def test_a_repository_s_description_tells_its_header(hub: Hub, command: Command) -> None:
    code, out, errors = command(hub, "show", REPO)
    assert code == ExitCode.OK, errors
    assert "layers" in out


def test_after_a_plan_the_whole_file_is_fetched(hub: Hub, written: Path) -> None:
    source = resolve_model(f"{REPO}:Q8_0")
    planned = fetch_model(source, with_weights=False)
    folder = fetch_model(source)
    assert folder != planned
    [file] = json.loads((folder / "gguf.json").read_text())["files"]
    assert Path(file["path"]).read_bytes() == written.read_bytes()
    assert find_here(source) == folder


def test_headers_are_listed_by_what_they_take_and_removed_when_unused(
    hub: Hub, written: Path, command: Command
) -> None:
    fetch_model(resolve_model(REPO), with_weights=False)
    listed = [json.loads(line) for line in command(hub, "cache", "list", "--json")[1].splitlines()]
    num_bytes = {kind["kind"]: kind["bytes"] for kind in listed}
    assert 0 < num_bytes["gguf-headers"] < written.stat().st_size / 2
    assert num_bytes["gguf"] > 0
    [folder] = cache_folder(HEADERS).iterdir()
    left_over = folder.with_name("new-x")
    left_over.mkdir()
    for each in (folder, left_over):
        os.utime(each, (1, 1))
    fetch_model(resolve_model(REPO), with_weights=False)
    assert [*cache_folder(HEADERS).iterdir()] == [folder]
    os.utime(folder, (1, 1))
    hub.commit = "1" * 40
    fetch_model(resolve_model(REPO), with_weights=False)
    assert not folder.exists()
    assert command(hub, "cache", "clear", "gguf", "gguf-headers", "--yes")[0] == ExitCode.OK
    assert not cache_folder(HEADERS).exists()


def test_a_header_without_its_end_is_broken(hub: Hub) -> None:
    whole = (hub.folders[REPO] / FILE).read_bytes()
    (hub.folders[REPO] / FILE).write_bytes(whole[:100_000])
    with pytest.raises(CheckpointError, match="header"):
        fetch_model(resolve_model(REPO), with_weights=False)
    hub.commit = "1" * 40
    (hub.folders[REPO] / FILE).write_bytes(b"GGUF" + bytes(1 << 21))
    with pytest.raises(CheckpointError):
        fetch_model(resolve_model(REPO), with_weights=False)
    assert not list(cache_folder(HEADERS).glob(f"{hub.commit}/*"))


def test_a_plan_says_which_form_is_better_here(hub: Hub, command: Command) -> None:
    code, _, errors = command(hub, "plan", BOTH)
    assert code == ExitCode.OK, errors
    assert f"there is also a GGUF: {BOTH}:Q8_0" in errors
    assert "better" in errors
    assert "also" not in command(hub, "plan", f"{BOTH}:Q8_0")[2]
    assert "also" not in command(hub, "plan", BOTH, "--json")[2]
