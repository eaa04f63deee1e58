"""Which results are older than the kernels that they measure? Git's history tells."""

import json
import re
from collections.abc import Iterable

from benchmarks import RESULTS, ROOT, environment
from benchmarks.report import short
from benchmarks.tables import markdown

_BERT = ("attention", "heads", "softmax", "norm", "bias_act", "dense_act", "dropout")
_BERT += ("linear_cross_entropy",)
# Job -> the modules of `jax_fastops` whose kernels it runs. Other jobs run those of all.
JOBS = {
    "bert": _BERT,
    "pretraining": _BERT,
    "inference": _BERT,
    "decoder": ("heads", "norm", "gated_act", "linear_cross_entropy"),
    "decoding": ("heads", "norm", "gated_act", "attention"),
    "packing": (*_BERT, "gated_act"),
    "resnet": ("batch_norm", "max_pool"),
    "neighbours": ("transpose", "heads"),
}
_OTHERS = {
    "cpu": ("*.cu", "*.cuh", "*_cuda.cc", "src/core/cuda"),
    "cuda": ("*_cpu.*", "*_simd.*", "src/core/cpu"),
}
_HEADER = ["results", "measured at", "last change of the kernels"]


def table(names: Iterable[str]) -> str:
    """The results that are older than their kernels, or that do not name their commit."""
    found = older(names)
    if found is None:
        return "The ages of results are not known without Git's history."
    return markdown(_HEADER, found) if found else "None.\n"


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
        paths = [f"src/{folder}" for module in modules for folder in folders(module)] + ["src/core"]
        paths += [f"jax_fastops/{module}.py" for module in modules]
    else:
        paths = ["src", "jax_fastops/*.py"]
    paths.append("jax_fastops/_*.py")
    if job:
        paths.append("jax_fastops/models/*.py")
    excluded = ["jax_fastops/models/*checkpoint*"]
    if not job.startswith(("fusing", "others", "tracing")):
        excluded.append("jax_fastops/autofuse")
    if slug:
        excluded += _OTHERS[results["hardware"]["platform"]]
    return paths + [f":(exclude){pattern}" for pattern in excluded]


def folders(module: str) -> list[str]:
    """The folders in ``src/`` with the kernels of a module, or of those that it imports."""
    if (ROOT / "src" / module).exists():
        return [module]
    handlers = ROOT.glob("src/*/ffi.cc")
    found = [h.parent.name for h in handlers if f'HANDLER("{module}"' in h.read_text()]
    text = (ROOT / "jax_fastops" / f"{module}.py").read_text()
    imported = re.findall(r"from jax_fastops\.([a-z]\w*) import", text)
    return found or [folder for other in imported for folder in folders(other)]


def _age(commit: str) -> int:
    """The number of commits before a commit, so less for an older one; 0 if it is not known."""
    count = environment.git("rev-list", "--count", commit.removesuffix(environment.DIRTY))
    return int(count or 0)


def _commits(*arguments) -> list[tuple[str, str]]:
    """The hashes and dates of the commits that ``git log`` lists, the newest first."""
    found = environment.git("log", "--format=%H %cs", *map(str, arguments)) or ""
    return [(line[:40], line[41:]) for line in found.splitlines()]
