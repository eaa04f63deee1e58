"""Which results are older than the kernels that they measure? Git's history tells."""

import json
from collections.abc import Iterable

from benchmarks import RESULTS, ROOT, environment
from benchmarks.report import short
from benchmarks.tables import markdown

_BERT = ("heads", "softmax", "norm", "bias_act", "dropout", "linear_cross_entropy")
# Job -> the modules of `jax_fastops` whose kernels it runs. Other jobs run those of all.
JOBS = {
    "bert": _BERT,
    "pretraining": _BERT,
    "inference": _BERT,
    "decoder": ("heads", "norm", "gated_act", "linear_cross_entropy"),
    "resnet": ("batch_norm", "max_pool"),
    "neighbours": ("transpose", "heads"),
}
# Module -> the folder of its kernels, if that has another name.
FOLDERS = {
    "bias_act": "elementwise",
    "gated_act": "elementwise",
    "lerp": "elementwise",
    "linear_cross_entropy": "cross_entropy",
    "max_pool": None,
}
_OTHERS = {
    "cpu": ("*.cu", "*.cuh", "*_cuda.cc", "src/core/cuda"),
    "cuda": ("*_cpu.*", "*_simd.*", "src/core/cpu"),
}
_UNKNOWN = "Git's history is not here, so that the ages of results are not known."
_HEADER = ["results", "measured at", "last change of the kernels"]


def table(names: Iterable[str]) -> str:
    """The results that are older than their kernels, or that do not name their commit."""
    found = older(names)
    return _UNKNOWN if found is None else markdown(_HEADER, found) if found else "None.\n"


def older(names: Iterable[str]) -> list[list[str]] | None:
    """A row for each such file; ``None`` without the whole history.

    A file is older if a later commit changed the kernels that it speaks of, or their Python. What
    was measured with changed files is as old as the commit of its results.
    """
    if environment.git("rev-parse", "--is-shallow-repository") != "false":
        return None
    rows = []
    for name in sorted(names):
        file = RESULTS / f"{name}.json"
        results = json.loads(file.read_text())
        own = _last("HEAD", file)
        commit = results.get("versions", {}).get("commit")
        clean = commit and not commit.endswith(environment.DIRTY)
        since = (clean and _last(commit)) or own or _last("HEAD")
        changed = since and _last(f"{since[0]}..HEAD", *kernels(name, results))
        if commit and not changed:
            continue
        made = f"`{short(commit)}`" if commit else "before commits were recorded"
        date = f", {since[1]}" if since else ""
        rows.append([f"`{name}`", made + date, changed[1] if changed else "not since"])
    return rows


def kernels(name: str, results: dict) -> list[str]:
    """Git's patterns of the files that results speak of."""
    slug = environment.slug(results) if "hardware" in results else ""
    job, _, family = name.partition(slug) if slug else (name, "", "")
    modules = JOBS.get(job.split("-")[0], (family.removeprefix("-"),))
    if not any((ROOT / "jax_fastops" / f"{module}.py").exists() for module in modules):
        return ["src", "jax_fastops/*.py"]
    folders = [FOLDERS.get(module, module) for module in modules]
    paths = [f"src/{folder}" for folder in folders if folder] + ["src/core"]
    paths += [f"jax_fastops/{module}.py" for module in modules]
    if job:
        paths += ["jax_fastops/models/_plain.py", "jax_fastops/models/_*_layers.py"]
    platform = results["hardware"]["platform"] if slug else "cuda"
    return paths + [f":(exclude){pattern}" for pattern in _OTHERS[platform]]


def _last(commits: str, *paths) -> tuple[str, str] | None:
    """The hash and the date of the last of ``commits`` that changed the paths."""
    found = environment.git("log", "-1", "--format=%H %cs", commits, "--", *map(str, paths))
    return tuple(found.split()) if found else None  # pyright: ignore[reportReturnType]
