"""SECURITY.md tells the limits that hold."""

from pathlib import Path

from localllm.attach import engine_client
from localllm.process.ending import ENDS_S
from localllm.server.limits import LIMITS
from localllm.text import (
    added_tokens,
    template,
    template_files,
    template_sandbox,
    tokenizer_check,
    tokenizer_files,
)
from localllm.untrusted import delegated_tokenizer, grammar_trials, worker, worker_process

PAGE = (Path(__file__).parents[1] / "SECURITY.md").read_text()
ELSEWHERE = {
    "start of a helper process, which reads a tokenizer": f"{worker.OPEN_S:g} s",
    "rendering and encoding a prompt": f"{delegated_tokenizer._JOB_S:g} s and 1 s for each "
    f"{delegated_tokenizer._BYTES_PER_S:,} bytes",
    "memory of a job in a helper process": f"{worker_process.JOB_BYTES >> 20} MB and "
    f"{worker_process.JOB_BYTES_PER_BYTE} bytes for each byte of its text",
    "a chat template's own Python": f"{template.RENDER_TIME_S:g} s",
    "a chat template's numbers": f"{template_sandbox.MAX_INTEGER_BITS} bits",
    "chat_template.jinja": f"{template_files.MAX_TEMPLATE_BYTES >> 20} MB",
    "tokenizer.json": f"{tokenizer_files.MAX_TOKENIZER_BYTES // 10**6} MB",
    "a token's text": f"{added_tokens.MAX_TOKEN_CHARS:,} characters",
    "growth of a text in a decoder": f"{tokenizer_check.MAX_GROWTH} times the length",
    "a grammar's slowest step": f"{grammar_trials.STEP_S:g} s",
    "a grammar's memory": f"{grammar_trials.GRAMMAR_BYTES >> 20} MB",
    "silence of an engine until it is called unresponsive": f"{engine_client.UNRESPONSIVE_S:g} s",
    "silence of an engine until it is restarted": f"{engine_client.HANGS_S:g} s",
    "end of a command after a signal": f"{ENDS_S:g} s",
}


def rows() -> list[str]:
    limits = [f"| {name} | {value:,} |" for name, value in LIMITS.rows()]
    return [*limits, *(f"| {name} | {value} |" for name, value in ELSEWHERE.items())]


def test_the_page_tells_each_limit_and_its_value() -> None:
    missing = [row for row in rows() if row not in PAGE]
    assert not missing, "\n".join(missing)


def test_the_page_tells_each_status_of_health() -> None:
    for state in engine_client.State.__args__:  # type: ignore[attr-defined]
        named = "ok" if state == "ready" else state
        assert f"`{named}`" in PAGE
