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
    "gpt": {"layer_norm": 5, "attention": 2, "gelu": 2, "linear_cross_entropy": 1},
    "resnet": {"batch_norm": 6, r"batch_norm \+ relu": 3, "linear_cross_entropy": 1},
    "transformer": {"layer_norm": 4, "attention": 2, "gelu": 2, "linear_cross_entropy": 1},
}


@pytest.fixture(scope="module")
def printed():
    """What the example prints of each model. One process trains all of them."""
    pytest.importorskip("optax")
    command = [sys.executable, "-P", str(EXAMPLE), "--steps=20"]
    environment = {**os.environ, "JAX_FASTOPS_IMPLEMENTATION": "native"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    _, *parts = re.split(rf"^({'|'.join(PATTERNS)})\b", done.stdout, flags=re.M)
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("name", PATTERNS)
def test_losses_and_report(printed, name):
    text = printed[name]
    if "is left out" in text:
        pytest.skip(text)
    rows = re.findall(r"^ *\d+  ([\d.]+)  ([\d.]+)$", text, re.M)
    assert len(rows) == 3
    for plain, fused in rows:
        assert abs(float(plain) - float(fused)) < 2e-3
    assert float(rows[-1][1]) < float(rows[0][1]) - 0.2
    for pattern, count in PATTERNS[name].items():
        number = r"(?:\((\d+)|.*\n\((\d+))?"  # of equal rows, here or in the next line
        found = re.findall(rf"^(?:[a-z]+ \+ )*{pattern} {number}", text, re.M)
        assert sum(int(here or below or 1) for here, below in found) == count, text
