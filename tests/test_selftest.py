"""``python -m jax_fastops --selftest``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness.process import TESTS

import jax_fastops as fo
from jax_fastops import _selftest
from jax_fastops._registry import families


def test_every_op_has_an_example():
    """The selftest calls it."""
    examples = {name for family in families().values() for name in family}
    assert {name for name in fo.info()["ops"] if not name.startswith("toy_")} <= examples


def test_a_family_is_a_module():
    folder = TESTS.parent / "jax_fastops"
    assert [name for name in families() if not (folder / f"{name}.py").exists()] == []


def test_a_right_kernel_passes_and_a_wrong_one_fails(monkeypatch, capsys):
    monkeypatch.setattr(_selftest, "families", lambda: {"relu": {"relu": call}})
    monkeypatch.setattr(_selftest, "_devices", lambda: jax.local_devices(backend="cpu")[:1])
    call = families()["relu"]["relu"]
    assert _selftest.main() == 0
    assert "no failures" in capsys.readouterr().out
    call = call._replace(function=lambda x: fo.relu(x) + jnp.nan)
    assert _selftest.main() == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize("bad", [np.nan, 2.0])
def test_an_error_is_relative_to_the_largest_element_and_nan_is_kept(bad):
    error = _selftest.error_of([np.zeros(3), np.array([bad, 4.0])], [np.zeros(3), np.full(2, 4.0)])
    assert not error <= 0.1
