# SPDX-License-Identifier: Apache-2.0
"""The documentation site as it is built: no warning, no broken link, all names in its inventory, accessible.

It needs the environment of `make site` (`.venv-site`). Accessibility needs chromium, and Playwright and axe
for Python (requirements/page.txt) beside the tests. What is not there is skipped, and says so.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE_PYTHON = Path(os.environ.get("MEMSCALE_SITE_PYTHON", ROOT / ".venv-site" / "bin" / "python"))
PAGES = (
    "index.html",
    "docs/index.html",
    "docs/guide/faq.html",
    "docs/guide/planning.html",
    "docs/reference/python.html",
    "docs/reference/config.html",
    "docs/reference/c/sim.html",
    "docs/reference/server-api.html",
    "docs/reference/numbers.html",
    "search.html",
)
"""Looked at in a browser: one of each kind."""

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not SITE_PYTHON.is_file(), reason="Sphinx is not installed; `make site` installs it"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built without any warning and without a broken link: else the builder fails."""
    folder = tmp_path_factory.mktemp("built") / "site"
    command = [str(SITE_PYTHON), "tools/build_site.py", "--packages", sysconfig.get_path("purelib")]
    done = subprocess.run(
        [*command, "--out", str(folder)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    return folder


def inventory(site: Path) -> set[str]:
    """The names that the site documents."""
    data = (site / "objects.inv").read_bytes()
    head = data.split(b"\n", 4)
    lines = zlib.decompress(head[4]).decode().splitlines()
    return {line.split(" ")[0] for line in lines}


def test_public_names_have_an_entry(site: Path) -> None:
    import memscale

    names = inventory(site)
    for owner in (memscale, memscale.autotuning, memscale.errors):
        missing = {f"{owner.__name__}.{name}" for name in owner.__all__ if not name.startswith("__")} - names
        assert not missing - {"memscale.autotuning", "memscale.errors"}


def test_functions_of_c_have_an_entry(site: Path) -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "include/memscale").glob("*.h"))
    code = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    functions = set(re.findall(r"^MSC_API[^;(]*?\b(msc_\w+)\(", code, re.MULTILINE))
    records = set(re.findall(r"^typedef (?:struct|enum) (msc_\w+)", code, re.MULTILINE))
    assert len(functions) > 50 and len(records) > 20
    assert not (functions | records) - inventory(site)


def test_search_themes_and_version_are_there(site: Path) -> None:
    text = (site / "docs/guide/planning.html").read_text(encoding="utf-8")
    version = re.search(r"^  version: '(.*)',$", (ROOT / "meson.build").read_text(), re.MULTILINE)
    assert version is not None
    assert f"MemScale {version[1]}" in text and "theme-toggle" in text and "search.html" in text
    assert (site / "searchindex.js").stat().st_size > 100_000


def test_texts_for_language_models(site: Path) -> None:
    listed = (site / "llms.txt").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]+)\)", listed)
    assert len(links) > 40
    assert not [link for link in links if not (site / link).is_file()]
    full = (site / "llms-full.txt").read_text(encoding="utf-8")
    wanted = (
        "## memscale.wrap\n",
        "# Frequently asked questions",
        "msc_decide(",
        "# Numbers",
        "usage: memscale",
    )
    assert not [words for words in wanted if words not in full]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright for Python is not installed")
    pytest.importorskip("axe_playwright_python", reason="axe for Playwright is not installed")
    program = os.environ.get("MEMSCALE_CHROMIUM") or shutil.which("chromium")
    if program is None:
        pytest.skip("no chromium; MEMSCALE_CHROMIUM may name one")
    with playwright.sync_playwright() as running:
        opened = running.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("page", PAGES)
def test_pages_are_accessible(site: Path, browser: Any, page: str, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    context = browser.new_context(color_scheme=scheme, viewport={"width": 1280, "height": 900})
    requests: list[str] = []
    tab = context.new_page()
    tab.on("request", lambda request: requests.append(request.url))
    tab.goto((site / page).as_uri())
    found = Axe().run(tab, options={"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]})
    context.close()
    assert not [url for url in requests if not url.startswith(("file:", "data:"))]
    assert found.violations_count == 0, found.generate_report()


@pytest.mark.parametrize("width", [360, 768, 1440])
def test_front_page_fits_the_window(site: Path, browser: Any, width: int) -> None:
    tab = browser.new_page(viewport={"width": width, "height": 800})
    tab.goto((site / "index.html").as_uri())
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    tab.close()
