"""Tokenizers and templates of strangers: the same ids, and nothing that hangs or fills."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localllm.errors import BusyError, CheckpointError, RequestError, TemplateError
from localllm.hub.checkpoint import open_checkpoint
from localllm.text.prompt import Conversation
from localllm.text.tokenizer import Tokenizer
from localllm.untrusted import delegated_tokenizer
from localllm.untrusted.delegated_tokenizer import DelegatedTokenizer
from localllm.untrusted.tokenizers import open_tokenizer

POCKET = open_checkpoint().folder
HI = [{"role": "user", "content": "hi"}]
TEMPLATE_BOMBS = {
    "hashes that collide": "{{ dict.fromkeys(range(0, 29999*(2**61-1), 2**61-1)) | length }}",
    "a format that is read again": "{{ ('%(' * 400000) % 1 }}",
    "a set of characters to strip": "{% set a='\u4e00'*500000 %}"
    "{% set b='\u5e00'~'\u6e00'*500000~'\u4e00' %}{{ a.strip(b)|length }}",
    "branches": "{% if 0 %}" + "{% elif 0 %}" * 40_000 + "{% endif %}",
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def stranger(folder: Path, template: str | None = None) -> Path:
    """The built-in tokenizer as a stranger's, with another template."""
    shutil.copytree(POCKET, folder)
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text() + "{# mine #}" if template is None else template)
    return folder


def change(folder: Path, **parts: Any) -> Path:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))
    return folder


@pytest.fixture(scope="module")
def delegated(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_tokenizer(stranger(tmp_path_factory.mktemp("models") / "copy"))


def test_the_built_in_one_works_in_this_process_and_others_do_not(tmp_path: Path) -> None:
    assert not isinstance(open_tokenizer(POCKET), DelegatedTokenizer)
    same = tmp_path / "same"
    shutil.copytree(POCKET, same)
    assert not isinstance(open_tokenizer(same), DelegatedTokenizer)
    for name in ("special_tokens_map.json", "added_tokens.json"):
        (same / name).write_text("{}")
        assert isinstance(open_tokenizer(same), DelegatedTokenizer)
        (same / name).unlink()
    (same / "additional_chat_templates").mkdir()
    assert isinstance(open_tokenizer(same), DelegatedTokenizer)


@pytest.mark.parametrize(
    "text", ["", "Hello, world!", "naïve 🦊 日本語\n\n\tdef f(x):", "<|im_end|> as text", " " * 300]
)
def test_ids_and_prompts_are_those_of_the_same_process(delegated: Tokenizer, text: str) -> None:
    own = Tokenizer.from_folder(POCKET)
    messages = [{"role": "system", "content": text}, *HI]
    for parse in (False, True):
        ways = {"add_special_tokens": True, "parse_special": parse}
        assert delegated.encode(text, **ways) == own.encode(text, **ways)
        assert delegated.encode_chat(
            Conversation(messages, parse_special=parse)
        ) == own.encode_chat(Conversation(messages, parse_special=parse))
    assert delegated.render_chat(Conversation(messages)) == own.render_chat(Conversation(messages))
    assert delegated.count_at_least(text * 1000, 100) == own.count_at_least(text * 1000, 100)
    assert delegated.decode(delegated.encode(text, add_special_tokens=False)) == text


def test_errors_are_those_of_the_same_process(delegated: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="not valid Unicode") as found:
        delegated.encode("\ud800", add_special_tokens=True)
    assert found.value.param == "prompt"
    refusing = open_tokenizer(stranger(tmp_path / "m", "{{ raise_exception('no system') }}"))
    with pytest.raises(TemplateError, match="no system") as told:
        refusing.encode_chat(Conversation(HI))
    assert told.value.hint == "change the messages"


def test_half_a_pair_of_surrogates_is_rendered_as_in_the_same_process(delegated: Tokenizer) -> None:
    half = [{"role": "user", "content": "half \ud800 of it"}]
    assert delegated.render_chat(Conversation(half)) == Tokenizer.from_folder(POCKET).render_chat(
        Conversation(half)
    )


def test_what_cannot_be_written_down_is_refused(delegated: Tokenizer) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for content in (deep, object()):
        with pytest.raises(RequestError, match="cannot be written as JSON"):
            delegated.encode_chat(Conversation([{"role": "user", "content": content}]))


@pytest.mark.parametrize("bomb", TEMPLATE_BOMBS.values(), ids=TEMPLATE_BOMBS)
def test_a_template_is_stopped_in_time_and_the_next_request_is_answered(
    bomb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delegated_tokenizer, "_JOB_S", 0.5)
    tokenizer = open_tokenizer(stranger(tmp_path / "model", bomb))
    began_s = time.monotonic()
    with pytest.raises(TemplateError, match="stopped"):
        tokenizer.encode_chat(Conversation(HI))
    assert time.monotonic() - began_s < 3
    assert tokenizer.encode("next", add_special_tokens=False)


def test_small_texts_do_not_wait_behind_large_ones(delegated: Tokenizer) -> None:
    large = "one two three " * 150_000
    done: list[float] = []

    def encode() -> None:
        delegated.encode(large, add_special_tokens=False)
        done.append(time.monotonic())

    threads = [threading.Thread(target=encode) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    for _ in range(5):
        delegated.encode("small", add_special_tokens=False)
    small_s = time.monotonic()
    for thread in threads:
        thread.join()
    assert small_s < max(done)


def test_waiting_for_others_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delegated_tokenizer, "_JOB_S", 0.5)
    bomb = TEMPLATE_BOMBS["a format that is read again"]
    tokenizer = open_tokenizer(stranger(tmp_path / "model", bomb))
    taken: list[float] = []

    def ask() -> None:
        began_s = time.monotonic()
        with pytest.raises((TemplateError, BusyError)):
            tokenizer.encode_chat(Conversation(HI))
        taken.append(time.monotonic() - began_s)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 8
    assert max(taken) < 4


def growing(char: str) -> list[dict[str, Any]]:
    tenfold = {"type": "Replace", "pattern": {"String": char}, "content": char * 10}
    return [tenfold] * 9


def test_a_normalizer_that_fills_memory_at_any_text_is_refused_when_it_is_opened(
    tmp_path: Path,
) -> None:
    normalizer = {"type": "Sequence", "normalizers": growing("A")}
    folder = change(stranger(tmp_path / "model"), normalizer=normalizer)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be used"):
        open_tokenizer(folder)


def test_a_normalizer_that_fills_memory_at_some_text_fails_that_request(tmp_path: Path) -> None:
    normalizer = {"type": "Sequence", "normalizers": growing("q")}
    tokenizer = open_tokenizer(change(stranger(tmp_path / "model"), normalizer=normalizer))
    with pytest.raises(RequestError, match="could not be encoded"):
        tokenizer.encode("quiz", add_special_tokens=False)
    assert tokenizer.encode("kiss", add_special_tokens=False)


def test_a_decoder_that_makes_texts_longer_and_longer_is_refused(tmp_path: Path) -> None:
    folder = change(
        stranger(tmp_path / "model"), decoder={"type": "Sequence", "decoders": growing("a")}
    )
    with pytest.raises(CheckpointError, match="8 times as long"):
        open_tokenizer(folder)


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""},
        {"type": "Replace", "pattern": {"String": ""}, "content": "a"},
        {"type": "Unheard"},
        {"type": "Strip", "content": " ", "start": 0, "stop": 1 << 62},
        {"type": "Strip", "content": " ", "start": -1, "stop": 0},
    ],
)
def test_a_decoder_whose_cost_is_unknown_is_refused(
    decoder: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be used: its decoder"):
        open_tokenizer(change(stranger(tmp_path / "model"), decoder=decoder))


def test_the_decoders_of_the_field_are_taken(tmp_path: Path) -> None:
    space = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    parts = [space, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]
    folder = change(stranger(tmp_path / "model"), decoder={"type": "Sequence", "decoders": parts})
    assert open_tokenizer(folder).decode([262]) is not None


def test_a_pattern_that_backtracks_for_ever_fails_one_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a panic of Rust code, a deadline or an error: each is told."""
    monkeypatch.setattr(delegated_tokenizer, "_JOB_S", 0.5)
    split = {
        "type": "Split",
        "pattern": {"Regex": "(a|aa)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    tokenizer = open_tokenizer(change(stranger(tmp_path / "model"), pre_tokenizer=split))
    with pytest.raises(RequestError, match="could not be encoded"):
        tokenizer.encode("a" * 5000 + "b", add_special_tokens=False)
    assert tokenizer.encode("b", add_special_tokens=False)


def test_a_vocabulary_is_read_elsewhere_once(tmp_path: Path) -> None:
    folder = stranger(tmp_path / "model")
    open_tokenizer(folder)
    marks = list((tmp_path / "cache" / "localllm" / "tokenizers").iterdir())
    assert len(marks) == 1
    change(folder, version="1.0", another=1)
    with pytest.raises(CheckpointError):  # what differs is read elsewhere again
        open_tokenizer(change(folder, model={"type": "BPE"}))
    assert len(list(marks[0].parent.iterdir())) == 1


def test_the_mark_is_of_all_files_that_make_the_vocabulary(tmp_path: Path) -> None:
    folder = stranger(tmp_path / "model")
    open_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|nowhere|>"}))
    assert open_tokenizer(folder).eos_token_id is not None
    (folder / "added_tokens.json").write_text(json.dumps({"<|more|>": 9999}))
    assert "<|more|>" in open_tokenizer(folder).vocabulary()
    assert len(list((tmp_path / "cache" / "localllm" / "tokenizers").iterdir())) == 3


PARENT = """
import signal, sys, threading, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
from localllm.untrusted.tokenizers import open_tokenizer
tokenizer = open_tokenizer(Path(sys.argv[1]))
threading.Thread(
    target=tokenizer.encode_chat, args=([{"role": "user", "content": "hi"}],), daemon=True
).start()
time.sleep(0.3)
print(tokenizer._elsewhere._all[0]._process.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def busy_parent(tmp_path: Path) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """A process whose worker is at a template that takes for ever, and the worker's number."""
    bomb = TEMPLATE_BOMBS["hashes that collide"]
    folder = stranger(tmp_path / "model", bomb)
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(folder)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        yield parent, int(parent.stdout.readline())
        parent.kill()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_end(pid: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_worker_whose_owner_was_killed_ends_too(
    busy_parent: tuple["subprocess.Popen[str]", int],
) -> None:
    parent, worker = busy_parent
    assert is_running(worker)
    parent.kill()
    wait_for_end(worker, 8)


def test_ctrl_c_is_heard_while_a_worker_is_busy(
    busy_parent: tuple["subprocess.Popen[str]", int],
) -> None:
    parent, worker = busy_parent
    os.kill(parent.pid, signal.SIGINT)
    assert parent.wait(15) != 0
    wait_for_end(worker, 2)
