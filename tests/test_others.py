"""The benchmark of programs that others wrote, at tiny sizes."""

import json
import pathlib
import sys

import jax.numpy as jnp
import pytest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

for needed in ("rich", "matplotlib", "optax"):
    pytest.importorskip(needed)

from benchmarks import __main__, processes, tables  # noqa: E402
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


NAMES = ["MLP", "logistic regression"]
COMMAND = ["others", "--tiny", "--only", *NAMES, "--out"]


def test_rows_and_tables(tmp_path):
    __main__.main([*COMMAND, str(tmp_path), "--sample", "0", "--samples", "1"])
    (path,) = tmp_path.iterdir()
    results = json.loads(path.read_text())
    assert [row["program"] for row in results["rows"]] == NAMES and results["first_trace_s"] > 0
    for row in results["rows"]:
        assert "error" not in row and row["autofuse_loss"] == pytest.approx(row["plain_loss"])
        assert len(row["plain_step_ms"]) == len(row["autofuse_step_ms"]) == 2
        first = row["plain_forward_first_trace_s"]
        assert row["plain_forward_first_call_s"] > first and row["autofuse_step_trace_s"]
    assert "logistic regression" in tables.others_table(results)
    assert "`autofuse`" in tables.others_summary(results)


def test_rows_after_errors_and_interruptions(tmp_path, monkeypatch, capsys):
    """A process that fails loses no row, and a later run measures what is missing first."""
    mlp, regression = ({"program": name} for name in NAMES)
    begun = mlp | {"build_s": 1.0, "stage": "timing"}
    late = {"error": "it took too long"}
    failed = mlp | {"build_s": 1.0, "error": "timing: it took too long"}
    tried = []

    def run(*processes, more=()):
        """The rows of a run, in which each process prints some of these."""
        left = [*processes]

        def stream(command, allowed):
            tried.append(json.loads(command[-1])["only"])
            yield {"first_trace_s": 1.0}
            yield from map(dict, left.pop(0))

        monkeypatch.setattr(others.processes, "stream", stream)
        __main__.main([*COMMAND, str(tmp_path), *more])
        (path,) = tmp_path.iterdir()
        return json.loads(path.read_text())["rows"]

    hardware = {"platform": "cpu", "device": "a CPU", "cores": 2}
    monkeypatch.setattr(others.processes, "process", lambda arguments: {"hardware": hardware})
    assert run([begun, late], [regression | {"stage": "building"}, regression]) == [
        failed,
        regression,
    ]
    assert run([begun, mlp], more=["--add"]) == [regression, mlp]
    assert tried == [NAMES, NAMES[1:], NAMES[:1]]
    assert run([begun, late], more=["--budget", "0"]) == []
    assert run([begun, mlp], [regression], more=["--add"]) == [mlp, regression]
    assert "no time for MLP, logistic regression" in capsys.readouterr().out
    timed = mlp | {"plain_step_ms": [1.0, 1.0]}
    assert run([timed | {"stage": "tuning"}, late], [regression]) == [timed, regression]
    with pytest.raises(SystemExit, match="too long"):
        run([late])


def test_lines_of_a_process():
    code = "import sys, time; print('{\"a\": 1}', flush=True); print('no row', flush=True); "
    for rest, limit, error in (
        ("sys.exit('reason')", 60, "reason"),
        ("time.sleep(600)", 3, "it took too long"),
        ("", 60, None),
    ):
        found = list(processes.stream(["-c", code + rest], lambda limit=limit: limit))
        assert (
            found[0] == {"a": 1} and [row["error"] for row in found[1:]] == [error][: bool(error)]
        )


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
