# SPDX-License-Identifier: Apache-2.0
"""`memscale estimate`: what fits, where the bytes go, what would help."""

from __future__ import annotations

import json

from memscale.cli.answers import answers_for
from memscale.cli.arguments import Options
from memscale.cli.problems import DOES_NOT_FIT, FITS
from memscale.cli.progress import Progress

__all__ = ["run"]


def run(options: Options) -> int:
    """Carries the command out and prints the answer.

    Raises:
        UsageError: it cannot be carried out.
    """
    if options.savings:
        from memscale.cli import savings

        return savings.run(options)
    from memscale.cli import estimate_text
    from memscale.cli.estimate_json import document
    from memscale.cli.text import safe

    with Progress() as progress:
        subject, answers = answers_for(options, progress.say)
        if options.as_json:
            text = json.dumps(document(subject, answers), indent=2)
        elif len(answers) == 1:
            progress.say("looking for what would help")
            text = safe(estimate_text.screen(subject, answers[0], options.verbose))
        else:
            text = safe(estimate_text.fit_table(subject, answers, options.verbose))
    print(text)
    return FITS if all(answer.verdict != "no" for answer in answers) else DOES_NOT_FIT
