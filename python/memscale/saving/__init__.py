# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are whole at any moment, and runs that go on from them."""

from memscale.saving.atomic import save
from memscale.saving.periodic import Autosave, autosave

__all__ = ["Autosave", "autosave", "save"]
