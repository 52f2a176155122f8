"""Who may import what. A circle between modules, or vllm or torch.distributed outside their rooms fails here."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VLLM = ("molt_ray/engine/api/", "molt_ray/engine/policy/", "molt_ray/engine/weights/")
TORCH_DISTRIBUTED = ("molt_ray/trainer/", "molt_ray/engine/weights/")

FILES = [file for folder in ("molt_ray", "graphs", "serve_apps") for file in sorted((ROOT / folder).rglob("*.py"))]
MODULES = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in FILES}


def typing_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports(tree: ast.AST, *, typed: bool) -> set[str]:
    """Names of all that a module imports, in functions too; with `typed` also what only its annotations need."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if typing_only(node) and not typed:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else str(node.module) for name in names}
        found |= imports(node, typed=typed)
    return found


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one circle of imports, none if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        return e.args[1]
    return []


def outside(module: str, rooms: tuple[str, ...]) -> list[str]:
    """Files that import `module` or a part of it though they lie in none of `rooms`."""
    found = []
    for file in FILES:
        place = file.relative_to(ROOT).as_posix()
        named = imports(ast.parse(file.read_text()), typed=False)
        if not place.startswith(rooms) and any(n == module or n.startswith(f"{module}.") for n in named):
            found.append(place)
    return found


def test_no_circles() -> None:
    graph = {
        name: imports(ast.parse(file.read_text()), typed=True) & MODULES.keys() - {name}
        for name, file in MODULES.items()
    }
    assert len(graph) > 100
    assert circle(graph) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})  # that it sees one


@pytest.mark.parametrize(("module", "rooms"), [("vllm", VLLM), ("torch.distributed", TORCH_DISTRIBUTED)])
def test_rooms(module: str, rooms: tuple[str, ...]) -> None:
    assert outside(module, rooms) == []
    assert len(outside(module, ("nowhere/",))) >= 5  # that it sees those that may
