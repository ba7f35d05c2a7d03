# SPDX-License-Identifier: Apache-2.0
"""Libraries that only the sweep needs, in a folder beside the environment: it stays as it is.

They are installed without what they require, which would bring another PyTorch. requirements/sweep.txt names
all.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from sweeping.rows import ROOT

REQUIREMENTS = ROOT / "requirements" / "sweep.txt"
FOLDER = ROOT / "build" / "sweep-packages"
_STAMP = FOLDER / ".installed"


def installed() -> Path:
    """The folder, up to date."""
    wanted = REQUIREMENTS.read_text(encoding="utf-8")
    if not _STAMP.is_file() or _STAMP.read_text(encoding="utf-8") != wanted:
        print("installing what requirements/sweep.txt names", file=sys.stderr)
        command = [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", "--upgrade", "--target", str(FOLDER), "-r", str(REQUIREMENTS)),
        ]
        subprocess.run(command, check=True)
        _STAMP.write_text(wanted, encoding="utf-8")
    return FOLDER
