"""Completion scripts, in the shells that are here."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fork_server import ROOT

from localllm.errors import ExitCode

# Each prints what the shell offers behind `localllm show po`.
ASKING = {
    "bash": "source {script}; COMP_WORDS=(localllm show po); COMP_CWORD=2; "
    "_localllm_completion localllm; echo ${{COMPREPLY[@]}}",
    "fish": "source {script}; complete -C 'localllm show po'",
}


@pytest.mark.parametrize("shell", ASKING)
def test_a_shell_completes_models(
    localllm: Callable[..., Any], tmp_path: Path, shell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script, program = tmp_path / "script", tmp_path / "localllm"
    script.write_text(localllm("--show-completion", shell).out)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m localllm "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'kernels'}")
    command = [shell, "-c", ASKING[shell].format(script=script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.split() == ["pocket", "pocket-draft"]


def test_completion_is_shown_for_the_named_shell(localllm: Callable[..., Any]) -> None:
    assert "compdef" in localllm("--show-completion", "zsh").out
    refused = localllm("--show-completion", "tcsh")
    assert refused.code == ExitCode.USAGE
    assert "one of bash, zsh, fish, pwsh" in refused.err
