"""Sphinx settings; the commands' help is written anew at every build."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import generated  # noqa: E402

from pp_free_warmup import __version__  # noqa: E402

project = "pp_free_warmup"
author = "the pp_free_warmup authors"
copyright = "the pp_free_warmup authors, Apache-2.0"
release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.doctest", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "_generated", "examples"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

doctest_global_setup = "import torch\nfrom pp_free_warmup import *\nfrom pp_free_warmup.testing import *"

html_theme = "furo"
html_title = f"pp_free_warmup {release}"
html_show_sourcelink = False


def setup(app: Any) -> None:
    """Write the commands' help before Sphinx reads its first page."""
    app.connect("builder-inited", lambda _: generated.write_commands(HERE / "_generated"))
