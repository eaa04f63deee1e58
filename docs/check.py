"""Checks the documentation after ``make docs`` has built it: ``make docs-check``.

Prints every problem, and fails if there is one.
"""

import ast
import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import jax
import nbformat
import notebooks
from bs4 import BeautifulSoup
from sphinx.util.inventory import InventoryFile

import jax_fastops.models

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # for the benchmarks; the installed jax_fastops comes first

from benchmarks import ages, numbers, pages  # noqa: E402
from benchmarks.__main__ import NAMES  # noqa: E402

SITE = ROOT / "build" / "docs" / "html"
README = ROOT / "README.md"
PUBLIC = ("jax_fastops", "jax_fastops.nnx")  # and the modules of jax_fastops.models
FENCE = re.compile(r"^( *)(`{3,}|~{3,})(\S*).*?\n(.*?)^\1\2 *$", re.DOTALL | re.MULTILINE)
# The kinds of blocks on a page. Python is in cells, which are executed.
DIRECTIVES = ("{code-cell}", "{include}", "{image}", "{eval-rst}", "{toctree}", "{literalinclude}")
KINDS = (*DIRECTIVES, "bash", "markdown")
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def main() -> None:
    found = list(problems())
    print("\n".join(found) or "the documentation is complete")
    sys.exit(bool(found))


def problems() -> Iterator[str]:
    yield from readme()
    yield from links()
    yield from public_names()
    yield from families()
    yield from results()
    yield from example_notebooks()
    for page in [README, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sources()]:
        yield from code_blocks(page)


def sources() -> list[Path]:
    """The pages' sources; generated parts are none."""
    skipped = ("_generated", "jupyter_execute")
    return [p for p in sorted(ROOT.glob("docs/**/*.md")) if not any(s in p.parts for s in skipped)]


def readme() -> Iterator[str]:
    """The README is one page, its links lead somewhere, and its Python prints what it says."""
    text = README.read_text()
    if len(text.splitlines()) > 150 or len(text.encode()) > 10_000:
        yield "README.md: more than 150 lines or 10 KB"
    for target in re.findall(r"\]\(([^)#]+)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text):
        if "://" not in target and not (ROOT / target).exists():
            yield f"README.md: no file {target}"
    code, output = (
        "\n".join(body for _, _, kind, body in FENCE.findall(text) if kind == wanted)
        for wanted in ("python", "text")
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        yield f"README.md: its Python fails: {done.stderr.strip().splitlines()[-1]}"
    elif done.stdout != output:
        yield f"README.md: its Python prints\n{done.stdout}"


def links() -> Iterator[str]:
    """Every link within the site leads to a file, and its fragment to an element there."""
    found = [path for path in SITE.rglob("*.html") if "_static" not in path.parts]
    pages = {path: BeautifulSoup(path.read_text(), "html.parser") for path in found}
    anchors = {p: {tag["id"] for tag in page.find_all(id=True)} for p, page in pages.items()}
    for path, page in pages.items():
        for tag in page.select("code.xref"):
            if path.stem != "py-modindex" and tag.find_parent("a") is None:
                yield f"{path.relative_to(SITE)}: nothing is documented under {tag.text}"
        for tag in page.find_all(["a", "img", "link", "script"]):
            url = urlsplit(tag.get("href") or tag.get("src") or "")
            if url.scheme or url.netloc or (not url.path and not url.fragment):
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            where = path.relative_to(SITE)
            if not target.exists():
                yield f"{where}: link to {url.path}, which does not exist"
            elif url.fragment and target in anchors and url.fragment not in anchors[target]:
                yield f"{where}: link to {url.path}#{url.fragment}, which does not exist"


def public_names() -> Iterator[str]:
    """Every public name has an entry on a page; functions and classes have doctests, which pass."""
    inventory = InventoryFile.loads((SITE / "objects.inv").read_bytes(), uri="")
    kinds = ("py:function", "py:class", "py:data")
    documented = {name for kind in kinds for name in inventory.data.get(kind, ())}
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner(verbose=False)
    imports = {"jax": jax, "jnp": jax.numpy, "fo": jax_fastops}
    models = (name for _, name, _ in pkgutil.iter_modules(jax_fastops.models.__path__))
    modules = [*PUBLIC, *(f"jax_fastops.models.{n}" for n in models if not n.startswith("_"))]
    for module_name in modules:
        module = importlib.import_module(module_name)
        imports[module_name.rpartition(".")[2]] = module
        for name in (name for name in module.__all__ if not name.startswith("__")):
            full, entry = f"{module_name}.{name}", getattr(module, name)
            if full not in documented:
                yield f"{full}: no page has an entry for it"
            if not callable(entry):
                continue
            tests = finder.find(entry, full, globs=imports)
            if not any(test.examples for test in tests):
                yield f"{full}: its docstring has no doctest"
            for test in tests:
                output: list[str] = []
                if runner.run(test, out=output.append).failed:
                    yield f"{full}: its doctest fails\n{''.join(output)}"


def families() -> Iterator[str]:
    """Every family of ops has an entry where a person writes what is true of it."""
    for page in (README, *(ROOT / "docs" / "guides" / f"{n}.md" for n in ("memory", "sharding"))):
        rows = "\n".join(re.findall(r"^\|.*", page.read_text(), re.MULTILINE))
        for family, calls in jax_fastops._registry.families().items():
            if not any(re.search(rf"`{name}\b", rows) for name in calls):
                yield f"{page.relative_to(ROOT)}: no table has a row for {family}"


def results() -> Iterator[str]:
    """Results on a page that are older than their kernels are listed, if Git's history is here."""
    with tempfile.TemporaryDirectory() as folder:
        pages.write(Path(folder))
    page = BeautifulSoup((SITE / "benchmarks" / "index.html").read_text(), "html.parser")
    listed = {tag.text for tag in page.select("td code")}
    for name, _, changed in ages.older(numbers.loaded()) or ():
        if name.strip("`") not in listed:
            yield f"{name}: the kernels changed ({changed}), and benchmarks/index does not list it"


def example_notebooks() -> Iterator[str]:
    """Each example is a notebook of the site, whose cells are Python."""
    for script in sorted(notebooks.EXAMPLES.rglob("*.py")):
        if script.stem in notebooks.SHARED:
            continue
        file = SITE / "_sources" / "examples" / f"{script.stem}.ipynb"
        if not file.exists():
            yield f"{script.relative_to(ROOT)}: no page names it, so the site has no notebook of it"
            continue
        for cell in nbformat.read(file, 4).cells:
            if cell.cell_type == "code" and not cell.source.startswith("%%"):
                ast.parse(cell.source, script.name)  # raises a SyntaxError that shows the line


def code_blocks(page: Path) -> Iterator[str]:
    """Python is executed, and what a shell command names exists."""
    where = page.relative_to(ROOT)
    for _, _, kind, body in FENCE.findall(page.read_text()):
        if kind not in KINDS and (page != README or kind not in ("python", "text")):
            yield f"{where}: a block of kind {kind!r}, not {', '.join(KINDS)}; Python is in cells"
        if kind == "bash":
            for line in body.replace("\\\n", " ").splitlines():
                if reason := command_problem(line):
                    yield f"{where}: {line.strip()!r}: {reason}"


def command_problem(line: str) -> str | None:
    """Why a documented shell command cannot work, if it names a thing that is not there."""
    for target in re.findall(r"\bmake ([a-z][a-z-]*)", line):
        if target not in TARGETS:
            return f"the Makefile has no target {target}"
    for job in re.findall(r"python3? -m benchmarks (\w+)", line):
        if job not in NAMES:
            return f"no job {job}"
    for program in re.findall(r"python3? ([\w/]+\.py|demo|examples/\w+)", line):
        if not (ROOT / program).exists():
            return f"no file {program}"
    for names in re.findall(r"\.\[([\w,-]+)\]", line):
        if unknown := set(names.split(",")) - set(PROJECT["optional-dependencies"]):
            return f"pyproject.toml has no extra {', '.join(sorted(unknown))}"
    return None


if __name__ == "__main__":
    main()
