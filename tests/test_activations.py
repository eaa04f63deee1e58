"""The activations: one list for Python and the kernels, and what follows from it."""

import inspect
import re

import jax
import numpy as np
import pytest
from conftest import CHECKOUT

import jax_fastops as fo
from jax_fastops import _activations, _auto
from jax_fastops._activations import ACTIVATIONS

OWN = [name for name in ACTIVATIONS if hasattr(_activations, name)]
# Other programs name the first four.
ADDED = [*ACTIVATIONS][4:]


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_the_kernels_have_the_same_names(platform):
    built = fo.info()["modules"][platform]
    if built is None:
        pytest.skip(f"no kernels were built for {platform}")
    assert built["activations"] == [*ACTIVATIONS]


@pytest.mark.parametrize("name", OWN)
def test_the_text_is_the_function(name):
    x = np.linspace(-4, 4, 33, dtype=np.float32)
    formula = re.match("``(.*?)``", ACTIVATIONS[name].__doc__)[1]
    np.testing.assert_array_equal(eval(formula, {"jax": jax, "x": x}), ACTIVATIONS[name](x))


def test_docstrings_list_them():
    for op in (fo.bias_act, fo.gated_act):
        listed = re.findall(r'^ +- ``"(\w+)"``: ``', inspect.getdoc(op), re.MULTILINE)
        assert listed == [*ACTIVATIONS]


@pytest.mark.parametrize("name", ADDED)
def test_an_activation_is_named_in_two_files(name):
    folders = ("src", "jax_fastops", "benchmarks", "docs", "examples", "tests")
    if not (CHECKOUT / "src").exists():
        pytest.skip("there are no sources next to the tests")
    files = [
        path.relative_to(CHECKOUT).as_posix()
        for folder in folders
        for path in sorted((CHECKOUT / folder).rglob("*"))
        if path.suffix in (".h", ".cc", ".cu", ".cuh", ".py", ".pyi", ".md", ".json")
        and not {"results", "_generated", "_build", "log"} & set(path.parts)
    ]
    named = {f for f in files if re.search(rf"\b{name}\b", (CHECKOUT / f).read_text())}
    # Other forms, times, and what need not be traced.
    others = {"docs/ops/bias_act.md"}
    others |= {f"tests/test_autofuse_{part}.py" for part in ("dense", "forms")}
    named -= others | {"jax_fastops/autofuse/_patterns.py"}
    assert named == {"src/core/activation.h", "jax_fastops/_activations.py"}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_auto_decides_each(name):
    for table in (_auto._CUDA, _auto._CPU):
        assert f"bias_{_activations.measured(name)}" in table
