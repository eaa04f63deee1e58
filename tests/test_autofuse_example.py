"""The example that trains models with and without `autofuse`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "autofuse.py"
pytestmark = pytest.mark.jax


PATTERNS = {
    "gpt": {"layer_norm": 5, "softmax": 2, "gelu": 2, "cross_entropy": 1},
    "resnet": {"batch_norm": 6, r"batch_norm \+ relu": 3, "cross_entropy": 1},
    "transformer": {"layer_norm": 4, "softmax": 2, "gelu": 2, "cross_entropy": 1},
}


@pytest.mark.parametrize("name", PATTERNS)
def test_losses_and_report(name):
    pytest.importorskip("optax")
    command = [sys.executable, "-P", str(EXAMPLE), "--steps=20", f"--models={name}"]
    environment = {**os.environ, "JAX_FASTOPS_IMPLEMENTATION": "native"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    if "is left out" in done.stdout:
        pytest.skip(done.stdout)
    rows = re.findall(r"^ *\d+  ([\d.]+)  ([\d.]+)$", done.stdout, re.M)
    assert len(rows) == 3
    for plain, fused in rows:
        assert abs(float(plain) - float(fused)) < 2e-3
    assert float(rows[-1][1]) < float(rows[0][1]) - 0.2
    for pattern, count in PATTERNS[name].items():
        found = re.findall(rf"^(?:[a-z]+ \+ )*{pattern} ", done.stdout, re.M)
        assert len(found) == count, done.stdout
