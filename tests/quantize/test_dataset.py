"""Calibration text from data sets, fetched from a hub on loopback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
from checkpoints import tiny_config, write_checkpoint
from fake_hub import COMMIT, Hub, running_hub, serve_hub, use_hub
from pyarrow import parquet

from localllm.cli.main import run
from localllm.errors import DownloadError, ExitCode
from localllm.quantize.dataset import _read_texts, fetch_dataset_text

ROOT = Path(__file__).parents[2]
NAME = "org/texts"


def words(tmp_path: Path) -> list[str]:
    source = tmp_path / "source"
    if not source.exists():
        config = tiny_config("LlamaForCausalLM", hidden_size=64, intermediate_size=96)
        write_checkpoint(source, config)
    arguments = ["quantize", str(source), str(tmp_path / "out"), "--calib-dataset", NAME, "--json"]
    return [*arguments, "--group-size", "32", "--calib-samples", "8", "--calib-seqlen", "32"]


def quantize(endpoint: str, tmp_path: Path) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "localllm", *words(tmp_path)],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_DISABLE_XET": "1",
        },
    )
    return done.returncode, done.stdout, done.stderr


def test_a_data_set_calibrates_and_the_report_names_it(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    rows = [
        {"messages": [{"role": "user", "content": f"Why is {i} a number? " * 9}]} for i in range(9)
    ]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "README.md").write_text("not a text that counts")
    with serve_hub(NAME, folder) as endpoint:
        code, out, errors = quantize(endpoint, tmp_path)
    assert code == 0, errors
    calibration = json.loads(out)["calibration"]
    assert calibration["source"] == NAME
    assert calibration["windows"] == 8
    assert len(calibration["sha256"]) == 64


@pytest.mark.parametrize(
    ("repo", "code", "word"),
    [("some/other", ExitCode.NETWORK, "spelling"), (NAME, ExitCode.USAGE, "--calib-text")],
)
def test_a_data_set_that_cannot_be_had(
    tmp_path: Path,
    repo: str,
    code: ExitCode,
    word: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "image.png").write_bytes(b"")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with running_hub(Hub({repo: tmp_path / "data"})) as hub:
        use_hub(hub, monkeypatch)
        assert run(words(tmp_path)) == code
    errors = capfd.readouterr().err
    assert NAME in errors
    assert word in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "out").exists()


def test_files_in_folders_are_fetched_once_and_none_from_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.txt").write_text("a text")
    with running_hub(Hub({NAME: folder})) as hub:
        use_hub(hub, monkeypatch)
        for name in ("../../../../train.txt", "/tmp/train.txt", "a\\train.txt"):
            hub.lie = lambda answer, name=name: answer["siblings"][0].update(rfilename=name)  # type: ignore[misc]
            with pytest.raises(DownloadError, match="makes no sense"):
                fetch_dataset_text(NAME)
        hub.lie = lambda answer: answer["siblings"][0].update(rfilename="a/b/train.txt")
        assert fetch_dataset_text(NAME) == fetch_dataset_text(NAME) == "a text"
    assert hub.sent["train.txt"] == 1
    snapshot = tmp_path / "hub" / "datasets--org--texts" / "snapshots" / COMMIT
    assert (snapshot / "a" / "b" / "train.txt").read_text() == "a text"


def test_rows_of_every_kind_are_read(tmp_path: Path) -> None:
    rows = [
        {"text": "a plain text", "conversations": None},
        {"conversations": [{"from": "human", "value": "asked"}, {"value": "answered"}]},
        {"text": None, "conversations": None},
    ]
    expected = ["a plain text", "asked", "answered"]
    lines = tmp_path / "rows.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)))
    assert list(_read_texts(lines)) == expected
    table = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    assert list(_read_texts(table)) == expected
    plain = tmp_path / "plain.txt"
    plain.write_text("all of it")
    assert list(_read_texts(plain)) == ["all of it"]
