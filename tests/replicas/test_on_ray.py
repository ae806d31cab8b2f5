"""Replicas on Ray, as a user starts them: `pip install -e '.[test,ray]' && pytest -m scale`;
with `--log-cli-level info` it tells what it measures.
"""

import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [
    pytest.mark.scale,
    # Not imported here: it reads its settings then.
    pytest.mark.skipif(find_spec("ray") is None, reason="pip install 'localllm[ray]'"),
]

logger = logging.getLogger(__name__)
WORDS = "the quick brown fox jumps over a lazy dog while wise owls watch".split()  # noqa: SIM905
GROUPS, TIMES = 8, 6


class Server:
    """A server with two replicas of pocket, or with one engine."""

    def __init__(self, folder: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "localllm", "serve", "--port", "0", *flags]
        # Not the home of the other tests: what Ray starts there outlives it.
        variables = {**os.environ, "HOME": str(folder), "XDG_CACHE_HOME": str(folder)}
        variables.pop("OMP_NUM_THREADS", None)
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=variables)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := re.search(r"answers at (http://\S+)/v1", line):
                self.url = found[1]
                break
        else:
            raise AssertionError("no server")
        self.client = httpx.Client(base_url=self.url, timeout=120)

    def complete(self, prompt: str, **fields: Any) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
        return self.client.post("/v1/completions", json=body)

    def health(self) -> dict[str, Any]:
        found: dict[str, Any] = self.client.get("/health").json()
        return found

    def wait_for_two(self, gone: Container[str]) -> None:
        """Until two answer that are not `gone`."""
        deadline = time.monotonic() + 60
        while sum(name not in gone for name in self.health().get("replicas", ())) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.5)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(60) in (0, 130)


@contextmanager
def running(folder: Path, *flags: str) -> Iterator[Server]:
    server = Server(folder, *flags)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("home"), "--replicas", "2") as server:
        yield server


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("home")) as server:
        yield server


def prompt(group: int, question: int, words: int = 260) -> str:
    text = " ".join(WORDS[(i * (group + 3) + group) % len(WORDS)] for i in range(words))
    return f"Group {group}. {text} Question {question}?"


def answered(server: Server) -> Counter[str]:
    """Requests that each replica was given so far."""
    text = server.client.get("/metrics").text
    found = re.findall(r'replica_answers_total\{.*replica="(\w+)"\} ([\d.]+)', text)
    return Counter({name: int(float(count)) for name, count in found})


@pytest.mark.parametrize("at_once", [1, 8])
def test_a_group_of_prompts_stays_on_one_replica_and_the_load_is_even(
    replicas: Server, at_once: int
) -> None:
    of_group: dict[int, Counter[str]] = defaultdict(Counter)
    cached = total = 0
    first = 100 * at_once

    def ask(group: int, question: int) -> tuple[int, dict[str, Any], str]:
        found = replicas.complete(prompt(first + group, question))
        return group, found.json()["usage"], found.headers["x-localllm-replica"]

    with ThreadPoolExecutor(at_once) as pool:
        order = [(group, question) for question in range(TIMES) for group in range(GROUPS)]
        for group, usage, replica in pool.map(lambda each: ask(*each), order):
            of_group[group][replica] += 1
            cached += usage["prompt_tokens_details"]["cached_tokens"]
            total += usage["prompt_tokens"]
    for counts in of_group.values():
        assert counts.most_common(1)[0][1] >= 0.95 * TIMES
    load = sum(of_group.values(), Counter[str]())
    assert len(load) == 2
    assert max(load.values()) <= 0.6 * sum(load.values())
    # Round robin computes a group's beginning once on each replica: four of six times it is cached.
    assert cached > 0.75 * total


def test_caches_that_hold_half_of_the_prompts_give_twice_what_round_robin_gives(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Each replica's cache, and each plain server's, holds 8,192 tokens; the groups have more."""
    cache = ("--max-num-seqs", "4", "--ctx", "2048")
    folder = tmp_path_factory.mktemp("home")
    rounds = [random.Random(question).sample(range(GROUPS), GROUPS) for question in range(TIMES)]
    prompts = [prompt(each, i, words=1250) for i, groups in enumerate(rounds) for each in groups]

    def cached_tokens(*servers: Server) -> tuple[int, int]:
        cached = total = 0
        for i, each in enumerate(prompts):
            usage = servers[i % len(servers)].complete(each).json()["usage"]
            cached += usage["prompt_tokens_details"]["cached_tokens"]
            total += usage["prompt_tokens"]
        return cached, total

    with running(folder, "--replicas", "2", *cache) as replicas:
        ours, total = cached_tokens(replicas)
    with running(folder, *cache) as first, running(folder, *cache) as second:
        theirs, _ = cached_tokens(first, second)
    logger.info("of %d tokens %d cached, with round robin %d", total, ours, theirs)
    assert total > 1.5 * 8192 * TIMES
    assert ours >= 2 * theirs > 0


def test_a_replica_that_dies_costs_no_later_request(replicas: Server, one: Server) -> None:
    prompts = [f"Once upon a time there was a {i} " for i in range(12)]
    wanted = [one.complete(each, max_tokens=60).json()["choices"][0]["text"] for each in prompts]
    before, pid = set(replicas.health()["replicas"]), pids_of_replicas()[0]
    with ThreadPoolExecutor(12) as pool:
        answers = pool.map(lambda each: replicas.complete(each, max_tokens=60), prompts)
        time.sleep(0.2)
        os.kill(pid, signal.SIGKILL)
        told = list(answers)
    # Nothing was sent of any of them, so another replica answers.
    assert [each.status_code for each in told] == [200] * 12
    assert [each.json()["choices"][0]["text"] for each in told] == wanted
    for each, text in zip(prompts, wanted, strict=True):
        assert replicas.complete(each, max_tokens=60).json()["choices"][0]["text"] == text
    deadline = time.monotonic() + 60
    while len(found := set(replicas.health()["replicas"])) < 2 or found == before:
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_a_streamed_answer_that_loses_its_replica_ends_with_an_error(replicas: Server) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with replicas.client.stream("POST", "/v1/completions", json=body) as response:
        before = set(replicas.health()["replicas"])
        assert response.headers["x-localllm-replica"] in before
        lines = response.iter_lines()
        for _ in range(20):
            next(lines)
        for pid in pids_of_replicas():
            os.kill(pid, signal.SIGKILL)
        rest = [line for line in lines if line.startswith("data: {")]
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "engine_down"
    replicas.wait_for_two(before)
    assert replicas.complete("Once upon a time").status_code == 200


def pids_of_replicas() -> list[int]:
    command = ["pgrep", "-f", "ray::ServeReplica:localllm:Engine"]
    return [int(each) for each in subprocess.check_output(command).split()]


def test_metrics_and_health_of_all_replicas_are_in_one_place(replicas: Server) -> None:
    health = replicas.health()
    assert health["status"] == "ok"
    assert all(each["status"] == "ok" for each in health["replicas"].values())
    for group in range(4):  # replicas that have just started have answered nothing
        replicas.complete(prompt(900 + group, 0))
    assert set(answered(replicas)) >= set(health["replicas"])


def first_token_s(server: Server) -> float:
    began = time.perf_counter()
    body = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line:
                return time.perf_counter() - began
    raise AssertionError("nothing came")


def test_ray_and_the_router_add_few_milliseconds(replicas: Server, one: Server) -> None:
    pairs = [(first_token_s(replicas), first_token_s(one)) for _ in range(30)]
    added = sorted(ours - plain for ours, plain in pairs)[len(pairs) // 2]
    logger.info("%.1f ms added to the first token", 1000 * added)
    assert added <= 0.015
