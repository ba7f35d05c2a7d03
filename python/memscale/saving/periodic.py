# SPDX-License-Identifier: Apache-2.0
"""`memscale.autosave`: a run that is killed at any moment goes on where it last saved, bit for bit."""

from __future__ import annotations

import os
import random
import re
import sys
import time
from collections.abc import Mapping
from typing import Any, Final, Protocol

import torch

from memscale.recording.current import resume_from, state_to_save
from memscale.saving.atomic import save

_VERSION: Final = 1
_UNITS: Final = {"s": 1.0, "min": 60.0, "h": 3600.0}
_INTERVAL: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(s|min|h)\s*")


class Stateful(Protocol):
    """What has a state to save: a model, an optimizer, a scheduler, a scaler, a sampler."""

    def state_dict(self) -> Any:
        """The state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Takes it."""


class Autosave:
    """Saves a run now and then. Made by `memscale.autosave`.

    Attributes:
        path: of the file.
        steps: that the run has made, over all of its processes.
    """

    def __init__(self, path: str | os.PathLike[str], every: int | str, parts: Mapping[str, Stateful]) -> None:
        self.path = os.fspath(path)
        self.steps = 0
        self._every_steps, self._every_seconds = _interval(every)
        self._parts = dict(parts)
        self._saved_steps, self._saved_at = 0, time.monotonic()

    def restore(self) -> int:
        """Loads what was saved last, if anything was: states, and the generators' numbers.

        Call it after `memscale.wrap`, before the loop. Models and optimizers are loaded in place.

        Returns:
            Steps that the run has made; 0 where there is no file.

        Raises:
            ValueError: the file is of other parts than these, or not one of `autosave`. Nothing is loaded.
        """
        try:
            saved = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
        except FileNotFoundError:
            return 0
        if not isinstance(saved, dict) or saved.get("memscale_autosave") != _VERSION:
            raise ValueError(f"path is {self.path!r}, which memscale.autosave has not written")
        states = saved["states"]
        if states.keys() != self._parts.keys():
            raise ValueError(
                f"parts are {', '.join(sorted(self._parts))}; the file {self.path!r} has "
                f"{', '.join(sorted(states))}"
            )
        for name, part in self._parts.items():
            part.load_state_dict(states[name])
        _put_generators(saved["generators"])
        resume_from(saved.get("recording"))
        self.steps = self._saved_steps = saved["steps"]
        self._saved_at = time.monotonic()
        return self.steps

    def step(self) -> bool:
        """Counts a step, and saves if it is time. Call it once at the end of each turn of the loop.

        Returns:
            Whether it has saved.
        """
        self.steps += 1
        if not self._is_due():
            return False
        self.save()
        return True

    def save(self) -> None:
        """Saves now. The file is the one before or the new one, whole, whatever happens.

        Raises:
            OSError: as `memscale.save`.
        """
        states = {name: part.state_dict() for name, part in self._parts.items()}
        save(
            {
                "memscale_autosave": _VERSION,
                "steps": self.steps,
                "states": states,
                "generators": _generators(),
                "recording": state_to_save(),
            },
            self.path,
        )
        self._saved_steps, self._saved_at = self.steps, time.monotonic()

    def _is_due(self) -> bool:
        if self._every_steps:
            return self.steps - self._saved_steps >= self._every_steps
        return time.monotonic() - self._saved_at >= self._every_seconds


def autosave(path: str | os.PathLike[str], *, every: int | str, **parts: Stateful) -> Autosave:
    """Saves a run every so often, atomically, and restores it, so that no run is lost.

    Saved are the states of all parts, the steps made, the states of the random generators of PyTorch (CPU and
    cards), Python and NumPy, and which run is recorded, so that it goes on as one. The position in the data
    is the loop's: skip `steps` batches, or give a sampler that has a state as a part. Several processes save
    to a path each.

    Args:
        path: of the file; its folder exists.
        every: a number of steps, or a time such as "10min", "30s" or "1.5h".
        **parts: by name, whatever has `state_dict` and `load_state_dict`.

    Raises:
        ValueError: `every` is no such interval, or there are no parts.
        TypeError: a part has no state.

    Example:
        >>> run = memscale.autosave("run.pt", every="10min", model=model, optimizer=optimizer)
        >>> for step in range(run.restore(), 1000):
        ...     train(step)
        ...     run.step()
    """
    if not parts:
        raise ValueError(
            "parts are missing: name what is to be saved, such as model=model, optimizer=optimizer"
        )
    for name, part in parts.items():
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise TypeError(
                f"{name} is a {type(part).__name__}; allowed: what has state_dict and load_state_dict"
            )
    return Autosave(path, every, parts)


def _interval(every: int | str) -> tuple[int, float]:
    """Steps, or seconds; the other one is 0."""
    if isinstance(every, int) and not isinstance(every, bool) and every > 0:
        return every, 0.0
    match = _INTERVAL.fullmatch(every) if isinstance(every, str) else None
    if match is None or float(match[1]) <= 0:
        raise ValueError(f'every is {every!r}; allowed: a number of steps above 0, or a time such as "10min"')
    return 0, float(match[1]) * _UNITS[match[2]]


def _generators() -> dict[str, Any]:
    """States of the generators, as plain data."""
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": list(random.getstate()[1])}
    found["python_gauss"] = random.getstate()[2]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state_all()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, gauss = numpy.random.get_state()
        found["numpy"] = [str(name), [int(key) for key in keys], int(position), int(has_gauss), float(gauss)]
    return found


def _put_generators(saved: dict[str, Any]) -> None:
    torch.set_rng_state(saved["torch"])
    random.setstate((3, tuple(saved["python"]), saved["python_gauss"]))
    if "cuda" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(saved["cuda"][: torch.cuda.device_count()])
    if "numpy" in saved:
        import numpy as np

        name, keys, position, has_gauss, gauss = saved["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
