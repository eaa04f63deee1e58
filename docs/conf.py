"""Sphinx configuration: ``make docs`` builds the site into build/docs/html.

Building runs every code cell, and draws charts and tables from benchmarks/results. A warning or a
failing cell fails the build.
"""

import os
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# For the benchmarks, and for the pictures; the installed jax_fastops comes first.
sys.path += [str(ROOT), str(ROOT / "docs")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # cells show the same results on every machine

import diagrams  # noqa: E402
import notebooks  # noqa: E402
from docutils import nodes  # noqa: E402

import jax_fastops  # noqa: E402
from benchmarks import numbers, pages  # noqa: E402

pages.write(ROOT / "docs" / "_generated")
diagrams.write(ROOT / "docs" / "_generated")

project = "jax_fastops"
author = "The jax_fastops authors"
copyright = "2026, the jax_fastops authors"
version = release = jax_fastops.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_generated/*.md"]
nitpicky = False

# ---- Cells: always executed, and an error ends the build ----
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True
nb_execution_show_tb = True

myst_enable_extensions = ["colon_fence", "dollarmath", "substitution"]
myst_substitutions = numbers.numbers()
myst_heading_anchors = 3

autodoc_typehints = "signature"
autodoc_preserve_defaults = True  # a default such as FASTOPS by its name
autodoc_type_aliases = {name: name for name in ("ArrayLike", "DTypeLike")}
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_ivar = True

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "sphinx_book_theme"
html_title = "jax_fastops"
html_static_path = ["_static"]
html_favicon = html_logo = "_static/icon.svg"
html_css_files = ["site.css"]
html_theme_options = {
    "show_navbar_depth": 1,
    "home_page_in_toc": True,
    "navbar_persistent": [],  # the sidebar has the search
    "logo": {"text": project},
}
# Buttons to the sources, to edit a page and to report a problem, once the address is a real one.
repository = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
if ".example" not in repository:
    html_theme_options |= {
        "repository_url": repository,
        "path_to_docs": "docs",
        "use_repository_button": True,
        "use_edit_page_button": True,
        "use_issues_button": True,
    }


# Names of other projects, which signatures and pages may use -> the page that describes them. Lists
# for intersphinx would need a network.
ELSEWHERE = {
    r"jax\.sharding\..*": "https://docs.jax.dev/en/latest/jax.sharding.html#{}",
    r"jax\.typing\..*": "https://docs.jax.dev/en/latest/jax.typing.html",
    r"jax\..*": "https://docs.jax.dev/en/latest/_autosummary/{}.html",
    r"numpy\..*": "https://numpy.org/doc/stable/reference/generated/{}.html",
    r"collections\.abc\..*": "https://docs.python.org/3/library/collections.abc.html#{}",
    r"os\..*": "https://docs.python.org/3/library/os.html#{}",
}
ALIASES = {
    "ArrayLike": "jax.typing.ArrayLike",
    "DTypeLike": "jax.typing.DTypeLike",
    "np.ndarray": "numpy.ndarray",
    "jax._src.mesh.Mesh": "jax.sharding.Mesh",
    "jaxlib._jax.Sharding": "jax.sharding.Sharding",
}


def elsewhere(app, env, node, content):
    """The link of a name that these pages do not document, if another project does."""
    name = ALIASES.get(node["reftarget"], node["reftarget"])
    if "._" in name or node.get("refdomain") != "py":
        return None
    pages = (page for pattern, page in ELSEWHERE.items() if re.fullmatch(pattern, name))
    address = next(pages, None)
    return address and nodes.reference("", "", content, refuri=address.format(name), reftitle=name)


def with_short_types(app, what, name, obj, options, signature, result):
    """In a union, Sphinx writes an alias of a type as the object that stands for it."""

    def short(text):
        return text and re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", text)

    return short(signature), short(result)


def setup(app):
    app.connect("autodoc-process-signature", with_short_types)
    app.connect("missing-reference", elsewhere)
    app.connect("html-page-context", notebooks.offer, priority=502)  # after the theme's buttons
