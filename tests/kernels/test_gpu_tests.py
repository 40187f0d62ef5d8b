"""``scripts/gpu_tests.py`` runs every test once and tells of those that fail."""

import shutil
import subprocess
import sys
from pathlib import Path

import gpu_tests
import pytest

SCRIPT = Path(gpu_tests.__file__)


def run_tests(*arguments, script=SCRIPT):
    command = [sys.executable, str(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture
def script(tmp_path):
    """The script in a project with two files of tests."""
    (tmp_path / "scripts").mkdir()
    text = "import pytest\n@pytest.mark.parametrize('n', range(5))\n"
    (tmp_path / "test_five.py").write_text(text + "def test_it(n):\n    assert n != 3\n")
    (tmp_path / "test_one.py").write_text("def test_it():\n    pass\n")
    return shutil.copy(SCRIPT, tmp_path / "scripts")


def test_every_test_once_and_what_failed(script):
    done = run_tests("--processes", 2, "test_five.py", "test_one.py", script=script)
    assert done.returncode == 1
    assert done.stdout.startswith("6 tests, 2 processes\n")
    assert done.stdout.endswith("\n1 failed, 5 passed\n")
    assert "test_five.py::test_it[3]" in done.stdout


def test_more_processes_than_tests(script):
    done = run_tests("--processes", 7, "test_one.py", script=script)
    assert (done.returncode, done.stdout) == (0, "1 tests, 7 processes\n1 passed\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["nowhere"], "nowhere"), (["--processes", "-1"], "must be at least 1")],
)
def test_a_mistake_is_told(arguments, says, capsys):
    with pytest.raises(SystemExit) as ended:
        gpu_tests.main(arguments)
    assert says in f"{ended.value.code} {capsys.readouterr().err}"


def test_the_default_is_all_tests_of_kernels_that_start_no_scripts():
    names = {test.split("::")[0] for test in gpu_tests.collected(gpu_tests.TESTS)}
    kernels = {f"tests/kernels/{path.name}" for path in (Path(__file__).parent).glob("test_*.py")}
    left_out = {f"tests/kernels/{name}" for name in gpu_tests.LEFT_OUT}
    assert left_out <= kernels
    assert names == kernels - left_out | {"tests/scripts/test_check_ring.py"}
