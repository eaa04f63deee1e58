"""Sphinx configuration: ``make docs`` builds the site into build/docs/html.

Building runs every code cell, and draws charts and tables from benchmarks/results. A warning or a
failing cell fails the build.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # for the benchmarks; the installed jax_fastops comes first
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # cells show the same results on every machine

import jax_fastops  # noqa: E402
from benchmarks import numbers, pages  # noqa: E402

pages.write(ROOT / "docs" / "_generated")

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
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_ivar = True

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "sphinx_book_theme"
html_title = "jax_fastops"
html_static_path = []
html_theme_options = {
    "show_navbar_depth": 1,
    "home_page_in_toc": True,
    "navbar_persistent": [],  # the sidebar has the search
}
