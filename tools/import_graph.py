"""What imports what, read from the source: `python tools/import_graph.py [CHECKOUT]`.

A room is a folder of modules, or a single module at the root of `localllm`; the kernels are one
room. An arrow is an import from one room into another. A room's floor is the longest chain of
arrows down from it.
"""

import ast
import sys
from collections import defaultdict
from pathlib import Path

PACKAGES = {"localllm": "localllm", "localllm_kernels": "kernels/localllm_kernels"}


def modules_of(root: Path) -> dict[str, Path]:
    """Every module by its name."""
    found = {}
    for package, place in PACKAGES.items():
        for path in sorted((root / place).rglob("*.py")):
            parts = path.relative_to(root / place).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


def room_of(module: str) -> str:
    """The room that a module belongs to; folders within a room belong to it."""
    parts = module.split(".")
    return parts[0] if parts[0] != "localllm" else ".".join(parts[:2])


def imports_of(path: Path, modules: dict[str, Path]) -> set[str]:
    """Our modules that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                names.add(whole if whole in modules else node.module)
    return names & modules.keys()


def arrows_of(root: Path) -> dict[str, set[str]]:
    """Which rooms each room imports from; every room has an entry."""
    modules = modules_of(root)
    arrows: dict[str, set[str]] = defaultdict(set)
    for module, path in modules.items():
        here = room_of(module)
        rooms = {room_of(name) for name in imports_of(path, modules)}
        # The version is in the package's own __init__, which imports only on first use.
        arrows[here] |= rooms - {here, "localllm"}
    return dict(arrows)


def floors_of(arrows: dict[str, set[str]]) -> dict[str, int]:
    """The floor of each room, 0 if it imports from none. Raises: ValueError for a cycle."""
    floors: dict[str, int] = {}

    def floor(room: str, above: tuple[str, ...]) -> int:
        if room in above:
            raise ValueError("a cycle: " + " → ".join((*above[above.index(room) :], room)))
        if room not in floors:
            below = (floor(each, (*above, room)) for each in arrows[room])
            floors[room] = 1 + max(below, default=-1)
        return floors[room]

    for room in arrows:
        floor(room, ())
    return floors


def main() -> int:
    """Print the rooms by floor, and the counts."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    arrows = arrows_of(root)
    floors = floors_of(arrows)
    for room in sorted(arrows, key=lambda room: (floors[room], room)):
        below = ", ".join(sorted(each.removeprefix("localllm.") for each in arrows[room]))
        sys.stdout.write(f"{floors[room]:2}  {room.removeprefix('localllm.'):28} {below}\n")
    count = sum(map(len, arrows.values()))
    sys.stdout.write(f"{len(arrows)} rooms, {count} arrows, {1 + max(floors.values())} floors\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
