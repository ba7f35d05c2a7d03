# SPDX-License-Identifier: Apache-2.0
"""`python -m memscale` is the `memscale` program."""

from __future__ import annotations

import sys

from memscale.cli.main import main

sys.exit(main())
