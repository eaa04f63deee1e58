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

    A file is as old as its oldest row. It is older than the kernels if a later commit changed the
    kernels that it measures, or the Python that decides what is measured. What was measured with
    changed files is as old as the commit that added it to the results.
    """
    if environment.git("rev-parse", "--is-shallow-repository") != "false":
        return None
    rows = []
    for name in sorted(names):
        file = RESULTS / f"{name}.json"
        results = json.loads(file.read_text())
        recorded = results.get("versions", {}).get("commit")
        commits = {row.get("commit", recorded) for row in results.get("rows") or [{}]}
        commit = None if None in commits else min(commits, key=_age)
        clean = commit and not commit.endswith(environment.DIRTY)
        added = [f"-S{commit}"] if commit else []
        since = (clean and _commits("-1", commit)) or _commits(*added, "--", file)
        since = since or _commits("-1")  # results that are not committed yet
        changed = since and _commits("-1", f"{since[-1][0]}..HEAD", "--", *kernels(name, results))
        if commit and not changed:
            continue
        measured = f"`{short(commit)}`" if commit else "before commits were recorded"
        date = f", {since[-1][1]}" if since else ""
        change = f"`{short(changed[0][0])}`, {changed[0][1]}" if changed else "not since"
        rows.append([f"`{name}`", measured + date, change])
    return rows


def kernels(name: str, results: dict) -> list[str]:
    """Git's patterns of the files that decide what results measure."""
    slug = environment.slug(results) if "hardware" in results else ""
    job, _, family = name.partition(slug) if slug else (name, "", "")
    modules = JOBS.get(job.split("-")[0], (family.removeprefix("-"),))
    if any((ROOT / "jax_fastops" / f"{module}.py").exists() for module in modules):
        folders = [FOLDERS.get(module, module) for module in modules]
        paths = [f"src/{folder}" for folder in folders if folder] + ["src/core"]
        paths += [f"jax_fastops/{module}.py" for module in modules]
    else:
        paths = ["src", "jax_fastops/*.py"]
    paths += ["jax_fastops/_*.py", "jax_fastops/auto_table.json"]
    if job:
        paths.append("jax_fastops/models/*.py")
    excluded = ["jax_fastops/models/*checkpoint*"]
    if not job.startswith("fusing"):
        excluded.append("jax_fastops/_autofuse")
    if slug:
        excluded += _OTHERS[results["hardware"]["platform"]]
    return paths + [f":(exclude){pattern}" for pattern in excluded]


def _age(commit: str) -> int:
    """The number of commits before a commit, so less for an older one; 0 if it is not known."""
    count = environment.git("rev-list", "--count", commit.removesuffix(environment.DIRTY))
    return int(count or 0)


def _commits(*arguments) -> list[tuple[str, str]]:
    """The hashes and dates of the commits that ``git log`` lists, the newest first."""
    found = environment.git("log", "--format=%H %cs", *map(str, arguments)) or ""
    return [(line[:40], line[41:]) for line in found.splitlines()]
