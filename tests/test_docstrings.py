"""Every public method has a docstring, in its class or in a base class whose method it implements.

ruff checks modules, classes and functions; it knows no base classes.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = [*(ROOT / "localllm").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]
Method = ast.FunctionDef | ast.AsyncFunctionDef


def undocumented(sources: list[str]) -> list[str]:
    classes: dict[str, list[ast.ClassDef]] = {}
    for source in sources:
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(node)
    return sorted(
        f"{each.name}.{method.name}"
        for named in classes.values()
        for each in named
        if not each.name.startswith("_")
        for method in methods(each)
        if not method.name.startswith("_") and not is_documented(method.name, each, classes)
    )


def methods(of: ast.ClassDef) -> list[Method]:
    return [each for each in of.body if isinstance(each, Method)]


def is_documented(name: str, of: ast.ClassDef, classes: dict[str, list[ast.ClassDef]]) -> bool:
    if any(each.name == name and ast.get_docstring(each) for each in methods(of)):
        return True
    bases = [ast.unparse(base).partition("[")[0] for base in of.bases]
    return any(
        is_documented(name, base, classes) for known in bases for base in classes.get(known, [])
    )


def test_public_methods_have_docstrings() -> None:
    assert undocumented([path.read_text(encoding="utf-8") for path in FILES]) == []


def test_a_base_class_documents_what_implements_it() -> None:
    base = 'class Base:\n def one(self):\n  """What it does."""\n def two(self): ...\n'
    own = "class Own(Base):\n def one(self): ...\n def two(self): ...\n def _three(self): ...\n"
    assert undocumented([base, own]) == ["Base.two", "Own.two"]
    assert undocumented([own]) == ["Own.one", "Own.two"]
