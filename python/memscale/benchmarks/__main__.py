# SPDX-License-Identifier: Apache-2.0
"""`python -m memscale.benchmarks`."""

from __future__ import annotations

import sys

from memscale.benchmarks.command import main

if __name__ == "__main__":
    sys.exit(main())
