"""Names of models, known and unknown."""

from pathlib import Path

import pytest

from localllm.errors import CatalogError, ExitCode
from localllm.hub import catalog
from localllm.hub.catalog import is_model_name, load_catalog, resolve_model
from localllm.model.families.table import FAMILIES
from localllm.text.tokenizer import Tokenizer


def test_every_entry_of_the_catalogue_can_be_run() -> None:
    entries = load_catalog()
    assert entries
    assert all(entry.architecture in FAMILIES for entry in entries.values())
    assert all(is_model_name(entry.repo) for entry in entries.values())


def test_an_alias_a_repository_and_a_folder_are_models(tmp_path: Path) -> None:
    assert resolve_model("qwen3-0.6b").repo == "Qwen/Qwen3-0.6B"
    source = resolve_model("org/name@v1.2")
    assert (source.repo, source.revision) == ("org/name", "v1.2")
    assert resolve_model(str(tmp_path)).folder == tmp_path
    folder = resolve_model("pocket").folder
    assert folder is not None
    assert folder.name == "pocket"


def test_a_gguf_file_is_known_by_how_it_begins_and_a_link_to_one_is_followed(
    tmp_path: Path,
) -> None:
    blob, link = tmp_path / "blobs" / "sha256-0f", tmp_path / "own" / "my.gguf"
    for path in (blob, link):
        path.parent.mkdir()
    blob.write_bytes(b"GGUF")
    link.symlink_to(blob)
    for path in (blob, link):
        assert is_model_name(str(path))
        assert resolve_model(str(path)).file == blob
    blob.write_bytes(b"PK\3\4")
    assert not is_model_name(str(blob))
    with pytest.raises(CatalogError, match="is a file, and no GGUF"):
        resolve_model(str(blob))
    assert resolve_model(str(link)).file == blob  # whose header says what is wrong
    blob.unlink()
    with pytest.raises(CatalogError, match="is a link to nothing") as caught:
        resolve_model(str(link))
    assert str(blob) in caught.value.hint


def test_a_path_takes_no_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.gguf").write_bytes(b"GGUF")
    (tmp_path / "main.py").write_text("")
    for path in ("my.gguf", str(tmp_path / "my.gguf"), str(tmp_path)):
        assert is_model_name(f"{path}:Q4_K_M")
        with pytest.raises(CatalogError, match="a path takes no tag") as caught:
            resolve_model(f"{path}:Q4_K_M")
        assert (caught.value.hint, caught.value.exit_code) == (path, ExitCode.USAGE)
    for words in ("main.py:12", "my.gguf: what is it?", ":x"):
        assert not is_model_name(words)


@pytest.mark.parametrize(
    "words", ["hello", "What is 1/2?", "and/or maybe", "tell me", "a/b/c", "../x", "x\0y", ""]
)
def test_a_prompt_is_no_model(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where no such folder is
    assert not is_model_name(words)


def test_an_unknown_name_is_exit_code_3_with_the_nearest() -> None:
    with pytest.raises(CatalogError) as caught:
        resolve_model("qwen3-06b")
    assert caught.value.exit_code == ExitCode.MODEL
    assert "qwen3-0.6b" in caught.value.where


@pytest.mark.parametrize("name", ["../x", "/no/such/folder", "a\0b", "", "org/../x", "~/x"])
def test_path_tricks_are_exit_code_2(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CatalogError) as caught:
        resolve_model(name)
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    "text",
    ["[a]\nrepo = 'x/y'", "[a]\nrepo=1\nlicence='x'\narchitecture='y'", "a = 1", "[a", "\xff"],
)
def test_a_broken_catalogue_is_exit_code_2(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models.toml").write_bytes(text.encode("latin-1"))
    monkeypatch.setattr(catalog, "_PACKAGE", tmp_path)
    with pytest.raises(CatalogError) as caught:
        load_catalog()
    assert caught.value.exit_code == ExitCode.USAGE


def test_a_template_of_the_catalogue_is_for_a_checkpoint_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_checkpoint, edit_json
) -> None:  # type: ignore[no-untyped-def]
    entry = "[a]\nrepo='x/y'\nlicence='x'\narchitecture='z'\nchat_template='<{{ messages }}>'"
    (tmp_path / "models.toml").write_text(entry)
    monkeypatch.setattr(catalog, "_PACKAGE", tmp_path)
    template = resolve_model("a").chat_template
    assert template == "<{{ messages }}>"
    folder = make_checkpoint()
    assert Tokenizer.from_folder(folder, template).chat_template != template
    edit_json(folder / "tokenizer_config.json", chat_template=None)
    assert Tokenizer.from_folder(folder, template).chat_template == template
