# SPDX-License-Identifier: Apache-2.0
"""`memscale.core.config`: the public name of what lives in `memscale.config`."""

from memscale.config.config import (
    CONFIG_VERSION,
    AsyncOffloadConfig,
    Config,
    EffectiveConfig,
    OptimizationMode,
)

__all__ = ["CONFIG_VERSION", "AsyncOffloadConfig", "Config", "EffectiveConfig", "OptimizationMode"]
