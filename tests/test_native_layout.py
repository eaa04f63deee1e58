"""The structure of src/: op families on a shared core."""

import fnmatch
import re

import pytest
from conftest import CHECKOUT

SRC = CHECKOUT / "src"
SOURCES = [path for path in sorted(SRC.rglob("*")) if path.suffix in (".h", ".cc", ".cu", ".cuh")]
# (family, other family): why the one may include the other's files.
EXCEPTIONS = {
    ("heads", "transpose"): "on a CPU, heads without a bias are a transposition",
    ("norm", "dropout"): "what no kernel of norm takes is a dropout, and then a norm",
    ("softmax", "dropout"): "on a CPU, rows with dropout are a softmax, and then a dropout",
}

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


# What moves and adds is core; what is computed is the family. Patterns of what moves and adds; a
# planner of rows is a file by its name.
CONCEPTS = {
    "shuffle": r"__(shfl|any|all|ballot|reduce|match)_|__activemask|\bExchange\(",
    "barrier": r"__sync(threads|warp)|\bbarrier\.|\bthis_(cluster|grid)\(|::Sync\(|\bBarrier\b"
    r"|\bKeepWarpsTogether\(",
    "vector type": r"\b(u?(char|short|int|long|longlong)|float|double)[234]\b",
    "loop over a row": r"__global__",  # in families of rows
    "finishing kernel": r"__global__[^;{]*?\w*(Finish|Merge|Total)\w*Kernel\(",
}
FAMILIES_OF_ROWS = ("cross_entropy", "norm", "softmax")
# Files, what they have of it, and why: at most 6.
KEPT = {
    "norm/*": (
        ("barrier", "loop over a row", "planner of rows"),
        "the backward's workers keep sums over rows, and bulk copies fill their rings; the "
        "forward's short and long rows were slower on the engine (the log)",
    ),
    "batch_norm/[fgr]*.cuh": (
        ("shuffle", "barrier", "vector type"),
        "a cooperative kernel keeps arrays on the chip; in functions it was 1.17 times slower",
    ),
    "heads/heads.cu": (("barrier",), "warps that share sectors stay together"),
    "segment_sum/*.cu": (
        ("shuffle", "barrier"),
        "groups of a block pass on the sum of a segment that they share; a sort ranks the keys of "
        "a warp by ballots, and moves them through shared memory",
    ),
    "transpose/*.cuh": (
        ("barrier", "vector type"),
        "it moves bytes: tiles and boxes in shared memory are all that it does",
    ),
    "window_sum/*.cuh": (
        ("barrier", "vector type"),
        "windows go over units and lanes, and wait in a ring in shared memory",
    ),
}


def concepts_of(path) -> set[str]:
    """What a source outside of the core has of what moves and adds, in its code."""
    code = re.sub(r"//.*", "", path.read_text())
    found = {name for name, pattern in CONCEPTS.items() if re.search(pattern, code)}
    if family_of(path) not in FAMILIES_OF_ROWS:
        return found - {"loop over a row"}
    return found | ({"planner of rows"} if path.name.startswith("plan") else set())


CUDA = [p for p in SOURCES if p.suffix in (".cu", ".cuh") or p.name.endswith("_cuda.cc")]
FAMILIES = [p for p in CUDA if family_of(p) != "core"]


def test_what_moves_and_adds_is_core():
    assert len(KEPT) <= 6
    unnamed = {}
    for path in FAMILIES:
        name = path.relative_to(SRC).as_posix()
        listed = [KEPT[glob][0] for glob in KEPT if fnmatch.fnmatch(name, glob)]
        if extra := concepts_of(path).difference(*listed):
            unnamed[name] = sorted(extra)
    assert not unnamed, f"move it into core/cuda, or name it in KEPT with the reason: {unnamed}"


@pytest.mark.parametrize("glob", KEPT)
def test_what_is_kept_is_needed(glob):
    paths = [p for p in FAMILIES if fnmatch.fnmatch(p.relative_to(SRC).as_posix(), glob)]
    assert set(KEPT[glob][0]) <= set().union(*map(concepts_of, paths)), glob
