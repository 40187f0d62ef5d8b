"""The house keeps its rules (``tests/house/rules.py``), and each rule notices who breaks it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.house import rules
from tests.house.tree import House, read_house

ROOT = Path(__file__).resolve().parent.parent
Rule = Callable[[House], Iterator[str]]

# A repository that keeps every rule.
HEALTHY = {
    "titan_relay/__init__.py": "'''A product.'''",
    "titan_relay/private_torch.py": "'''Names.'''\nfrom torch._C import _name as name",
    "titan_relay/measure/count.py": (
        "'''Counts.'''\n"
        "import torch\n"
        "from titan_relay.private_torch import name\n"
        "torch.backends.cudnn.enabled = False\n"
        "class Counter:\n"
        "    def __init__(self):\n"
        "        self._total = 0\n"
        "    def add(self, a, b, c, d, e, f, g):\n"
        "        return self._total\n"
    ),
    "titan_relay/titan/device.py": (
        "'''Devices.'''\nimport torchtitan\nfrom titan_relay import private_torch"
    ),
    "scripts/bench.py": "'''Measures.'''\nfrom titan_relay.measure import count",
    "train.py": "'''Trains.'''\nfrom titan_relay.measure.count import Counter",
    "tests/test_count.py": "'''Tests.'''\nfrom titan_relay.measure.count import Counter",
}

# By rule: files that break it, and what it then says.
LONG, EIGHT = "'''Long.'''\n" + "\n" * 400, "a, b, c, d, e, f, g, h"
PLANTED: list[tuple[Rule, dict[str, str], str]] = [
    (
        rules.imports_go_down,
        {"titan_relay/measure/up.py": "def late():\n    from titan_relay.titan import device"},
        "titan_relay/measure/up.py: imports titan_relay.titan.device, "
        "and titan_relay.measure does not stand on titan_relay.titan.device",
    ),
    (
        rules.imports_go_down,
        {"titan_relay/titan/device.py": "from titan_relay.titan.train.build import x"}
        | {"titan_relay/titan/train/build.py": "x = 1"},
        "titan_relay/titan/device.py: imports titan_relay.titan.train.build, "
        "and titan_relay.titan.device does not stand on titan_relay.titan.train",
    ),
    (
        rules.imports_go_down,
        {"titan_relay/measure/near.py": "from . import count"},
        "titan_relay/measure/near.py: a relative import",
    ),
    (
        rules.imports_go_down,
        {"titan_relay/shed/tool.py": "x = 1"},
        "titan_relay/shed/tool.py: its place is not in STANDS_ON",
    ),
    (
        rules.imports_go_down,
        {"titan_relay/measure/tested.py": "from tests.test_count import Counter"},
        "titan_relay/measure/tested.py: imports tests.test_count, "
        "and titan_relay.measure does not stand on tests",
    ),
    (
        rules.no_circles,
        {
            "scripts/one.py": "import two",
            "scripts/two.py": "def late():\n    from three import x",
            "scripts/three.py": "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from one import x",
        },
        "one, three, two: a circle",
    ),
    (
        rules.only_titan_imports_torchtitan,
        {"titan_relay/measure/model.py": "from torchtitan.models import moe"},
        "titan_relay/measure/model.py: imports torchtitan",
    ),
    (
        rules.only_titan_imports_torchtitan,
        {"titan_relay/config/load.py": "import torch"},
        "titan_relay/config/load.py: imports torch",
    ),
    (
        rules.folders_are_small,
        {f"scripts/bench_{n}.py": "x = 1" for n in range(20)},
        "scripts: 21 files",
    ),
    (rules.files_are_short, {"titan_relay/cli.py": LONG}, "titan_relay/cli.py: 401 lines"),
    (
        rules.no_crumbs,
        {"titan_relay/cli.py": "x = 1", "titan_relay/__main__.py": "from titan_relay.cli import x"},
        "titan_relay/cli.py: 1 lines for titan_relay/__main__.py alone",
    ),
    (
        rules.names_are_given_once,
        {"titan_relay/titan/other.py": "class Counter: ..."},
        "Counter: in titan_relay/measure/count.py, titan_relay/titan/other.py",
    ),
    *(
        (
            rules.private_names_have_one_home,
            {"titan_relay/measure/secret.py": text},
            f"titan_relay/measure/secret.py: {name}",
        )
        for text, name in {
            "from torch._ops import OpOverload": "torch._ops.OpOverload",
            "import torch\ntorch._C._name()": "torch._C._name",
            "import torch.distributed as dist\ndist.x._y": "torch.distributed.x._y",
            "from torchtitan.tools import utils\nutils._x": "torchtitan.tools.utils._x",
            "def f(tensor):\n    return tensor._cdata": "(object)._cdata",
            "def f(tensor):\n    return getattr(tensor, '_cdata')": "(object)._cdata",
            "import torch\ntorch.add = None": "torch.add",
            "import torch\nsetattr(torch.Tensor, 'add', None)": "torch.Tensor.add",
        }.items()
    ),
    *(
        (
            rules.nothing_of_ours_is_patched,
            {"scripts/patch.py": text},
            "scripts/patch.py: sets titan_relay.measure.count.Counter.add",
        )
        for text in (
            "from titan_relay.measure.count import Counter\nCounter.add = None",
            "from titan_relay.measure import count\ncount.Counter.add = None",
            "from titan_relay.measure import count\nsetattr(count.Counter, 'add', None)",
            "def f(monkeypatch):\n"
            "    monkeypatch.setattr('titan_relay.measure.count.Counter.add', None)",
        )
    ),
    *(
        (
            rules.tests_use_public_names,
            {"tests/test_count.py": text},
            f"tests/test_count.py: {name}",
        )
        for text, name in {
            "from titan_relay.measure.count import _x": "titan_relay.measure.count._x",
            "def test_it(counter):\n    assert counter._total == 0": "_total",
        }.items()
    ),
    (
        rules.few_parameters,
        {"scripts/many.py": f"def many({EIGHT}): ..."},
        "scripts/many.py: many has 8",
    ),
    (
        rules.few_parameters,
        {"scripts/many.py": f"class C:\n    def many(self, a, b, *, {EIGHT[6:]}): ..."},
        "scripts/many.py: many has 8",
    ),
    (
        rules.files_say_what_they_are_for,
        {"tests/test_count.py": "# Tests.\nx = 1"},
        "tests/test_count.py: no docstring",
    ),
]


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps_its_rules(rule: Rule, house: House) -> None:
    offenders = list(rule(house))
    assert not offenders, "\n".join(["", *offenders])


@pytest.mark.parametrize(
    ("rule", "files", "said"), PLANTED, ids=[rule.__name__ for rule, *_ in PLANTED]
)
def test_a_rule_notices_who_breaks_it(
    rule: Rule, files: dict[str, str], said: str, tmp_path: Path
) -> None:
    write(HEALTHY, tmp_path)
    assert list(rule(read_house(tmp_path))) == []
    write(files, tmp_path)
    assert list(rule(read_house(tmp_path))) == [said]


def test_every_rule_is_shown_to_fail() -> None:
    assert {rule for rule, *_ in PLANTED} == set(rules.RULES)


def test_kernels_and_registered_ops_take_what_they_need(tmp_path: Path) -> None:
    text = f"import triton\n@triton.jit\ndef kernel({EIGHT}): ...\n"
    text += f"@torch.library.custom_op('a::b', mutates_args=())\ndef op({EIGHT}): ...\n"
    write({"kernels/relay_kernels/op.py": text}, tmp_path)
    assert list(rules.few_parameters(read_house(tmp_path))) == []


@pytest.fixture(scope="module")
def house() -> House:
    return read_house(ROOT)


def write(files: dict[str, str], folder: Path) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
