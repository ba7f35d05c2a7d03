# SPDX-License-Identifier: Apache-2.0
"""`memscale telemetry`: whether it is on and why, the switch, and the bytes that would be sent next."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from memscale.cli.arguments import Options
from memscale.cli.problems import FITS, UsageError
from memscale.cli.progress import Progress
from memscale.cli.text import safe
from memscale.telemetry.address import address_of
from memscale.telemetry.consent import URL, choice_file, decide, destination, keep, kept

if TYPE_CHECKING:
    from memscale.telemetry.payload import Said

__all__ = ["TELEMETRY_VERSION", "run"]

TELEMETRY_VERSION: Final = 1


def run(options: Options) -> int:
    """Carries an action out.

    Raises:
        UsageError: there is no address, or the choice cannot be written.
    """
    if options.action == "show":
        return _show(options)
    if options.action == "enable":
        _keep(True, _address(options.url))
    elif options.action == "disable":
        _keep(False, kept().url)
    found = document()
    print(json.dumps(found, indent=2) if options.as_json else safe(_text(found)))
    return FITS


def document() -> dict[str, Any]:
    """What `status` shows, as plain data."""
    decision, file = decide(), choice_file()
    address, nowhere = destination()
    return {
        "format": "memscale-telemetry",
        "version": TELEMETRY_VERSION,
        "enabled": decision.enabled,
        "sends": decision.enabled and address is not None,
        "decided_by": decision.decided_by,
        "reason": decision.reason,
        "url": None if address is None else address.url,
        "url_problem": nowhere or None,
        "file": None if file is None else _shown(file),
        "file_exists": file is not None and file.exists(),
        "file_problem": kept().problem or None,
    }


def _text(found: dict[str, Any]) -> str:
    there = found["file_problem"] or ("" if found["file_exists"] else "not there")
    rows = [
        ("telemetry", "on" if found["sends"] else "on, and nothing is sent" if found["enabled"] else "off"),
        ("decided by", f"{found['decided_by']}: {found['reason']}"),
        ("address", found["url"] or found["url_problem"]),
        ("file", f"{found['file'] or 'none: there is no home'}" + (f" ({there})" if there else "")),
    ]
    return "\n".join(f"{name:<10}  {value}" for name, value in rows)


def _shown(path: Path) -> str:
    home = Path(os.path.expanduser("~"))
    return str(Path("~") / path.relative_to(home) if path.is_relative_to(home) else path)  # no user's name


def _address(given: str | None) -> str:
    """The address to keep: the one that is given, else that of the environment, else the one before.

    Raises:
        UsageError: there is none, or it is not one.
    """
    text = (given or os.environ.get(URL) or kept().url or "").strip()
    if not text:
        raise UsageError(
            "there is no address to send to, and none is built in: memscale telemetry enable "
            f"--url http://HOST:PORT of your memscale-server, or set {URL}"
        )
    try:
        return address_of(text).url
    except ValueError as error:
        raise UsageError(str(error)) from error


def _keep(enabled: bool, url: str | None) -> None:
    try:
        keep(enabled, url)
    except OSError as error:
        raise UsageError(f"cannot write {str(choice_file())!r}: {error.strerror or error}") from error


def _show(options: Options) -> int:
    """Prints the payload and a line break: of MODEL, else of a small model that needs no plan."""
    with Progress() as progress:
        progress.say("loading PyTorch")
        from memscale.telemetry.payload import payload

        text = payload(_said_of(options, progress) if options.model else _said_of_nothing()).decode()
    print(text)
    if not options.model and not options.as_json and sys.stderr is not None:
        print("(of a small model of your own that needs no plan; MODEL shows another)", file=sys.stderr)
    return FITS


def _said_of_nothing() -> Said:
    from memscale.cli.predicting import resolve
    from memscale.telemetry.payload import Said

    return Said(device=resolve(())[0].device_kind)


def _said_of(options: Options, progress: Progress) -> Said:
    from memscale.cli.answers import answers_for, is_graph, request_of
    from memscale.cli.workload import open_workload
    from memscale.telemetry.payload import said_of

    if is_graph(options.model):
        raise UsageError(f"{options.model!r} is a graph, which has no architecture: give the model")
    _, (answer, *_) = answers_for(options, progress.say)
    workload = open_workload(request_of(options))
    case = workload.make(*workload.sizes[0])
    device = answer.hardware.device_kind
    return said_of(case.model, answer.predicted.plan, device, case.optimizers)
