# SPDX-License-Identifier: Apache-2.0
"""Builds the documentation site and its front page into build/site.

    make site
    .venv-site/bin/python tools/build_site.py --packages .venv/lib/python3.11/site-packages

The site has the layout of the repository, so relative links mean the same in both. Pages are copied to
build/site-src, the reference is made from the code there, and Sphinx makes HTML of it; a warning fails the
build, and so does a link that leads nowhere. Nothing is read from the network.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from website import accessible, headers, landing, links, llms, numbers_page, pages, reference, stage

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ROOT / "docs" / "_site"


def prepare(root: Path, tree: Path) -> None:
    """Makes the tree that Sphinx reads: the pages, the generated reference, and the root page."""
    stage.stage(root, tree)
    reference.write(root, tree / "docs/reference")
    (tree / "bench/results").mkdir(parents=True, exist_ok=True)
    for path in sorted((root / "bench/results").iterdir()):
        shutil.copy2(path, tree / "bench/results" / path.name)
    numbers = numbers_page.numbers_page(root / "bench/results")
    (tree / "docs/reference/numbers.md").write_text(numbers, encoding="utf-8")
    with (tree / "docs/adr/README.md").open("a", encoding="utf-8") as decisions:
        decisions.write("\n```{toctree}\n:hidden:\n:glob:\n\n[0-9]*\n```\n")
    (tree / f"{pages.INDEX}.md").write_text(pages.index_page(tree), encoding="utf-8")


def run_sphinx(tree: Path, site: Path, packages: str) -> int:
    """Makes HTML of the tree; the exit status of Sphinx."""
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-c", str(SETTINGS)]
    command += ["-d", str(site.with_name("site-doctrees")), str(tree), str(site)]
    headers_folder = site.with_name("site-headers") / "memscale"
    headers.write_headers(ROOT, headers_folder)
    environment = {
        **os.environ,
        "MEMSCALE_SITE_PACKAGES": packages,
        "MEMSCALE_SITE_HEADERS": str(headers_folder),
    }
    return subprocess.run(command, env=environment, check=False).returncode


def main() -> int:
    """Builds the site; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--packages", default="", help="where PyTorch and memscale are, if not here")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site")
    args = parser.parse_args()
    start = time.monotonic()
    sys.path.extend(filter(None, args.packages.split(os.pathsep)))
    site = args.out.resolve()
    tree = site.with_name("site-src")
    prepare(ROOT, tree)
    shutil.rmtree(site, ignore_errors=True)
    if run_sphinx(tree, site, args.packages):
        return 1
    (site / "index.html").write_text(landing.landing_page(ROOT), encoding="utf-8")
    accessible.mend(site)
    llms.write(ROOT, tree, site)
    broken = links.broken_links(site)
    for line in broken:
        print(line, file=sys.stderr)
    count = sum(1 for _ in site.rglob("*.html"))
    print(f"{count} pages in {time.monotonic() - start:.0f} s: {site / 'index.html'}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
