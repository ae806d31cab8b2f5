"""What imports what, read from the source: `python tools/import_graph.py [CHECKOUT]`.

A room is a folder of modules, or a single module at the root of `localllm`; the kernels are one
room. An arrow is an import from one room into another. A room's floor is the longest chain of
arrows down from it.

A circle is a set of modules that import each other. An upward arrow is an import within a folder,
between two of its files and folders, that closes a circle of them, each folder taken as one: a
folder has a floor too, so it imports what is below and is imported from above. All imports count,
wherever they stand in a file.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGES = {"localllm": "localllm", "localllm_kernels": "kernels/localllm_kernels"}
LONG_LINES = 60

Graph = Mapping[str, set[str]]


@cache
def parsed(path: Path) -> ast.Module:
    """A file's source as a tree."""
    return ast.parse(path.read_text("utf-8"))


def modules_of(root: Path) -> dict[str, Path]:
    """Every module by its name; a package's own is `NAME.__init__`."""
    found = {}
    for package, place in PACKAGES.items():
        for path in sorted((root / place).rglob("*.py")):
            parts = path.relative_to(root / place).with_suffix("").parts
            found[".".join((package, *parts))] = path
    return found


def room_of(module: str) -> str:
    """The room that a module belongs to; folders within a room belong to it."""
    parts = module.split(".")
    return parts[0] if parts[0] != "localllm" else ".".join(parts[:2])


def imports_of(path: Path, modules: Mapping[str, Path]) -> set[str]:
    """Our modules that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                is_module = whole in modules or f"{whole}.__init__" in modules
                names.add(whole if is_module else node.module)
    return {each for name in names for each in (name, f"{name}.__init__") if each in modules}


def graph_of(root: Path) -> dict[str, set[str]]:
    """For each module, those that it imports."""
    modules = modules_of(root)
    return {name: imports_of(path, modules) - {name} for name, path in modules.items()}


def circles_of(graph: Graph) -> list[list[str]]:
    """The circles: all largest sets of names from each of which every other can be reached.

    Source: Tarjan, "Depth-first search and linear graph algorithms", 1972.
    """
    low: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        place = low[name] = len(low)
        start = len(path)
        path.append(name)
        for other in sorted(graph.get(name, ())):
            if other not in low:
                visit(other)
            low[name] = min(low[name], low[other])
        if low[name] == place:
            circle = path[start:]
            del path[start:]
            low.update(dict.fromkeys(circle, sys.maxsize))
            if len(circle) > 1:
                found.append(sorted(circle))

    for name in graph:
        if name not in low:
            visit(name)
    return found


def upward_arrows_of(graph: Graph) -> Iterator[str]:
    """The imports that close a circle of the files and folders of one folder, each as
    "FROM imports TO".
    """
    folders = {".".join(name.split(".")[:depth]) for name in graph for depth in range(1, 9)}
    for folder in sorted(folders - graph.keys()):
        depth = folder.count(".") + 2
        within = [name for name in graph if name.startswith(f"{folder}.")]

        def child(name: str, depth: int = depth) -> str:
            return ".".join(name.split(".")[:depth])

        arrows = [(name, other) for name in within for other in graph[name] if other in within]
        beside: dict[str, set[str]] = defaultdict(set)
        for name, other in arrows:
            beside[child(name)] |= {child(other)} - {child(name)}
        for circle in circles_of(dict(beside)):
            for name, other in arrows:
                if child(name) != child(other) and {child(name), child(other)} <= {*circle}:
                    yield f"{name} imports {other}"


def arrows_of(graph: Graph) -> dict[str, set[str]]:
    """Which rooms each room imports from; every room has an entry."""
    # The package itself is in no room; it imports what it gives out on first use.
    package = "localllm.__init__"
    arrows: dict[str, set[str]] = defaultdict(set)
    for module in graph.keys() - {package}:
        here = room_of(module)
        arrows[here] |= {room_of(name) for name in graph[module] - {package}} - {here}
    return dict(arrows)


def floors_of(arrows: Graph) -> dict[str, int]:
    """The floor of each room, 0 if it imports from none. Raises: ValueError for a circle."""
    floors: dict[str, int] = {}

    def floor(room: str, above: tuple[str, ...]) -> int:
        if room in above:
            raise ValueError("a circle: " + " → ".join((*above[above.index(room) :], room)))
        if room not in floors:
            below = (floor(each, (*above, room)) for each in arrows[room])
            floors[room] = 1 + max(below, default=-1)
        return floors[room]

    for room in arrows:
        floor(room, ())
    return floors


@dataclass(frozen=True, slots=True)
class Function:
    """A function and how many lines it has, decorators apart."""

    module: str
    name: str
    num_lines: int
    is_kernel: bool


def functions_of(modules: Mapping[str, Path]) -> Iterator[Function]:
    """Every function of the modules; a kernel is one that Triton compiles."""
    for module, path in modules.items():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                decorators = {ast.unparse(each) for each in node.decorator_list}
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                is_kernel = any(each.startswith("triton.jit") for each in decorators)
                yield Function(module, node.name, num_lines, is_kernel)


def describe(root: Path) -> Iterator[str]:
    """The rooms by floor with their lines, then what should be zero, then the long functions."""
    modules, graph = modules_of(root), graph_of(root)
    arrows = arrows_of(graph)
    floors = floors_of(arrows)
    lines: dict[str, int] = defaultdict(int)
    for module, path in modules.items():
        lines[room_of(module)] += len(path.read_text("utf-8").splitlines())
    yield "floor  lines  room                 imports"
    for room in sorted(arrows, key=lambda room: (floors[room], room)):
        below = ", ".join(sorted(each.removeprefix("localllm.") for each in arrows[room]))
        name = room.removeprefix("localllm.")
        yield f"{floors[room]:5} {lines[room]:6}  {name:20} {below}".rstrip()
    count = sum(map(len, arrows.values()))
    yield f"{len(arrows)} rooms, {count} arrows, {1 + max(floors.values())} floors"
    yield from _counted("circles", (" ↔ ".join(circle) for circle in circles_of(graph)))
    yield from _counted("upward arrows", upward_arrows_of(graph))
    long = [each for each in functions_of(modules) if each.num_lines > LONG_LINES]
    long.sort(key=lambda each: -each.num_lines)
    told = (
        f"{each.num_lines:4}  {each.module}.{each.name}" + "  (a kernel)" * each.is_kernel
        for each in long
    )
    yield from _counted(f"functions over {LONG_LINES} lines", told)


def _counted(what: str, found: Iterable[str]) -> Iterator[str]:
    rows = [*found]
    yield f"{len(rows)} {what}"
    yield from (f"    {row}" for row in rows)


def main() -> int:
    """Print all of it."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    for line in describe(root):
        sys.stdout.write(f"{line}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
