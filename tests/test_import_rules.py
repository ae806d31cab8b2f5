"""Who may import whom, read from the source; and what must not wait for torch."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tools.import_graph import (
    circles_of,
    functions_of,
    graph_of,
    modules_of,
    parsed,
    upward_arrows_of,
)
from tools.import_graph import imports_of as imports_of_ours

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "localllm").rglob("*.py")) + sorted((ROOT / "kernels").rglob("*.py"))
# Sixty are the limit of style; a few functions are one thought that does not divide.
MAX_LINES, MAX_KERNEL_LINES = 80, 150
# Each room may import what stands left of it, and nothing else of ours.
LINE = [
    *("localllm_kernels", "errors", "files", "user", "text", "model"),
    *("operators", "schedule", "drafting", "engine"),
    *("grammars", "process", "untrusted", "hub", "answer", "cost", "attach", "chat"),
    *("quantize", "bench", "server", "replicas", "launch", "cli", "__main__"),
]
WITHOUT_TORCH = [
    "localllm",
    "localllm.errors",
    "localllm.model.families.table",
    "localllm.hub.catalog",
    "localllm.hub.download",
    "localllm.hub.local_models",
    "localllm.hub.card",
    "localllm.model.weight_check",
    "localllm.text.template",
    "localllm.text.tokenizer",
    *(f"localllm.schedule.{path.stem}" for path in (ROOT / "localllm/schedule").glob("*.py")),
    "localllm.engine.memory",
    "localllm.chat.store",
    "localllm.chat.recorder",
    "localllm.chat.conversation",
    "localllm.cli.main",
]


def room_of(module: str) -> str | None:
    """The room of one of our modules; the version stands in none."""
    parts = module.split(".")
    if parts[0] == "localllm_kernels":
        return parts[0]
    return parts[1] if parts[0] == "localllm" and len(parts) > 1 else None


def module_of(path: Path) -> str:
    root = ROOT / "kernels" if "kernels" in path.relative_to(ROOT).parts[:1] else ROOT
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


@cache
def imports_of(path: Path) -> list[str]:
    names = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.append(node.module or "")
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def imports_from_the_right(path: Path) -> list[str]:
    """Imports of what does not stand left of a file."""
    here = room_of(module_of(path))
    if here is None:
        return []  # the package itself, which gives out LLM when it is asked for
    assert here in LINE, f"{here} has no place in the line"
    left = [None, "__version__", *LINE[: LINE.index(here) + 1]]
    wrong = [name for name in imports_of(path) if room_of(name) not in left]
    return [f"{module_of(path)} imports {name}" for name in wrong]


def test_a_file_imports_only_what_stands_left_of_it() -> None:
    assert [line for path in FILES for line in imports_from_the_right(path)] == []


def test_ray_is_imported_where_replicas_run_and_nowhere_else() -> None:
    here = {path.stem for path in FILES if any(n.split(".")[0] == "ray" for n in imports_of(path))}
    assert here == {"application", "client", "deployment", "here", "replica", "router"}
    starting = imports_of(ROOT / "localllm" / "replicas" / "scale.py")
    assert not any(name.startswith("localllm.replicas") for name in starting)


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles_of(graph_of(ROOT)) == []


def test_no_folder_imports_what_imports_it() -> None:
    assert [*upward_arrows_of(graph_of(ROOT))] == []


def test_circles_and_upward_arrows_are_found() -> None:
    chain = {"a.b.__init__": set[str](), "a.b.c": {"a.d"}, "a.d": {"a.e"}, "a.e": set[str]()}
    assert circles_of(chain) == []
    assert [*upward_arrows_of(chain)] == []
    # No two modules import each other, but b and what lies beside it do.
    around = {**chain, "a.e": {"a.b.f"}, "a.b.f": set[str]()}
    assert circles_of(around) == []
    assert [*upward_arrows_of(around)] == [
        "a.b.c imports a.d",
        "a.d imports a.e",
        "a.e imports a.b.f",
    ]
    assert circles_of({**chain, "a.e": {"a.b.c"}}) == [["a.b.c", "a.d", "a.e"]]


def test_an_import_counts_wherever_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from localllm.errors import ExitCode\n"
        "def f():\n    from localllm.text import template\n    import localllm\n"
    )
    modules = dict.fromkeys(
        ("localllm.errors", "localllm.text.template", "localllm.__init__"), file
    )
    assert imports_of_ours(file, modules) == modules.keys()


def test_functions_are_short() -> None:
    long = [
        f"{each.module}.{each.name}: {each.num_lines}"
        for each in functions_of(modules_of(ROOT))
        if each.num_lines > (MAX_KERNEL_LINES if each.is_kernel else MAX_LINES)
    ]
    assert long == []


def test_nothing_lies_loose_at_the_root() -> None:
    loose = {path.name for path in (ROOT / "localllm").glob("*.py")}
    assert loose == {"__init__.py", "__main__.py", "errors.py"}


def test_the_kernels_import_only_torch_and_the_standard_library() -> None:
    for path in (ROOT / "kernels").rglob("*.py"):
        for name in imports_of(path):
            top = name.split(".")[0]
            known = top in ("torch", "triton", "localllm_kernels") or top in sys.stdlib_module_names
            assert known, f"{path.name} imports {name}"


def test_packages_do_nothing_when_imported() -> None:
    for path in (ROOT / "localllm").rglob("*/__init__.py"):
        body = parsed(path).body
        assert len(body) == 1, f"{path} holds more than a docstring"


def test_no_environment_variable_is_read_at_import() -> None:
    for path in FILES:
        for node in parsed(path).body:
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                assert "'environ'" not in ast.dump(node), f"{path} reads the environment"


def test_jinja_is_used_in_one_place() -> None:
    for path in FILES:
        if path.name not in ("template.py", "template_sandbox.py"):
            assert not any(name.startswith("jinja2") for name in imports_of(path)), path


def loaded_by(modules: Iterable[str], among: Iterable[str]) -> list[str]:
    """Which of `among` a new process has loaded once it has imported `modules`."""
    code = f"import sys, {', '.join(modules)}; print(*(n for n in {[*among]} if n in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "PATH": ""},
    )
    return done.stdout.split()


def test_the_command_line_waits_for_nothing_that_only_some_commands_need() -> None:
    heavy = ("msgpack", "httpx", "tokenizers", "llguidance", "jinja2", "localllm.untrusted")
    assert loaded_by(["localllm.cli.main"], heavy) == []
    assert loaded_by(["localllm.text.template"], heavy) == ["jinja2"]


def test_the_scheduling_core_and_the_command_line_do_not_import_torch() -> None:
    assert loaded_by(WITHOUT_TORCH, ["torch"]) == []
    assert loaded_by(["localllm.model.rope"], ["torch"]) == ["torch"]


def test_what_lists_and_describes_models_does_not_wait_for_torch() -> None:
    commands = [["ls"], ["show", "pocket"], ["show", "pocket", "--template"], ["ps"], ["cache"]]
    assert run_and_look(commands, "torch") == "0 0 0 0 0 False"


def test_an_answer_on_a_cpu_does_not_wait_for_triton() -> None:
    words = ["chat", "pocket", "Hi.", "-n", "1", "--device", "cpu", "--keepalive", "0"]
    assert run_and_look([words], "triton") == "0 False"


def test_a_list_of_the_commands_waits_for_none_of_them() -> None:
    for command in (["--help"], ["ls"]):
        for module in ("localllm.cli.chat.flags", "localllm.cli.bench.command"):
            assert run_and_look([command], module) == "0 False"


def run_and_look(commands: list[list[str]], module: str) -> str:
    """The exit codes of commands in a new process, and whether `module` is loaded then."""
    code = (
        "import sys; from localllm.cli.main import run; "
        f"print(*(run(words) for words in {commands}), '{module}' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
    )
    return done.stdout.splitlines()[-1]
