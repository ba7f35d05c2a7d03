# SPDX-License-Identifier: Apache-2.0
"""Checks that measured figures in README and guides agree with rows of bench/results.

    python tools/readme_figures.py            what does not agree; exit status 1 if anything
    python tools/readme_figures.py --write    puts the figures of the rows into docs/guide/measured.md

That page is made of bench/measured.md; tools/measured.py says of each figure which rows it is made of,
and which lines of README and guides have figures.
"""

from __future__ import annotations

import sys
from pathlib import Path

from figures import Document, FigureError, Results, problems
from measured import GUIDES, figures_of

ROOT = Path(__file__).resolve().parents[1]

DOCUMENT = Document(
    path=ROOT / "docs" / "guide" / "measured.md",
    template=ROOT / "bench" / "measured.md",
    begin="<!-- Made of bench/measured.md by tools/readme_figures.py: edit there. -->",
    end="<!-- End of what is made of bench/measured.md. -->",
)


def main(arguments: list[str]) -> int:
    """Carries the program out; the exit status."""
    if arguments not in ([], ["--write"]):
        print(__doc__, file=sys.stderr)
        return 2
    results = Results(ROOT / "bench" / "results")
    if arguments:
        try:
            DOCUMENT.write(DOCUMENT.rendered(figures_of(results)))
        except FigureError as error:
            print(error, file=sys.stderr)
            return 1
    guides = {ROOT / path: lines for path, lines in GUIDES.items()}
    found = list(problems(DOCUMENT, lambda: figures_of(results), guides))
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
