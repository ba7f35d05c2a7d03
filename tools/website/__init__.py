# SPDX-License-Identifier: Apache-2.0
"""The documentation site: `tools/build_site.py` builds it, and this package makes its parts."""
