# SPDX-License-Identifier: Apache-2.0
"""The 95 % interval of a predicted peak.

What a trace cannot know falls on both sides of it, and not evenly:

    low                                    peak    high
     ├───── output, idle state ─────────┬────┼────┤
      a loop that drops the output early  slack  Python numbers, losses outside of the model, ...

The trace takes the model's output to live until the step is over, as in `out = model(**batch)`. A loop that
only takes `model(**batch).loss` frees the rest of it before, so the truth may lie lower by its bytes. The
same bytes leave room for a loss outside of the model that needs less than the one that `loss.py` assumes.

A forward without gradients is taken to be the first of its loop: `out = model(batch)` holds the last output
while the next one is made, and the truth may lie higher by its bytes.

State is counted for every parameter that is trained, also where this step gives it no gradient (an expert
that no token came to): another step may. Until one does, the truth lies lower by it.

The other two parts were set with the workloads that `bench/python/truth.py` marks "tuned": half of its
workloads, plain and under three modes each. Of their errors, with kept outputs, the largest over-estimate
was 0.3 % and the largest under-estimate 0.1 % of the peak. The constants are larger, for shapes beyond the
sizes that `scratch_probe` measures, where bounds take over. That 95 % of truths lie inside is checked by the
same script on the workloads that it marks "held out".
"""

from __future__ import annotations

_BELOW_PPM = 7_500
_ABOVE_PPM = 5_000
_LEAST_BYTES = 64 * 1024
"""Slack of small peaks: what Python's numbers and step counters take, and rounding."""


def error_band(
    peak_bytes: int, context_bytes: int, lower_bytes: int = 0, higher_bytes: int = 0
) -> tuple[int, int]:
    """Bounds between which the truth lies in 95 of 100 cases.

    Args:
        peak_bytes: predicted peak of the bytes that a device holds, its context included.
        context_bytes: the device's context, which is counted, not estimated, and so not part of the slack.
        lower_bytes: by which a loop may take less than the trace assumes.
        higher_bytes: by which a loop may take more.

    Returns:
        The lowest and the highest number of bytes.
    """
    varying = max(peak_bytes - context_bytes, 0)
    below = max(_LEAST_BYTES, varying * _BELOW_PPM // 1_000_000) + lower_bytes
    above = max(_LEAST_BYTES, varying * _ABOVE_PPM // 1_000_000) + higher_bytes
    return max(peak_bytes - below, context_bytes), peak_bytes + above
