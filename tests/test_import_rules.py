"""Who may import whom, read from the source; and what must not wait for torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "localllm").rglob("*.py")) + sorted((ROOT / "kernels").rglob("*.py"))
# These import nothing of ours but errors, and what their row says.
LEAVES = {
    "errors",
    "file_times",
    "json_file",
    "model_file",
    "regular_file",
    "stop_strings",
    "speculation_config",
    "overflow",
    "openai_chunks",
    "places",
    "private_files",
    "gpus",
    "grammar",
    "ending",
    "process_memory",
}
# Each place, and what of ours it may import beside itself, the leaves and config.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "file_times": set(),
    "regular_file": set(),
    "model_file": {"regular_file"},
    "json_file": {"model_file"},
    "stop_strings": set(),
    "config": set(),
    "openai_chunks": set(),
    "openai_client": {"openai_chunks"},
    "overflow": set(),
    "places": set(),
    "ending": set(),
    "process_memory": set(),
    "private_files": {"regular_file"},
    "speculation_config": set(),
    "catalog": set(),
    "gpus": set(),
    "grammar": set(),
    "tool_calls": set(),
    "grammars": {"special_text"},
    "grammar_compiler": {"engine", "grammars", "prompt", "thinking", "tokenizer"} | {"untrusted"},
    "settings": {"places"},
    "cache_kinds": {"places"},
    "verified": {"places"},
    "transfer": {"verified"},
    "recommendation": {"catalog"},
    "runnable": {"model"},
    "hub_snapshot": {"transfer"},
    "download": {"catalog", "runnable", "transfer", "verified", "model", "hub_snapshot"},
    "planning": {"bench", "card", "catalog", "download", "engine", "gpus", "model"}
    | {"localllm_kernels"},
    "template": {"template_sandbox"},
    "template_sandbox": set(),
    "special_text": set(),
    "thinking": set(),
    "prompt": {"thinking"},
    "tokenizer": {"template", "special_text", "thinking", "prompt", "tokenizer_check"},
    "tokenizer_check": set(),
    "frames": {"prompt", "thinking"},
    "untrusted": {"engine", "frames", "grammars", "places", "prompt", "tokenizer"},
    "generation_config": set(),
    "model": {"localllm_kernels"},
    "engine": {"localllm_kernels", "model"},
    "completion": {"engine"},
    "text_engine": {"engine", "tokenizer", "thinking", "prompt", "completion"}
    | {"grammar_compiler"},
    "prompt_writer": {"prompt", "tokenizer"},
    "checkpoint": {"catalog", "download", "generation_config", "model", "tokenizer", "untrusted"},
    "loaded_model": {"completion", "engine", "generation_config", "prompt", "prompt_writer"}
    | {"text_engine", "tokenizer"},
    "remote": {"completion", "engine", "generation_config", "loaded_model", "prompt"}
    | {"openai_client"}
    | {"prompt_writer", "text_engine", "thinking", "tokenizer"},
    "session": {"catalog", "checkpoint", "download", "engine", "loaded_model", "text_engine"},
    "transcript": {"engine"},
    "session_rows": {"engine", "transcript"},
    "sessions": {"engine", "session_rows", "transcript"},
    "recorder": {"session_rows", "sessions", "transcript"},
    "cache_report": {"tokenizer", "transcript"},
    "conversation": {"loaded_model", "engine", "text_engine", "completion", "tokenizer", "prompt"}
    | {"transcript", "cache_report"},
    "llm": {"session", "loaded_model", "completion"},
    "evaluation": {"session", "checkpoint", "loaded_model", "engine"},
    "quantize": {
        "engine",
        "session",
        "checkpoint",
        "loaded_model",
        "evaluation",
        "model",
        "tokenizer",
        "prompt",
        "localllm_kernels",
        "hub_snapshot",
        "transfer",
        "verified",
    },
    "bench": {
        "session",
        "checkpoint",
        "loaded_model",
        "engine",
        "model",
        "catalog",
        "tokenizer",
        "localllm_kernels",
        "openai_client",
    },
    "server": {"session", "checkpoint", "loaded_model", "engine", "text_engine", "completion"}
    | {"tokenizer", "prompt", "prompt_writer", "thinking", "generation_config", "tool_calls"}
    | {"speculation_config", "places", "frames", "untrusted"},
    "card": {"catalog", "generation_config", "model", "tokenizer", "untrusted"},
    "local_models": {"card", "catalog", "model", "hub_snapshot"},
    "removal": {"catalog", "local_models"},
    "cli": {
        "session",
        "checkpoint",
        "loaded_model",
        "conversation",
        "transcript",
        "sessions",
        "recorder",
        "cache_report",
        "evaluation",
        "card",
        "local_models",
        "removal",
        "recommendation",
        "quantize",
        "bench",
        "server",
        "prompt_writer",
        "model",
        "engine",
        "prompt",
        "text_engine",
        "completion",
        "catalog",
        "download",
        "hub_snapshot",
        "transfer",
        "settings",
        "cache_kinds",
        "planning",
        "tokenizer",
        "llm",
        "grammar_compiler",
        "remote",
    },
    "localllm": {"llm", "engine"},
    "__main__": {"cli"},
    "localllm_kernels": set(),
}
WITHOUT_TORCH = [
    "localllm",
    "localllm.errors",
    "localllm.config",
    "localllm.catalog",
    "localllm.download",
    "localllm.template",
    "localllm.tokenizer",
    "localllm.engine.request",
    "localllm.engine.block_pool",
    "localllm.engine.prefix_cache",
    "localllm.engine.scheduler",
    "localllm.engine.memory",
    "localllm.sessions",
    "localllm.recorder",
    "localllm.conversation",
    "localllm.cli.main",
]


def place_of(module: str) -> str | None:
    """The place of one of our modules in the table above."""
    parts = module.split(".")
    if parts[0] == "localllm_kernels":
        return "localllm_kernels"
    if parts[0] != "localllm":
        return None
    return parts[1] if len(parts) > 1 else "localllm"


def module_of(path: Path) -> str:
    root = ROOT / "kernels" if "kernels" in path.relative_to(ROOT).parts[:1] else ROOT
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.append(node.module or "")
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_what_stands_below_it(path: Path) -> None:
    place = place_of(module_of(path))
    assert place in ALLOWED, f"{place} has no row in the table"
    allowed = ALLOWED[place] | {place}
    if place in LEAVES:
        allowed |= {"errors"}
    elif place != "localllm_kernels":
        allowed |= LEAVES | {"config"}
    for name in imports_of(path):
        imported = place_of(name)
        if imported in ALLOWED and imported != "localllm":
            assert imported in allowed, f"{module_of(path)} imports {name}"


def test_the_kernels_import_only_torch_and_the_standard_library() -> None:
    for path in (ROOT / "kernels" / "localllm_kernels").glob("*.py"):
        for name in imports_of(path):
            top = name.split(".")[0]
            known = top in ("torch", "triton", "localllm_kernels") or top in sys.stdlib_module_names
            assert known, f"{path.name} imports {name}"


def test_packages_do_nothing_when_imported() -> None:
    for path in (ROOT / "localllm").rglob("*/__init__.py"):
        body = ast.parse(path.read_text()).body
        assert len(body) == 1, f"{path} holds more than a docstring"


def test_no_environment_variable_is_read_at_import() -> None:
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                assert "'environ'" not in ast.dump(node), f"{path} reads the environment"


def test_jinja_is_used_in_one_place() -> None:
    for path in FILES:
        if path.name not in ("template.py", "template_sandbox.py"):
            assert not any(name.startswith("jinja2") for name in imports_of(path)), path


def test_the_command_line_waits_for_nothing_that_only_some_commands_need() -> None:
    heavy = ("msgpack", "httpx", "tokenizers", "llguidance", "jinja2", "localllm.untrusted")
    code = f"import sys, localllm.cli.main; print([n for n in {heavy} if n in sys.modules])"
    path = f"{ROOT}:{ROOT / 'kernels'}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": path, "PATH": ""},
    )
    assert done.stdout == "[]\n"


def test_the_scheduling_core_and_the_command_line_do_not_import_torch() -> None:
    code = f"import sys, {', '.join(WITHOUT_TORCH)}; print('torch' in sys.modules)"
    path = f"{ROOT}:{ROOT / 'kernels'}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": path, "PATH": ""},
    )
    assert done.stdout == "False\n"
