"""`localllm bench` as it is typed; its figures are checked in tests/bench."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tiny_config, write_checkpoint
from window import Window

from localllm.bench.contended import busy_processes
from localllm.bench.plot import check_plot, write_plot
from localllm.bench.report import Report
from localllm.bench.results import Result, Spread
from localllm.cli.bench.flags import parse_counts
from localllm.cli.bench.table import bar, report_text
from localllm.errors import ExitCode, RequestError

Run = Callable[..., Any]
SMALL = ("-p", "32", "-n", "8", "-r", "2")
NUM_TOKENS = 3


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_checkpoint(tmp_path / "tiny", tiny_config("Qwen3ForCausalLM")))


def test_speed_as_a_table_and_as_json(localllm: Run, model: str, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    arguments = ("--depth", "0,16", "--batch", "1,3", "--json", str(file))
    outcome = localllm("bench", model, *SMALL, *arguments)
    assert outcome.code == 0, outcome.err
    assert "of the memory bandwidth" in outcome.out or "of the arithmetic peak" in outcome.out
    report = json.loads(file.read_text())
    assert report.keys() == {"environment", "model", "limits", "seed", "results"}
    assert report["environment"]["versions"]["torch"]
    assert report["model"]["operators"] in ("c", "torch")
    rows = {(row["test"], row.get("depth"), row.get("batch")): row for row in report["results"]}
    assert rows.keys() == {
        ("start-up", None, None),
        *(("pp32", depth, 1) for depth in (0, 16)),
        *(("tg8", depth, batch) for depth in (0, 16) for batch in (1, 3)),
    }
    decode = rows["tg8", 16, 3]
    assert decode["tokens_per_s"]["min"] <= decode["tokens_per_s"]["median"]
    assert 0 < decode["share_of_limit"] < 2
    start = rows["start-up", None, None]
    assert start["total_s"] == pytest.approx(
        start["imports_s"] + start["weights_s"] + start["first_step_s"]
    )


@pytest.mark.slow
def test_every_suite_of_a_model(localllm: Run, model: str, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    suites = ("--serve-load", "--prefix", "--paging", "--ops", "--compare", "transformers")
    outcome = localllm("bench", model, *SMALL, *suites, "--json", str(file))
    assert outcome.code == 0, outcome.err
    results = json.loads(file.read_text())["results"]
    found = {row["suite"] for row in results}
    assert found == {
        "start-up", "load", "batching", "python", "prefix", "paging", "operators", "compare",
    }  # fmt: skip
    for row in results:
        assert row["test"].split(" against")[0] in outcome.out
    load = [row for row in results if row["suite"] == "load"]
    assert all(row["failed"] == 0 for row in load)
    assert all(row["ttft_s"]["p50"] <= row["ttft_s"]["p99"] for row in load)


@pytest.mark.slow
def test_drafts_and_whether_texts_stay_the_same(localllm: Run, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    small = ("-n", "4", "-r", "1", "--batch", "1,2", "--json", str(file))
    outcome = localllm("bench", "--spec", "--verify", "--drafter", "draft:pocket-draft", *small)
    assert outcome.code == 0, outcome.err
    results = json.loads(file.read_text())["results"]
    assert [row["batch"] for row in results if row["suite"] == "speculation"] == [1] * 7 + [2] * 7
    verified = [row for row in results if row["suite"] == "verify"]
    assert len(verified) == 5
    assert all(row["identical"] for row in verified)
    assert outcome.out.count("identical") == 5
    assert "1,000,000 tokens" in outcome.out


@pytest.mark.slow
def test_a_plot(localllm: Run, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="plots are an extra")
    reports: list[Report] = []

    def write(report: Report, path: Path) -> None:
        reports.append(report)
        write_plot(report, path)

    monkeypatch.setattr("localllm.bench.plot.write_plot", write)
    png, html = tmp_path / "bench.png", tmp_path / "bench.html"
    outcome = localllm("bench", model, *SMALL, "--plot", str(png))
    assert outcome.code == 0, outcome.err
    assert png.read_bytes().startswith(b"\x89PNG")
    [report] = reports
    check_plot(html)
    write_plot(report, html)
    assert b"<!doctype html>" in html.read_bytes()[:100]


@pytest.mark.slow
def test_a_plot_for_a_browser(localllm: Run, model: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots are an extra")
    file = tmp_path / "bench.html"
    outcome = localllm("bench", model, *SMALL, "--plot", str(file))
    assert outcome.code == 0, outcome.err
    assert b"<!doctype html>" in file.read_bytes()[:100]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batch", "1,x"), "--batch must be like 1 or 1,4,16"),
        (("--batch", "0"), "--batch must be at least 1"),
        (("-p", "100000"), "the longest test has"),
        (("--compare", "vllm"), "--compare must be transformers"),
        (("--weights", "int4"), "--weights needs --random-weights"),
        (("--random-weights", "--weights", "int2"), "--weights must be bf16, int4"),
        (("--plot", "a.gif"), "--plot writes .png or .html"),
        (("--url", "localhost:8000"), "--url must be like http://"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    localllm: Run, arguments: tuple[str, ...], message: str
) -> None:
    outcome = localllm("bench", *arguments)
    assert outcome.code == ExitCode.USAGE
    assert message in outcome.err
    assert outcome.out == ""


def test_a_server_that_is_not_there_is_told(localllm: Run) -> None:
    outcome = localllm("bench", "--url", "http://127.0.0.1:9")
    assert outcome.code == ExitCode.NETWORK
    assert "127.0.0.1:9 cannot be reached: Connection refused" in outcome.err


def test_ctrl_c_keeps_what_was_measured(model: str, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    words = ["bench", model, "-p", "8", "-n", "8", "-r", "100000", "--json", str(file)]
    window = Window(["-m", "localllm", *words], 120, 40, tmp_path / "data")
    window.wait_for("tg8", seconds=60)
    time.sleep(1)  # eight tokens of a tiny model take less
    window.process.send_signal(signal.SIGINT)
    window.wait_for("interrupted")
    assert window.exit_code() == ExitCode.SIGINT
    assert "tg8" in window.text.partition("interrupted")[2]
    assert any(row["test"] == "tg8" for row in json.loads(file.read_text())["results"])


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that answers every completion with three words; and the bodies it was sent."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"data": [{"id": "echo\x1b[2J"}]}).encode())

        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()
            for _ in range(NUM_TOKENS):
                time.sleep(0.002)
                chunk = {"choices": [{"text": " word"}]}
                line = json.dumps(chunk).encode()
                self.wfile.write(b": a comment\nevent: text\ndata: " + line + b"\n\n")
            usage = {"choices": [], "usage": {"completion_tokens": NUM_TOKENS}}
            self.wfile.write(b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n")

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # of the default, five, a burst of connections can lose some

    httpd = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_port}", bodies
    httpd.shutdown()


def test_a_server_under_load(
    localllm: Run, server: tuple[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    url, bodies = server
    file = tmp_path / "bench.json"
    outcome = localllm("bench", "--url", f"{url}/v1", "--batch", "8,4", "--json", str(file))
    assert outcome.code == 0, outcome.err
    assert f"echo␛[2J at {url}" in outcome.out  # no command to the terminal
    assert {body["model"] for body in bodies} == {"echo\x1b[2J"}
    assert len(bodies) == 2 * (2 + 3 * 64)
    # No run finds the prompts of another in the server's cache, but for the few that are short.
    long = [body["prompt"] for body in bodies if len(body["prompt"]) > 100]
    assert len(set(long)) == len(long) > 100
    for row in json.loads(file.read_text())["results"]:
        assert row["failed"] == 0
        # A busy client may find tokens together that were sent one by one.
        assert row["time_per_token_s"]["p50"] > 0
        assert row["total_s"]["p50"] >= NUM_TOKENS * 0.002


@pytest.mark.parametrize(
    ("share", "drawn"),
    [(0.0, "··········"), (0.5, "█████·····"), (0.55, "█████▌····"), (1.3, "██████████")],
)
def test_bars(share: float, drawn: str) -> None:
    assert bar(share) == drawn


def test_counts() -> None:
    assert parse_counts("batch", "1, 4,16,4") == (1, 4, 16)
    with pytest.raises(RequestError, match="--depth must be like"):
        parse_counts("depth", "-1")


def test_verdicts_stand_below_their_rows_where_the_terminal_is_narrow() -> None:
    spread = Spread.of([0.5])
    result = Result(
        "prefix", "90% of 2,000 shared", {}, {"times": spread}, "first token 6.5 times sooner"
    )
    report = Report({}, {"name": "model", "url": "http://here"}, None, 0, [result])
    wide = report_text(report, 60).splitlines()
    assert wide[-1] == "90% of 2,000 shared  first token 6.5 times sooner"
    assert report_text(report) == report_text(report, 60)
    narrow = report_text(report, 24).splitlines()
    assert narrow[-3:] == ["90% of 2,000 shared", "    first token 6.5", "    times sooner"]


def test_kernels_need_a_gpu(localllm: Run) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    outcome = localllm("bench", "--kernels")
    assert outcome.code == ExitCode.MEMORY
    assert "no usable GPU" in outcome.err


def test_what_other_work_leaves_of_the_speed(localllm: Run, model: str, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    outcome = localllm("bench", model, "--contended", "-n", "8", "-r", "2", "--json", str(file))
    assert outcome.code == 0, outcome.err
    assert "of its speed alone" in outcome.out
    rows = [row for row in json.loads(file.read_text())["results"] if row["suite"] == "contended"]
    assert [(row["busy"], row["pairs"]) for row in rows] == [(1, 2), (2, 2)]
    for row in rows:
        assert 0 < row["kept"]["min"] <= row["kept"]["max"]


def test_busy_processes_end_with_the_measurement_and_with_who_started_them() -> None:
    before = children(os.getpid())  # such as workers of earlier tests
    with busy_processes(2):
        started = children(os.getpid()) - before
        assert len(started) >= 2
    assert not children(os.getpid()) & started
    code = (
        "import os\\nfrom localllm.bench.contended import busy_processes\\n"
        "with busy_processes(1):\\n    print(os.getpid(), flush=True)\\n    os._exit(1)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.wait()
    left = [pid for pid in busy_pids() if pid not in started]
    deadline = time.monotonic() + 10
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = [pid for pid in left if pid in busy_pids()]
    assert left == []


def test_a_busy_process_that_ends_too_soon_fails_the_measurement() -> None:
    with pytest.raises(RequestError, match="ended"), busy_processes(1):
        kill(busy_pids() & children(os.getpid()))


def kill(pids: set[int]) -> None:
    """Kill children and wait until they can be reaped, without reaping them."""
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def children(parent: int) -> set[int]:
    return {
        int(stat.parent.name)
        for stat in Path("/proc").glob("[0-9]*/stat")
        if parent_of(stat) == parent
    }


def parent_of(stat: Path) -> int | None:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended
        return None


def busy_pids() -> set[int]:
    found = set()
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"for _ in range(100_000)" in line.read_bytes():
                found.add(int(line.parent.name))
        except OSError:
            continue
    return found
