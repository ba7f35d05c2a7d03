# SPDX-License-Identifier: Apache-2.0
"""`AutoTuner`: the fastest micro-batch and plan within a budget, without ever running out of memory.

    worst batches ─► candidates     micro-batches that divide the global batch, each predicted with the
                        │           fastest plan that fits
                        └► confirm  real steps of the most promising, from small to large, in a guard; what
                                    was measured beyond its prediction narrows the budget of the rest

The global batch, and with it learning rate and schedule, stay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn

from memscale.autotuning.candidate import Candidate
from memscale.autotuning.candidates import Candidates, batch_norms, divisors
from memscale.autotuning.checked import whole_number
from memscale.autotuning.confirm import Confirmation
from memscale.autotuning.result import TuningResult
from memscale.autotuning.samples import Samples, generators_kept, samples_in, samples_of
from memscale.autotuning.scratch import why_no_steps
from memscale.config.checks import show
from memscale.config.config import Config
from memscale.core.arguments import effective_config, merged, model_of, optimizer_of
from memscale.core.devices import resolve_device
from memscale.core.planner import device_of
from memscale.core.profiler import normalize_sample
from memscale.hardware.detect import budget_bytes
from memscale.techniques.left_out import require_matches
from memscale.units import format_bytes

_CONFIRMED: Final = 8
"""Candidates that are run for real, unless the caller says otherwise."""

_CLOSE: Final = 1.25
"""Times that a busy machine may have put in the wrong order."""

_ROUNDS: Final = 2
"""Times that those close to the fastest are timed again, in turns: what slows a machine slows them all."""


def _check_sources(sample: Callable[..., Any] | None, loader: Any, sequence: int | None) -> None:
    """Batches come from one place, and sequences of one length from there."""
    if (sample is None) == (loader is None):
        there = "neither" if sample is None else "both"
        raise TypeError(f"of sample and loader {there} are given; allowed: one of them")
    if loader is not None and sequence is not None:
        raise ValueError(
            f"sequence is {show(sequence)} beside loader, whose batches have theirs; allowed: None"
        )


class AutoTuner:
    """Searches the fastest way to compute a step of a global batch within a budget.

    Args:
        model: the module, on any device. A wrapped one is looked at without its plan, which it keeps.
        optimizer: trains it; None: an AdamW is assumed.
        sample: a function of `batch` and, if it has sequences, `sequence` that makes a training batch, as
            `memscale.predict` takes it.
        global_batch: samples of one step of the optimizer, over all processes. It stays.
        loader: instead of `sample`: your batches; the worst of them are taken.
        sequence: the longest sequence of the run, for `sample`.
        config: its budget is what must hold, and its mode what plans may do; None for the defaults.
        device: for a card that is not here, as for `memscale.predict`; then all of the answer is predicted.
        confirm: how many candidates are run for real; 0 or False: none, True: 8.
        splittable: False: the loss is one over the whole batch, as of contrastive training, and
            accumulation would change it. True: it may be split even where batch normalisation will see
            smaller batches. None: unless there is batch normalisation in training mode.
        world_size: number of processes; None: of `torch.distributed`, else 1.
        progress: called with what is being done.
        **fields: fields of `Config`, as keywords.

    Raises:
        TypeError: an argument is of a wrong type, or there are both or none of `sample` and `loader`.
        ValueError: a value is not allowed; the message names it.

    Example:
        >>> tuner = AutoTuner(model, optimizer, sample=batches, global_batch=64, memory_budget="8GiB")
        >>> print(tuner.tune().explain())
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        sample: Callable[..., Any] | None = None,
        global_batch: int | None = None,
        *,
        loader: Any = None,
        sequence: int | None = None,
        config: Config | None = None,
        device: str | torch.device | None = None,
        confirm: bool | int = True,
        splittable: bool | None = None,
        world_size: int | None = None,
        progress: Callable[[str], None] | None = None,
        **fields: Any,
    ) -> None:
        self.model = model_of(model)
        self.optimizer = optimizer_of(optimizer, self.model)
        self.config = effective_config(merged(config, fields))
        require_matches(self.model, self.config)
        _check_sources(sample, loader, sequence)
        if global_batch is None:
            raise TypeError("global_batch is None; allowed: the number of samples of one step")
        if splittable not in (None, True, False):
            raise TypeError(f"splittable is {show(splittable)}; allowed: True, False or None")
        self.global_batch = whole_number("global_batch", global_batch)
        self.world_size = _world_size(world_size)
        if self.global_batch % self.world_size:
            raise ValueError(
                f"global_batch is {self.global_batch}, not for {self.world_size} processes; allowed: "
                f"a multiple of {self.world_size}"
            )
        self.splittable = splittable
        self.confirm = _CONFIRMED if confirm is True else 0 if confirm is False else whole_number(
            "confirm", confirm, least=0
        )  # fmt: skip
        self._sources = sample, loader, sequence
        self.hardware = resolve_device(device, self.model)
        self.is_here = device is None or _is_at(self.model, device)
        self.say = progress or (lambda _: None)

    def tune(self) -> TuningResult:
        """Searches. Model, optimizer, gradients and random generators are left as they were, bit for bit.

        Returns:
            The answer; where nothing fits `fits` is False, and `advice` says what would help.

        Raises:
            ProfileError: the model has no data and cannot be traced without.
            Exception: the model rejects a batch, or the caller's function cannot make it.
        """
        with generators_kept():  # a loader or a function that makes batches may draw
            return self._tuned()

    def _tuned(self) -> TuningResult:
        sample, loader, sequence = self._sources
        samples = samples_of(sample, sequence) if sample is not None else samples_in(loader)
        share = self.global_batch // self.world_size
        norms = batch_norms(self.model)
        sizes, notes = self._sizes(share, norms)
        notes += [samples.note] if samples.note else []
        candidates = Candidates(self.model, self.optimizer, samples, share, self.hardware, self.say)
        found = candidates.all(sizes, self.config)
        notes += [f"micro-batch {size} was left out: {why}" for size, why in candidates.refused.items()]
        search = _Search(self, candidates, samples, {one.micro_batch: one for one in found}, self.config)
        notes += search.confirm()
        return self._result(search, samples, notes, norms, sizes)

    def _sizes(self, share: int, norms: list[str]) -> tuple[list[int], list[str]]:
        """Micro-batches that may be used, rising, and what to say about them."""
        if self.splittable is False:
            return [share], ["the loss is one over the whole batch (splittable=False), which is not split"]
        if norms and self.splittable is None:
            return [share], [
                f"batch normalisation ({_some(norms)}) would see smaller batches, so the batch is not split; "
                "splittable=True allows it"
            ]
        if norms:
            return divisors(share), [f"batch normalisation ({_some(norms)}) sees the micro-batch alone"]
        return divisors(share), []

    def _result(
        self, search: _Search, samples: Samples, notes: list[str], norms: list[str], sizes: list[int]
    ) -> TuningResult:
        best = search.best
        least = search.known[min(search.known)]
        advice: tuple[str, ...] = ()
        if best is None:
            assert least.prediction is not None
            advice = least.prediction.advice
            if len(sizes) == 1 and self.global_batch // self.world_size > 1:
                what = "the batch norms are frozen or replaced" if norms else "its loss allows that"
                advice += (f"splittable=True splits the batch: safe only where {what}",)
        elif best.accumulation > 1:
            notes.append(
                "accumulated gradients are those of the whole batch if the loss is a mean over samples; of a "
                "mean over tokens, divide their sum by the tokens of the whole batch"
            )
        first = samples.makers[0](min(search.known))
        return TuningResult(
            fits=best is not None,
            micro_batch=0 if best is None else best.micro_batch,
            accumulation=0 if best is None else best.accumulation,
            global_batch=self.global_batch,
            world_size=self.world_size,
            sequence=samples.sequence,
            config=search.config if best is None or best.config is None else best.config,
            device=self.hardware.name,
            budget_bytes=budget_bytes(self.config, self.hardware).bytes,
            confirmed=best is not None and best.confirmed is not None,
            smallest_peak_bytes=least.smallest_peak_bytes,
            candidates=tuple(search.known[size] for size in sorted(search.known)),
            advice=advice,
            notes=tuple(notes),
            call=_call_of(first),
            loss=_loss_of(self.model, best),
        )


@dataclass
class _Search:
    """Chooses among candidates, the most promising by real steps.

    Attributes:
        tuner: what was asked.
        candidates: predicts.
        samples: the worst batches.
        known: micro-batch → candidate.
        config: with the budget of the next plans. It is narrowed where a step took more than predicted.
    """

    tuner: AutoTuner
    candidates: Candidates
    samples: Samples
    known: dict[int, Candidate]
    config: Config

    @property
    def best(self) -> Candidate | None:
        """The fastest: of those that were run if any was."""
        fitting = [one for one in self.known.values() if one.fits]
        confirmed = [one for one in fitting if one.confirmed is not None]
        return min(confirmed or fitting, key=lambda one: (one.best_ns, one.peak_bytes), default=None)

    def confirm(self) -> list[str]:
        """Runs the most promising candidates; returns what to say about that.

        The fastest by prediction comes first, then the largest that fits and one between the two, then
        neighbours of the fastest of those. Those close to the fastest are timed again, in turns.
        """
        tuner = self.tuner
        if not tuner.confirm or not any(one.fits for one in self.known.values()):
            return []
        why = "it is for another device" if not tuner.is_here else why_no_steps(tuner.model, tuner.optimizer)
        if why:
            return [f"predicted, no step was run: {why}"]
        runs = Confirmation(tuner.model, tuner.optimizer, tuner.hardware)
        notes: list[str] = []
        for _ in range(tuner.confirm):
            candidate = self._next()
            if candidate is None or not self._run(candidate, runs, notes):
                break
        for _ in range(_ROUNDS):
            for size in [one.micro_batch for one in self._close()]:
                candidate = self.known[size]
                if candidate.fits:  # an earlier one of the round may have shown that it does not
                    self._run(candidate, runs, notes)
        return notes

    def _run(self, candidate: Candidate, runs: Confirmation, notes: list[str]) -> bool:
        """Runs a candidate; adds to what is to say. False: it could not be run, so no other can."""
        size = candidate.micro_batch
        reason = runs.why_not(candidate)
        self.tuner.say(f"running micro-batch {size}")
        try:
            makers = [functools.partial(make, size) for make in self.samples.makers]
            real = None if reason else runs.run(candidate, makers, candidate.config or self.config)
        except OSError as error:
            reason, real = str(error), None
        if real is None:
            notes.append(f"micro-batch {size} was not run: {reason}")
            return False
        self.known[size] = replace(candidate, confirmed=real.merged(candidate.confirmed))
        notes += self._learn(candidate, runs)
        return True

    def _fitting(self) -> list[Candidate]:
        return sorted((one for one in self.known.values() if one.fits), key=lambda one: one.micro_batch)

    def _next(self) -> Candidate | None:
        """The candidate to run next; None: no other is worth it."""
        fitting = self._fitting()
        if not fitting:
            return None
        promising = min(range(len(fitting)), key=lambda at: (fitting[at].step_ns, fitting[at].peak_bytes))
        largest = len(fitting) - 1
        wanted = [promising, (promising + largest + 1) // 2, largest]
        run = [at for at, one in enumerate(fitting) if one.confirmed is not None]
        if run:
            best = min(run, key=lambda at: fitting[at].best_ns)
            wanted += [at for at in (best - 1, best + 1) if 0 <= at <= largest]
        return next((fitting[at] for at in wanted if at not in run), None)

    def _close(self) -> list[Candidate]:
        """The fastest of those that were run and what is close to it; none where nothing is."""
        run = [one for one in self._fitting() if one.confirmed is not None]
        least = min((one.best_ns for one in run), default=0)
        close = [one for one in run if one.best_ns <= _CLOSE * least]
        return close if len(close) > 1 else []

    def _learn(self, candidate: Candidate, runs: Confirmation) -> list[str]:
        """Takes what real steps have shown into account; returns what to say about it."""
        real = self.known[candidate.micro_batch].confirmed
        assert real is not None
        failed = real.out_of_memory or real.alloc_retries > 0
        known = 0 if candidate.confirmed is None else candidate.confirmed.peak_bytes
        if not failed and real.peak_bytes <= max(known, candidate.highest_bytes):
            return []
        size = candidate.micro_batch
        taken = real.peak_bytes
        what = f"took {format_bytes(taken)}"
        if real.out_of_memory:
            taken, what = runs.guarded_bytes(candidate), "ran into the guard"
        kept = "plans are made for less"
        budget = budget_bytes(self.tuner.config, self.tuner.hardware).bytes
        if failed or taken > budget:
            kept = "it and all larger ones are dropped"
            for other in [one for one in self.known.values() if one.micro_batch >= size]:
                self.known[other.micro_batch] = replace(other, fits=False)
        self._narrow(budget * candidate.highest_bytes // max(taken, candidate.highest_bytes, 1))
        return [f"micro-batch {size} {what}, predicted were {format_bytes(candidate.peak_bytes)}; {kept}"]

    def _narrow(self, budget: int) -> None:
        """Plans for less; what was measured within the budget stays, the rest is predicted again."""
        present = budget_bytes(self.config, self.tuner.hardware).bytes
        self.config = self.config.replace(memory_budget=max(1, min(budget, present)))
        for size, one in list(self.known.items()):
            if one.confirmed is None and one.fits:
                self.known[size] = self.candidates.of(size, self.config)


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _call_of(sample: Any) -> str:
    if isinstance(sample, torch.Tensor):
        return "tensor"
    return "keywords" if normalize_sample(sample)[1] else "arguments"


def _loss_of(model: nn.Module, best: Candidate | None) -> str:
    """As real steps have seen it; else by the model's origin."""
    if best is not None and best.confirmed is not None:
        return best.confirmed.loss
    return ".loss" if any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__) else ""


def _is_at(model: nn.Module, device: str | torch.device) -> bool:
    """Whether a device is where the model is."""
    text = str(device).strip().lower()
    own = device_of(model)
    return text == own.type or text == str(own)


def _world_size(given: int | None) -> int:
    if given is not None:
        return whole_number("world_size", given)
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if there else 1
