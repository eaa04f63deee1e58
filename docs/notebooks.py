"""Notebooks of the site: the examples, and the pages that run code.

``docs/conf.py`` calls :func:`offer` for each page. The page's download button then has the page
itself, if it needs no other file of the repository, and each example that its text names.
"""

import ast
import re
import shlex
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
# Modules that the examples share; they run nothing.
SHARED = {path.stem: path for path in EXAMPLES.glob("*.py") if "__main__" not in path.read_text()}


def offer(app, pagename, templatename, context, doctree) -> None:
    """Writes the notebooks of a page next to its source, and adds them to its download button."""
    del templatename
    buttons = [b for b in context.get("header_buttons", ()) if b["label"] == "download-buttons"]
    if doctree is None or not buttons:
        return
    sources = Path(app.outdir) / "_sources"
    found = []
    executed = Path(app.outdir).parent / "jupyter_execute" / f"{pagename}.ipynb"
    if executed.exists() and needs_nothing(executed):
        found.append((f"{pagename}.ipynb", executed.read_text()))
    for name in re.findall(
        r"(?:examples/|tutorial/|`)(\w+)\.py", app.env.doc2path(pagename).read_text()
    ):
        for script in (EXAMPLES / f"{name}.py", EXAMPLES / "tutorial" / f"{name}.py"):
            if script.exists() and name not in SHARED:
                found.append((f"examples/{name}.ipynb", nbformat.writes(notebook(script))))
    for number, (path, content) in enumerate(dict(found).items()):
        (sources / path).parent.mkdir(parents=True, exist_ok=True)
        (sources / path).write_text(content)
        button = {
            "type": "link",
            "url": f"{context['pathto']('_sources', 1)}/{path}",
            "text": Path(path).name,
            "icon": "fas fa-code",
            "tooltip": "Download notebook",
            "label": "download-notebook-button",
        }
        buttons[0]["buttons"].insert(number, button)


def needs_nothing(executed: Path) -> bool:
    """Whether the code of a notebook reads no file of the repository."""
    cells = nbformat.read(executed, 4).cells
    return not any("../" in cell.source for cell in cells if cell.cell_type == "code")


def notebook(script: Path) -> nbformat.NotebookNode:
    """A program as a notebook: its docstring, a cell for each definition, and a run at the end."""
    text = script.read_text()
    description = ast.get_docstring(ast.parse(text)) or ""
    code = text.split('"""', 2)[2] if description else text
    code, is_run, run = code.partition('if __name__ == "__main__":')
    parts = re.split(r"\n{3,}(?=\S)", code.strip())  # two empty lines between definitions
    if is_run:
        command = re.search(rf"python (\S*{script.name}.*)", description)
        arguments = shlex.split(command[1]) if command else [script.name]
        run = re.sub(r"^sys\.exit\((.*)\)$", r"\1", run.strip())
        parts.append(f"import sys\n\nsys.argv = {arguments}\n{run}")
    shared = (f"%%writefile {p.name}\n{p.read_text()}" for p in needed(text).values())
    cells = [new_markdown_cell(description)] if description else []
    return new_notebook(cells=[*cells, *map(new_code_cell, (*shared, *parts))])


def needed(text: str, known: dict[str, Path] | None = None) -> dict[str, Path]:
    """The shared modules that a program imports, and those that these import."""
    known = {} if known is None else known
    for name in re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE):
        if name in SHARED and name not in known:
            known[name] = SHARED[name]
            needed(SHARED[name].read_text(), known)
    return known
