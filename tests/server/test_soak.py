"""Two minutes of 64 clients who leave, stop and send nonsense: `pytest -m slow tests/server`."""

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIError, OpenAI

SECONDS, CLIENTS = 120, 64
QUESTIONS = [f"Question {i}: what is the KV cache?" for i in range(24)]


def resident_bytes(pid: int) -> int:
    """Of a process and its engine."""
    pages = 0
    for place in Path("/proc").glob("[0-9]*"):
        try:
            status = (place / "status").read_text()
            if place.name == str(pid) or f"\nPPid:\t{pid}\n" in status:
                pages += int((place / "statm").read_text().split()[1])
        except OSError:
            continue
    return pages * 4096


def ask(client: OpenAI, question: str, num_tokens: int) -> str:
    answer = client.chat.completions.create(
        model="pocket",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=num_tokens,
    )
    return answer.choices[0].message.content or ""


@pytest.mark.slow
def test_64_clients_for_two_minutes(
    serve: Callable[..., Any], tmp_path: Path, record_property: Callable[..., None]
) -> None:
    server = serve("--ctx", "512", "--max-num-seqs", "16")
    client = server.client()
    alone = {question: ask(client, question, 24) for question in QUESTIONS}
    done: Counter[str] = Counter()
    wrong: list[str] = []
    latencies: list[float] = []
    lock = threading.Lock()
    began = time.monotonic()
    memory = []

    def live(number: int) -> None:
        rng = random.Random(number)
        own = server.client()
        while time.monotonic() - began < SECONDS:
            what = rng.choices(["ask", "stream", "leave", "stop", "nonsense"], [4, 4, 2, 2, 2])[0]
            question = rng.choice(QUESTIONS)
            started = time.monotonic()
            try:
                if what == "ask":
                    if ask(own, question, 24) != alone[question]:
                        wrong.append(f"ask {question}")
                elif what in ("stream", "leave"):
                    text = ""
                    stream = own.chat.completions.create(
                        model="pocket",
                        messages=[{"role": "user", "content": question}],
                        temperature=0,
                        max_tokens=24 if what == "stream" else 400,
                        stream=True,
                        extra_body={"ignore_eos": what == "leave"},
                    )
                    left = rng.randrange(20)
                    for chunk in stream:
                        text += chunk.choices[0].delta.content or ""
                        left -= 1
                        if what == "leave" and left < 0:
                            stream.close()
                            break
                    if what == "stream" and text != alone[question]:
                        wrong.append(f"stream {question}")
                elif what == "stop":
                    answer = own.completions.create(
                        model="pocket", prompt=question, stop=[" ", "e"], max_tokens=40, seed=number
                    )
                    if any(mark in answer.choices[0].text for mark in (" ", "e")):
                        wrong.append("stop")
                else:
                    bad = rng.choice(["{", "[]", '{"prompt": 5}', '{"prompt": "a", "n": 99}'])
                    headers = {"Content-Type": "application/json"}
                    url = f"{server.url}/v1/completions"
                    code = httpx.post(url, content=bad, headers=headers, timeout=60).status_code
                    if code != 400:
                        wrong.append(f"nonsense {code}")
            except APIError as error:
                wrong.append(f"{what}: {error!r:.200}")
            with lock:
                done[what] += 1
                if what == "ask":
                    latencies.append(time.monotonic() - started)

    with ThreadPoolExecutor(CLIENTS) as pool:
        lives = [pool.submit(live, number) for number in range(CLIENTS)]
        while time.monotonic() - began < SECONDS:
            time.sleep(5)
            memory.append(resident_bytes(server.process.pid))
        for each in lives:
            each.result()
    assert not wrong, wrong[:5]
    assert min(done.values()) > CLIENTS
    time.sleep(2.5)
    load = httpx.get(f"{server.url}/health").json()
    assert load["restarts"] == 0
    assert load["load"]["running"] == load["load"]["waiting"] == load["load"]["used_blocks"] == 0
    # Flat, once everything has been used once.
    settled = memory[len(memory) // 3 :]
    assert max(settled) < 1.1 * min(settled)
    assert {question: ask(client, question, 24) for question in QUESTIONS} == alone
    latencies.sort()
    report = {
        "requests": dict(done),
        "seconds": SECONDS,
        "ask_s": {f"p{p}": latencies[len(latencies) * p // 100] for p in (50, 90, 99)},
        "resident_bytes": [settled[0], settled[-1]],
    }
    (tmp_path / "soak.json").write_text(json.dumps(report))
    record_property("report", json.dumps(report))
