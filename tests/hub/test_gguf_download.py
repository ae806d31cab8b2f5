"""GGUF models from a hub, over loopback, and those that are files here."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from fake_hub import Fault, Hub, running_hub, use_hub

from localllm.cli.flags import suggestions
from localllm.cli.models import variants
from localllm.engine.config import EngineConfig
from localllm.errors import CatalogError, DownloadError, ExitCode, LocalLLMError, RequestError
from localllm.hub.catalog import CatalogEntry, resolve_model
from localllm.hub.download import fetch_model, find_here
from localllm.hub.local_models import find_local_models
from localllm.hub.removal import plan_removals

REPO, BOTH = "tester/tiny-GGUF", "tester/both"
SMALL, LARGE = "tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf"
PARTS = [f"BF16/tiny-BF16-{i:05}-of-00002.gguf" for i in (1, 2)]

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files of which folders were made, each of which is an empty one here."""
    files: list[Path] = []

    def folder_of(file: Path) -> Path:
        assert file.read_bytes().startswith(b"GGUF")
        files.append(file)
        folder = tmp_path / "derived" / file.stem
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    module = ModuleType("localllm.hub.gguf_folder")
    module.folder_of = folder_of  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return files


def fill(folder: Path) -> None:
    for number, name in enumerate((SMALL, LARGE, *PARTS, "mmproj-F16.gguf")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"GGUF" + bytes([number]) * 50_000)


@pytest.fixture
def hub(
    make_checkpoint: Callable[..., Path],
    tmp_path: Path,
    hub_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Hub]:
    """A hub with a repository of GGUF files alone, and one of both forms."""
    alone, both = tmp_path / "alone", make_checkpoint()
    alone.mkdir()
    (alone / "README.md").write_text("tiny")
    fill(alone)
    fill(both)
    monkeypatch.setenv("HF_HUB_CACHE", str(hub_home / "hub"))
    cache = "huggingface_hub.utils._cache_manager.HF_HUB_CACHE"
    monkeypatch.setattr(cache, str(hub_home / "hub"))
    with running_hub(Hub({REPO: alone, BOTH: both})) as hub:
        use_hub(hub, monkeypatch)
        yield hub


def fetch(name: str, **options: bool) -> Path:
    return fetch_model(resolve_model(name), **options)


def fetched(hub: Hub) -> set[str]:
    """The names of the files of which bytes were sent."""
    return {name for name in hub.sent_bytes if name and hub.sent_bytes[name]}


def test_a_file_that_is_here_is_opened_where_it_lies(tmp_path: Path, opened: list[Path]) -> None:
    file = tmp_path / "own.gguf"
    file.write_bytes(b"GGUF")
    for options in ({}, {"refresh": True}, {"with_weights": False}):
        assert fetch(str(file), **options) == tmp_path / "derived" / "own"
    assert opened == [file] * 3


@pytest.mark.parametrize("tag", ["Q8_0", "q8_0", "tiny-q8_0", "tiny-Q8_0.gguf"])
def test_a_tag_chooses_the_one_file_that_is_fetched(hub: Hub, opened: list[Path], tag: str) -> None:
    fetch(f"{REPO}:{tag}")
    [file] = opened
    assert file.name == LARGE
    assert file.read_bytes() == (hub.folders[REPO] / LARGE).read_bytes()
    assert fetched(hub) == {LARGE}


def test_a_split_set_is_fetched_whole_and_opened_at_its_first_file(
    hub: Hub, opened: list[Path]
) -> None:
    fetch(f"{REPO}:bf16")
    [file] = opened
    assert str(file).endswith(PARTS[0])
    assert fetched(hub) == {Path(part).name for part in PARTS}
    assert all((file.parents[1] / part).exists() for part in PARTS)


@pytest.mark.parametrize("name", [REPO, f"{REPO}:latest", f"{REPO}@main"])
def test_without_a_tag_the_usual_one_is_fetched(hub: Hub, name: str) -> None:
    fetch(name)
    assert fetched(hub) == {SMALL}


def test_a_tag_that_nothing_has_lists_what_there_is(hub: Hub, command: Command) -> None:
    with pytest.raises(CatalogError) as caught:
        fetch(f"{REPO}:Q5_K_M")
    assert "Q4_K_M (0.1 MB), Q8_0 (0.1 MB)" in caught.value.where
    assert "BF16 (0.1 MB)" in caught.value.where
    code, _, errors = command(hub, "pull", f"{REPO}:Q5_K_M")
    assert code == ExitCode.MODEL
    assert f"{REPO} has no GGUF file 'Q5_K_M'" in errors
    with pytest.raises(CatalogError, match="no GGUF file"):
        fetch(f"{BOTH}:mmproj")
    assert not fetched(hub)


def test_what_is_here_is_used_without_asking(hub: Hub, opened: list[Path]) -> None:
    fetch(f"{REPO}:Q8_0")
    fetch(REPO)
    hub.sent.clear()
    for name, file in ((f"{REPO}:q8_0", LARGE), (REPO, SMALL)):
        assert fetch(name) == find_here(resolve_model(name))
        assert opened[-1].name == file
    assert not hub.sent
    opened[-1].unlink()
    assert find_here(resolve_model(REPO)) is None


def test_without_the_hub_what_another_program_fetched_is_used(
    hub: Hub, opened: list[Path], monkeypatch: pytest.MonkeyPatch, hub_home: Path
) -> None:
    root = hub_home / "hub" / f"models--{REPO.replace('/', '--')}"
    for folder in ("blobs", "refs", f"snapshots/{hub.commit}"):
        (root / folder).mkdir(parents=True)
    (root / "refs" / "main").write_text(hub.commit)
    (root / "blobs" / "f00").write_bytes(b"GGUF")
    link = root / "snapshots" / hub.commit / LARGE
    link.symlink_to(root / "blobs" / "f00")
    hub.faults["api"] = [Fault(status=503, times=100)]
    for name in (f"{REPO}:q8_0", REPO):
        fetch(name)
        assert opened[-1] == link
    with pytest.raises(DownloadError) as caught:
        fetch(f"{REPO}:Q4_K_M")
    assert caught.value.exit_code == ExitCode.NETWORK
    assert "no GGUF file 'Q4_K_M'" in caught.value.where
    hub.faults.clear()
    with pytest.raises(DownloadError, match="damaged"):  # checked where the hub can be asked
        fetch(f"{REPO}:q8_0")


@pytest.mark.parametrize(
    "fault", [Fault(cut_at=20_000), Fault(status=503), Fault(flip=True)], ids=str
)
def test_a_download_gets_over(hub: Hub, opened: list[Path], fault: Fault) -> None:
    hub.faults[LARGE] = [fault]
    fetch(f"{REPO}:Q8_0")
    assert opened[-1].read_bytes() == (hub.folders[REPO] / LARGE).read_bytes()


def test_a_download_goes_on_where_it_stopped(hub: Hub) -> None:
    hub.faults[LARGE] = [Fault(cut_at=20_000), Fault(times=9, status=500)]
    with pytest.raises(DownloadError):
        fetch(f"{REPO}:Q8_0")
    hub.faults.clear()
    fetch(f"{REPO}:Q8_0")
    size = (hub.folders[REPO] / LARGE).stat().st_size
    assert size <= hub.sent_bytes[LARGE] <= size + 10_000


def test_of_both_forms_the_safetensors_are_taken_unless_a_tag_says_otherwise(
    hub: Hub, opened: list[Path]
) -> None:
    fetch(f"{BOTH}:Q8_0")
    assert fetched(hub) == {LARGE}
    folder = fetch(BOTH)
    assert "model.safetensors" in fetched(hub)
    assert not fetched(hub) & {SMALL, "mmproj-F16.gguf"}
    assert (folder / "config.json").exists()
    assert len(opened) == 1
    hub.sent.clear()
    assert fetch(BOTH) == folder
    fetch(f"{BOTH}:q8_0")
    assert not hub.sent
    assert opened[-1] == folder / LARGE


def test_pull_tells_of_both_forms_and_fetches_one(
    hub: Hub, command: Command, tmp_path: Path
) -> None:
    code, out, errors = command(hub, "pull", BOTH, "--dry-run")
    assert code == 0, errors
    assert f"there is also a GGUF: {BOTH}:Q4_K_M, 50 kB (2 other sizes too)" in errors
    assert "its safetensors have" in errors
    assert "the GGUF is better: a token reads" in errors
    assert "gguf" not in out
    code, out, errors = command(hub, "pull", f"{BOTH}:bf16", "--dry-run")
    assert "also" not in errors
    assert [line.split()[-1] for line in out.splitlines()] == PARTS
    code, out, errors = command(hub, "pull", f"{BOTH}:q8_0")
    assert (code, out) == (0, f"{tmp_path / 'derived' / 'tiny-Q8_0'}\n"), errors
    assert f"localllm chat {BOTH}:q8_0" in errors


def test_the_question_before_a_download_tells_of_the_gguf(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    entry = CatalogEntry("both", BOTH, "mit", "LlamaForCausalLM", sizes={})
    monkeypatch.setattr(variants, "load_catalog", lambda: {"both": entry})
    monkeypatch.setattr(variants, "is_terminal", lambda stream: True)
    choice = variants._Choice("both", "fetch it as it is", 1.0, True)
    monkeypatch.setattr(variants, "_choices", lambda *arguments: [choice])
    monkeypatch.setattr(variants, "_ask", lambda count: 0)
    assert variants.choose_variant("both", EngineConfig()) == "both"
    assert f"(there is also a GGUF: {BOTH}:Q4_K_M, 50 kB" in capfd.readouterr().err
    hub.faults["api"] = [Fault(status=503, times=100)]
    assert variants.choose_variant("both", EngineConfig()) == "both"
    assert "GGUF" not in capfd.readouterr().err


def test_ls_and_completion_show_each_and_rm_deletes_one(hub: Hub, opened: list[Path]) -> None:
    names = (f"{REPO}:Q8_0", f"{REPO}:BF16", f"{BOTH}:Q8_0", BOTH)
    for name in names:
        fetch(name)
    models = {model.name: model for model in find_local_models().models}
    assert {*names} <= {*models}
    assert REPO not in models
    assert all(models[name].problem is None for name in names)
    assert models[names[0]].format == "GGUF Q8_0"
    assert models[names[1]].num_bytes == 2 * 50_004
    assert {*suggestions.removable("tester/")} == {*names, REPO}
    root = opened[0].parents[2]
    blob = opened[0].resolve()
    [removal] = plan_removals([f"{REPO}:q8_0"])
    assert removal.freed_bytes == 50_004
    removal.carry_out()
    assert not blob.exists()
    assert not opened[0].is_symlink()
    assert opened[1].exists()
    for missing in (f"{REPO}:q8_0", f"{REPO}:Q2_K"):
        with pytest.raises(CatalogError, match="is not on this machine"):
            plan_removals([missing])
    [removal] = plan_removals([f"{REPO}:BF16"])
    assert removal.folders == (root,)  # nothing else is left in it
    removal.carry_out()
    assert not root.exists()
    [removal] = plan_removals([f"{BOTH}:Q8_0"])
    removal.carry_out()
    assert find_here(resolve_model(BOTH)) is not None


def test_a_hub_s_words_on_gguf_files_become_no_path(hub: Hub, tmp_path: Path) -> None:
    def lie(answer: dict[str, object]) -> None:
        siblings = answer["siblings"]
        assert isinstance(siblings, list)
        for file, name in zip(siblings, ("../x-Q5_K_M.gguf", "/x-Q2_K.gguf"), strict=False):
            file["rfilename"] = name
            file["size"] = "../x"
        siblings[-1].update(rfilename="\x1b[2Jx-Q6_K.gguf")

    hub.lie = lie
    for tag in ("Q5_K_M", "Q2_K", "Q6_K"):
        with pytest.raises(LocalLLMError) as caught:
            fetch(f"{REPO}:{tag}")
        assert "\x1b" not in str(caught.value)
    assert not list(tmp_path.rglob("x-Q*"))
    assert not fetched(hub)


def test_a_folder_with_one_gguf_model_is_that_model_and_one_with_several_lists_them(
    tmp_path: Path, opened: list[Path], command: Command
) -> None:
    folder = tmp_path / "my models"
    folder.mkdir()
    fill(folder)
    (folder / "dangling.gguf").symlink_to("nowhere")
    code, _, errors = command(Hub({}), "chat", str(folder), "Hello")
    assert code == ExitCode.CHECKPOINT
    paths = [f"'{folder / name}'" for name in (PARTS[0], SMALL, LARGE)]
    assert f"has 3 GGUF models\n  {', '.join(paths)}\n" in errors
    assert f"the path of one of them: {paths[0]}" in errors
    for name in (LARGE, *PARTS):
        (folder / name).unlink()
    assert resolve_model(str(folder)).file == folder / SMALL
    find_here(resolve_model(str(folder)))
    assert opened == [folder / SMALL]
    with pytest.raises(RequestError, match="a folder of your own"):
        plan_removals([str(folder)])
    (folder / SMALL).unlink()
    (folder / "mmproj-F16.gguf").unlink()
    code, _, errors = command(Hub({}), "chat", str(folder / "BF16" / ".."), "Hello")
    assert "dangling" not in errors
