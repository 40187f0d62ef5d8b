"""The repository's Python files as the rules of the house see them: modules and what they import.

A module is named as it is imported: ``kernels/relay_kernels/chunk.py`` is ``relay_kernels.chunk``,
``scripts/budget/share.py`` is ``budget.share``. An import is one wherever it stands: inside a
function it delays the cost and not the dependency, and so does one under ``TYPE_CHECKING``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

# Folders on the path of imports, each with what its modules are to the rules.
PRODUCT, SCRIPTS, TESTS = "product", "scripts", "tests"
SKIPPED = {".venv", ".git", "build", "outputs"}


@dataclass(frozen=True)
class Import:
    """A name that an import binds: ``from a import b as c`` is c for the target a.b."""

    name: str
    target: str
    level: int = 0


@dataclass(frozen=True)
class Module:
    """One file: ``path`` from the repository's root, ``name`` as imported, ``kind`` as above."""

    path: str
    name: str
    kind: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def num_lines(self) -> int:
        return len(self.text.splitlines())

    @cached_property
    def imports(self) -> list[Import]:
        return [each for node in ast.walk(self.tree) for each in _imports(node)]

    def dotted(self, node: ast.AST) -> str:
        """``dist.x.y`` as ``torch.distributed.x.y``; empty if no import binds its first name."""
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        target = self._bound.get(node.id) if isinstance(node, ast.Name) else None
        return ".".join([target, *reversed(names)]) if target else ""

    @cached_property
    def _bound(self) -> dict[str, str]:
        # ``import a.b`` binds a, and imports a.b.
        return {
            each.name: each.name if each.target.startswith(each.name + ".") else each.target
            for each in self.imports
        }


def _imports(node: ast.AST) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.asname or alias.name.split(".")[0], alias.name)
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            target = f"{node.module or ''}.{alias.name}"
            yield Import(alias.asname or alias.name, target, node.level)


@dataclass(frozen=True)
class House:
    """All modules of a repository by name."""

    modules: dict[str, Module]

    def of(self, *kinds: str) -> list[Module]:
        return [module for module in self.modules.values() if module.kind in kinds]

    def module_of(self, target: str) -> str | None:
        """The module of this house that defines a dotted name, or None."""
        while target:
            if target in self.modules:
                return target
            target = target.rpartition(".")[0]
        return None

    @cached_property
    def imported(self) -> dict[str, set[str]]:
        """By module: the other modules of this house that it imports."""
        edges = {}
        for name, module in self.modules.items():
            found = {self.module_of(each.target) for each in module.imports}
            edges[name] = {each for each in found if each is not None and each != name}
        return edges


def read_house(root: Path) -> House:
    """Every Python file below ``root`` that is not empty."""
    modules = {}
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root)
        if path.parts[0] in SKIPPED or not file.stat().st_size:
            continue
        kind = path.parts[0] if path.parts[0] in (SCRIPTS, TESTS) else PRODUCT
        inside = path.parts[1:] if path.parts[0] in ("kernels", SCRIPTS) else path.parts
        name = ".".join(inside).removesuffix(".py").removesuffix(".__init__")
        modules[name] = Module(path.as_posix(), name, kind, file.read_text("utf-8"))
    return House(modules)
