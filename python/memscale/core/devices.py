# SPDX-License-Identifier: Apache-2.0
"""Resolves the device of a prediction: a card by name or size, the present card, or this machine.

No answer touches a device, unless this process uses it already.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from memscale.core.calibration import calibrated
from memscale.hardware.cards import CARDS, Card
from memscale.hardware.detect import Hardware, card_hardware, detect
from memscale.hardware.present_gpu import present_gpu
from memscale.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["CARDS", "Card", "closest_names", "find_card", "resolve_device"]

_ASSUMED_CAPABILITY: Final = (8, 0)
"""Of a card that is given by its memory alone."""

_NOISE: Final = frozenset(
    (
        *("nvidia", "geforce", "tesla", "quadro", "rtx", "gtx", "gpu", "generation", "graphics", "edition"),
        *("sxm2", "sxm3", "sxm4", "sxm5", "hbm2e", "hbm3"),
    )
)
"""Words that tell no two cards of the table apart."""

_SIZE_WORD: Final = re.compile(r"(\d+)(gb|gib|g)")


def resolve_device(device: str | torch.device | None, model: nn.Module | None = None) -> Hardware:
    """The hardware that a device, given in one of many ways, stands for.

    Args:
        device: "RTX 3090", "a100-40gb": a card of the table, in about any spelling. "24GiB": a card with so
            much memory, of compute capability 8.0. "cuda", "cuda:1" or such a `torch.device`: the card that
            is present. "cpu": this machine. None: where the model's parameters are; "meta" is this machine.
        model: for None.

    Raises:
        TypeError: `device` is something else.
        ValueError: an unknown card; the message has the closest names.
        MemScaleError: there is no such CUDA device here, or a device that MemScale does not know.

    Example:
        >>> resolve_device("rtx3090").name
        'NVIDIA GeForce RTX 3090'
    """
    import torch

    if device is None:
        return _device_of(model)
    if isinstance(device, torch.device):
        return _present(device)
    if not isinstance(device, str):
        raise TypeError(f"device is a {type(device).__name__}; allowed: a text, a torch.device or None")
    text = device.strip()
    if re.fullmatch(r"cpu|cuda(:\d+)?", text.lower()):
        return _present(torch.device(text.lower()))
    size = _size_of(text)
    if size is not None:
        name = f"{format_bytes(size)} CUDA card (capability 8.0 assumed)"
        return card_hardware(name, _ASSUMED_CAPABILITY, size)
    card = find_card(text)
    if card is None:
        close = ", ".join(repr(name) for name in closest_names(text))
        raise ValueError(
            f"device is {device!r}, which is none of the {len(CARDS)} known cards; closest: {close}. "
            "Also allowed: its memory ('24GiB'), 'cuda', 'cpu'"
        )
    return card_hardware(card.name, card.capability, card.total_bytes)


def find_card(text: str) -> Card | None:
    """The card of the table that a text names, or None.

    The text must have every word that tells the card from others, and no word that the card has not. A text
    that leaves the memory open ("V100") gets the card with the least: what fits there fits on the others.
    """
    asked, size = _words(text)
    if not asked:
        return None
    candidates = []
    for card in CARDS:
        own, own_size = _words(card.name)
        if own == asked and (size is None or own_size is None or own_size == size):
            if size is not None and own_size is None and abs(_gib(card) - size) > _gib(card) // 10 + 1:
                continue  # "RTX 3090 48GB" is not in the table
            candidates.append(card)
    return min(candidates, key=lambda card: card.total_bytes, default=None)


def closest_names(text: str, count: int = 5) -> list[str]:
    """Names of the table that look most like a text, the most alike first."""
    by_words = {" ".join(sorted(_words(card.name)[0])): card.name for card in CARDS}
    asked = " ".join(sorted(_words(text)[0])) or text.lower()
    found = difflib.get_close_matches(asked, list(by_words), n=count, cutoff=0.0)
    return [by_words[words] for words in found]


def _gib(card: Card) -> int:
    return round(card.total_bytes / 2**30)


def _words(text: str) -> tuple[frozenset[str], int | None]:
    """The words that matter of a name, and its memory in GB if it says so.

    "NVIDIA GeForce RTX 3090 Ti" → {3090, ti}; "a100-sxm4-80gb" → {a100}, 80; "RTX6000Ada" → {6000, ada}.
    """
    spaced = re.sub(r"[^a-z0-9]+", " ", text.lower())
    spaced = re.sub(r"\b(rtx|gtx|geforce|nvidia|tesla|quadro)(?=[a-z]?\d)", r"\1 ", spaced)
    spaced = spaced.replace("tisuper", "ti super")
    spaced = re.sub(r"(\d)(ti|super|ada|laptop|sxm|pcie|nvl)(?![a-z])", r"\1 \2 ", spaced)
    spaced = re.sub(r"(\d) (gb|gib)\b", r"\1\2", spaced)
    words, size = set(), None
    for word in spaced.split():
        sized = _SIZE_WORD.fullmatch(word)
        if sized is not None:
            size = int(sized.group(1))
        elif word not in _NOISE:
            words.add(word)
    if words == {"h100"} or ("h100" in words and any(part in text.lower() for part in ("hbm3", "sxm"))):
        words |= {"sxm"}
    if words & {"a100", "a800", "v100", "p100", "h200"}:
        words -= {"sxm", "pcie"}
    return frozenset(words), size


def _size_of(text: str) -> int | None:
    if not re.match(r"[\d.]", text) or not re.search(r"[bB]\s*$", text):
        return None
    try:
        return parse_bytes(text)
    except ValueError:
        return None


def _device_of(model: nn.Module | None) -> Hardware:
    import torch

    from memscale.core.planner import device_of

    device = torch.device("cpu") if model is None else device_of(model)
    return _present(torch.device("cpu") if device.type == "meta" else device)


def _present(device: torch.device) -> Hardware:
    """A device of this machine. A card is asked through the driver, unless this process uses it already."""
    import torch

    if device.type != "cuda" or torch.cuda.is_initialized():
        return calibrated(detect(device))
    index = device.index or 0
    gpu = present_gpu(index)
    card = find_card(gpu.name)
    if card is None or abs(card.total_bytes - gpu.total_bytes) > gpu.total_bytes // 10:
        card = _of_this_size(gpu.name, gpu.total_bytes)
    # Of a card that the table does not have, all that NVML counts; a program gets some percent less.
    total = gpu.total_bytes if card is None else min(card.total_bytes, gpu.total_bytes)
    return replace(card_hardware(gpu.name, gpu.capability, total), device_index=index)


def _of_this_size(name: str, total_bytes: int) -> Card | None:
    """The table's row for a card that is made with several sizes of memory, by the size that is there."""
    asked, _ = _words(name)
    alike = [card for card in CARDS if _words(card.name)[0] == asked]
    close = [card for card in alike if abs(card.total_bytes - total_bytes) <= total_bytes // 10]
    return min(close, key=lambda card: abs(card.total_bytes - total_bytes), default=None)
