# SPDX-License-Identifier: Apache-2.0
"""`memscale tune`: the fastest micro-batch and plan for a global batch, and the loop to paste."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

from memscale import __version__
from memscale.cli.answers import config_of, is_graph, request_of, subject_of
from memscale.cli.arguments import Options
from memscale.cli.problems import DOES_NOT_FIT, FITS, UsageError, one_line, quoted, require_writable
from memscale.cli.progress import Progress
from memscale.cli.text import safe

if TYPE_CHECKING:
    from memscale.autotuning import TuningResult
    from memscale.cli.answers import Subject
    from memscale.cli.workload import Case, Workload

__all__ = ["TUNE_DOCUMENT_VERSION", "document", "run"]

TUNE_DOCUMENT_VERSION: Final = 1


def run(options: Options) -> int:
    """Carries the command out and prints the answer.

    Raises:
        UsageError: it cannot be carried out.
    """
    require_writable(options.output)
    with Progress() as progress:
        subject, result = _tuned(options, progress.say)
        if options.output is not None:
            _draw(result, options.output)
    print(
        json.dumps(document(subject, result), indent=2) if options.as_json else safe(_screen(subject, result))
    )
    if options.output is not None and not options.as_json:
        print(f"\nsaved: {options.output}")
    return FITS if result.fits else DOES_NOT_FIT


def document(subject: Subject, result: TuningResult) -> dict[str, Any]:
    """The answer as plain data; sizes in bytes, times in nanoseconds."""
    return {
        **result.to_dict(),
        "format": "memscale-tune",
        "version": TUNE_DOCUMENT_VERSION,
        "memscale": __version__,
        "model": {**asdict(subject), "notes": list(subject.notes)},
    }


# ---- parts -----------------------------------------------------------------------------------------


def _tuned(options: Options, say: Callable[[str], None]) -> tuple[Subject, TuningResult]:
    if is_graph(options.model):
        raise UsageError(f"{options.model!r} is a graph, which is one step of one size already")
    if options.confirm and options.devices and options.devices[0] not in ("cpu", "cuda"):
        raise UsageError("--confirm: real steps run here, not on another card; leave --gpu out")
    if options.optimizer == "muon":
        raise UsageError("--optimizer muon: two optimizers step there, and tune knows one; give adamw")
    say("loading PyTorch")
    from memscale.cli.predicting import resolve
    from memscale.cli.workload import open_workload
    from memscale.errors import MemScaleError, ProfileError

    (hardware, *_) = resolve(options.devices)
    device = options.devices[0] if options.devices else hardware.device_kind
    say(f"building {options.model}")
    workload = open_workload(request_of(options))
    case = _case(workload, options.confirm, device)
    try:
        try:
            result = _result(case, options, device, say)
        except ProfileError:
            if options.confirm or workload.with_data is None:
                raise
            say("building with data")
            case = workload.with_data(*workload.sizes[0])
            result = _result(case, options, device, say)
    except (MemScaleError, TypeError, ValueError) as error:
        raise UsageError(one_line(error)) from error
    except Exception as error:
        raise UsageError(f"the model raised {quoted(error)}") from error
    return subject_of(options, workload, case.optimizer), result


def _case(workload: Workload, confirm: bool, device: str) -> Case:
    sizes = workload.sizes[0]
    if not confirm:
        return workload.make(*sizes)
    case = workload.make(*sizes) if workload.with_data is None else workload.with_data(*sizes)
    return case if device == "cpu" else _moved(case, device)


def _moved(case: Case, device: str) -> Case:
    """The model and its batches on the card that is here."""
    from torch import Tensor
    from torch.utils._pytree import tree_map_only

    def there(batch: Any) -> Any:
        return tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)

    case.model.to(device)
    own = case.sample
    if not callable(own):
        return replace(case, sample=there(own))
    if case.length is None:
        return replace(case, sample=lambda batch: there(own(batch=batch)))
    return replace(case, sample=lambda batch, sequence: there(own(batch=batch, sequence=sequence)))


def _result(case: Case, options: Options, device: str, say: Callable[[str], None]) -> TuningResult:
    from memscale.autotuning import AutoTuner

    function = callable(case.sample)
    tuner = AutoTuner(
        case.model,
        case.optimizer,
        case.sample if function else None,
        options.global_batch,
        loader=None if function else [case.sample],
        sequence=case.length if function else None,
        config=config_of(options),
        device=device,
        confirm=options.confirm,
        splittable=options.splittable,
        progress=say,
    )
    return tuner.tune()


def _draw(result: TuningResult, path: str) -> None:
    from memscale.errors import MemScaleError

    try:
        result.save_picture(path)
    except (MemScaleError, ValueError) as error:
        raise UsageError(one_line(error)) from error
    except OSError as error:
        raise UsageError(f"cannot write {path!r}: {error.strerror or error}") from error


def _screen(subject: Subject, result: TuningResult) -> str:
    from memscale.cli.estimate_text import head_rows

    head = "\n".join(f"{name:8}{value}" for name, value in head_rows(subject, None))
    parts = [head, result.explain()]
    return "\n\n".join([*parts, result.snippet()] if result.fits else parts)
