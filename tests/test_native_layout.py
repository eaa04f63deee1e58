"""The structure of src/: op families on a shared core."""

import re

import pytest
from conftest import CHECKOUT

SRC = CHECKOUT / "src"
SOURCES = [path for path in sorted(SRC.rglob("*")) if path.suffix in (".h", ".cc", ".cu", ".cuh")]
# (family, other family): why the one may include the other's files.
EXCEPTIONS = {("heads", "transpose"): "on a CPU, heads without a bias are a transposition"}

if not SOURCES:
    pytest.skip("there are no sources next to the tests", allow_module_level=True)


def includes(path) -> list[str]:
    return re.findall(r'^#include ["<]([^">]+)[">]', path.read_text(), re.MULTILINE)


def family_of(path) -> str:
    return path.relative_to(SRC).parts[0]


def speaks_ffi(path) -> bool:
    """Whether a file belongs to the handlers, by its name."""
    within = path.relative_to(SRC).as_posix()
    return within.startswith("core/ffi/") or path.name == "ffi.cc"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.relative_to(SRC).as_posix())
def test_includes(path):
    """A family includes the core and itself; the core includes only the core. Only handlers include
    XLA's headers, and only the modules include nanobind's."""
    family = family_of(path)
    for name in includes(path):
        if (SRC / name).exists():
            other = name.split("/")[0]
            assert other in ("core", family) or (family, other) in EXCEPTIONS, name
            assert speaks_ffi(path) or not speaks_ffi(SRC / name), name
        elif name.startswith("xla/"):
            assert speaks_ffi(path), name
        elif name.startswith(("nanobind/", "Python.h")):
            assert path.name.startswith("module"), name


def test_the_exceptions_are_needed():
    used = {(family_of(p), name.split("/")[0]) for p in SOURCES for name in includes(p)}
    assert set(EXCEPTIONS) <= used


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.relative_to(SRC).as_posix())
def test_guards_name_the_file(path):
    if path.suffix in (".h", ".cuh"):
        guard = "JAX_FASTOPS_" + re.sub(r"\W", "_", path.relative_to(SRC).as_posix()).upper() + "_"
        assert f"#ifndef {guard}\n#define {guard}\n" in path.read_text()
