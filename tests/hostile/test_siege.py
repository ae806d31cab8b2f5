"""A server and a library under hostile inputs: `pytest -m hostile`, some three minutes.

Meanwhile other clients ask what they asked before, and get the same bits; `/health` answers within
a second; nothing hangs, no traceback is written, and memory does not grow.
"""

import contextlib
import json
import re
import shutil
import socket
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx
import jsonschema
import pytest
from checkpoints import tiny_config, write_checkpoint
from fake_hub import Hub, running_hub
from hostile.inputs import (
    bodies,
    grammars,
    mutated,
    raw_requests,
    templates,
    with_bytes_exchanged,
)
from server.conftest import Server, end, start_server
from small_server import MODELS, SAID, Answer, models, small_server, stream

from localllm.answer.opening import open_model
from localllm.attach.remote import open_remote
from localllm.chat.recorder import Recorder
from localllm.chat.transcript import Transcript, Turn
from localllm.engine.config import EngineConfig
from localllm.errors import LocalLLMError
from localllm.hub.checkpoint import find_model, open_checkpoint
from localllm.text.prompt import Conversation
from localllm.text.tokenizer import Tokenizer
from localllm.untrusted import delegated_tokenizer
from localllm.untrusted.tokenizers import open_tokenizer

pytestmark = pytest.mark.hostile
KEYS = ("peaceful", "hostile")
GROWTH_BYTES = 200 << 20
HEALTH_S = 1.0
QUESTIONS = [
    {
        "messages": [{"role": "user", "content": f"Tell me of {what}."}],
        "max_tokens": 24,
        "logprobs": True,
        "top_logprobs": 3,
        "temperature": temperature,
        "seed": seed,
    }
    for seed, what in enumerate(["the KV cache", "a fox", "drafts", "GPUs", "rain"] * 4)
    for temperature in (0, 0.9)
]


@dataclass
class Siege:
    """The server, and what peaceful clients have seen while it was besieged."""

    server: Server
    http: httpx.Client
    expected: list[Any]
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[Any] = field(default_factory=list)
    slowest_s: float = 0.0
    longest_gap_s: float = 0.0
    is_over: bool = False

    def ask(self, question: dict[str, Any]) -> Any:
        found = self.http.post("/v1/chat/completions", json=question, headers=key("peaceful"))
        assert found.status_code == 200, found.text
        return found.json()["choices"]

    def fill_the_cache(self) -> None:
        """The system hands out the cache's memory when it is first written, which is no growth."""

        def ask(number: int) -> None:
            body = {"prompt": f"{number}:", "max_tokens": 500, "ignore_eos": True}
            self.http.post("/v1/completions", json=body, headers=key("peaceful")).raise_for_status()

        with ThreadPoolExecutor(40) as pool:
            list(pool.map(ask, range(60)))

    def ask_again_and_again(self, places: range) -> None:
        while not self.is_over:
            for place in places:
                found = self.ask(QUESTIONS[place])
                self.counts["answers compared"] += 1
                if found != self.expected[place]:
                    self.wrong.append((place, found))

    def look_after_health(self) -> None:
        while not self.is_over:
            began_s = time.monotonic()
            assert self.http.get("/health", headers=key("peaceful")).status_code == 200
            self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
            time.sleep(0.05)

    def read_a_stream(self) -> None:
        body = {"prompt": "Once", "max_tokens": 450, "ignore_eos": True, "stream": True}
        while not self.is_over:
            with self.http.stream(
                "POST", "/v1/completions", json=body, headers=key("peaceful")
            ) as answer:
                last_s = None
                for _ in answer.iter_lines():
                    now = time.monotonic()
                    if last_s is not None:
                        self.longest_gap_s = max(self.longest_gap_s, now - last_s)
                    last_s = now
                    if self.is_over:
                        break


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


def resident_bytes(pid: int) -> int:
    """Of a process and those that it has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 + sum(resident_bytes(int(child)) for child in children)


@pytest.fixture(scope="module")
def siege(compiled_kernels: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Siege]:
    home = tmp_path_factory.mktemp("siege")
    (home / "localllm").mkdir()
    (home / "localllm" / "kernels").symlink_to(compiled_kernels)
    folder = tmp_path_factory.mktemp("model") / "pocket"
    shutil.copytree(open_checkpoint().folder, folder)
    # A stranger's: its template and tokenizer work in a process of their own.
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "{# a stranger's #}")
    flags = [word for each in KEYS for word in ("--api-key", each)]
    named = ("--served-model-name", "pocket", "--max-num-seqs", "48", "--ctx", "512")
    server = start_server(home, *flags, *named, model=str(folder))
    with httpx.Client(
        base_url=server.url, timeout=120, limits=httpx.Limits(max_connections=200)
    ) as http:
        besieged = Siege(server, http, [])
        besieged.expected = [besieged.ask(question) for question in QUESTIONS]
        with ThreadPoolExecutor(40) as pool:  # as much as peace alone takes
            alone = list(pool.map(besieged.ask, QUESTIONS))
        assert alone == besieged.expected
        hostile_grammars(besieged, 20, seed=99)
        besieged.fill_the_cache()
        before = resident_bytes(server.process.pid)
        with ThreadPoolExecutor(8) as pool:
            halves = (range(0, 20), range(20, 40))
            peaceful = [
                *(pool.submit(besieged.ask_again_and_again, half) for half in halves),
                pool.submit(besieged.look_after_health),
                pool.submit(besieged.read_a_stream),
            ]
            yield besieged
            with ThreadPoolExecutor(40) as many:
                assert list(many.map(besieged.ask, QUESTIONS)) == besieged.expected
            besieged.is_over = True
            for each in peaceful:
                each.result()
        time.sleep(2)
        growth = resident_bytes(server.process.pid) - before
    print(  # noqa: T201
        f"\n{dict(besieged.counts)}; /health at most {besieged.slowest_s:.2f} s, a gap between "
        f"tokens at most {besieged.longest_gap_s:.2f} s, growth {growth >> 20} MB"
    )
    assert end(server) == 143  # and no traceback
    assert not besieged.wrong
    assert besieged.slowest_s < HEALTH_S
    assert growth < GROWTH_BYTES


def test_bodies(siege: Siege) -> None:
    def send(asked: tuple[str, bytes]) -> None:
        path, content = asked
        headers = key("hostile") | {"Content-Type": "application/json"}
        answer = siege.http.post(path, content=content, headers=headers)
        siege.counts[f"bodies {answer.status_code}"] += 1
        assert answer.status_code < 500 or answer.status_code == 503, (path, content, answer.text)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(send, bodies(2000, seed=1)))


def test_raw_requests(siege: Siege) -> None:
    host, port = siege.server.url.removeprefix("http://").split(":")

    def send(request: bytes) -> None:
        with socket.create_connection((host, int(port)), timeout=40) as connection:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                while connection.recv(1 << 16):
                    pass
        siege.counts["raw requests"] += 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(send, raw_requests(800, seed=2)))


def test_connections(siege: Siege) -> None:
    """Idle ones, ones that end in the middle, ones that read nothing."""
    host, port = siege.server.url.removeprefix("http://").split(":")
    random, kept = Random(3), list[socket.socket]()
    body = b'{"prompt": "a", "max_tokens": 500, "stream": true}'
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer hostile\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    )
    for _ in range(600):
        connection = socket.create_connection((host, int(port)), timeout=20)
        siege.counts["connections"] += 1
        with contextlib.suppress(OSError):
            connection.sendall(
                (head + body)[: random.choice([0, 10, len(head), len(head) + 9, 999])]
            )
        if random.random() < 0.2:
            kept.append(connection)
        else:
            connection.close()
    for connection in kept:
        connection.close()


def hostile_grammars(siege: Siege, count: int, seed: int) -> None:
    def ask(form: dict[str, Any]) -> None:
        body = {"prompt": "So:", "max_tokens": 60, "structured_outputs": form, "temperature": 1.0}
        answer = siege.http.post("/v1/completions", json=body, headers=key("hostile"))
        siege.counts[f"grammars {answer.status_code}"] += 1
        assert answer.status_code in (200, 400, 413, 429, 503), answer.text
        if answer.status_code != 200:
            return
        choice = answer.json()["choices"][0]
        if choice["finish_reason"] == "stop":
            siege.counts["finished forms"] += 1
            check_form(form, choice["text"])

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(ask, grammars(count, seed)))


def check_form(form: dict[str, Any], text: str) -> None:
    """Whether a finished answer has its form, as far as another library can tell."""
    if "json" in form:
        with contextlib.suppress(jsonschema.SchemaError):  # which is read more kindly here
            jsonschema.validate(json.loads(text), form["json"])
    elif "choice" in form:
        assert text in form["choice"]
    elif "regex" in form and not re.search(r"\\[^d]", form["regex"]):
        assert re.fullmatch(form["regex"], text, re.DOTALL), (form, text)


def test_grammars(siege: Siege) -> None:
    hostile_grammars(siege, 500, seed=4)


def test_large_prompts(siege: Siege) -> None:
    texts = ["word " * 1_500_000, "a" * 7_000_000, "🦊" * 1_000_000, " " * 5_000_000]

    def ask(text: str) -> None:
        body = {"prompt": text, "max_tokens": 1}
        answer = siege.http.post("/v1/completions", json=body, headers=key("hostile"))
        siege.counts[f"large prompts {answer.status_code}"] += 1
        assert answer.status_code in (200, 400, 413, 429, 503)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, texts * 3))


# -- what a user opens


def refused_or_taken(counts: Counter[str], name: str, work: Callable[[], object]) -> None:
    try:
        work()
    except LocalLLMError:
        counts[f"{name} refused"] += 1
    else:
        counts[f"{name} taken"] += 1


def test_templates(siege: Siege, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delegated_tokenizer, "_JOB_S", 0.3)
    folder = tmp_path / "model"
    shutil.copytree(open_checkpoint().folder, folder)
    for template in templates(250, seed=5):
        (folder / "chat_template.jinja").write_text(template, "utf-8", "replace")
        began_s = time.monotonic()
        asked = Conversation([{"role": "user", "content": "hi"}])
        render = partial(open_tokenizer(folder).encode_chat, asked)
        refused_or_taken(siege.counts, "templates", render)
        assert time.monotonic() - began_s < 20


def test_tokenizers(siege: Siege, tmp_path: Path) -> None:
    folder, random = tmp_path / "model", Random(6)
    shutil.copytree(open_checkpoint().folder, folder)
    path = folder / "tokenizer.json"
    sound = json.loads(path.read_text())
    model = sound.pop("model")
    for number in range(80):
        state = mutated(sound, random)
        if isinstance(state, dict):
            state["model"] = mutated(model, random) if number % 3 == 0 else model
        path.write_text(json.dumps(state), "utf-8", "replace")
        began_s = time.monotonic()

        def encode() -> None:
            tokenizer = open_tokenizer(folder)
            tokenizer.decode(tokenizer.encode("Hello, world", add_special_tokens=True))

        refused_or_taken(siege.counts, "tokenizers", encode)
        assert time.monotonic() - began_s < 30


def test_checkpoints(siege: Siege, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Those of strangers are tried above; here it would only take longer.
    monkeypatch.setattr(
        "localllm.hub.checkpoint.open_tokenizer",
        lambda folder, *_, **flags: Tokenizer.from_folder(folder),
    )
    folder, random = tmp_path / "model", Random(7)
    write_checkpoint(folder, tiny_config("Qwen3ForCausalLM", num_hidden_layers=1))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "top_k": 5}))
    sound = {path: path.read_bytes() for path in folder.iterdir() if path.name != "tokenizer.json"}
    config = EngineConfig(device="cpu", max_model_len=64)
    for _ in range(1200):
        path = random.choice(list(sound))
        if path.suffix == ".safetensors":
            length = 8 + int.from_bytes(sound[path][:8], "little")
            head = with_bytes_exchanged(sound[path][:length], random)
            path.write_bytes(head + sound[path][length:])
        elif random.random() < 0.5:
            path.write_text(json.dumps(mutated(json.loads(sound[path]), random)))
        else:
            path.write_bytes(with_bytes_exchanged(sound[path], random))

        def load() -> None:
            open_model(str(folder), config).close()

        began_s = time.monotonic()
        refused_or_taken(siege.counts, "checkpoints", load)
        assert time.monotonic() - began_s < 10
        path.write_bytes(sound[path])


def test_saved_conversations(siege: Siege, tmp_path: Path) -> None:
    random = Random(8)
    talk = Transcript("pocket", None, (Turn("Why?", "pocket", "Because.", token_ids=(1, 2, 3)),))
    sound = tmp_path / "sound.db"
    recorder = Recorder(sound, lambda _: None)
    recorder.save(talk)
    recorder.close()
    with contextlib.closing(sqlite3.connect(sound)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    data = sound.read_bytes()
    for number in range(300):
        path = tmp_path / str(number) / "sessions.db"
        path.parent.mkdir()
        path.write_bytes(with_bytes_exchanged(data, random))
        recorder = Recorder(path, lambda _: None)
        with contextlib.suppress(LocalLLMError):
            recorder.store().latest()
        recorder.save(talk)
        recorder.close()
        siege.counts["conversations"] += 1


def test_remotes(siege: Siege) -> None:
    """Servers behind `--remote` whose answers are nearly those of one."""
    random = Random(9)
    for number in range(250):
        answers: dict[str, Answer] = {}
        path = random.choice(["/v1/models", "/v1/chat/completions"])
        if random.random() < 0.5 and path == "/v1/models":
            answers[path] = models(mutated(MODELS, random))
        elif random.random() < 0.5:
            path = "/v1/chat/completions"
            answers[path] = stream(*mutated(list(SAID), random))
        else:
            whole = models() if path == "/v1/models" else stream()
            answers[path] = with_bytes_exchanged(whole, random)
        with small_server(answers) as server:

            def ask(url: str = server.url) -> None:
                model = open_remote(url, None, None)
                asked = Conversation([{"role": "user", "content": "hi"}])
                _, events = model.ask(asked, model.sampling_params(max_tokens=8))
                list(events)

            began_s = time.monotonic()
            refused_or_taken(siege.counts, "remotes", ask)
            assert time.monotonic() - began_s < 20, (number, answers)


def test_hubs(siege: Siege, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hubs whose lists of files are nearly those of one; nothing is written beside the cache."""
    random = Random(10)
    folder = write_checkpoint(tmp_path / "model", tiny_config("Qwen3ForCausalLM"))
    cache = tmp_path / "cache"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    hub = Hub({"me/tiny": folder})
    before = {path for path in tmp_path.rglob("*") if not path.is_relative_to(cache)}

    def lie(answer: Any) -> None:
        told = {name: answer[name] for name in ("sha", "siblings")}
        found = mutated(told, random) if random.random() < 0.8 else told
        answer.update(found if isinstance(found, dict) else {"": found})

    hub.lie = lie
    with running_hub(hub):
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        for _ in range(60):
            shutil.rmtree(cache, ignore_errors=True)
            began_s = time.monotonic()
            refused_or_taken(siege.counts, "hubs", lambda: find_model("me/tiny"))
            assert time.monotonic() - began_s < 30
    after = {path for path in tmp_path.rglob("*") if not path.is_relative_to(cache)}
    assert {path for path in after - before if not path.is_relative_to(tmp_path / "home")} == set()


def test_all_of_it_was_tried(siege: Siege) -> None:
    peaceful = siege.counts["answers compared"] + siege.counts["finished forms"]
    assert sum(siege.counts.values()) - peaceful >= 5000
    assert siege.counts["answers compared"] > 100
    assert threading.active_count() < 100
