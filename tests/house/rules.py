"""The rules of the house, one function each: what breaks it, in words, or nothing.

A rule is given all modules and returns its offenders as ``place: what is wrong``.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator

from tests.house.tree import PRODUCT, SCRIPTS, TESTS, House, Module

MOST_FILES_A_FOLDER = 20
MOST_LINES = 400
FEWEST_LINES_OF_ONE_USER = 40
MOST_PARAMETERS = 7

# What each place stands on, and so what it may import: that, and what that stands on in turn.
# A module belongs to the longest name here that it begins with.
STANDS_ON: dict[str, tuple[str, ...]] = {
    "titan_relay": (),
    "titan_relay.units": (),
    "titan_relay.private_torch": (),
    "titan_relay.local_ranks": ("titan_relay.private_torch",),
    "relay_kernels": (),
    "titan_relay.measure": ("titan_relay.units", "titan_relay.private_torch"),
    "titan_relay.recompute": ("titan_relay.measure",),
    "titan_relay.ops": ("titan_relay.recompute",),
    "titan_relay.config": ("titan_relay", "titan_relay.units"),
    "titan_relay.launcher": ("titan_relay.config",),
    "titan_relay.moe": ("titan_relay.ops", "titan_relay.config", "relay_kernels"),
    "titan_relay.data": ("titan_relay.config",),
    "titan_relay.titan.private_torchtitan": ("titan_relay.moe", "titan_relay.data"),
    "titan_relay.titan.device": ("titan_relay.titan.private_torchtitan",),
    "titan_relay.titan": ("titan_relay.titan.device", "titan_relay.local_ranks"),
    "titan_relay.titan.model": ("titan_relay.titan",),
    "titan_relay.titan.metrics": ("titan_relay.titan.model",),
    "titan_relay.titan.recompute": ("titan_relay.titan.metrics",),
    "titan_relay.titan.hf": ("titan_relay.titan.recompute",),
    "titan_relay.titan.train": ("titan_relay.titan.hf",),
    "titan_relay.titan.hf_compare": ("titan_relay.titan.train",),
    "titan_relay.titan.plan": ("titan_relay.titan.train",),
    "titan_relay.titan.preflight": ("titan_relay.titan.plan",),
    "titan_relay.titan.run": ("titan_relay.titan.preflight", "titan_relay.launcher"),
    "titan_relay.validate": ("titan_relay.titan.model", "titan_relay.data"),
    "titan_relay.commands": (
        "titan_relay.titan.run",
        "titan_relay.titan.hf_compare",
        "titan_relay.validate",
    ),
    "titan_relay.cli": ("titan_relay.commands",),
    "titan_relay.__main__": ("titan_relay.cli",),
    "train": ("titan_relay.cli",),
    SCRIPTS: ("train", "titan_relay.__main__"),
}
WITHOUT_TORCH = (
    "titan_relay.units",
    "titan_relay.config",
    "titan_relay.launcher",
    "titan_relay.data",
)
WITH_TORCHTITAN = ("titan_relay.titan",)

# Names that several modules of the product give to their own part of one idea.
SHARED_NAMES = {
    *("Adapter", "build", "main", "parser"),
    # A family's parts are configured (``families/parts.py``) under the names of what computes them.
    *("feed_forward", "moe", "rms_norm", "rope"),
}

# Libraries whose private names have one home each.
PRIVATE_NAMES = {
    "torch": "titan_relay.private_torch",
    "torchtitan": "titan_relay.titan.private_torchtitan",
}
# Attributes of torch that are settings: assigning one is not a patch.
SETTINGS = ("torch.backends", "torch._dynamo.config", "torch._inductor.config")


def imports_go_down(house: House) -> Iterator[str]:
    """A module imports only what its place stands on."""
    for module in house.of(PRODUCT, SCRIPTS):
        place = _place(module)
        if any(each.level for each in module.imports):
            yield f"{module.path}: a relative import"
        if place is None:
            yield f"{module.path}: its place is not in STANDS_ON"
            continue
        allowed = _below(place) | {place}
        for name in sorted(house.imported[module.name]):
            if (other := _place(house.modules[name])) not in allowed:
                yield f"{module.path}: imports {name}, and {place} does not stand on {other}"


def no_circles(house: House) -> Iterator[str]:
    """No module imports itself over others."""
    names = {module.name for module in house.of(PRODUCT, SCRIPTS)}
    for circle in _circles({name: house.imported[name] & names for name in names}):
        yield f"{', '.join(circle)}: a circle"


def only_titan_imports_torchtitan(house: House) -> Iterator[str]:
    """torchtitan stays in its package; configuration and data load without torch."""
    for module in house.of(PRODUCT):
        for each in module.imports:
            if within(each.target, "torchtitan") and not within(module.name, *WITH_TORCHTITAN):
                yield f"{module.path}: imports torchtitan"
            if within(each.target, "torch") and within(module.name, *WITHOUT_TORCH):
                yield f"{module.path}: imports torch"


def folders_are_small(house: House) -> Iterator[str]:
    """At most 20 files a folder."""
    folders: defaultdict[str, int] = defaultdict(int)
    for module in house.of(PRODUCT, SCRIPTS, TESTS):
        folders[module.path.rpartition("/")[0]] += 1
    for folder, count in folders.items():
        if count > MOST_FILES_A_FOLDER:
            yield f"{folder}: {count} files"


def files_are_short(house: House) -> Iterator[str]:
    """At most 400 lines a file."""
    for module in house.of(PRODUCT, SCRIPTS, TESTS):
        if module.num_lines > MOST_LINES:
            yield f"{module.path}: {module.num_lines} lines"


def no_crumbs(house: House) -> Iterator[str]:
    """A file of a few lines that a single other file imports belongs into that file."""
    users: defaultdict[str, list[str]] = defaultdict(list)
    for module in house.of(PRODUCT, SCRIPTS):
        for name in house.imported[module.name]:
            users[name].append(module.path)
    for module in house.of(PRODUCT):
        if module.path.endswith(("__init__.py", "__main__.py")):
            continue
        if module.num_lines < FEWEST_LINES_OF_ONE_USER and len(users[module.name]) == 1:
            yield f"{module.path}: {module.num_lines} lines for {users[module.name][0]} alone"


def names_are_given_once(house: House) -> Iterator[str]:
    """A public class or function stands in one module of the product, but for SHARED_NAMES."""
    homes: defaultdict[str, list[str]] = defaultdict(list)
    for module in house.of(PRODUCT):
        for name in {each.name for each in module.tree.body if isinstance(each, _DEFINITIONS)}:
            if not name.startswith("_") and name not in SHARED_NAMES:
                homes[name].append(module.path)
    for name, paths in homes.items():
        if len(paths) > 1:
            yield f"{name}: in {', '.join(paths)}"


def private_names_have_one_home(house: House) -> Iterator[str]:
    """What is private to a library, or patched in it, stands in that library's one module."""
    own = _private_names_of(house, PRODUCT)
    for module in house.of(PRODUCT):
        for name in _private_uses(module, own):
            homes = [home for library, home in PRIVATE_NAMES.items() if within(name, library)]
            if module.name not in (homes or PRIVATE_NAMES.values()):
                yield f"{module.path}: {name}"


def nothing_of_ours_is_patched(house: House) -> Iterator[str]:
    """An attribute of our modules and classes is set where it is defined."""
    for module in house.of(PRODUCT, SCRIPTS, TESTS):
        for name in _patched(module):
            if house.module_of(name) is not None:
                yield f"{module.path}: sets {name}"


def tests_use_public_names(house: House) -> Iterator[str]:
    """A test sees of the product and the scripts what any other user would."""
    own = _private_names_of(house, PRODUCT, SCRIPTS) - _private_names_of(house, TESTS)
    for module in house.of(TESTS):
        for name in sorted({each.target for each in module.imports}):
            home = house.modules.get(house.module_of(name) or "", module)
            if _is_private(name) and home.kind != TESTS:
                yield f"{module.path}: {name}"
        for node in ast.walk(module.tree):
            if (name := _attribute(node)) in own and ast.unparse(node) != f"self.{name}":
                yield f"{module.path}: {name}"


def few_parameters(house: House) -> Iterator[str]:
    """At most seven parameters, but for Triton's kernels and registered ops."""
    for module in house.of(PRODUCT, SCRIPTS):
        for function in ast.walk(module.tree):
            if not isinstance(function, _FUNCTIONS) or _is_registered(function):
                continue
            if (count := _num_parameters(function)) > MOST_PARAMETERS:
                yield f"{module.path}: {function.name} has {count}"


def files_say_what_they_are_for(house: House) -> Iterator[str]:
    """Every file that is not empty begins with a docstring."""
    for module in house.of(PRODUCT, SCRIPTS, TESTS):
        if not ast.get_docstring(module.tree):
            yield f"{module.path}: no docstring"


RULES: list[Callable[[House], Iterator[str]]] = [
    imports_go_down,
    no_circles,
    only_titan_imports_torchtitan,
    folders_are_small,
    files_are_short,
    no_crumbs,
    names_are_given_once,
    private_names_have_one_home,
    nothing_of_ours_is_patched,
    tests_use_public_names,
    few_parameters,
    files_say_what_they_are_for,
]

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def _place(module: Module) -> str | None:
    if module.kind != PRODUCT:
        return module.kind
    places = [place for place in STANDS_ON if within(module.name, place)]
    place = max(places, key=len, default=None)
    # Otherwise a new package would pass as part of the root.
    return None if place == "titan_relay" != module.name else place


def _below(place: str) -> set[str]:
    direct = set(STANDS_ON.get(place, ()))
    return direct.union(*(_below(each) for each in direct))


def _circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Sets of nodes that reach one another, each sorted."""
    reached = {name: _reached(name, edges) for name in edges}
    circles = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in edges
        if name in reached[name]
    }
    return [list(circle) for circle in sorted(circles)]


def _reached(start: str, edges: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    todo = list(edges[start])
    while todo:
        if (name := todo.pop()) not in found:
            found.add(name)
            todo += edges[name]
    return found


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def _private_uses(module: Module, own: set[str]) -> set[str]:
    """Dotted names of libraries with a private part, patches, and private attributes not ours.

    Of ``group._name`` nobody knows whose ``group`` is; but if no class of the product has a
    ``_name``, it is a library's.
    """
    used = {each.target for each in module.imports}
    foreign = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and (name := module.dotted(node)):
            used.add(name)
        elif (attribute := _attribute(node)) and _is_private(attribute) and attribute not in own:
            foreign.add(f"(object).{attribute}")
    patched = {name for name in _patched(module) if not within(name, *SETTINGS)}
    libraries = {name for name in used if _is_private(name)} | patched
    found = {name for name in libraries if within(name, *PRIVATE_NAMES)}
    # ``torch._C`` is part of every ``torch._C.name``.
    return foreign | {name for name in found if not any(x.startswith(f"{name}.") for x in found)}


def _private_names_of(house: House, *kinds: str) -> set[str]:
    """Private names that modules define, and those that Python gives to named tuples."""
    own = {"_replace", "_asdict", "_fields"}
    for node in (node for module in house.of(*kinds) for node in ast.walk(module.tree)):
        if isinstance(node, _DEFINITIONS):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif _stores_attribute(node) and ast.unparse(node.value) in ("self", "cls"):
            own.add(node.attr)
    return {name for name in own if _is_private(name)}


def _stores_attribute(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del)


def _attribute(node: ast.AST) -> str:
    """The attribute that a node reads or sets, also where it is given as a text."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Call) and _last(node.func) in ("getattr", "setattr", "hasattr"):
        texts = [each.value for each in node.args[1:2] if isinstance(each, ast.Constant)]
        return next((text for text in texts if isinstance(text, str)), "")
    return ""


def _patched(module: Module) -> Iterator[str]:
    """Dotted names of imported things whose attributes a module sets."""
    for node in ast.walk(module.tree):
        if _stores_attribute(node):
            yield module.dotted(node)
        elif isinstance(node, ast.Call) and _last(node.func) == "setattr" and node.args:
            owner = node.args[0]
            if isinstance(owner, ast.Constant):  # pytest's monkeypatch takes a dotted text
                yield str(owner.value)
            elif name := module.dotted(owner):
                yield f"{name}.{_attribute(node) or '...'}"


def _is_registered(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = {_last(each) for each in function.decorator_list}
    return bool(names & {"jit", "custom_op", "register_fake"})


def _last(node: ast.AST) -> str:
    """``register`` of ``a.b.register(...)``."""
    while isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    named = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return len([each for each in named if each.arg not in ("self", "cls")])
