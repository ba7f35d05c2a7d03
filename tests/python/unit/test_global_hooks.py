# SPDX-License-Identifier: Apache-2.0
"""Global module hooks fire as often as in plain PyTorch, in pairs; planning fires none; every bit is kept."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

import memscale
from amounts import also
from calls import beside, failing
from memscale.techniques.checkpoint import global_hooks
from memscale.techniques.checkpoint.checkpointing import CheckpointAttachment

ROWS = 256
CONFIG = memscale.Config(memory_budget=1, enable_logging=False, strict_budget=False)
TABLES = (*global_hooks._TABLES, *global_hooks._BACKWARD)


class Block(nn.Module):
    """A branch with dropout and operations in place."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(self.act(self.up(x)), 0.2, self.training)
        return x + self.down(hidden * torch.sigmoid(hidden))


def network(chain: bool) -> nn.Module:
    """Blocks that are checkpointed one by one, or in a run."""
    torch.manual_seed(0)
    blocks = [Block() for _ in range(4)]
    return nn.Sequential(*blocks) if chain else Net(blocks)


class Net(nn.Module):
    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


Setup = Callable[[Counter[str]], list[Any]]
"""Registers hooks that count, and gives their handles."""


class Watch:
    """When hooks are registered and removed, in a step. The default: around all of it."""

    def __init__(self, setup: Setup, begin: str = "wrap", end: str = "last") -> None:
        self.setup, self.begin, self.end = setup, begin, end
        self.fired: Counter[str] = Counter()
        self.handles: list[Any] = []

    def at(self, moment: str) -> None:
        if moment == self.begin:
            self.handles += self.setup(self.fired)
        if moment in (self.end, "last"):
            for handle in self.handles:
                handle.remove()
            self.handles.clear()


def train(watch: Watch, wrapped: bool, chain: bool = False) -> list[Tensor]:
    """Three steps; everything that can be compared."""
    model, seen = network(chain), []
    watch.at("wrap")
    x = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(1))
    if wrapped:
        memscale.wrap(model, CONFIG, sample_input=(x,))
        assert memscale.executor_of(model).plan.active
    for step in range(3):
        torch.manual_seed(step)
        watch.at("forward")
        loss = model(x).square().mean()
        watch.at("backward")
        loss.backward()
        watch.at("over")
        assert not any(isinstance(hook, global_hooks._Shim) for table in TABLES for hook in table.values())
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        model.zero_grad()
    watch.at("last")
    if wrapped:
        memscale.detach(model)
    return seen


@pytest.fixture(autouse=True)
def no_hook_is_left() -> Iterator[None]:
    methods = nn.Module._get_backward_hooks, nn.Module._get_backward_pre_hooks
    yield
    try:
        assert not any(TABLES)
        assert (nn.Module._get_backward_hooks, nn.Module._get_backward_pre_hooks) == methods
        assert not global_hooks._installed.blocks and global_hooks._thread.frame is None
    finally:
        for table in TABLES:
            table.clear()


def check(setup: Setup, begin: str = "wrap", end: str = "last", chain: bool = False) -> Counter[str]:
    plain, planned = Watch(setup, begin, end), Watch(setup, begin, end)
    with_plain, with_plan = train(plain, False, chain), train(planned, True, chain)
    assert planned.fired == plain.fired
    assert all(map(torch.equal, with_plain, with_plan))
    assert len(with_plain) == len(with_plan)
    return planned.fired


def named(fired: Counter[str], kind: str) -> Callable[..., None]:
    return lambda module, *rest: fired.update([f"{kind} {type(module).__name__}"])


def observers(fired: Counter[str]) -> list[Any]:
    """One of each kind."""
    pre, post = torch_modules.register_module_forward_pre_hook, torch_modules.register_module_forward_hook
    return [
        pre(named(fired, "pre")),
        post(named(fired, "post")),
        post(named(fired, "with kwargs"), with_kwargs=True),
        post(named(fired, "always"), always_call=True),
        torch_modules.register_module_full_backward_pre_hook(named(fired, "backward pre")),
        torch_modules.register_module_full_backward_hook(named(fired, "backward")),
    ]


@pytest.mark.parametrize(
    ("begin", "end", "chain"),
    [
        ("wrap", "last", False),
        ("forward", "over", True),
        ("forward", "backward", False),  # there in the forward alone
        ("backward", "over", True),  # there in backward alone
        ("backward", "forward", False),  # of one step until the next one
    ],
)
def test_observers_fire_as_in_plain(begin: str, end: str, chain: bool) -> None:
    fired = check(observers, begin, end, chain)
    assert (
        fired["pre Linear"] == fired["post Linear"] == fired["with kwargs Linear"] == fired["always Linear"]
    )
    assert bool(fired["pre Linear"]) == (begin in ("wrap", "forward"))


def doubling(fired: Counter[str]) -> list[Any]:
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        return output * 2 if isinstance(module, nn.Tanh) else None

    return [torch_modules.register_module_forward_hook(hook)]


def in_place(fired: Counter[str]) -> list[Any]:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        if isinstance(module, nn.Linear):
            output.mul_(0.5)

    return [torch_modules.register_module_forward_hook(hook)]


def drawing(fired: Counter[str]) -> list[Any]:
    """Returns nothing, but moves the generator that dropout draws from."""
    return [torch_modules.register_module_forward_hook(lambda *args: torch.rand(3) is None or None)]


def of_inputs(fired: Counter[str]) -> list[Any]:
    def hook(module: nn.Module, args: Any) -> Any:
        return (args[0] + 0.25,) if isinstance(module, nn.Tanh) else None

    return [torch_modules.register_module_forward_pre_hook(hook)]


def in_order(fired: Counter[str]) -> list[Any]:
    """Two that do not commute; the first in order is not the first to change values."""

    def narrow(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        return output + 1 if isinstance(module, nn.Linear) and module.out_features == 16 else None

    def each(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        return output * 3 if isinstance(module, nn.Linear) else None

    register = torch_modules.register_module_forward_hook
    return [register(narrow), register(each)]


def with_kwargs(fired: Counter[str]) -> list[Any]:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor | None:
        assert kwargs == {}
        return output.sin() if isinstance(module, nn.Linear) else None

    register = torch_modules.register_module_forward_hook
    return [register(hook, with_kwargs=True, always_call=True)]


CHANGING = [doubling, in_place, drawing, of_inputs, in_order, with_kwargs]


@pytest.mark.parametrize(
    ("begin", "end", "chain"),
    [("wrap", "last", False), ("forward", "backward", True), *also(("backward", "over", False))],
)
@pytest.mark.parametrize("setup", CHANGING, ids=lambda setup: setup.__name__)
def test_hooks_that_change_values_keep_every_bit(setup: Setup, begin: str, end: str, chain: bool) -> None:
    def beside_an_observer(fired: Counter[str]) -> list[Any]:
        return [*setup(fired), torch_modules.register_module_forward_hook(named(fired, "post"))]

    check(beside_an_observer, begin, end, chain)


def test_what_hooks_compute_is_no_part_of_the_recompute() -> None:
    """With a graph that a loss uses, and with operations that save the block's own tensors."""
    terms: list[Tensor] = []

    def penalties(fired: Counter[str]) -> list[Any]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            if isinstance(module, nn.Linear):
                terms.append((output @ output.mT).tanh().square().mean())

        return [torch_modules.register_module_forward_hook(hook)]

    def run(wrapped: bool) -> list[Tensor]:
        watch, model, x = Watch(penalties), network(chain=False), torch.ones(ROWS, 16)
        if wrapped:
            memscale.wrap(model, CONFIG, sample_input=(x,))
        watch.at("wrap")
        torch.manual_seed(0)
        terms.clear()
        (model(x).square().mean() + sum(terms)).backward()
        watch.at("last")
        assert len(terms) == 8
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert all(map(torch.equal, run(False), run(True)))


@pytest.mark.parametrize("setup", [observers, doubling, in_place])
def test_selective_checkpoints_keep_the_same_operations(setup: Setup) -> None:
    def computing(fired: Counter[str]) -> list[Any]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            torch.addmm(torch.ones(16), torch.ones(2, 16), torch.ones(16, 16)).tanh()

        return [*setup(fired), torch_modules.register_module_forward_hook(hook)]

    def run(kept: bool) -> tuple[list[Tensor], Counter[str]]:
        block, watch = Block(), Watch(computing)
        torch.manual_seed(0)
        for parameter in block.parameters():
            nn.init.normal_(parameter)
        operations = frozenset({("addmm", 0), ("addmm", 1), ("tanh", 0), ("sigmoid", 0)})
        attachment = CheckpointAttachment(block, "block", kept=operations) if kept else None
        if attachment is not None:
            attachment.attach()
        watch.at("wrap")
        x = torch.linspace(-1, 1, 64).view(4, 16).requires_grad_()
        block(x).square().mean().backward()
        watch.at("last")
        if attachment is not None:
            attachment.undo()
        return [x.grad, *(p.grad for p in block.parameters())], watch.fired

    (plain, fired), (kept, fired_too) = run(False), run(True)
    assert all(map(torch.equal, plain, kept)) and fired == fired_too


def test_operations_in_place_go_with_backward_hooks_that_come_late() -> None:
    """Such a hook makes a module return a view, which cannot be written to."""

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.act = nn.Linear(16, 16), nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.up(x)).tanh()

    block = InPlace()
    attachment = CheckpointAttachment(block, "block")
    attachment.attach()
    out = block(torch.ones(2, 16))
    handle = torch_modules.register_module_full_backward_hook(lambda *args: None)
    out.sum().backward()
    handle.remove()
    attachment.undo()


def test_an_own_hook_for_backward_stays_beside_global_ones() -> None:
    """Inside a recompute a module has its own hooks for backward, and no global ones."""
    block, seen = Block(), []
    own = block.up.register_full_backward_hook(lambda *args: None)
    own_pre = block.up.register_full_backward_pre_hook(lambda *args: None)
    handles = observers(Counter())

    def forward(x: Tensor) -> Tensor:
        seen.append([len(found) for found in block.up._get_backward_hooks()])
        seen.append(len(block.up._get_backward_pre_hooks()))
        return Block.forward(block, x)

    block.forward = forward  # type: ignore[method-assign]
    attachment = CheckpointAttachment(block, "block")
    attachment.attach()
    block(torch.ones(2, 16)).sum().backward()
    assert seen == [[2, 0], 2, [1, 0], 1]
    attachment.undo()
    for handle in [*handles, own, own_pre]:
        handle.remove()


class Problem(Exception):
    """Of a hook."""


@pytest.mark.parametrize("always", [False, True])
def test_exceptions_in_hooks_and_forwards_leave_nothing(always: bool) -> None:
    def run(wrapped: bool) -> Counter[str]:
        model, fired, x = network(chain=False), Counter[str](), torch.ones(ROWS, 16)
        if wrapped:
            memscale.wrap(model, CONFIG, sample_input=(x,))

        def fails(module: nn.Module, args: Any) -> None:
            fired.update(["fails"])
            if fired["fails"] in (7, 11):
                raise Problem

        handles = [
            torch_modules.register_module_forward_pre_hook(fails),
            torch_modules.register_module_forward_hook(named(fired, "post"), always_call=always),
        ]
        for _ in range(3):
            try:
                model(x).sum().backward()
            except Problem:
                fired.update(["problems"])
        for handle in handles:
            handle.remove()
        return fired

    plain, planned = run(False), run(True)
    assert plain == planned and plain["problems"] == 2


def test_another_thread_keeps_its_hooks_meanwhile() -> None:
    """Its model's calls, while this thread is in a recompute, fire every hook once."""
    block, other, fired = Block(), nn.Tanh(), Counter[str]()
    handles = observers(fired)
    turns = Counter[str]()

    def elsewhere() -> None:
        other(torch.ones(2, requires_grad=True)).sum().backward()

    def forward(x: Tensor) -> Tensor:
        turns.update(["forward"])
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return F.silu(block.up(x)).tanh()

    block.forward = forward  # type: ignore[method-assign]
    attachment = CheckpointAttachment(block, "block")
    attachment.attach()
    block(torch.ones(2, 16)).sum().backward()
    assert turns["forward"] == 2
    kinds = ("pre", "post", "with kwargs", "always", "backward pre", "backward")
    assert fired == {
        **{f"{kind} Block": 1 for kind in kinds},
        **{f"{kind} Linear": 1 for kind in kinds},
        **{f"{kind} Tanh": 2 for kind in kinds},
    }
    attachment.undo()
    for handle in handles:
        handle.remove()


def test_a_handle_removes_its_hook_in_the_midst_of_a_region() -> None:
    block, fired = Block(), Counter[str]()
    handle = torch_modules.register_module_forward_hook(named(fired, "post"))

    def forward(x: Tensor) -> Tensor:
        x = block.up(x)
        handle.remove()
        return block.down(x).tanh()

    block.forward = forward  # type: ignore[method-assign]
    attachment = CheckpointAttachment(block, "block")
    attachment.attach()
    block(torch.ones(2, 16)).sum().backward()
    assert fired == {"post Linear": 1}
    attachment.undo()


def test_regions_inside_of_regions() -> None:
    def run(attach: bool) -> tuple[list[Tensor], Counter[str]]:
        torch.manual_seed(0)
        model, fired = nn.Sequential(Block(), Block()), Counter[str]()
        places = [CheckpointAttachment(model[0], "0"), CheckpointAttachment(model, "")] if attach else []
        for place in places:
            place.attach()
        handles = [*doubling(fired), *observers(fired)]
        torch.manual_seed(0)
        model(torch.ones(2, 16)).sum().backward()
        for handle in handles:
            handle.remove()
        return [p.grad for p in model.parameters() if p.grad is not None], fired

    (plain, fired), (nested, fired_too) = run(False), run(True)
    assert all(map(torch.equal, plain, nested)) and fired == fired_too


def test_planning_fires_none() -> None:
    class Registers(Net):
        """Makes a module, a parameter and a buffer in each forward. May decide by a value."""

        by_value = False

        def forward(self, x: Tensor) -> Tensor:
            self.made = nn.Tanh()
            self.weight = nn.Parameter(torch.ones(1))
            self.register_buffer("state", torch.ones(1))
            if self.by_value and float(x.sum()) < -1e9:
                return x
            return super().forward(x) * self.weight

    fired: Counter[str] = Counter()
    for by_value in (False, True):
        model, x = Registers([Block() for _ in range(3)]), torch.ones(ROWS, 16)
        model.by_value = by_value
        model(x)  # so that what it makes is there before
        handles = [
            *observers(fired),
            torch_modules.register_module_module_registration_hook(named(fired, "module")),
            torch_modules.register_module_parameter_registration_hook(named(fired, "parameter")),
            torch_modules.register_module_buffer_registration_hook(named(fired, "buffer")),
        ]
        if not by_value:  # whose traces, by real steps, `wrap` shows as well
            memscale.predict(model, config=CONFIG, sample_input=(x,), device="cpu")
            memscale.plan(model, config=CONFIG, sample_input=(x,))
        memscale.wrap(model, CONFIG, sample_input=(x,))
        memscale.verify(model, (x,))
        memscale.detach(model)
        memscale.verify(model, (x,), config=CONFIG)
        assert not fired
        for handle in handles:
            handle.remove()


def test_nothing_is_done_where_there_are_no_hooks() -> None:
    with beside({global_hooks._in_force: failing(AssertionError)}):
        train(Watch(lambda fired: []), wrapped=True)
