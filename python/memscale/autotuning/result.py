# SPDX-License-Identifier: Apache-2.0
"""The answer of `AutoTuner.tune`: a table, JSON, a picture, and the lines to paste."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict, dataclass, replace
from enum import Enum
from os import PathLike
from typing import Any, Final

from memscale.autotuning.candidate import Candidate
from memscale.config.config import Config
from memscale.log import table
from memscale.units import format_bytes

__all__ = ["TuningResult"]

RESULT_VERSION: Final = 1

_CALLS: Final = {"keywords": "model(**batch)", "arguments": "model(*batch)", "tensor": "model(batch)"}


@dataclass(frozen=True)
class TuningResult:
    """The fastest micro-batch and plan within a budget.

    Attributes:
        fits: there is one. Otherwise `advice` says what would help, and sizes are 0.
        micro_batch: samples of a forward.
        accumulation: forwards of a step in each process.
        global_batch: samples of a step over all processes, as it was asked for.
        world_size: number of processes.
        sequence: length of the worst batch; None: unknown.
        config: to wrap the model with.
        device: name of what it runs on.
        budget_bytes: bytes that there are.
        confirmed: real steps of the answer were run; False: all of it is predicted.
        smallest_peak_bytes: smallest peak of the smallest micro-batch allowed, under any plan.
        candidates: all that were looked at, by rising micro-batch.
        advice: what would make it fit, a line each.
        notes: what a user should know, a line each.
        call: how a loop calls the model: "keywords", "arguments" or "tensor".
        loss: how it gets the loss from the output, as text: ".loss", "" or "criterion".
    """

    fits: bool
    micro_batch: int
    accumulation: int
    global_batch: int
    world_size: int
    sequence: int | None
    config: Config
    device: str
    budget_bytes: int
    confirmed: bool
    smallest_peak_bytes: int
    candidates: tuple[Candidate, ...]
    advice: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    call: str = "keywords"
    loss: str = ""

    def __repr__(self) -> str:
        if not self.fits:
            return f"<TuningResult: nothing fits {format_bytes(self.budget_bytes)} on {self.device}>"
        how = "confirmed" if self.confirmed else "predicted"
        return (
            f"<TuningResult: micro-batch {self.micro_batch} × {self.accumulation}, {how} within "
            f"{format_bytes(self.budget_bytes)} on {self.device}>"
        )

    @property
    def chosen(self) -> Candidate | None:
        """The candidate that is the answer; None where nothing fits."""
        for candidate in self.candidates:
            if self.fits and candidate.micro_batch == self.micro_batch:
                return candidate
        return None

    @property
    def out_of_memory(self) -> int:
        """Candidates whose real steps ran out of memory, or into the guard."""
        return sum(one.confirmed.out_of_memory for one in self.candidates if one.confirmed is not None)

    # ---- text ------------------------------------------------------------------------------------

    def explain(self) -> str:
        """The answer, the table, notes and advice as text."""
        parts = [self.headline(), self.table()]
        rows = [*(f"note    {line}" for line in self.notes), *(f"advice  {line}" for line in self.advice)]
        return "\n\n".join([*parts, "\n".join(rows)] if rows else parts)

    def headline(self) -> str:
        """The answer in a line."""
        budget = f"{format_bytes(self.budget_bytes)} on {self.device}"
        if not self.fits:
            least = format_bytes(self.smallest_peak_bytes)
            return f"nothing fits {budget}: the smallest peak is {least}"
        chosen = self.chosen
        assert chosen is not None
        how = "confirmed by real steps" if self.confirmed else "predicted, no step was run"
        ranks = f" × {self.world_size} processes" if self.world_size > 1 else ""
        rate = chosen.samples_per_s() * self.world_size
        return (
            f"micro-batch {self.micro_batch} × {self.accumulation} accumulated{ranks} = {self.global_batch} "
            f"samples per step, {rate:.4g} samples/s within {budget} ({how})"
        )

    def table(self) -> str:
        """A row for each candidate."""
        headers = ("", "micro", "accumulate", "peak", "measured", "samples/s", "measured", "plan")
        rows = []
        for one in self.candidates:
            real = one.confirmed
            rows.append(
                (
                    "→" if one is self.chosen else "",
                    one.micro_batch,
                    one.accumulation,
                    format_bytes(one.peak_bytes),
                    ""
                    if real is None
                    else "out of memory"
                    if real.out_of_memory
                    else format_bytes(real.peak_bytes),
                    f"{replace(one, confirmed=None).samples_per_s():.4g}" if one.fits else "",
                    "" if real is None or real.out_of_memory else f"{one.samples_per_s():.4g}",
                    (", ".join(one.techniques) or "none needed") if one.fits else "does not fit",
                )
            )
        return table(rows, headers)

    def snippet(self) -> str:
        """The loop with this answer, to paste.

        Raises:
            ValueError: nothing fits.
        """
        chosen = self.chosen
        if chosen is None:
            raise ValueError("nothing fits, so there is no loop to paste; `advice` says what would help")
        accumulates = self.accumulation > 1
        lines = [f"# {self.headline()}"]
        if chosen.techniques:
            lines.append(f"memscale.wrap(model, {_fields(self.config)}optimizer=optimizer)")
        lines.append(
            f"loader = DataLoader(dataset, batch_size={self.micro_batch}, shuffle=True, drop_last=True)"
        )
        lines.append("for number, batch in enumerate(loader, 1):" if accumulates else "for batch in loader:")
        call = _CALLS[self.call]
        loss = f"criterion({call})" if self.loss == "criterion" else call + self.loss
        if not accumulates:
            return "\n".join(
                [*lines, f"    {loss}.backward()", "    optimizer.step()", "    optimizer.zero_grad()"]
            )
        return "\n".join(
            [
                *lines,
                f"    loss = {loss} / {self.accumulation}  # a mean over its samples",
                "    loss.backward()",
                f"    if number % {self.accumulation} == 0:",
                "        optimizer.step()",
                "        optimizer.zero_grad()",
            ]
        )

    # ---- data ------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data, with a version. Plans are not in it."""
        own = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        own["config"] = self.config.to_dict()
        own["candidates"] = [_plain(candidate) for candidate in self.candidates]
        own["samples_per_s"] = None if self.chosen is None else self.chosen.samples_per_s() * self.world_size
        own["snippet"] = self.snippet() if self.fits else None
        return {"format": "memscale-tuning", "version": RESULT_VERSION, **own}

    def to_json(self, indent: int | None = None) -> str:
        """The result as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def save_picture(self, path: str | PathLike[str]) -> None:
        """Draws throughput and peak against the micro-batch; the file's ending says in what format.

        Raises:
            MemScaleError: matplotlib is not installed.
            ValueError: a format that matplotlib does not know.
            OSError: the file cannot be written.
        """
        from memscale.autotuning.picture import draw

        draw(path, self.headline(), self.candidates, self.chosen, self.budget_bytes)


def _plain(candidate: Candidate) -> dict[str, Any]:
    data = asdict(replace(candidate, prediction=None, config=None))
    del data["prediction"], data["config"]
    return {**data, "samples_per_s": candidate.samples_per_s()}


def _fields(config: Config) -> str:
    """The fields that were given, as keywords, each with a comma behind it."""
    names = sorted(config.explicit - {"enable_logging"})
    return "".join(f"{name}={_written(getattr(config, name))}, " for name in names)


def _written(value: Any) -> str:
    if isinstance(value, Enum):
        return repr(value.value)
    return f"memscale.{value!r}" if dataclasses.is_dataclass(value) else repr(value)
