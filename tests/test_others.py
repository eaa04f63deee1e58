"""The benchmark of programs that others wrote, at tiny sizes."""

import json
import pathlib
import sys

import jax.numpy as jnp
import pytest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

for needed in ("rich", "matplotlib", "optax"):
    pytest.importorskip(needed)

from benchmarks import __main__, tables  # noqa: E402
from benchmarks.jobs import others  # noqa: E402
from benchmarks.others import PACKAGES, WORKLOADS, packages, program, workloads  # noqa: E402


def test_every_program_of_the_list_is_there():
    """The list is fixed, so that no program is removed because of its result."""
    functions = {name: build.__module__ for name, build in program.BUILD.items()}
    assert functions == dict.fromkeys(PACKAGES, packages.__name__) | dict.fromkeys(
        WORKLOADS, workloads.__name__
    )
    assert len(PACKAGES) >= 20 and len(WORKLOADS) >= 20


def test_values_are_those_of_the_plain_program():
    found = others.check("RMS norm, reduction", "native")
    assert found["loss"] and found["forward_difference"] < 1e-5
    assert found["gradient_difference"] < 1e-4


def test_rows_and_tables(tmp_path):
    names = ["MLP", "logistic regression"]
    command = ["others", "--tiny", "--sample", "0", "--samples", "1", "--out", str(tmp_path)]
    __main__.main([*command, "--only", names[0]])
    __main__.main([*command, "--add", "--only", *names])  # measures the second one
    (path,) = tmp_path.iterdir()
    results = json.loads(path.read_text())
    assert [row["program"] for row in results["rows"]] == names
    for row in results["rows"]:
        assert "error" not in row and row["autofuse_loss"] == pytest.approx(row["plain_loss"])
        assert len(row["plain_step_ms"]) == len(row["autofuse_step_ms"]) == 2
    assert "logistic regression" in tables.others_table(results)
    assert "`autofuse`" in tables.others_summary(results)


def test_a_loss_is_slower_in_both_measurements():
    row = dict(plain_step_ms=[1.0, 1.0], autofuse_step_ms=[1.1, 1.02], autofuse_step_equal=False)
    assert not tables.loses(row, "autofuse", "step")
    assert tables.loses(row | dict(autofuse_step_ms=[1.1, 1.04]), "autofuse", "step")


def test_a_gradient_that_is_zero_but_for_rounding_counts_little():
    want = {"a": jnp.ones(4), "b": jnp.full(4, 1e-9)}
    have = {"a": jnp.ones(4), "b": jnp.zeros(4)}
    assert (
        others.difference(want, have) < 1e-5 < others.difference(want, {**have, "a": 2 * have["a"]})
    )
