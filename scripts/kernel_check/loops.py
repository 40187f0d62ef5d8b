"""The loops of a kernel's machine code: cycles of its control flow, with what they hold.

Compilers move cold code (such as waiting at a barrier) behind the rest and jump back from there, so
a backward branch alone is no loop: control must be able to come round.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import networkx as nx

_BRANCHES = ("BRA", "JMP")
_CALLS = ("CALL",)
_ENDS = ("EXIT", "RET", "BRX", "JMX")  # computed targets: see _graph
_TARGET = re.compile(r"0x([0-9a-f]+)\s*$")


@dataclass(frozen=True)
class Instruction:
    address: int
    has_predicate: bool
    name: str  # with its modifiers, such as LDG.E.128
    operands: str

    @property
    def is_conditional(self) -> bool:
        """A predicate stands before a branch, or is its first operand."""
        return self.has_predicate or "," in self.operands


Loop = frozenset[int]  # the addresses of a natural loop


def find_loops(instructions: Sequence[Instruction]) -> list[Loop]:
    """Every natural loop: a header, and all from which it is reached again."""
    if not instructions:
        return []
    graph = _graph(instructions)
    start = instructions[0].address
    dominator = nx.immediate_dominators(graph, start)
    bodies: dict[int, set[int]] = {}
    for end, header in graph.edges:
        if _dominates(header, end, dominator, start):
            bodies.setdefault(header, {header}).update(_body(graph, header, end))
    # The last instruction that branches to itself pads the code.
    endless = [e.address for e in instructions if e.name == "BRA" and _target(e) == e.address]
    return [frozenset(body) for body in bodies.values() if body != set(endless[-1:])]


def innermost(loops: Sequence[Loop]) -> list[Loop]:
    return [loop for loop in loops if not any(other < loop for other in loops)]


def _graph(instructions: Sequence[Instruction]) -> "nx.DiGraph[int]":
    """Instructions by address and where control goes from each."""
    graph: nx.DiGraph[int] = nx.DiGraph()
    addresses = {each.address for each in instructions}
    for index, each in enumerate(instructions):
        graph.add_node(each.address)
        kind = each.name.split(".")[0]
        target = _target(each)
        if kind in (*_BRANCHES, *_CALLS) and target in addresses:
            graph.add_edge(each.address, target)
        falls_through = each.is_conditional or kind not in (*_BRANCHES, *_ENDS)
        if falls_through and index + 1 < len(instructions):
            graph.add_edge(each.address, instructions[index + 1].address)
    # What nothing leads to is reached by a jump whose target is computed.
    start = instructions[0].address
    reached = {start} | nx.descendants(graph, start)
    for each in instructions:
        if each.address not in reached:
            graph.add_edge(start, each.address)
            reached |= {each.address} | nx.descendants(graph, each.address)
    return graph


def _target(instruction: Instruction) -> int | None:
    found = _TARGET.search(instruction.operands)
    return int(found[1], 16) if found else None


def _dominates(header: int, node: int, dominator: dict[int, int], start: int) -> bool:
    while node not in (header, start):
        node = dominator[node]
    return node == header


def _body(graph: "nx.DiGraph[int]", header: int, end: int) -> set[int]:
    """What leads to ``end`` without passing ``header``."""
    inside = nx.restricted_view(graph, [header], [])
    return {end} | nx.ancestors(inside, end) if end != header else {header}
