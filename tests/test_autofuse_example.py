"""The example that trains a GPT with and without `autofuse`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "autofuse.py"
pytestmark = pytest.mark.jax


def test_losses_and_report():
    pytest.importorskip("optax")
    command = [sys.executable, "-P", str(EXAMPLE), "--steps=20"]
    environment = {**os.environ, "JAX_FASTOPS_IMPLEMENTATION": "native"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    rows = re.findall(r"^ *\d+  ([\d.]+)  ([\d.]+)$", done.stdout, re.M)
    assert len(rows) == 3
    for plain, fused in rows:
        assert abs(float(plain) - float(fused)) < 2e-3
    assert float(rows[-1][1]) < float(rows[0][1]) - 0.2
    for pattern, count in [("layer_norm", 5), ("softmax", 2), ("gelu", 2), ("cross_entropy", 1)]:
        found = re.findall(rf"^(?:[a-z]+ \+ )*{pattern} ", done.stdout, re.M)
        assert len(found) == count, done.stdout
