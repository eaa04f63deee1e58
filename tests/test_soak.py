"""The soak passes on a few calls, and finds wrong values, leaks and deadlocks."""

import dataclasses

import jax.numpy as jnp
import pytest

pytest.importorskip("rich")

import soak
from harness.process import run

from jax_fastops import _implementation

ONE = ["--threads", "2", "--seed", "1", "--seconds", "60", "--cases", "8", "--inputs", "4"]


@pytest.fixture
def only(monkeypatch):
    """Restricts the soak to one op, with a fault in what it calls."""

    def restrict(name, fault=lambda out: out):
        (op,) = (op for op in soak.DRAWN if op.name == name)

        def wrong(*args, **options):
            out = op.ours(*args, **options)
            return fault(out) if _implementation.current() == "native" else out

        monkeypatch.setattr(soak, "DRAWN", [dataclasses.replace(op, ours=wrong)])
        monkeypatch.setattr(soak, "FAMILIES", [op.family])
        monkeypatch.setattr(soak, "MIN_ROUND", 1.0)

    return restrict


def test_a_right_kernel_passes(only, capsys):
    only("layer_norm")
    assert soak.main([*ONE, "--calls", "3"]) == 0
    assert "layer_norm" in capsys.readouterr().out


@pytest.mark.parametrize("factor", [1.1, jnp.nan])
def test_a_wrong_value_is_found(only, factor, capsys):
    only("relu", lambda out: out.at[(0,) * out.ndim].multiply(factor).at[-1].multiply(factor))
    assert soak.main(ONE) == 1
    assert "FAILED: AssertionError: " in capsys.readouterr().out


def test_growing_memory_is_found(only):
    only("relu")
    made = soak.Soak(soak.parsed([*ONE, "--cases", "0"]))
    soak.faulthandler.cancel_dump_traceback_later()
    for kind in ("device", "host"):
        made.failures, others = [], dict.fromkeys(("device", "host"), 0)
        made.memory = [others | {kind: i << 27} for i in range(9)]
        made.grown()
        assert [f.split()[0] for f in made.failures] == [kind]
    made.failures, made.memory = [], [{"device": 1, "host": 2}] * 9
    made.grown()
    assert not made.failures


def test_a_deadlock_prints_the_stacks_and_ends_the_process():
    code = (
        "import soak, threading\n"
        "soak.STUCK = 1 - soak.MIN_ROUND\n"
        "soak.Soak.once = lambda self, rng: threading.Event().wait()\n"
        "soak.main(['--threads', '2'])"
    )
    done = run(code)
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert done.stderr.count("line 3 in <lambda>") == 2
