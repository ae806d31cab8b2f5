"""A module that is imported late is executed with its first use, and then like any other."""

import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import sys
sys.path[:0] = [{folder!r}, {repo!r}]
from localllm.process.late_import import import_late
import_late("parent.late")
import parent
from parent import late
import parent.late
assert told == [], told
assert late.value == 3 and told == ["executed"]
assert late.__name__ == "parent.late" and not hasattr(late, "other")
import parent.late as again
assert again is late and told == ["executed"]
"""


def test_a_late_module_is_executed_once_with_its_first_use(tmp_path: Path) -> None:
    (tmp_path / "parent").mkdir()
    (tmp_path / "parent" / "__init__.py").write_text("")
    late = "import __main__\n__main__.told.append('executed')\nvalue = 3\n"
    (tmp_path / "parent" / "late.py").write_text(late)
    repo = str(Path(__file__).parents[2])
    program = "told = []\n" + _PROGRAM.format(folder=str(tmp_path), repo=repo)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_torch_works_without_its_meta_kernels_and_has_them_when_they_are_used() -> None:
    program = """
import sys
from localllm.process.late_import import OF_COMPILERS, import_late
import_late(OF_COMPILERS)
import torch
assert "torch._decomp" not in sys.modules
assert torch.ones(2, 3).softmax(-1).sum().item() == 2
assert torch._meta_registrations.meta_index_Tensor is not None
assert "torch._decomp" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
