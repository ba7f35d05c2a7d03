# SPDX-License-Identifier: Apache-2.0
"""Recomputes on a card are compared with their forwards at the end of backward.

Tensors are the CPU's, and a stand-in for `_core.FingerprintTable` takes their fingerprints. The real one is
tested by tests/python/unit/test_fingerprint_table.py, and on a card by
tests/python/gpu/test_gpu_recompute_check.py.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_recompute_check import (
    WORLD,
    Block,
    DropsMask,
    FlipsOneBit,
    ReadsGlobal,
    SavesMore,
    SwallowsErrors,
    backward_in_another_world,
    batch,
    model_of,
    step,
    wrapped,
)
from torch import Tensor, nn

import memscale
from calls import beside
from card_table import Table, card_of_the_cpu
from memscale.errors import MemScaleError, RecomputeError
from memscale.optim import cards
from memscale.techniques.checkpoint import card_check, recompute_check
from memscale.techniques.checkpoint.checkpoint_state import Body


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[Table]:
    """Has tensors of the CPU compared as those of a card are."""
    with card_of_the_cpu(monkeypatch) as made:
        yield made
    WORLD.clear()


FIRST = {FlipsOneBit: "1", SwallowsErrors: "1"}
"""The first module that a backward recomputes, where that is not "2"."""


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [value.grad for value in model.parameters()]


# ---- what is found ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ReadsGlobal, DropsMask, FlipsOneBit, SwallowsErrors])
def test_a_planted_defect_comes_out_of_backward(kind: type[Block], table: Table) -> None:
    model = wrapped(model_of(kind))
    with pytest.raises(RecomputeError) as caught:
        backward_in_another_world(model)
    error = caught.value
    assert (error.module, error.tensor) == (FIRST.get(kind, "2"), "saved tensor 2")  # as on the host
    assert "has other values than in its forward (float32[8, 4, 64]" in error.what
    assert error.cause == recompute_check.OTHER_ON_CARD
    assert table.reads == 1 and table.submitted == []


def test_equal_recomputes_pass_and_are_read_once(table: Table) -> None:
    model, plain = wrapped(model_of(Block)), model_of(Block)
    for count in (1, 2, 3):
        for each in (model, plain):
            step(each)
        assert table.reads == count
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(plain), strict=True))  # type: ignore[arg-type]
    gc.collect()
    assert table.alive == 0  # slots go back


def test_the_module_is_kept_for_the_rest_of_the_run(table: Table) -> None:
    model, failed = wrapped(model_of(ReadsGlobal)), []
    for _ in range(6):
        model.zero_grad()
        try:
            backward_in_another_world(model)
        except RecomputeError as error:
            failed.append(error.module)
            continue
        break
    assert failed == ["2", "1", "0"]
    assert not [choice for choice in memscale.executor_of(model).plan.active if choice.module in failed]


def test_modes(table: Table) -> None:
    model = wrapped(model_of(Block), "off")
    step(model)
    assert table.reads == 0
    model = wrapped(model_of(ReadsGlobal), "first")
    with pytest.raises(RecomputeError):
        backward_in_another_world(model)


def test_a_graph_that_is_kept_is_compared_again(table: Table) -> None:
    loss = wrapped(model_of(ReadsGlobal))(batch()).square().mean()
    loss.backward(retain_graph=True)
    WORLD["now"] = True
    with pytest.raises(RecomputeError):
        loss.backward()


# ---- other ways through a backward ------------------------------------------------------------------------


def test_no_gradient_is_used_by_a_step_inside_of_backward(table: Table) -> None:
    """The optimizer steps when a gradient is complete; those behind a wrong recompute are not used."""
    model = model_of(ReadsGlobal)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = memscale.Config(
        memory_budget=1, enable_logging=False, enable_offloading=False, step_in_backward=True
    )
    memscale.wrap(model, config, batch(), optimizer=optimizer)
    step(model)
    optimizer.step()
    reads = table.reads
    assert reads > 1  # before steps that come behind a recompute
    before = [value.detach().clone() for value in model.parameters()]
    with pytest.raises(RecomputeError) as caught:
        backward_in_another_world(model)
    assert caught.value.module == "2"
    changed = [
        name
        for (name, value), was in zip(model.named_parameters(), before, strict=True)
        if not torch.equal(value, was)
    ]
    assert changed and all(name.startswith("3.") for name in changed)  # right ones, before the recompute


def test_outside_of_a_backward_the_result_is_there_at_once(table: Table) -> None:
    model = wrapped(model_of(ReadsGlobal))
    node = model(batch()).grad_fn
    nodes = [node]
    for each in nodes:
        nodes += [before for before, _ in each.next_functions if before is not None and before not in nodes]
    tanh = [each for each in nodes if each.name() == "TanhBackward0"]
    WORLD["now"] = True
    with pytest.raises(RecomputeError):
        for each in tanh:
            _ = each._saved_result
    assert table.submitted == []


def test_a_difference_of_a_failed_backward_is_not_the_next_ones(table: Table) -> None:
    """Its module is kept all the same."""
    model = wrapped(model_of(ReadsGlobal))
    loss = model(batch()).square().mean()
    WORLD["now"] = True

    def fail(gradient: Tensor) -> None:
        raise ArithmeticError

    handle = model[1].up.weight.register_hook(fail)
    with pytest.raises(ArithmeticError):
        loss.backward()
    handle.remove()
    WORLD.clear()
    assert table.submitted and table.reads == 0
    model.zero_grad()
    step(model)
    assert [path for path, _ in memscale.executor_of(model)._to_keep] == ["2"]


def test_another_number_of_saves_is_known_at_once(table: Table) -> None:
    with pytest.raises(RecomputeError):
        backward_in_another_world(wrapped(model_of(SavesMore)))


def test_a_difference_is_raised_in_its_own_backward(table: Table) -> None:
    """Another one runs within it, reads the card, and has none."""
    other, model = wrapped(model_of(Block)), wrapped(model_of(ReadsGlobal))
    loss = model(batch()).square().mean()
    ended = []

    def run_another(gradient: Tensor) -> None:
        thread = threading.Thread(target=lambda: ended.append(step(other)))
        thread.start()
        thread.join()

    model[1].up.weight.register_hook(run_another)  # behind the first recompute
    WORLD["now"] = True
    with pytest.raises(RecomputeError):
        loss.backward()
    assert len(ended) == 1 and table.reads == 3  # once more, where the other one begins
    assert not card_check._due


def test_backwards_in_threads(table: Table) -> None:
    models = [wrapped(model_of(kind)) for kind in (Block, Block, ReadsGlobal)]
    losses = [model(batch()).square().mean() for model in models]
    WORLD["now"] = True
    raised: list[Any] = []

    def run(loss: Tensor) -> None:
        try:
            loss.backward()
        except RecomputeError as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(loss,)) for loss in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(raised) == 1 and raised[0].module == "2"


# ---- what is not compared ----------------------------------------------------------------------------------


class SavesScratch(torch.autograd.Function):
    """As an attention without dropout, whose seed is whatever the memory had."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        seed, offset = torch.tensor(time.perf_counter_ns()), torch.tensor([time.perf_counter_ns(), 0])
        ctx.save_for_backward(seed, offset.view(torch.uint64), x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        assert len(ctx.saved_tensors) == 3
        return gradients[0] * 2


class HasScratch(Block):
    def defect(self, h: Tensor) -> Tensor:
        return SavesScratch.apply(h)  # type: ignore[no-any-return]


def test_scratch_of_a_cards_kernels_is_not_compared() -> None:
    with pytest.raises(RecomputeError):
        step(wrapped(model_of(HasScratch)))

    def has_cards(result: None, body: Body, *unused: Any) -> None:
        body.has_cards = True

    with beside(after={Body.__init__: has_cards}):
        model = wrapped(model_of(HasScratch))
        step(model)


def test_nothing_is_while_a_graph_is_captured(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    backward_in_another_world(wrapped(model_of(ReadsGlobal)))
    assert table.alive == 0 and table.reads == 0


def test_saves_beyond_the_slots(table: Table, caplog: pytest.LogCaptureFixture) -> None:
    table.slots = 3
    caplog.set_level("WARNING", "memscale")
    logging.getLogger("memscale").propagate = True
    model = wrapped(model_of(Block))
    for _ in range(2):
        step(model)
    told = [
        record.getMessage() for record in caplog.records if "wait for their recompute" in record.getMessage()
    ]
    assert told == [
        "more than 65536 saved tensors wait for their recompute on cpu: the others are not compared"
    ]


@pytest.mark.parametrize("status", ["EUNSUPPORTED", "EDEVMEM"])
def test_a_card_without_kernels(
    status: str, table: Table, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def refuse(device: torch.device, slots: int) -> None:
        asked.append(slots)
        error: Any = MemScaleError("no compiler:\n  install one")
        error.status = status
        raise error

    monkeypatch.setattr(cards, "fingerprint_table", refuse)
    caplog.set_level("WARNING", "memscale")
    logging.getLogger("memscale").propagate = True
    backward_in_another_world(wrapped(model_of(ReadsGlobal)))
    told = [record.getMessage() for record in caplog.records if "not compared" in record.getMessage()]
    assert told == ["recomputes on cpu are not compared with their forwards: no compiler: install one"]
    assert (len(asked) == 1) is (status == "EUNSUPPORTED")  # another time there may be memory


def test_its_memory_is_within_what_a_prediction_has_for_the_context() -> None:
    from memscale.hardware import detect

    assert 8 * card_check.SLOTS + 64 < 2 << 20 < detect._LAZY_CONTEXT_BYTES - int(0.47 * 2**30)
