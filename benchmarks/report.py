"""Keeps results as JSON."""

import json
from pathlib import Path

from benchmarks import environment


class Results(dict):
    """What a job found: a file that is named after the job and the device."""

    def __init__(self, folder: Path, stem: str, **more):
        super().__init__(environment.facts() | more)
        self.path = folder / f"{stem}-{environment.slug(self)}.json"

    def add(self, key: str, row: dict) -> None:
        """Adds a row to a list, and writes the file."""
        self.setdefault(key, []).append(row)
        write(self.path, self)

    def end(self) -> None:
        write(self.path, self)
        print(f"{headline(self)}\nwrote {self.path}", flush=True)


def write(path: Path, results: dict) -> None:
    """Write compact JSON, and make its folder: a line for each key, and for each case.

    A program that is killed meanwhile leaves the file as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{json.dumps(key)}: {_entry(value)}" for key, value in _rounded(results).items()]
    part = path.with_suffix(".part")
    part.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    part.replace(path)


def _entry(value) -> str:
    """JSON in one line; a list of objects has a line for each."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(json.dumps(item) for item in value) + "\n]"
    return json.dumps(value)


def _rounded(value):
    """Floats with six significant digits."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def headline(results: dict) -> str:
    """Hardware, versions, the clock, and the copy that sets the floor if there is one."""
    hardware, versions, copy = results["hardware"], results["versions"], results.get("copy")
    torch = f", PyTorch {versions['torch']}" if "torch" in versions else ""
    commit = f" at {short(versions['commit'])}" if versions.get("commit") else ""
    speed = copy and (
        f"streaming copy {copy['gbs']:.0f} GB/s (from {copy['min_gbs']:.0f} to "
        f"{copy['max_gbs']:.0f}); "
    )
    what = (
        f"{hardware['device']} ({hardware['platform']}, {hardware['cores']} CPU cores), "
        f"jax {versions['jax']}, jax_fastops {versions['jax_fastops']}{commit}{torch}"
    )
    if "clock" not in results:  # nothing was timed
        return what
    return f"{what}; {speed or ''}{results['clock']} clock, median of {results['rounds']} rounds"


def short(commit: str) -> str:
    """``0123456789`` or ``0123456789-dirty``."""
    return commit[:10] + (environment.DIRTY if commit.endswith(environment.DIRTY) else "")
