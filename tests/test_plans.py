"""The launch plans of the native code are plain C++: their property tests need no GPU."""

import shutil
import subprocess

import pytest
from conftest import CHECKOUT

TESTS = sorted((CHECKOUT / "tests" / "native").glob("*_test.cc"))
COMPILER = shutil.which("c++")

if not (CHECKOUT / "src").exists() or COMPILER is None:
    pytest.skip("needs the sources and a C++ compiler", allow_module_level=True)


def family_of(test) -> str:
    """The folder of the plans; the core has several tests."""
    name = test.stem.removesuffix("_plan_test")
    return "core" if name.startswith("core_") else name


@pytest.mark.parametrize("test", TESTS, ids=lambda path: path.stem)
def test_plans(test, tmp_path):
    """``tests/native/<family>_plan_test.cc``, compiled with the family's plan.

    A fault ends the program with the shape for which it occurs.
    """
    family = CHECKOUT / "src" / family_of(test)
    sources = [test, *{*family.glob("plan*.cc"), *(CHECKOUT / "src" / "core").glob("*.cc")}]
    program = tmp_path / test.stem
    subprocess.run(
        [
            *(COMPILER, "-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror"),
            *(f"-I{CHECKOUT / 'src'}", f"-I{CHECKOUT / 'tests' / 'native'}"),
            *(map(str, sources)),
            *("-o", str(program)),
        ],
        check=True,
    )
    done = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_every_plan_has_a_test():
    planned = {path.parent.name for path in (CHECKOUT / "src").glob("*/plan*.cc")}
    assert planned <= set(map(family_of, TESTS))
