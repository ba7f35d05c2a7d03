# SPDX-License-Identifier: Apache-2.0
"""`memscale estimate --savings`: what the plan saves over a plain run in bytes, time and money."""

from __future__ import annotations

import json
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from memscale import __version__
from memscale.cli.arguments import Options
from memscale.cli.problems import DOES_NOT_FIT, FITS, UsageError, one_line, quoted
from memscale.cli.progress import Progress
from memscale.cli.text import safe
from memscale.errors import MemScaleError

if TYPE_CHECKING:
    from memscale.cli.answers import Answer, Subject
    from memscale.config.config import Config
    from memscale.hardware.detect import Hardware
    from memscale.plans.plan import Prediction
    from memscale.plans.savings import Savings

__all__ = ["SAVINGS_DOCUMENT_VERSION", "document", "run"]

SAVINGS_DOCUMENT_VERSION: Final = 1


def run(options: Options) -> int:
    """Carries the command out and prints the savings.

    Raises:
        UsageError: it cannot be carried out.
    """
    from memscale.cli.answers import answers_for
    from memscale.cli.estimate_text import head_rows, headline
    from memscale.core.savings_build import Terms

    try:
        terms = Terms(options.compare or "same", _prices(options.prices), options.steps)
    except ValueError as error:
        raise UsageError(one_line(error)) from error
    with Progress() as progress:
        subject, (answer, *_) = answers_for(options, progress.say)
        progress.say("looking for the largest batches")
        found = _savings(options, answer, terms)
    if options.as_json:
        print(json.dumps(document(subject, answer, found), indent=2))
    else:
        head = "\n".join(f"{name:8}{value}" for name, value in head_rows(subject, answer))
        print(safe("\n\n".join([head, headline(answer), found.explain()])))
    return FITS if answer.verdict != "no" else DOES_NOT_FIT


def document(subject: Subject, answer: Answer, found: Savings) -> dict[str, Any]:
    """The answer as plain data; sizes in bytes, times in nanoseconds."""
    return {
        "format": "memscale-savings",
        "version": SAVINGS_DOCUMENT_VERSION,
        "memscale": __version__,
        "model": {**asdict(subject), "notes": list(subject.notes)},
        "batch": answer.batch,
        "sequence": answer.length,
        "device": answer.hardware.name,
        "verdict": answer.verdict,
        "savings": found.to_dict(),
    }


def _savings(options: Options, answer: Answer, terms: Any) -> Savings:
    from memscale.cli.answers import config_of
    from memscale.core.predictor import predict_step
    from memscale.core.savings_build import Asked, savings_of
    from memscale.core.scaling import Scaling

    prediction = answer.predicted.prediction
    scaling = prediction.scaling
    if not isinstance(scaling, Scaling):
        raise UsageError(
            f"--savings: {options.model!r} is a graph, which is a step of one size on one device"
        )

    def on(hardware: Hardware, config: Config) -> Prediction:
        planner = scaling.planner
        return predict_step(planner.model, config, scaling.sample, planner.step, hardware)

    config = config_of(options)
    try:
        plain = on(answer.hardware, config) if config.use_8bit_optimizer else prediction
        return savings_of(Asked(answer.hardware, config, plain, prediction, on), terms)
    except Exception as error:
        if not isinstance(error, MemScaleError) and _is_ours(error):
            raise
        raise UsageError(f"a step of another size raised {quoted(error)}") from error


def _is_ours(error: Exception) -> bool:
    """Whether it was raised in this package, which is a mistake of it, and not by the model or its sample."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return Path(frame.f_code.co_filename).is_relative_to(Path(__file__).parent.parent)


def _prices(given: tuple[tuple[str, float], ...]) -> dict[str, float] | None:
    return dict(given) or None
