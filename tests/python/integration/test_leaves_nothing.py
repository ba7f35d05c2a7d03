# SPDX-License-Identifier: Apache-2.0
"""Planning leaves nothing behind in the process: caches of functions, globals, classes, closures, threads."""

from __future__ import annotations

import array
import contextvars
import copy
import gc
import importlib
import io
from collections import deque
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import caching_nets
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import memscale
from memscale.errors import ProfileError
from memscale.state import leftovers, model_state

QUIET = {"enable_logging": False}


@pytest.fixture
def nets() -> ModuleType:
    """The nets in a module of their own, whose caches are empty."""
    return importlib.reload(caching_nets)


class _NoImages:
    """In place of `ProcessImages`: nothing is restored."""

    replays_generators = uses_gradients = False

    def __init__(self, model: nn.Module, contents: bool) -> None:
        pass

    def changed(self) -> list[Any]:
        return []

    def restore(self) -> None:
        pass


def _no_search(search: Any, watch: Any) -> list[str]:
    raise AssertionError("the image was to suffice")


_OF_OTHERS: list[FakeTensor] = []
"""What is alive before these tests: torch.compile, for one, keeps fakes of its own."""


def fakes_alive() -> list[FakeTensor]:
    gc.collect()
    known = set(map(id, _OF_OTHERS))
    return [value for value in gc.get_objects() if type(value) is FakeTensor and id(value) not in known]


@pytest.fixture(autouse=True, scope="module")
def fakes_of_others() -> Iterator[None]:
    gc.unfreeze()  # what is frozen is not listed, and a search for leftovers thaws it
    _OF_OTHERS[:] = fakes_alive()
    yield
    _OF_OTHERS.clear()


def predict(model: nn.Module, x: Tensor) -> None:
    memscale.predict(model, sample_input=x)


def wrap(model: nn.Module, x: Tensor) -> None:
    memscale.wrap(model, memscale.Config(memory_budget=1, **QUIET), sample_input=x)


def wrap_without_a_plan(model: nn.Module, x: Tensor) -> None:
    memscale.wrap(model, memscale.Config(memory_budget="1GiB", **QUIET), sample_input=x)


def wrap_by_a_real_step(model: nn.Module, x: Tensor) -> None:
    config = memscale.Config(memory_budget=1, use_static_profiling=False, **QUIET)
    memscale.wrap(model, config, sample_input=x)


CASES = [
    *((kind.__name__, predict) for kind in caching_nets.KINDS),
    *((name, wrap) for name in ("Cache", "GlobalFlag", "Closure", "Counters", "ContextVariable")),
    *((name, wrap_without_a_plan) for name in ("LruCache", "OnParameter")),
    *(
        (name, wrap_by_a_real_step)
        for name in ("LruCache", "GlobalDict", "Slots", "ThreadLocal", "ContextVariable")
    ),
]


def train(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Losses, gradients and weights of two steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    seen = []
    for _ in range(2):
        loss = model(x).square().mean()
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return seen + [p.detach().clone() for p in model.parameters()]


def state_of(nets: ModuleType) -> dict[str, str]:
    """Globals of the module, their contents and those of classes, as text."""
    return {
        name: repr(vars(value))
        if isinstance(value, type) and value.__module__ == nets.__name__
        else _text(value)
        for name, value in vars(nets).items()
        if not name.startswith("__")
    }


def _text(value: Any) -> str:
    if hasattr(value, "cache_info"):
        return str(value.cache_info())
    own = {} if isinstance(value, ModuleType) else getattr(value, "__dict__", {})
    is_slotted = type(value).__name__ == "Slotted"
    return f"{value!r} {own} {[value.calls, value.table] if is_slotted else []}"


def check(nets: ModuleType, kind: type[nn.Module], entry: Callable[[nn.Module, Tensor], None]) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8, nets.WIDTH)
    model = kind()
    weights = copy.deepcopy(model.state_dict())
    before, variable = state_of(nets), nets.VARIABLE.get()
    attributes = [dict(vars(p)) for p in model.parameters()]
    entry(model, x)
    assert not fakes_alive()
    assert state_of(nets) == before
    assert nets.VARIABLE.get() is variable
    assert [dict(vars(p)) for p in model.parameters()] == attributes
    if entry is not predict:
        memscale.detach(model)
    planned = contextvars.copy_context().run(train, model, x)
    other = kind()
    other.load_state_dict(weights)
    again = contextvars.copy_context().run(train, other, x)
    assert all(map(torch.equal, planned, again))
    assert all(type(value) is Tensor for value in planned)


@pytest.mark.parametrize(("name", "entry"), CASES)
def test_state_is_restored(
    nets: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, entry: Callable[[nn.Module, Tensor], None]
) -> None:
    monkeypatch.setattr(leftovers._Search, "remove", _no_search)
    check(nets, getattr(nets, name), entry)


@pytest.mark.long
@pytest.mark.parametrize("name", [kind.__name__ for kind in caching_nets.SEARCHED])
def test_leftovers_are_found_without_an_image(
    nets: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(model_state, "ProcessImages", _NoImages)
    torch.manual_seed(0)
    x = torch.randn(4, 8, nets.WIDTH)
    model = getattr(nets, name)()
    weights = copy.deepcopy(model.state_dict())
    predict(model, x)
    assert not fakes_alive()
    assert not nets.NESTED, "half of an entry is left"
    planned = train(model, x)
    other = getattr(nets, name)()
    other.load_state_dict(weights)
    assert all(map(torch.equal, planned, train(other, x)))


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("HiddenName", "caching_nets.HIDDEN_NAME"),
        ("HelperClass", "caching_nets.Helper.table"),
        ("Slots", "caching_nets.Slotted.table"),
        ("GlobalFlag", "caching_nets.RAMP"),
        ("Closure", "closed over"),
    ],
)
def test_a_place_that_cannot_be_put_back_is_named(
    nets: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, place: str
) -> None:
    monkeypatch.setattr(model_state, "ProcessImages", _NoImages)
    model = getattr(nets, name)()
    with pytest.raises(leftovers.LeftoverError, match=place.replace(".", r"\.")):
        wrap(model, torch.randn(4, 8, nets.WIDTH))
    assert not fakes_alive()
    assert "forward" not in vars(model), "something is attached"


def test_planning_that_fails_leaves_nothing(nets: ModuleType) -> None:
    class Failing(nets.GlobalDict):  # type: ignore[misc, name-defined]
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise ValueError("on purpose", x)

    with pytest.raises(ValueError, match="on purpose") as error:
        wrap(Failing(), torch.randn(4, 8, nets.WIDTH))
    assert not fakes_alive()
    assert not nets.TABLE
    del error


@pytest.mark.parametrize("how", ["an attribute that it lacks", "an argument of the error"])
def test_an_error_about_an_output_is_raised_as_it_is(how: str) -> None:
    """The error holds the output, and that holds tensors."""

    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Any:
            output = SimpleNamespace(logits=x * 2)
            if how == "an attribute that it lacks":
                return output.loss
            raise ValueError("on purpose", output)

    with pytest.raises((AttributeError, ValueError), match=r"no attribute 'loss'|on purpose"):
        memscale.predict(Failing(), sample_input=torch.ones(2, 2))


@pytest.mark.parametrize("budget", ["1GiB", 1])
def test_hooks_find_what_parameters_carry(budget: str | int) -> None:
    calls: list[int] = []
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)))
    parameters: list[Any] = list(model.parameters())
    for p in parameters:
        p.uses, p.samples = 0, []

    def forward_hook(module: nn.Module, args: Any, output: Tensor) -> None:
        calls.append(len(calls))
        for p in module.parameters(recurse=False):
            p.uses += 1

    def backward_hook(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        for p in module.parameters(recurse=False):
            p.uses -= 1
            p.samples.append(grad_output[0].shape[0])

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(forward_hook)
            module.register_full_backward_hook(backward_hook)
    x = torch.randn(4, 8)
    plan = memscale.plan(model, config=memscale.Config(memory_budget=budget, **QUIET), sample_input=x)
    assert {(p.uses, len(p.samples)) for p in parameters} == {(0, 0)}
    assert not calls
    assert not any("really ran" in note for note in plan.notes), "hooks failed on fakes"


def test_a_real_step_leaves_no_hook_on_leaves_of_a_living_graph(nets: ModuleType) -> None:
    """The graph of a loss that is kept, and that of the trace, share the nodes that add gradients."""
    model, x = nets.GlobalDict(), torch.randn(4, 8, nets.WIDTH)
    loss = model(x).square().mean()
    wrap_by_a_real_step(model, x)
    memscale.detach(model)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_vision_transformer_with_a_cached_function_for_positions() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.DINOv3ViTConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
    )
    model = transformers.DINOv3ViTModel(config)
    pixels = torch.randn(2, 3, 32, 32)
    memscale.predict(model, sample_input={"pixel_values": pixels})
    assert not fakes_alive()
    output = model(pixel_values=pixels).last_hidden_state
    assert type(output) is Tensor


@pytest.mark.parametrize("entry", [predict, wrap])
def test_tensors_of_others_keep_their_contents(entry: Callable[[nn.Module, Tensor], None]) -> None:
    """A teacher that PyTorch is not to see, a global average: written to in forward, by numbers alone."""
    average = torch.ones(100)

    class Averages(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(
                *(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3))
            )
            self.teacher = [nn.Linear(16, 16)]

        def forward(self, x: Tensor) -> Tensor:
            average.mul_(0.5)
            with torch.no_grad():
                torch._foreach_mul_(list(self.teacher[0].parameters()), 0.9)
                for one, other in zip(self.teacher[0].parameters(), self[0][0].parameters(), strict=True):
                    one.add_(other.mean(), alpha=0.1)
            return super().forward(x)

    model = Averages()
    tensors: list[Tensor] = [*model.teacher[0].parameters(), average]
    before = [tensor.detach().clone() for tensor in tensors]
    entry(model, torch.randn(8, 16))
    assert all(map(torch.equal, tensors, before))
    assert not any(isinstance(tensor, FakeTensor) for tensor in tensors)


def test_generators_of_numpy_that_are_global() -> None:
    numpy = pytest.importorskip("numpy")
    generators = [numpy.random.default_rng(0), numpy.random.RandomState(0)]

    class Draws(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * float(sum(generator.uniform() for generator in generators))

    model = Draws(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)))
    before = str([generators[0].bit_generator.state, generators[1].get_state()])
    predict(model, torch.randn(8, 16))
    assert str([generators[0].bit_generator.state, generators[1].get_state()]) == before


@pytest.mark.parametrize("place", ["dictionary", "closed over"])
def test_graphs_and_gradients_of_others(place: str) -> None:
    """What a model is conditioned on, hung where PyTorch does not look: planning stops at others' graphs."""
    conditions: dict[str, Tensor] = {}
    gain = torch.ones(64, requires_grad=True)
    maker = nn.Linear(4, 64)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
            self.settings = conditions if place == "dictionary" else {}

        def forward(self, x: Tensor) -> Tensor:
            settings = self.settings or conditions
            return x + self.down(torch.tanh(self.up(x)) * settings["scale"] * gain)

    def train(wrapped: bool) -> list[Tensor]:
        torch.manual_seed(0)
        nn.init.ones_(maker.weight)
        model = nn.Sequential(*(Block() for _ in range(3)))
        if wrapped:
            memscale.wrap(model, memscale.Config(memory_budget=1, **QUIET))
        seen = []
        for _ in range(2):
            conditions["scale"] = torch.tanh(maker(torch.rand(2, 4))).mean(0)
            model(torch.randn(8, 16)).square().mean().backward()
            grads = [p.grad for p in (*model.parameters(), *maker.parameters(), gain)]
            seen += [grad.clone() for grad in grads if grad is not None]
        if wrapped:
            assert memscale.executor_of(model).plan.active
        model.zero_grad()
        maker.zero_grad()
        gain.grad = None
        return seen

    planned = train(True)
    assert all(type(value) is Tensor for value in planned)
    assert all(map(torch.equal, planned, train(False)))
    assert not fakes_alive()


def test_a_backward_that_cannot_run_on_fakes_leaves_none() -> None:
    """The step is traced for real then."""
    seen: list[float] = []

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.up(x))
            hidden.register_hook(lambda gradient: seen.append(gradient.sum().item()))
            return x + self.down(hidden)

    predict(nn.Sequential(*(Block() for _ in range(3))), torch.randn(8, 16))
    assert not fakes_alive()


def test_a_dictionary_in_a_context_variable() -> None:
    variable: contextvars.ContextVar[dict[int, Tensor]] = contextvars.ContextVar("variable")

    class Caches(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            table = variable.get(None)
            if table is None:
                table = {}
                variable.set(table)
            return super().forward(x * table.setdefault(16, torch.linspace(0, 1, 16)))

    wrap(
        Caches(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3))),
        torch.ones(8, 16),
    )
    assert variable.get(None) is None
    assert not fakes_alive()


@pytest.mark.parametrize("entry", [predict, wrap_by_a_real_step])
def test_generators_are_not_used_up(entry: Callable[[nn.Module, Tensor], None]) -> None:
    """They cannot be copied: planning refuses where the forward takes from one."""
    scales = (number / 2 for number in range(9))

    class Scales(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * next(scales)

    model = Scales(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)))
    with pytest.raises(ProfileError, match="cannot be copied"):
        entry(model, torch.randn(8, 16))
    assert list(scales) == [number / 2 for number in range(9)]


DEQUE, BYTES, INTEGERS, NUMBERS = deque[int](maxlen=100), bytearray(), array.array("i"), np.zeros(2)
TEXT, BINARY, OBJECTS, VIEWED = io.StringIO(newline="\r\n"), io.BytesIO(b"ab"), np.array([[], 0], object), [0]


class WritesToGlobals(nn.Module):
    """Keeps a count in every kind of global that holds no attributes, and computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def keep(self) -> float:
        DEQUE.append(1)
        BYTES.append(1)
        INTEGERS.append(1)
        NUMBERS[0] += 1
        OBJECTS[0].append(1)
        OBJECTS[1] += 1
        TEXT.write("a\n")
        BINARY.write(b"c")
        counts = (len(DEQUE), len(BYTES), len(INTEGERS), NUMBERS[0], OBJECTS[1], TEXT.tell(), BINARY.tell())
        return float(sum(counts))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)) * self.keep())


class Slotted(WritesToGlobals):
    __slots__ = ("calls", "last")
    calls: int
    last: int

    def keep(self) -> float:
        self.last = self.calls = getattr(self, "calls", 0) + 1
        return self.calls


class WritesToItsOwn(WritesToGlobals):
    """The same in what hangs on the module."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.integers, self.numbers = bytearray(4), array.array("i"), np.zeros((2, 3)).T
        self.text, self.binary, self.view = io.StringIO(), io.BytesIO(), memoryview(bytearray(2))
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(2))
        self.seen_numbers = self.seen.numpy()

    def keep(self) -> float:
        self.bytes += b"a"
        self.integers.append(1)
        self.numbers[1, 1] += 1
        self.view[0] += 1
        self.text.write("a")
        self.binary.write(b"a")
        self.seen_numbers[0] += 1
        return sum(self.state())

    def state(self) -> list[float]:
        lengths = [len(self.bytes), len(self.integers), self.text.tell(), len(self.binary.getvalue())]
        return [*lengths, self.numbers.sum(), self.view[0], float(self.seen_numbers[0])]


def state_of_globals() -> list[Any]:
    """What the globals hold."""
    values: list[Any] = [
        list(DEQUE),
        bytes(BYTES),
        list(INTEGERS),
        NUMBERS.tolist(),
        copy.deepcopy(OBJECTS.tolist()),
    ]
    return [*values, TEXT.getvalue(), TEXT.tell(), BINARY.getvalue(), BINARY.tell()]


def state_of_block(block: Any) -> list[Any]:
    own = block.state() if isinstance(block, WritesToItsOwn) else []
    return [*own, getattr(block, "calls", 0), hasattr(block, "last")]


def clear_globals() -> None:
    DEQUE.clear()
    BYTES.clear()
    del INTEGERS[:]
    NUMBERS[:] = 0
    OBJECTS[0].clear()
    OBJECTS[1] = 0
    TEXT.seek(0)
    TEXT.truncate()
    BINARY.seek(0)
    BINARY.truncate(2)


@pytest.mark.parametrize("kind", [WritesToGlobals, WritesToItsOwn, Slotted])
@pytest.mark.parametrize("entry", [predict, wrap, wrap_by_a_real_step])
def test_contents_of_arrays_bytes_and_streams(
    entry: Callable[[nn.Module, Tensor], None], kind: type[nn.Module]
) -> None:
    def run(planned: bool) -> list[Any]:
        torch.manual_seed(0)
        model, seen = nn.Sequential(*(kind() for _ in range(3))), list[Any]()
        x = torch.randn(64, 16)
        before = [state_of_globals(), *map(state_of_block, model)]
        versions = [buffer._version for buffer in model.buffers()]
        if planned:
            entry(model, x)
            assert [state_of_globals(), *map(state_of_block, model)] == before
            assert [buffer._version for buffer in model.buffers()] == versions
        for _ in range(2):
            loss = model(x).square().mean()
            loss.backward()
            seen += [loss.item(), state_of_globals(), *map(state_of_block, model)]
            seen += [p.grad.tolist() for p in model.parameters() if p.grad is not None]
        return seen

    clear_globals()
    planned = run(planned=True)
    clear_globals()
    assert run(planned=False) == planned


AVERAGE, COUNT = torch.ones(100), torch.zeros(3, dtype=torch.int64)


class Writes(nn.Module):
    """Writes in place to tensors of every kind, and has something that a second forward looks at."""

    def __init__(self, needs_values: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.needs_values, self.calls = needs_values, 0
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(16))
        self.plain, self.held, self.teacher = torch.ones(16), [torch.ones(4)], [nn.Linear(16, 16)]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        AVERAGE.mul_(0.5)
        COUNT.add_(1)
        self.held[0].mul_(0.5)
        self.scale[:3].mul_(0.9)
        self.plain.data.mul_(0.9)
        self.plain.mul_(0.9)
        with torch.no_grad():
            self.teacher[0].weight.mul_(0.9)
            torch._foreach_mul_([self.teacher[0].bias, self.up.bias], 0.9)
        factor = x.detach().mean().item() if self.needs_values else 1.0
        return x + self.down(torch.tanh(self.up(x * self.scale * self.plain))) * factor

    def tensors(self) -> list[Tensor]:
        own = [*self.parameters(), *self.buffers(), self.plain, *self.held]
        return [*own, *self.teacher[0].parameters(), AVERAGE, COUNT]


@pytest.mark.parametrize("needs_values", [False, True])
@pytest.mark.parametrize("entry", [predict, wrap])
def test_tensors_have_their_contents_and_versions(
    entry: Callable[[nn.Module, Tensor], None], needs_values: bool
) -> None:
    model = nn.Sequential(*(Writes(needs_values) for _ in range(3)))
    tensors: list[Tensor] = [tensor for block in model for tensor in block.tensors()]
    before = [(tensor._version, tensor.detach().clone()) for tensor in tensors]
    entry(model, torch.randn(8, 16))
    for tensor, (version, value) in zip(tensors, before, strict=True):
        assert torch.equal(tensor, value)
        assert tensor._version == version


def test_a_backward_that_waits_while_planning_runs_for_real() -> None:
    class Decays(Writes):
        def forward(self, x: Tensor) -> Tensor:
            self.scale.mul_(0.9)
            return x + self.down(torch.tanh(self.up(x * self.scale))) * x.detach().mean().item()

    model, x = nn.Sequential(*(Decays(True) for _ in range(3))), torch.randn(8, 16)
    loss = model(x).square().mean()
    predict(model, x)
    loss.backward()
    assert all(
        p.grad is not None for block in model for p in (*block.up.parameters(), *block.down.parameters())
    )


@pytest.mark.parametrize("needs_values", [False, True])
@pytest.mark.parametrize("entry", [predict, wrap])
def test_hooks_on_tensors_that_a_forward_registers(
    entry: Callable[[nn.Module, Tensor], None], needs_values: bool
) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
            self.up.bias.register_hook(torch.neg)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(x)
            hooked = [hidden] if needs_values else [hidden, self.up.weight]  # `autograd.grad` forbids leaves
            torch.autograd.graph.register_multi_grad_hook(hooked, lambda gradients: None)
            self.up.bias.register_hook(torch.neg)
            self.down.weight.register_post_accumulate_grad_hook(lambda weight: None)
            return x + self.down(torch.tanh(hidden)) * (x.detach().mean().item() if needs_values else 1)

    def hooks() -> list[Any]:
        return [
            [
                list((registry or {}).items())
                for registry in (p._backward_hooks, p._post_accumulate_grad_hooks)
            ]
            for p in model.parameters()
        ]

    model = nn.Sequential(*(Block() for _ in range(3)))
    before = hooks()
    entry(model, torch.randn(8, 16))
    if entry is wrap:
        memscale.detach(model)
    assert not fakes_alive()
    assert hooks() == before


@pytest.mark.parametrize("entry", [predict, wrap])
def test_a_jagged_tensor_in_a_process_that_has_made_none(
    monkeypatch: pytest.MonkeyPatch, entry: Callable[[nn.Module, Tensor], None]
) -> None:
    """PyTorch keeps the first of its own."""
    from torch.nested._internal import nested_tensor

    monkeypatch.setattr(nested_tensor, "_dummy_instance", None)
    monkeypatch.setattr(leftovers._Search, "remove", _no_search)

    class Ragged(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            rows = torch.nested.nested_tensor([x[:3], x[3:]], layout=torch.jagged)
            return super().forward(rows).values()

    model = Ragged(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)))
    x = torch.randn(64, 16)
    entry(model, x)
    model(x).square().mean().backward()
    assert not fakes_alive()
