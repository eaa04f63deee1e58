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
    own = path.name in ("ffi.cc", "ffi_cuda.cc", "module_cuda.cc")
    return within.startswith("core/ffi/") or own


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


LONGEST_FILE, LONGEST_KERNEL = 700, 150
# A file that has more lines, or a longer kernel, says why, in a comment that begins so.
REASON = "// Long because"


def bodies(text: str) -> dict[str, int]:
    """The kernels and other device functions in a source: the number of lines of each body."""
    found = {}
    for match in re.finditer(r"__(?:global|device)__[^;{}]*\([^;{}]*\)[^;{}()]*\{", text):
        depth, end = 1, match.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        called = re.findall(r"(\w+) *\(", match[0]) or re.findall(r"operator\S+", match[0])
        name = called[-1]
        found[name] = max(found.get(name, 0), text.count("\n", match.end(), end))
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.relative_to(SRC).as_posix())
def test_lengths(path):
    text = path.read_text()
    if REASON in text:
        return
    lines = text.count("\n")
    assert lines <= LONGEST_FILE, f"{lines} lines"
    for name, length in bodies(text).items():
        assert length <= LONGEST_KERNEL, f"{name} has a body of {length} lines"
