# SPDX-License-Identifier: Apache-2.0
"""`memscale report`: one step as an HTML file, and as a trace for Perfetto."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from memscale.cli.answers import answers_for
from memscale.cli.arguments import Options
from memscale.cli.problems import DOES_NOT_FIT, FITS, UsageError, one_line, require_writable
from memscale.cli.progress import Progress
from memscale.cli.text import safe

if TYPE_CHECKING:
    from memscale.cli.answers import Answer, Subject

__all__ = ["REPORT_VERSION", "run"]

REPORT_VERSION: Final = 1


def run(options: Options) -> int:
    """Writes the files, and says where they are and whether the step fits.

    Raises:
        UsageError: it cannot be carried out.
    """
    from memscale.cli.estimate_json import document
    from memscale.cli.estimate_text import headline
    from memscale.errors import MemScaleError
    from memscale.observability.perfetto import write_trace
    from memscale.observability.report import write_report

    output = options.output or "report.html"
    require_writable(output, options.trace)
    with Progress() as progress:
        subject, answers = answers_for(options, progress.say)
        answer = answers[0]
        progress.say("drawing")
        about = _about(subject, answer)
        detail = answer.predicted.detail(about)
        try:
            write_report(answer.predicted.prediction, output, title=_title(subject), detail=detail)
            if options.trace is not None:
                write_trace(options.trace, detail.views, reserved=detail.reserved, about=dict(about))
        except OSError as error:
            raise UsageError(f"cannot write {error.filename!r}: {error.strerror or error}") from error
        except MemScaleError as error:
            raise UsageError(one_line(error)) from error
    if options.as_json:
        found = {**document(subject, answers), "format": "memscale-report", "version": REPORT_VERSION}
        print(json.dumps({**found, "report": output, "trace": options.trace}, indent=2))
    else:
        written = [f"report: {output}"]
        if options.trace is not None:
            written.append(f"trace: {options.trace} (open it in ui.perfetto.dev)")
        print(safe("\n".join([headline(answer), *written])))
    return FITS if answer.verdict != "no" else DOES_NOT_FIT


def _title(subject: Subject) -> str:
    return f"{subject.name}: memory of a training step"


def _about(subject: Subject, answer: Answer) -> list[tuple[str, str]]:
    from memscale.cli.estimate_text import head_rows

    return head_rows(subject, answer)
