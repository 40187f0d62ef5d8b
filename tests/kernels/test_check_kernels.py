"""``scripts/check_kernels.py`` finds what is wrong with a compiled kernel, and nothing in ours."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import check_kernels
from kernel_check.chips import CHIPS
from kernel_check.compile import Measured
from kernel_check.judge import faults
from kernel_check.sass import MachineCode, parse_resources

pytest.importorskip("triton", reason="triton is for Linux")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "check_kernels.py"


def check(*arguments, **environment):
    without_interpreter = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=590,
        cwd=ROOT,
        env={**without_interpreter, **environment},
    )


def test_every_kind_of_fault_is_found():
    done = check("--registry", "tests.kernels.unfit_kernels:variants", "--arch", "sm_90",
                 "--dtype", "bfloat16")  # fmt: skip
    assert done.returncode == 1, done.stderr
    verdicts = {
        cells[1]: cells[-2]
        for cells in (
            [cell.strip() for cell in line.split("|")] for line in done.stdout.splitlines()
        )
        if len(cells) > 3
    }
    assert verdicts.pop("fit") == "ok"
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    expected = {
        "spilling": "spills: ",
        "without_tensor_cores": "has no HGMMA in a loop (tensor-core instructions: none at all)",
        "half_without": "ordinary multiply-adds and no HGMMA",
        "too_much_shared_memory": "sm_90 has 232448 for a block",
        "wrong": "does not compile: CompilationError: arange's range must be a power of 2",
    }
    assert len(errors) == len(expected)
    for name, text in expected.items():
        assert verdicts[name] == "FAIL"
        assert any(line.startswith(f"error: {name} ") and text in line for line in errors), name


# One configuration per kind of layer; `make check-kernels` compiles all of them.
def test_our_kernels_are_fit():
    done = check("--dtype", "bfloat16", "--only", "/narrow/")
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


def no_variants(arch, dtype):
    return []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "sm_90,sm_91"], "'sm_91' must be one of sm_80, sm_90, sm_100"),
        (["--dtype", "int8"], "'int8' must be one of bfloat16"),
    ],
)
def test_what_cannot_be_compiled_for_is_refused(capsys, arguments, message):
    with pytest.raises(SystemExit) as refused:
        check_kernels.main(arguments)
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


def test_a_check_of_nothing_is_refused(capsys, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    arguments = ["--registry", f"{__name__}:no_variants", "--only", "this", "that"]
    assert check_kernels.main(arguments) == 2
    assert (
        capsys.readouterr().err == "error: no kernel's name contains this or that; there are none\n"
    )


def test_the_interpreter_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert check_kernels.main([]) == 2
    assert "turns the compiler off" in capsys.readouterr().err


def code(*lines):
    """Machine code of 16-byte instructions, as cuobjdump prints it."""
    return MachineCode.parse(
        "\n".join(
            f"        /*{16 * index:04x}*/                   {line} ;    /* 0x0000 */\n"
            "                                                  /* 0x000fe40000000f00 */"
            for index, line in enumerate(lines)
        )
    )


HMMA = CHIPS["sm_80"].tensor_core


def test_products_count_only_where_they_repeat():
    looped = code("MOV R1, R2", "HMMA.16816.F32 R4, R8", "@!P0 BRA 0x10", "EXIT", "BRA 0x40")
    assert len(looped.loops) == 1
    assert [each.name for each in looped.in_loops(HMMA)] == ["HMMA.16816.F32"]
    once = code("MOV R1, R2", "HMMA.16816.F32 R4, R8", "EXIT", "BRA 0x30")
    assert once.loops == []
    assert once.in_loops(HMMA) == []


def test_a_jump_back_from_code_moved_to_the_end_is_no_loop():
    # 0x20 jumps out of the way to wait at 0x60, and from there back to 0x30.
    moved = code(
        "MOV R1, R2", "HMMA.16816.F32 R4, R8", "@P0 BRA 0x60", "HMMA.16816.F32 R4, R8", "EXIT",
        "NOP", "SYNCS R1", "@!P1 BRA 0x60", "BRA 0x30", "BRA 0x90",
    )  # fmt: skip
    assert [sorted(loop) for loop in moved.loops] == [[0x60, 0x70]]
    assert moved.in_loops(HMMA) == []


def test_a_branch_on_a_uniform_predicate_is_conditional():
    nested = code(
        "HMMA.16816.F32 R4, R8", "BRA.U UP0, 0x0", "FFMA R1, R1, R2, R3", "@!P0 BRA 0x0", "EXIT",
    )  # fmt: skip
    assert len(nested.loops) == 1  # one header, two ways back
    assert sorted(nested.loops[0]) == [0, 0x10, 0x20, 0x30]


def test_code_behind_a_computed_jump_is_seen():
    behind = code("BRX R2 -0x20", "HMMA.16816.F32 R4, R8", "@P0 BRA 0x10", "EXIT")
    assert len(behind.in_loops(HMMA)) == 1


def test_ordinary_products_beside_tensor_cores_are_seen():
    two_loops = code(
        "HMMA.16816.F32 R4, R8", "@P0 BRA 0x0", *["FFMA R1, R1, R2, R3"] * 100, "@P0 BRA 0x20",
        "EXIT",
    )  # fmt: skip
    assert two_loops.scalar_products(HMMA) == 100
    measured = Measured(num_tensor_core=1, num_scalar_products=100)
    (fault,) = faults(measured, CHIPS["sm_80"], needs_tensor_cores=True)
    assert "100 ordinary multiply-adds" in fault
    assert not faults(measured, CHIPS["sm_80"], needs_tensor_cores=False)


def two_variants(arch, dtype):
    return [SimpleNamespace(name=f"{name}/narrow") for name in "ab"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--only", "c/", "--registry", f"{__name__}:two_variants"],
            "no kernel's name contains c/; there are a, b",
        ),
        (["--registry", "no_such_module:f"], "--registry no_such_module:f: No module named"),
        (["--registry", "pathlib"], "--registry pathlib: "),
    ],
)
def test_questions_about_no_kernel(arguments, words, capsys, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert check_kernels.main([*arguments, "--arch", "sm_90,sm_90", "--dtype", "bfloat16"]) == 2
    assert words in capsys.readouterr().err


def test_a_switch_that_the_compiler_ignores():
    def found(measured):
        return faults(measured, CHIPS["sm_90"], needs_tensor_cores=False, specializes_warps=True)

    (fault,) = found(Measured())
    assert "has WARP_SPECIALIZE, and the compiler gave no warps a part of their own" in fault
    assert not found(Measured(specializes_warps=True))


def test_widths_of_loads_and_bytes_of_spills():
    loop = code(
        "LDG.E.128 R4, [R2]", "LDG.E.U16 R4, [R2]", "LDG.E R4, [R2]",
        "LDGSTS.E.BYPASS.LTC128B.128 [R1], [R2]", "UTMALDG.2D [UR8], [UR4]", "@P0 BRA 0x0",
        "LDG.E.64 R4, [R2]", "STL.64 [R1], R2", "STL [R1], R2", "STL.S16 [R1], R2", "EXIT",
    )  # fmt: skip
    assert loop.load_widths() == {"128": 2, "16": 1, "32": 1, "TMA": 1}
    assert loop.spilled_bytes == 8 + 4 + 2


def test_tensor_memory_is_limited():
    fault = faults(Measured(tensor_memory_columns=1024), CHIPS["sm_100"], needs_tensor_cores=False)
    assert fault == ["needs 1024 columns of tensor memory; sm_100 has 512"]


def test_resources_are_read():
    text = "Resource usage:\n Function f:\n  REG:178 STACK:16 SHARED:0 LOCAL:0 CONSTANT[0]:408\n"
    assert parse_resources(text) == (178, 16)
    with pytest.raises(ValueError, match="told nothing about resources"):
        parse_resources("cuobjdump fatal")
