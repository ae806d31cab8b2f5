"""GGUF models that other programs have downloaded, in folders laid out as theirs."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localllm.cli.chat.words import choose_model_and_prompt
from localllm.cli.flags import suggestions
from localllm.errors import CatalogError, ExitCode, RequestError
from localllm.hub.catalog import is_model_name, resolve_model
from localllm.hub.local_models import find_local_models
from localllm.hub.removal import plan_removals
from localllm.hub.store_walk import StoreWalk
from localllm.hub.stores import find_by_name, find_stored

MODEL = "application/vnd.ollama.image.model"


@pytest.fixture
def ollama(tmp_path: Path) -> Callable[..., Path]:
    """A function that puts a model where Ollama would; returns its blob."""
    root = tmp_path / "home" / "ollama"

    def put(name: str, data: bytes = b"GGUF", root: Path = root, **changes: Any) -> Path:
        digest = hashlib.sha256(data).hexdigest()
        layers = [
            {"mediaType": "application/vnd.ollama.image.license", "digest": "x", "size": 1},
            {"mediaType": MODEL, "digest": f"sha256:{digest}", "size": len(data), **changes},
        ]
        manifest, blob = root / "manifests" / name, root / "blobs" / f"sha256-{digest}"
        for path in (manifest, blob):
            path.parent.mkdir(parents=True, exist_ok=True)
        manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
        blob.write_bytes(data)
        return blob

    return put


def put(file: Path, data: bytes = b"GGUF") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    return file


LIBRARY = "registry.ollama.ai/library"


@pytest.mark.parametrize(
    ("place", "name", "spelt"),
    [
        (f"{LIBRARY}/qwen3/4b", "qwen3:4b", ["QWEN3:4B", "ollama/qwen3:4b", "library/qwen3:4b"]),
        (f"{LIBRARY}/qwen3/latest", "qwen3:latest", ["qwen3", "https://ollama.com/library/qwen3"]),
        ("registry.ollama.ai/me/own/v1", "me/own:v1", ["Me/Own:V1"]),
        ("hf.co/Org/Re-GGUF/Q4_K_M", "hf.co/Org/Re-GGUF:Q4_K_M", ["org/re-gguf:q4_k_m"]),
        ("hf.co/Org/Re-GGUF/latest", "hf.co/Org/Re-GGUF:latest", ["hf.co/org/re-gguf"]),
    ],
)
def test_a_model_of_ollama_is_found_by_its_name(
    ollama: Callable[..., Path], place: str, name: str, spelt: list[str]
) -> None:
    blob = ollama(place)
    for each in (name, *spelt):
        source = resolve_model(each)
        assert (source.name, source.file, source.repo) == (name, blob, None)
        assert is_model_name(each)
        assert choose_model_and_prompt([each], None, None).model == each
    assert find_by_name("qwen3:8b") is None


def test_an_alias_comes_first_and_what_resembles_one_last(ollama: Callable[..., Path]) -> None:
    assert resolve_model("qwen3:4b").repo == "Qwen/Qwen3-4B"
    ollama(f"{LIBRARY}/qwen3/4b")
    assert resolve_model("qwen3-4b").repo == "Qwen/Qwen3-4B"
    assert resolve_model("qwen3:4b").file is not None
    ollama(f"{LIBRARY}/pocket/latest")
    assert resolve_model("pocket").folder is not None
    assert resolve_model("pocket:latest").file is not None


def test_the_folder_of_a_user_and_that_of_a_service_are_looked_at(
    ollama: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "home" / ".ollama" / "models"
    service = tmp_path / "service"
    blob = ollama(f"{LIBRARY}/a/1b", root=own)
    ollama(f"{LIBRARY}/a/1b", b"GGUF2", root=service)
    ollama(f"{LIBRARY}/b/1b", root=service)
    assert find_stored() == []
    monkeypatch.delenv("OLLAMA_MODELS")
    monkeypatch.setattr("localllm.hub.ollama_store._SERVICE", service)
    assert [model.name for model in find_stored()] == ["a:1b", "b:1b"]
    assert resolve_model("a:1b").file == blob


@pytest.mark.parametrize(
    "changes",
    [
        {"digest": "sha256:../../../../escaped"},
        {"digest": "sha256-" + "a" * 63 + "/"},
        {"digest": "sha256:" + "A" * 64},
        {"digest": None},
        {"digest": ["sha256:" + "a" * 64]},
        {"digest": "sha256:" + "a" * 64},  # whose blob is not here
        {"size": 5},
        {"size": "4"},
        {"mediaType": "application/vnd.ollama.image.tensor"},
        {"mediaType": {}},
    ],
    ids=str,
)
def test_a_manifest_s_words_become_no_path(
    ollama: Callable[..., Path], tmp_path: Path, changes: dict[str, Any]
) -> None:
    put(tmp_path / "home" / "escaped")
    ollama(f"{LIBRARY}/bad/1b", **changes)
    ollama(f"{LIBRARY}/good/1b")
    assert [model.name for model in find_stored()] == ["good:1b"]


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"{", b"[]", b'{"layers": 1}', b'{"layers": [1, null]}', b"\xff"),
        *(b"[" * 100_000, b" " * 2_000_000),
    ],
    ids=lambda text: repr(text[:12]),
)
def test_a_broken_manifest_is_left_out(ollama: Callable[..., Path], text: bytes) -> None:
    blob = ollama(f"{LIBRARY}/good/1b")
    folder = blob.parents[1] / "manifests" / LIBRARY
    put(folder / "bad" / "1b", text)
    put(folder / "od\nd" / "1b", text)
    os.mkfifo(folder / "bad" / "pipe")
    (folder / "bad" / "dangling").symlink_to("nowhere")
    assert [model.name for model in find_stored()] == ["good:1b"]


def test_a_model_with_an_adapter_is_not_its_file_alone(ollama: Callable[..., Path]) -> None:
    blob = ollama(f"{LIBRARY}/tuned/1b")
    manifest = blob.parents[1] / "manifests" / LIBRARY / "tuned" / "1b"
    read = json.loads(manifest.read_text())
    read["layers"].append({"mediaType": "application/vnd.ollama.image.adapter"})
    manifest.write_text(json.dumps(read))
    assert find_stored() == []


def test_a_look_ends_however_much_there_is(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    for i in range(30):
        put(folder / f"{i:02}" / "m.gguf")
    walk = StoreWalk(20)
    assert len(walk.gguf(folder)) == 0
    assert walk.folders(folder) == []
    assert len(StoreWalk(90).gguf(folder)) == 30


def test_models_of_lm_studio_are_found_by_folder_tag_and_file(tmp_path: Path) -> None:
    root = tmp_path / "home" / ".lmstudio" / "models" / "pub" / "Qwen3-4B-GGUF"
    small, large = (put(root / f"Qwen3-4B-{label}.gguf") for label in ("Q4_K_M", "Q8_0"))
    for name in ("mmproj-F16.gguf", "mtp-Q4_K_M.gguf", "m.imatrix.gguf", "config.json"):
        put(root / name)
    older = tmp_path / "home" / ".cache" / "lm-studio" / "models" / "pub" / "old"
    parts = [put(older / f"x-{i:05}-of-00002.gguf", b"GGUF" * i) for i in (1, 2)]
    stored = {model.name: model for model in find_stored()}
    assert {*stored} == {"pub/Qwen3-4B-GGUF:Q4_K_M", "pub/Qwen3-4B-GGUF:Q8_0", "pub/old:x"}
    assert stored["pub/old:x"].num_bytes == 12
    for name, file in (
        ("pub/qwen3-4b-gguf", small),
        ("pub/Qwen3-4B-GGUF:q8_0", large),
        ("Qwen3-4B-Q8_0.gguf", large),
        ("qwen3-4b-q8_0", large),
        ("pub/old", parts[0]),
        ("old", parts[0]),
        ("Qwen3-4B-GGUF", small),
        ("qwen3-4b-gguf:q8_0", large),
    ):
        assert resolve_model(name).file == file, name
    assert resolve_model("pub/Qwen3-4B-GGUF:Q2_K").tag == "Q2_K"  # of the hub


def test_near_names_and_other_tags_of_what_is_here_are_told(
    ollama: Callable[..., Path], tmp_path: Path
) -> None:
    ollama(f"{LIBRARY}/tiny-llama-x/1b")
    put(tmp_path / "home" / ".lmstudio" / "models" / "pub" / "Own-GGUF" / "Own-Q8_0.gguf")
    for name, near in (("tiny-lama-x", "tiny-llama-x:1b"), ("Ownn-GGUF", "pub/Own-GGUF:Q8_0")):
        with pytest.raises(CatalogError) as caught:
            resolve_model(name)
        assert near in caught.value.where
    for name, other in (
        ("tiny-llama-x:8b", "tiny-llama-x:1b"),
        ("own:Q4_K_M", "pub/Own-GGUF:Q8_0"),
    ):
        with pytest.raises(CatalogError) as caught:
            resolve_model(name)
        assert caught.value.where == f"here is {other}"
        assert caught.value.hint.startswith(other)


def test_another_tag_that_is_here_is_named_where_the_hub_cannot_be_asked(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    from fake_hub import Hub

    put(tmp_path / "home" / ".lmstudio" / "models" / "pub" / "Own-GGUF" / "Own-Q8_0.gguf")
    code, _, errors = command(Hub({}), "pull", "pub/Own-GGUF:Q4_K_M")
    assert code in (ExitCode.MODEL, ExitCode.NETWORK)
    assert "try: pub/Own-GGUF:Q8_0, which is on this machine" in errors
    code, out, errors = command(Hub({}), "pull", "Own-GGUF")
    assert code == ExitCode.OK, errors
    assert "nothing to fetch" in errors
    assert out.endswith("Own-Q8_0.gguf\n")


def test_a_link_to_another_program_s_file_is_that_file(
    ollama: Callable[..., Path], tmp_path: Path
) -> None:
    blob = ollama(f"{LIBRARY}/qwen3/4b")
    link = tmp_path / "home" / ".lmstudio" / "models" / "ollama" / "qwen3" / "qwen3-Q4_0.gguf"
    link.parent.mkdir(parents=True)
    link.symlink_to(blob)
    found = find_by_name("ollama/qwen3:Q4_0")
    assert found is not None
    assert (found.file, found.program) == (blob, "LM Studio")


def test_models_of_llama_cpp_are_found_in_both_layouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = tmp_path / "home" / "llama.cpp"
    file = put(older / "ggml-org_gemma-3-4b-it-GGUF_gemma-3-4b-it-Q4_K_M.gguf")
    own = put(older / "own.gguf")
    put(older / "manifest=ggml-org=gemma-3-4b-it-GGUF=latest.json")
    assert resolve_model("ggml-org/gemma-3-4b-it-GGUF:Q4_K_M").file == file
    assert resolve_model("ggml-org/gemma-3-4b-it-gguf").file == file
    assert resolve_model("own.gguf").file == own
    cache = tmp_path / "elsewhere"
    snapshot = cache / "models--org--repo" / "snapshots" / "abc"
    blob = put(cache / "models--org--repo" / "blobs" / "f00")
    snapshot.mkdir(parents=True)
    (snapshot / "m-Q8_0.gguf").symlink_to(blob)
    monkeypatch.setenv("LLAMA_CACHE", str(cache))
    assert resolve_model("org/repo:q8_0").file == snapshot / "m-Q8_0.gguf"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))  # then it is our own cache too
    assert find_stored() == []


def test_ls_and_completion_offer_them_and_rm_refuses(
    ollama: Callable[..., Path], tmp_path: Path
) -> None:
    blob = ollama(f"{LIBRARY}/qwen3/4b")
    file = put(tmp_path / "home" / ".lmstudio" / "models" / "p" / "m" / "m-Q8_0.gguf")
    [first, second] = [model for model in find_local_models().models if model.program]
    assert (first.name, first.program, first.folder) == ("qwen3:4b", "Ollama", str(blob))
    assert (second.name, second.program, second.format) == ("p/m:Q8_0", "LM Studio", "GGUF Q8_0")
    assert "qwen3:4b" in suggestions.models("qwen3:")
    assert suggestions.models("p/m") == ["p/m:Q8_0"]
    assert suggestions.models(f"{file.parent}/") == [str(file)]
    assert suggestions.removable("p/m") == suggestions.removable("qwen3:") == []
    for name, hint in (("QWEN3:4b", "ollama rm qwen3:4b"), ("p/m", "LM Studio itself")):
        with pytest.raises(RequestError, match="was downloaded by") as caught:
            plan_removals([name])
        assert caught.value.hint.startswith(hint)
    assert caught.value.where == str(file)
    own = put(tmp_path / "own.gguf")
    with pytest.raises(RequestError, match="a file of your own") as caught:
        plan_removals([str(own)])
    assert f"rm {own}" in caught.value.hint
    assert blob.exists()
    assert file.exists()


def test_the_table_names_the_program(
    ollama: Callable[..., Path], command: Callable[..., tuple[int, str, str]]
) -> None:
    from fake_hub import Hub

    ollama(f"{LIBRARY}/qwen3/4b")
    hub = Hub({})
    code, out, errors = command(hub, "ls")
    assert code == 0, errors
    [line] = [line for line in out.splitlines() if line.startswith("qwen3:4b ")]
    assert line.endswith("ready, from Ollama")
    code, out, errors = command(hub, "rm", "qwen3:4b", "--yes")
    assert code == ExitCode.USAGE
    assert "ollama rm qwen3:4b" in errors
