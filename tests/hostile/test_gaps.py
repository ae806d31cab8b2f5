"""How long one client's answer can stand still for the sake of another client's requests."""

import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hostile.inputs import bodies, grammars
from server.conftest import end, start_server

from localllm.hub.checkpoint import open_checkpoint

pytestmark = pytest.mark.hostile
MOST_S = 0.2
Post = Callable[[str, Any], object]


def forms(post: Post) -> None:
    def ask(form: dict[str, Any]) -> None:
        body = {"prompt": "So:", "max_tokens": 60, "structured_outputs": form, "temperature": 1}
        post("/v1/completions", body)

    together(6, ask, grammars(250, seed=11))


def broken_bodies(post: Post) -> None:
    together(4, lambda asked: post(*asked), bodies(500, seed=12))


def long_texts(post: Post) -> None:
    texts = ["word " * 1_500_000, "a" * 7_000_000, "🦊" * 1_000_000, " " * 5_000_000]
    together(4, lambda text: post("/v1/completions", {"prompt": text, "max_tokens": 1}), texts * 5)


def prompts(post: Post) -> None:
    def ask(number: int) -> None:
        prompt = f"{number} " + "word " * 900
        post("/v1/completions", {"prompt": prompt, "max_tokens": 40, "ignore_eos": True})

    together(6, ask, range(60))


def together(count: int, work: Callable[[Any], object], things: Iterable[Any]) -> None:
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(work, things))


@pytest.fixture(scope="module")
def http(
    compiled_kernels: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    home = tmp_path_factory.mktemp("gaps")
    (home / "localllm").mkdir()
    (home / "localllm" / "kernels").symlink_to(compiled_kernels)
    folder = home / "pocket"
    shutil.copytree(open_checkpoint().folder, folder)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "{# a stranger's #}")
    server = start_server(
        home,
        "--api-key",
        "patient",
        "--api-key",
        "hostile",
        "--max-num-seqs",
        "48",
        model=str(folder),
    )
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client
    assert end(server) == 143


@pytest.mark.parametrize("attack", [forms, broken_bodies, long_texts, prompts])
def test_an_answer_never_stands_still(http: httpx.Client, attack: Callable[[Post], None]) -> None:
    gaps: list[float] = []
    is_over = threading.Event()

    def read() -> None:
        name = http.get("/v1/models", headers=key("patient")).json()["data"][0]["id"]
        body = {"model": name, "prompt": "Once", "max_tokens": 1500, "ignore_eos": True}
        body["stream"] = True
        while not is_over.is_set():
            with http.stream(
                "POST", "/v1/completions", json=body, headers=key("patient")
            ) as answer:
                assert answer.status_code == 200
                last_s = None
                for _ in answer.iter_lines():
                    now = time.monotonic()
                    if last_s is not None:
                        gaps.append(now - last_s)
                    last_s = now
                    if is_over.is_set():
                        break

    def post(path: str, body: Any) -> None:
        kind = {"content": body} if isinstance(body, bytes) else {"json": body}
        headers = key("hostile") | {"Content-Type": "application/json"}
        http.post(path, headers=headers, **kind)

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(read)
        try:
            attack(post)
        finally:
            is_over.set()
        reader.result()
    print(f"{attack.__name__}: {len(gaps)} gaps, at most {1e3 * max(gaps):.0f} ms")  # noqa: T201
    assert len(gaps) > 500
    assert max(gaps) < MOST_S


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}
