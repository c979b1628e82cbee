"""How the documentation is built: ``make docs``."""

import os
import sys
from pathlib import Path
from typing import Any

import seqgp

ROOT = Path(__file__).parent.parent
# Tutorials import each other, and some of them start further processes.
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])

from gallery import TUTORIALS  # noqa: E402

project = "seqgp"
author = "the seqgp developers"
copyright = author
version = release = seqgp.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build"]
default_role = "py:obj"
add_module_names = False
nitpicky = False

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"show-inheritance": True}
autodoc_inherit_docstrings = False
# Defaults as they are written: the values of some are not Python, and break a signature.
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 90
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"seqgp {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]


sphinx_gallery_conf = {
    "examples_dirs": ["../tutorials"],
    "gallery_dirs": ["tutorials"],
    "filename_pattern": r"\.py$",
    "ignore_pattern": "^(?!(.*/)?(" + "|".join(TUTORIALS) + r")\.py$)",
    "within_subsection_order": "gallery.ByIndex",
    "image_scrapers": ("gallery.figures_of_tutorial",),
    "reset_argv": "gallery.short_run",
    "remove_config_comments": True,
    "write_computation_times": False,
    "min_reported_time": 3600,  # seconds: none, since the machine that builds the site may be busy
    "show_signature": False,
    "abort_on_example_error": True,
}


def _skip(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Fields of named tuples are documented by their class."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-skip-member", _skip)
