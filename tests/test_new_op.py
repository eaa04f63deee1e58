"""`make new-op`: what it writes is imported, compiled and right, and what it names exists."""

import shutil
import subprocess
import sys

import pytest
from conftest import CHECKOUT
from harness.process import run

SCRIPT = CHECKOUT / ".ci" / "new-op"
if not SCRIPT.exists():
    pytest.skip("there is no checkout around the tests", allow_module_level=True)

# Its test file in plain JAX, because the kernels are not built.
CODE = """
import importlib.util, sys
import conftest
import jax_fastops as fo
from harness.case import DECLARED, find

def load(name, path):
    spec = importlib.util.spec_from_file_location(name, sys.path[0] + path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

sys.path.insert(0, {folder!r})
fo.toy_op = load("jax_fastops.toy_op", "/jax_fastops/toy_op.py").toy_op
load("test_toy_op", "/tests/test_toy_op.py").test_errors()
for check in ("value", "jvp", "vjp", "vmap_of_vjp/all", "linear_transpose"):
    find(DECLARED[-1], check, "xla")()
"""


def new_op(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)


def test_a_new_family(tmp_path):
    done = new_op("toy_op", f"--into={tmp_path}")
    assert done.returncode == 0, done.stderr
    places = [line.split()[1].rstrip(":") for line in done.stdout.split("\n") if line[:4] == "edit"]
    assert len(places) > 5 and not [place for place in places if not (CHECKOUT / place).exists()]

    python = run(CODE.format(folder=str(tmp_path)))
    assert python.returncode == 0, python.stderr

    again = new_op("toy_op", f"--into={tmp_path}")
    assert again.returncode == 2 and "src/toy_op/toy_op.cu" in again.stderr
    assert new_op("Toy").returncode == new_op("class").returncode == 2

    if (compiler := shutil.which("c++")) is None:
        pytest.skip("needs a C++ compiler")
    headers = min((CHECKOUT / "third_party" / "xla").glob("jaxlib-*"))
    paths = f"-I{tmp_path}/src", f"-I{CHECKOUT}/src", "-isystem", headers
    isa = ["-DFASTOPS_ISA=baseline", "-DFASTOPS_ISA_LEVEL=0"]
    isa += [f"-DFASTOPS_BUILT_{name}=1" for name in ("baseline", "avx2", "avx512")]
    for file in ("toy_op_cpu.cc", "toy_op_simd.cc", "ffi.cc"):
        source = tmp_path / "src" / "toy_op" / file
        subprocess.run(
            [compiler, "-std=c++20", "-fsyntax-only", "-Werror", *paths, *isa, source], check=True
        )
