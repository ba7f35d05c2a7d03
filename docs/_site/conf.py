# SPDX-License-Identifier: Apache-2.0
"""What Sphinx is given to build the site. `tools/build_site.py` makes the pages ready and calls it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from website import comments  # noqa: E402

# PyTorch and the built package live in another environment. What both have, Sphinx's own has first.
sys.path.extend(filter(None, os.environ.get("MEMSCALE_SITE_PACKAGES", "").split(os.pathsep)))

project = "MemScale"
version = release = re.search(r"^  version: '(.*)',$", (ROOT / "meson.build").read_text(), re.MULTILINE)[1]
copyright = "the authors of MemScale, Apache License 2.0"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "hawkmoth",
    "hawkmoth.ext.javadoc",
]
root_doc = "docs/index"
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
language = "en"
nitpicky = False  # types of PyTorch and of the package's inside have no page

myst_heading_anchors = 6

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
c_maximum_signature_line_length = 100
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

_HEADERS = subprocess.run(
    [os.environ.get("CC", "cc"), "-print-file-name=include"], capture_output=True, text=True, check=True
).stdout.strip()
hawkmoth_root = os.environ["MEMSCALE_SITE_HEADERS"]  # a form of include/memscale: tools/website/headers.py
hawkmoth_clang = [f"-I{Path(hawkmoth_root).parent}", "-isystem", _HEADERS, "-std=c11"]
hawkmoth_transform_default = "javadoc"

html_theme = "furo"
html_title = f"MemScale {release}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"


def _python(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    lines[:] = comments.literal_code(lines)


def _c(app: Any, lines: list[str], transform: Any, options: Any) -> None:
    lines[:] = comments.literal_code(comments.readable(lines))


def setup(app: Any) -> None:
    """Hooks of this file."""
    app.connect("autodoc-process-docstring", _python, priority=100)
    app.connect("hawkmoth-process-docstring", _c, priority=100)
