# SPDX-License-Identifier: Apache-2.0
"""Runs of children of a `nn.Sequential`, checkpointed as one: equal, exact in memory, gone when undone."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import io
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from memscale.core.in_force import runs_of
from memscale.errors import AttachError, RecomputeError
from memscale.plans.plan import Choice
from memscale.techniques.checkpoint.chains import ChainAttachment, ChainRun
from memscale.techniques.checkpoint.checkpoint_state import Uses
from memscale.techniques.checkpoint.checkpointing import Region
from technique_samples import WIDTH, Transformer, attached, plain, seeded, selective, train
from zoo import blocks as odd
from zoo.models import Case, mean_square, numbers
from zoo.models import case as zoo_case
from zoo.training import Loop, assert_same, same_bits


def run(chain: nn.Module, first: str, last: str) -> ChainRun:
    """A run with all that the executor would say of it, and more."""
    names = list(chain._modules)
    inside = [chain._modules[name] for name in names[names.index(first) : names.index(last) + 1]]
    modules = {module for child in inside if child is not None for module in child.modules()}
    buffers = [(owner, name) for owner in modules for name in owner._buffers]
    return ChainRun(first, last, buffers, uses=Uses(True, True))


def on(model: nn.Module, path: str, *runs: tuple[str, str]) -> ChainAttachment:
    chain = model.get_submodule(path)
    return ChainAttachment(chain, path, [run(chain, *each) for each in runs])


def mixed() -> nn.Sequential:
    """Running statistics, random numbers, in-place operations, tied and frozen weights."""
    first, second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, 2 * WIDTH)
    tied = nn.Linear(2 * WIDTH, 2 * WIDTH)
    tied.weight = second.weight
    tied.bias.requires_grad_(False)
    return nn.Sequential(
        first, nn.BatchNorm1d(2 * WIDTH), nn.ReLU(inplace=True), nn.Dropout(0.2), second, nn.GELU(),
        nn.Sequential(tied, nn.BatchNorm1d(2 * WIDTH), nn.Tanh()), nn.Dropout(0.1),
        nn.Linear(2 * WIDTH, WIDTH),
    )  # fmt: skip


def shared() -> nn.Sequential:
    """The same child twice in one run, and in another one."""
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), block, nn.Sigmoid(), block, nn.Tanh(), block, nn.Sigmoid())


def oddities() -> nn.Sequential:
    """Blocks that draw from Python's generator, have functions of their own, and checkpoint inside."""
    kinds = (odd.PythonRandom, odd.Custom, functools.partial(odd.UsesCheckpoint, False), odd.InPlaceViews)
    return nn.Sequential(*(kind() for kind in kinds), functools.partial(odd.UsesCheckpoint, True)())


CASES: list[tuple[Case, str, list[tuple[str, str]]]] = [
    (Case("mixed", mixed, numbers(12, WIDTH), mean_square, frozen=("1",)), "", [("0", "3"), ("4", "7")]),
    (Case("all", mixed, numbers(12, WIDTH), mean_square, frozen=("0",)), "", [("0", "8")]),
    (Case("inner", mixed, numbers(12, WIDTH), mean_square, frozen=("6.0",)), "6", [("0", "1")]),
    (Case("shared", shared, numbers(12, WIDTH), mean_square, frozen=("0",)), "", [("0", "3"), ("4", "6")]),
    (Case("odd", oddities, numbers(8, odd.WIDTH), mean_square, frozen=("0",)), "", [("0", "1"), ("2", "4")]),
    (zoo_case("convnet"), "blocks", [("0", "1"), ("2", "3")]),
    (zoo_case("convnet"), "blocks", [("1", "3")]),
]

LOOPS = {
    "plain": Loop(),
    "autocast": Loop(3, autocast=True),
    "accumulate": Loop(3, accumulate=2),
    "frozen": Loop(3, freeze=True),
    "all": Loop(3, autocast=True, accumulate=2, freeze=True),
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: f"{CASES[number][0].name}{number}")
def test_equal_to_plain_pytorch(number: int, loop: str) -> None:
    case, path, runs = CASES[number]
    assert_same(plain(case, LOOPS[loop]), train(case, lambda model: [on(model, path, *runs)], LOOPS[loop]))


def test_runs_beside_other_techniques() -> None:
    """A run, a child that is checkpointed alone, selectively, and a chain inside a run of another chain."""
    case = CASES[0][0]

    def attach(model: nn.Module) -> Sequence[Any]:
        parts = [on(model, "", ("0", "2"), ("5", "7")), on(model, "6", ("0", "2"))]
        return [selective(model, "4", frozenset([("addmm", 0)])), *parts]

    assert_same(plain(case), train(case, attach))


# ---- what a chain does -------------------------------------------------------------------------------


CALLS: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
"""Not on the modules, where a recompute finds and leaves what its forward found."""


class Noted(nn.Module):
    """A linear layer that notes its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        CALLS[self] = CALLS.get(self, 0) + 1
        return torch.tanh(self.inner(x))


def noted(count: int = 6) -> nn.Sequential:
    model = seeded(lambda: nn.Sequential(*(Noted() for _ in range(count))))
    assert isinstance(model, nn.Sequential)
    return model


def batch() -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(3))


def step(model: Callable[..., Tensor], parameters: Sequence[nn.Parameter], **call: Tensor) -> list[Tensor]:
    loss = (model(**call) if call else model(batch())).pow(2).mean()
    return [loss.detach(), *torch.autograd.grad(loss, list(parameters))]


def assert_equal(a: list[Tensor], b: list[Tensor]) -> None:
    assert len(a) == len(b) > 0
    assert all(same_bits(x, y) for x, y in zip(a, b, strict=True))


def calls(model: nn.Sequential) -> list[int]:
    return [CALLS.get(child, 0) for child in model]


def test_the_children_of_a_run_run_again_once() -> None:
    model = noted()
    with attached(on(model, "", ("1", "3"))):
        step(model, list(model.parameters()))
    assert calls(model) == [1, 2, 2, 2, 1, 1]


def test_hooks_of_the_children_are_called() -> None:
    plain_model, model = noted(), noted()
    for each in (plain_model, model):
        each[2].register_forward_hook(lambda module, args, output: output * 1.5)
        each[2].register_forward_pre_hook(lambda module, args: (args[0] + 0.25,))
    with attached(on(model, "", ("1", "3"))):
        assert_equal(step(plain_model, list(plain_model.parameters())), step(model, list(model.parameters())))


@pytest.mark.parametrize("form", ["keyword", "no-grad", "inference", "functorch", "functional-call"])
def test_other_ways_to_call(form: str) -> None:
    def use(model: nn.Sequential) -> list[Tensor]:
        parameters = dict(model.named_parameters())
        if form == "keyword":
            return step(model, list(parameters.values()), input=batch())
        if form == "functorch":
            grads = torch.func.grad(lambda p: torch.func.functional_call(model, p, (batch(),)).sum())
            return list(grads(parameters).values())
        if form == "functional-call":
            other = {name: (p.detach() * 1.5).requires_grad_() for name, p in parameters.items()}
            loss = torch.func.functional_call(model, other, (batch(),)).sum()
            return list(torch.autograd.grad(loss, list(other.values())))
        with torch.inference_mode() if form == "inference" else torch.no_grad():
            return [model(batch()).clone()]

    plain_model, model = noted(), noted()
    expected = use(plain_model)
    with attached(on(model, "", ("1", "3"))):
        assert_equal(expected, use(model))


@pytest.mark.parametrize("arguments", [(), (1, 2)])
def test_a_wrong_call_fails_as_before(arguments: tuple[int, ...]) -> None:
    model = noted()

    def message() -> str:
        with pytest.raises(TypeError) as caught:
            model(*arguments)
        return str(caught.value)

    expected = message()
    with attached(on(model, "", ("1", "3"))):
        assert message() == expected


# ---- a chain that changes ----------------------------------------------------------------------------


def _swap(model: nn.Sequential) -> None:
    model[1], model[2] = model[2], model[1]


def _rotate(model: nn.Sequential) -> None:
    children = list(model._modules.items())
    model._modules.clear()
    model._modules.update(children[2:] + children[:2])


CHANGES: dict[str, tuple[Callable[[nn.Sequential], Any], list[int]]] = {
    "append": (lambda model: model.append(Noted()), [1, 2, 2, 2, 1, 1, 1]),
    "replace inside": (lambda model: model.__setitem__(2, Noted()), [1, 1, 1, 1, 1, 1]),
    "replace outside": (lambda model: model.__setitem__(0, Noted()), [1, 2, 2, 2, 1, 1]),
    "delete inside": (lambda model: model.__delitem__(2), [1, 1, 1, 1, 1]),
    "delete behind": (lambda model: model.__delitem__(5), [1, 2, 2, 2, 1]),
    "delete all behind": (lambda model: model.__delitem__(slice(2, None)), [1, 1]),
    "insert before": (lambda model: model.insert(0, Noted()), [1, 1, 1, 1, 1, 1, 1]),
    "swap": (_swap, [1, 1, 1, 1, 1, 1]),
    "rotate": (_rotate, [1, 1, 1, 1, 2, 2][::-1]),
    "empty": (lambda model: model.__delitem__(slice(0, None)), []),
}


@pytest.mark.parametrize("change", [name for name in CHANGES if name not in ("rotate", "empty")])
def test_children_changed_after_attaching(change: str) -> None:
    alter, expected_calls = CHANGES[change]
    plain_model, model = noted(), noted()
    with attached(on(model, "", ("1", "3"))):
        for each in (plain_model, model):
            torch.manual_seed(1)
            alter(each)
        assert_equal(step(plain_model, list(plain_model.parameters())), step(model, list(model.parameters())))
        assert calls(model) == expected_calls


def test_children_in_another_order() -> None:
    plain_model, model = noted(), noted()
    with attached(on(model, "", ("1", "3"))):
        for each in (plain_model, model):
            _rotate(each)
        assert_equal(step(plain_model, list(plain_model.parameters())), step(model, list(model.parameters())))
    assert set(calls(model)) == {1}


def test_an_emptied_chain() -> None:
    model = noted()
    with attached(on(model, "", ("1", "3"))):
        del model[:]
        x = batch()
        assert model(x) is x


def test_changed_between_forward_and_backward() -> None:
    """The recompute is of the children that the first run was of."""
    plain_model, model = noted(), noted()
    parameters, plain_parameters = list(model.parameters()), list(plain_model.parameters())
    expected = step(plain_model, plain_parameters)
    with attached(on(model, "", ("1", "3"))):
        loss = model(batch()).pow(2).mean()
        del model[2]
        assert_equal(expected, [loss.detach(), *torch.autograd.grad(loss, parameters)])


# ---- errors, copies, the end -------------------------------------------------------------------------


class OwnForward(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


class OwnOrder(nn.Sequential):
    def __iter__(self) -> Any:
        return reversed(list(super().__iter__()))


class Renamed(nn.Sequential):
    """A subclass that leaves the forward alone, as torchvision's do."""


def test_a_subclass_that_is_still_a_chain() -> None:
    plain_model, model = seeded(lambda: Renamed(*noted())), seeded(lambda: Renamed(*noted()))
    with attached(on(model, "", ("0", "5"))):
        assert_equal(step(plain_model, list(plain_model.parameters())), step(model, list(model.parameters())))


@pytest.mark.parametrize(
    ("build", "first", "last"),
    [
        (lambda: OwnForward(Noted(), Noted()), "0", "1"),
        (lambda: OwnOrder(Noted(), Noted()), "0", "1"),
        (lambda: nn.ModuleList([Noted(), Noted()]), "0", "1"),
        (lambda: nn.Sequential(Noted(), Noted()), "0", "2"),
        (lambda: nn.Sequential(Noted(), Noted()), "1", "0"),
    ],
)
def test_what_is_no_chain_is_refused(build: Callable[[], nn.Module], first: str, last: str) -> None:
    model = build()
    attachment = ChainAttachment(model, "net", [ChainRun(first, last)])
    with pytest.raises(AttachError, match="net"):
        attachment.attach()
    assert "forward" not in model.__dict__


def test_a_forward_of_somebody_elses_is_refused() -> None:
    model = noted()
    model.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(AttachError, match="own forward"):
        on(model, "", ("0", "1")).attach()


def test_an_error_names_the_children() -> None:
    class Differs(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            CALLS[self] = CALLS.get(self, 0) + 1
            return x[CALLS[self] - 1 :].sin()

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Differs(), nn.Tanh())
    holder = nn.ModuleDict({"net": model})
    with attached(on(holder, "net", ("0", "2"))):
        loss = model(batch()).sum()
        with pytest.raises(RecomputeError, match=r"net\.0 to net\.2"):
            loss.backward()


@pytest.mark.parametrize("moment", ["forward", "recompute"])
def test_an_exception_and_then_a_good_step(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_model, model = seeded(mixed), seeded(mixed)

    def bomb(*args: Any) -> Any:
        raise KeyboardInterrupt

    with attached(on(model, "", ("0", "7"))):
        statistics = model[1].running_mean.clone()
        # By its class: a recompute finds the forward, and the class, that were on the module itself.
        own = type(model[5])
        bombing = type("Bombing", (own,), {"forward": bomb})
        if moment == "forward":
            model[5].__class__ = bombing
            with pytest.raises(KeyboardInterrupt):
                model(batch())
            model[5].__class__ = own
        if moment == "recompute":
            loss = model(batch()).sum()
            monkeypatch.setattr(own, "forward", bomb)  # a recompute has the class of the forward
            after = model[1].running_mean.clone()
            with pytest.raises(KeyboardInterrupt):
                loss.backward()
            assert torch.equal(model[1].running_mean, after)  # the recompute wrote to a copy
            monkeypatch.undo()
        assert not torch.equal(model[1].running_mean, statistics)
        for each in (plain_model, model):
            each.load_state_dict(seeded(mixed).state_dict())
            each.zero_grad()
        results = []
        for each in (plain_model, model):
            torch.manual_seed(7)
            results.append(step(each, [p for p in each.parameters() if p.requires_grad]))
        assert_equal(*results)


def test_two_backwards_and_create_graph() -> None:
    def use(model: nn.Sequential) -> list[Tensor]:
        x = batch().requires_grad_()
        loss = model(x).pow(2).mean()
        loss.backward(retain_graph=True)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.pow(2).sum() * 1e3).backward()
        return [x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]

    plain_model, model = noted(), noted()
    expected = use(plain_model)
    with attached(on(model, "", ("1", "4"))):
        assert_equal(expected, use(model))


def test_a_copy_and_a_file() -> None:
    model = noted()
    expected = noted()(batch())
    attachment = on(model, "", ("1", "3"))
    attachment.attach()
    twin = copy.deepcopy(model)
    assert torch.equal(expected, twin(batch()))
    step(twin, list(twin.parameters()))
    assert calls(twin) == [2] * 6 and calls(model) == [0] * 6
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(expected, loaded(batch()))
    assert "forward" not in twin.__dict__ and "forward" in model.__dict__
    attachment.undo()
    assert "forward" not in model.__dict__


def test_undo_leaves_nothing_and_no_step_leaks() -> None:
    model = seeded(mixed)
    before = [dict(module.__dict__) for module in model.modules()]
    gc.collect()
    gc.disable()
    regions = sum(type(o) is Region for o in gc.get_objects())
    try:
        with attached(on(model, "", ("0", "3"), ("4", "8"))):
            for _ in range(3):
                step(model, [p for p in model.parameters() if p.requires_grad])
            tensors = sum(issubclass(type(o), Tensor) for o in gc.get_objects())
            for _ in range(200):
                step(model, [p for p in model.parameters() if p.requires_grad])
            assert sum(issubclass(type(o), Tensor) for o in gc.get_objects()) == tensors
        assert sum(type(o) is Region for o in gc.get_objects()) == regions
    finally:
        gc.enable()
    assert [dict(module.__dict__) for module in model.modules()] == before


def test_only_the_first_input_is_held() -> None:
    """After forward: the run's input and its output, whatever is in between."""
    seen: list[weakref.ref[Any]] = []

    class Seen(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x)
            seen.append(weakref.ref(y.untyped_storage()))
            return y

    model = seeded(lambda: nn.Sequential(*(Seen(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6))))
    with attached(on(model, "", ("1", "4"))):
        y = model(batch())
        alive = [index for index, ref in enumerate(seen) if ref() is not None]
    assert alive == [0, 4, 5]
    del y


def test_torch_compile() -> None:
    model = seeded(
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5)))
    )
    parameters = list(model.parameters())
    expected = step(model, parameters)
    with attached(on(model, "", ("1", "3"))):
        torch._dynamo.utils.counters.clear()
        assert_equal(expected, step(torch.compile(model, backend="aot_eager", fullgraph=True), parameters))
    torch._dynamo.reset()


# ---- through the executor ----------------------------------------------------------------------------

SMALLEST = memscale.Config(memory_budget=1, enable_logging=False)


def choice(module: str, joined: bool = False, *kept: str) -> Choice:
    techniques = ("selective",) if kept else ("checkpoint",)
    values = {"type": "T", "rule": "chosen", "reason": "", "calls": 1, "bytes": 0, "ns": 0}
    return Choice(module=module, techniques=techniques, kept=kept, joined=joined, **values)  # type: ignore[arg-type]


def test_choices_are_grouped_by_chain() -> None:
    active = [
        choice("a.0"),
        choice("a.1", True),
        choice("b.3"),
        choice("a.2", True),
        choice("a.3"),
        choice("c"),
    ]
    groups = [[each.module for each in group] for group in runs_of(active)]
    assert groups == [["a.0", "a.1", "a.2"], ["b.3"], ["a.3"], ["c"]]


def wrapped(build: Callable[[], nn.Module], choices: Sequence[Choice], sample: bool) -> nn.Module:
    """A wrapped model whose plan, whatever it was, is `choices` from now on."""
    model = seeded(build)
    memscale.wrap(model, SMALLEST, (batch(),))
    executor = memscale.executor_of(model)
    plan = dataclasses.replace(executor.planned.plan, choices=tuple(choices))
    planned = dataclasses.replace(executor.planned, plan=plan)
    executor.in_force.undo()
    executor.planned = planned
    executor._known = {signature: planned for signature in executor._known}
    executor.in_force.attach(planned)
    return model


@pytest.mark.parametrize("inner", [False, True], ids=["the model itself", "inside"])
def test_a_plan_with_runs_and_kept_operations(inner: bool) -> None:
    def build() -> nn.Module:
        chain = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(5))
        )
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), chain, nn.Dropout(0.1)) if inner else chain

    head = "1." if inner else ""
    choices = [
        choice(f"{head}0", False, "addmm#0"),
        choice(f"{head}1"),
        choice(f"{head}2", True),
        choice(f"{head}3"),
    ]
    plain_model, model = seeded(build), wrapped(build, choices, True)
    chain = model.get_submodule("1") if inner else model
    results = []
    for each in (plain_model, model):
        torch.manual_seed(7)
        parameters = list(each.parameters())
        results.append(step(each, parameters) + [buffer.clone() for buffer in each.buffers()])
    assert_equal(*results)
    assert [type(child.__dict__.get("forward")).__name__ for child in chain] == [
        "CheckpointedForward", "NoneType", "NoneType", "CheckpointedForward", "NoneType",
    ]  # fmt: skip
    executor = memscale.executor_of(model)
    assert [type(part).__name__ for part in executor.in_force.attached][-1] == "ChainAttachment"

    twin = copy.deepcopy(model)
    torch.manual_seed(7)
    step(twin, list(twin.parameters()))
    assert not any("forward" in module.__dict__ for module in twin.modules())

    # A batch that the plan does not cover passes the executor first, which re-plans.
    before = executor.planned
    model(torch.randn(64, WIDTH)).sum().backward()
    assert executor.planned is not before
    model(batch()).sum().backward()
    memscale.detach(model)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_wrapped_chain_is_freed_without_the_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        model = wrapped(noted, [choice("1"), choice("2", True)], True)
        ref = weakref.ref(model[1].inner.weight)
        model(batch()).sum().backward()
        del model
        assert ref() is None
    finally:
        gc.enable()


def test_transformers_in_a_row() -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(Transformer() for _ in range(4)))

    case = Case("row", build, numbers(3, 5, WIDTH), mean_square)
    assert_same(plain(case), train(case, lambda model: [on(model, "", ("0", "1"), ("2", "3"))]))


@pytest.mark.parametrize("sample", [False, True])
def test_a_model_that_is_a_chain_has_runs(sample: bool) -> None:
    """With and without a sample: the first batch is planned in the middle of the model's own call."""
    model = nn.Sequential(
        *(child for _ in range(3) for child in (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.GELU()))
    )
    batch = torch.ones(512, WIDTH)
    memscale.wrap(model, memscale.Config(memory_budget=1, enable_logging=False), batch if sample else None)
    model(batch).sum().backward()
    assert any(choice.joined for choice in memscale.executor_of(model).plan.active)
