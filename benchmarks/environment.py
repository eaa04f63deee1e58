"""The hardware and the versions that numbers were measured on."""

import os
import platform
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import jax

from benchmarks import ROOT

DIRTY = "-dirty"  # after a commit: files were changed that decide what is measured
_CODE = ("src", "jax_fastops", "third_party", "cmake", "CMakeLists.txt", "benchmarks/*.py")


def platform_name() -> str:
    """ "cpu", "cuda" or "rocm" (JAX calls the latter two "gpu")."""
    device = jax.devices()[0]
    gpu = "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
    return gpu if device.platform == "gpu" else device.platform


def facts(*more: str) -> dict:
    """How a results file begins: the hardware, and the versions, ``more`` among them."""
    return {"hardware": hardware(), "versions": versions(*more)}


def hardware() -> dict:
    """The first device's kind, how many there are, the driver, the CPU."""
    devices = jax.devices()
    return {
        "platform": platform_name(),
        "device": cpu_model() if devices[0].platform == "cpu" else devices[0].device_kind,
        "device_count": len(devices),
        "driver": _driver() if devices[0].platform == "gpu" else None,
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),  # that this process may use
        "machine": platform.machine(),
    }


def versions(*more: str) -> dict:
    """The commit, versions of Python, JAX, this package, ``more``, and of JAX's CUDA."""
    cuda = re.search(r"cuda (\d+)", jax.devices()[0].client.platform_version)
    return {
        "commit": commit(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("jax", "jaxlib", "jax_fastops", "numpy", *more)},
        "cuda": cuda[1] if cuda else None,
    }


def commit() -> str | None:
    """The hash of the checkout's commit, with ``DIRTY`` if its code was changed.

    The variable JAX_FASTOPS_COMMIT stands for it, for a copy without the history. ``None`` if there
    is neither.
    """
    if given := os.environ.get("JAX_FASTOPS_COMMIT"):
        return given
    found = git("rev-parse", "HEAD")
    return found and found + (DIRTY if git("status", "--porcelain", "--", *_CODE) else "")


def git(*arguments: str) -> str | None:
    """What git prints in the checkout; ``None`` if it fails."""
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return None if done.returncode else done.stdout.strip()


def slug(results: dict) -> str:
    """The device as a part of a file name; for a CPU with the number of its cores."""
    name = results["hardware"]["device"]
    if results["hardware"]["platform"] == "cpu":
        name += f" {results['hardware']['cores']} cores"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def cpu_model() -> str:
    """The CPU's name from /proc/cpuinfo, or the platform's if there is none."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", info.read_text()) if info.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    if not (tool := shutil.which("nvidia-smi")):
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.split("\n")[0].strip() or None
