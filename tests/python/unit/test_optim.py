# SPDX-License-Identifier: Apache-2.0
"""The caller's optimizer with our state: the same steps, the same object, whoever holds it, and back."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memscale.optim import give_back, is_patched, moments_of, take_over
from optim_samples import OPTIMIZERS, Lion, equal, network, train

DTYPES = [torch.float32, torch.bfloat16]
NAMES = list(OPTIMIZERS)


def pair(name: str, moments: str = "fp32", dtype: torch.dtype = torch.float32) -> Any:
    """Twice the same model and optimizer; the second is patched."""
    models = network(dtype), network(dtype)
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in models]
    assert take_over(optimizers[1], moments) == ""
    return models, optimizers


def assert_close(one: list[Tensor], other: list[Tensor]) -> None:
    """For training, where a gradient that is nearly zero makes much of little."""
    torch.testing.assert_close(one, other, rtol=0, atol=2e-5)


# ---- the steps ---------------------------------------------------------------------------------------


def assert_within_rounding(plain: list[Tensor], ours: list[Tensor], steps: int, lr: float) -> None:
    """Equal up to what another order of operations explains, for gradients that do not depend on weights.

    PyTorch fuses a product and a sum where it vectorises `lerp` and `add`: one rounding of a moment less in
    each step. That is 2^-24 of the largest gradient that the moment remembers, hence some 2^-21 of the
    learning rate in the update, and may round the weight to its neighbour.
    """
    for a, b in zip(plain, ours, strict=True):
        bound = steps * (a.abs() * 2.0**-23 + lr * 2.0**-21)
        assert bool(((a - b).abs() <= bound).all()), ((a - b).abs() / bound).max()


def linear_loss(parameters: list[nn.Parameter], seed: int) -> Tensor:
    """A loss whose gradients are random numbers."""
    generator = torch.Generator().manual_seed(seed)
    terms = [(value * torch.randn(value.shape, generator=generator)).sum() for value in parameters]
    return torch.stack(terms).sum()


@pytest.mark.parametrize("name", NAMES)
def test_fp32_state_is_that_of_pytorch(name: str) -> None:
    models, optimizers = pair(name)
    for model, optimizer in zip(models, optimizers, strict=True):
        for index in range(50):
            linear_loss(list(model.parameters()), index).backward()
            optimizer.step()
            optimizer.zero_grad()
    plain, ours = ([value.detach() for value in model.parameters()] for model in models)
    assert_within_rounding(plain, ours, 50, optimizers[1].defaults["lr"])
    (plain_model, model), (standard, taken) = pair(name)
    assert_close(train(plain_model, standard, 20), train(model, taken, 20))


def test_fp32_state_with_everything_that_a_loop_has() -> None:
    """Groups, weight decay, a schedule, clipping, accumulation, a frozen parameter, one without gradient."""

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        weights = [value for value in model.parameters() if value.dim() > 1]
        biases = [value for value in model.parameters() if value.dim() == 1]
        return [{"params": weights, "weight_decay": 0.3}, {"params": biases, "lr": 1e-2, "betas": (0.8, 0.9)}]

    results = []
    for taken in (False, True):
        model = network()
        model[2].bias.requires_grad_(False)
        optimizer = torch.optim.AdamW(groups(model), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [3e-3, 1e-2], total_steps=60)
        if taken:
            assert take_over(optimizer, "fp32") == ""
        trained = [value for value in model.parameters() if value.requires_grad]
        for index in range(50):
            for micro in range(2):
                (linear_loss(trained, 2 * index + micro) / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            if index % 7 == 3:
                model[0].bias.grad = None
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        results.append([value.detach().clone() for value in model.parameters()])
        assert len(optimizer.state) == 5
    assert_within_rounding(*results, 50, 1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_8_bits_train_as_the_standard_state(name: str, dtype: torch.dtype) -> None:
    (plain, model), (standard, taken) = pair(name, "code8", dtype)
    # of 40 networks the worst; SGD's step is as long as its gradient, and so is what rounding makes of it
    most = 0.08 if name in ("sgd", "nesterov") else 0.012
    for a, b in zip(train(plain, standard, 30), train(model, taken, 30), strict=True):
        assert (a.float() - b.float()).abs().max() <= most
    for parameter, entry in taken.state.items():
        count = parameter.numel()
        moments = 1 if name in ("sgd", "nesterov", "lion") else 2
        expected = moments * (count + -(-count // 128)) + (count if dtype is torch.bfloat16 else 0)
        assert entry["memscale_state"].nbytes == expected


def test_bf16_weights_keep_a_master() -> None:
    """Steps far below half a unit of a BF16 weight add up."""
    weight, plain = (nn.Parameter(torch.ones(1024, dtype=torch.bfloat16)) for _ in range(2))
    optimizer, standard = (torch.optim.AdamW([w], lr=1e-4, weight_decay=0.0) for w in (weight, plain))
    take_over(optimizer)
    for _ in range(200):
        weight.grad, plain.grad = torch.ones_like(weight), torch.ones_like(plain)
        optimizer.step()
        standard.step()
    assert bool((plain == 1).all())
    assert abs(float(weight.detach().float().mean()) - 0.98) < 0.001


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_for_any_number_of_threads(dtype: torch.dtype) -> None:
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 3, 64):
            torch.set_num_threads(threads)
            weight = nn.Parameter(torch.linspace(-1, 1, 40_000).to(dtype))
            optimizer = torch.optim.AdamW([weight])
            take_over(optimizer)
            for index in range(3):
                weight.grad = torch.linspace(-3, 2 + index, 40_000).to(dtype)
                optimizer.step()
            results.append([weight.detach().clone(), optimizer.state[weight]["memscale_state"].clone()])
    finally:
        torch.set_num_threads(before)
    assert equal(results[0], results[1]) and equal(results[0], results[2])


# ---- whoever holds it --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_same_object_of_a_class_of_the_same_name(name: str) -> None:
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    kind, attributes, text = type(optimizer), dict(vars(optimizer)), repr(optimizer)
    assert moments_of(optimizer) is None and not is_patched(optimizer)
    assert take_over(optimizer) == ""
    assert moments_of(optimizer) == "code8" and is_patched(optimizer)
    assert isinstance(optimizer, kind) and type(optimizer).__name__ == kind.__name__
    assert vars(optimizer) == attributes and repr(optimizer) == text
    assert take_over(optimizer) == "it has this state already"
    train(model, optimizer, 2)
    give_back(optimizer)
    assert type(optimizer) is kind and vars(optimizer).keys() == attributes.keys()
    give_back(optimizer)
    train(model, optimizer, 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_schedulers_made_before_and_after(name: str, when: str, recwarn: Any) -> None:
    (plain, model), (standard, taken) = pair(name)
    if when == "before":
        give_back(taken)
    make = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.7)
    schedulers = make(standard), make(taken)
    if when == "before":
        wrapper = vars(taken)["step"]
        assert take_over(taken, "fp32") == ""
    for _ in range(4):
        train(plain, standard, 1)
        train(model, taken, 1)
        for scheduler in schedulers:
            scheduler.step()
    assert taken.param_groups[0]["lr"] == standard.param_groups[0]["lr"]
    assert all("memscale_state" in entry for entry in taken.state.values()) and len(taken.state) == 6
    give_back(taken)
    if when == "before":
        assert vars(taken)["step"] is wrapper
    assert_close(train(plain, standard, 2), train(model, taken, 2))
    assert not any("memscale_state" in entry for entry in taken.state.values())
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion"])
def test_hooks_run_once_and_in_order(name: str) -> None:
    heard: list[str] = []

    def hear(what: str) -> Callable[..., None]:
        return lambda *_: heard.append(what)

    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    optimizer.register_step_pre_hook(hear("before"))
    take_over(optimizer)
    optimizer.register_step_post_hook(hear("after"))
    first = register_optimizer_step_pre_hook(hear("any before"))
    last = register_optimizer_step_post_hook(hear("any after"))
    try:
        optimizer.step(lambda: heard.append("closure"))  # type: ignore[func-returns-value, call-overload]
    finally:
        first.remove()
        last.remove()
    assert heard == ["any before", "before", "closure", "after", "any after"]


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion"])
def test_closures(name: str) -> None:
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    take_over(optimizer)
    losses = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(torch.ones(4, 24)) - 1).square().mean()
        loss.backward()
        return loss

    for _ in range(5):
        losses.append(optimizer.step(closure).item())  # type: ignore[arg-type, union-attr]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler_skips_and_unscales(fused: bool) -> None:
    results = []
    for taken in (False, True):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        if taken:
            assert take_over(optimizer, "fp32") == ""
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
        for index in range(5):
            loss = model(torch.ones(4, 24) * (index + 1)).square().mean()
            scaler.scale(loss).backward()
            if index == 2:
                model[0].weight.grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append([value.detach().clone() for value in model.parameters()])
        assert scaler.get_scale() == 512.0
        if taken:
            assert {entry["memscale_step"] for entry in optimizer.state.values()} == {4}
        give_back(optimizer)
        assert bool(vars(optimizer).get("_step_supports_amp_scaling")) is fused
    assert_close(*results)


def test_step_that_someone_holds_from_before() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    held = optimizer.step
    take_over(optimizer)
    model(torch.ones(4, 24)).sum().backward()
    held()
    assert all("memscale_state" in entry for entry in optimizer.state.values()) and len(optimizer.state) == 6


def test_a_changed_weight_is_noticed_by_autograd() -> None:
    weight = nn.Parameter(torch.ones(8))
    optimizer = torch.optim.AdamW([weight])
    take_over(optimizer)
    loss = (weight * weight).sum()
    weight.grad = torch.ones(8)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- copies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@pytest.mark.parametrize("name", ["adamw", "sgd", "lion"])
def test_copies_go_on_with_every_bit(name: str, way: str, dtype: torch.dtype) -> None:
    model = network(dtype)
    optimizer = OPTIMIZERS[name](model.parameters())
    take_over(optimizer)
    train(model, optimizer, 3)
    both = (model, optimizer)
    twin, other = copy.deepcopy(both) if way == "deepcopy" else pickle.loads(pickle.dumps(both))
    assert other is not optimizer and type(other) is type(optimizer)
    assert equal(train(model, optimizer, 3, seed=2), train(twin, other, 3, seed=2))
    give_back(other)
    assert type(other) is type(OPTIMIZERS[name]([nn.Parameter(torch.ones(1))]))


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion"])
def test_a_pickle_read_where_there_is_no_such_class_yet(name: str) -> None:
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    take_over(optimizer)
    train(model, optimizer, 2)
    kept, held = pickle.dumps((model, optimizer)), weakref.ref(type(optimizer))
    expected = train(model, optimizer, 2, seed=2)
    del optimizer
    gc.collect()
    assert held() is None
    twin, other = pickle.loads(kept)
    assert equal(expected, train(twin, other, 2, seed=2))


# ---- state dicts -------------------------------------------------------------------------------------


def saved(value: Any) -> Any:
    """Through a file that contains nothing but tensors and numbers."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("moments", ["code8", "fp32"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_resumed_with_our_state_every_bit_is_the_same(name: str, dtype: torch.dtype, moments: str) -> None:
    model = network(dtype)
    optimizer = OPTIMIZERS[name](model.parameters())
    take_over(optimizer, moments)
    train(model, optimizer, 6)
    state = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    again = network(dtype)
    other = OPTIMIZERS[name](again.parameters())
    take_over(other, moments)
    again.load_state_dict(state["model"])
    other.load_state_dict(state["optimizer"])
    assert equal(train(model, optimizer, 6, seed=2), train(again, other, 6, seed=2))
    for a, b in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert (
            torch.equal(a["memscale_state"], b["memscale_state"]) and a["memscale_step"] == b["memscale_step"]
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_resumed_with_pytorch_alone_and_back(name: str, dtype: torch.dtype) -> None:
    model = network(dtype)
    optimizer = OPTIMIZERS[name](model.parameters())
    take_over(optimizer)
    train(model, optimizer, 4)
    state = saved(optimizer.state_dict())
    plain = OPTIMIZERS[name](model.parameters())
    plain.load_state_dict(state)
    standard = {"adamw": {"step", "exp_avg", "exp_avg_sq"}, "sgd": {"momentum_buffer"}, "lion": {"exp_avg"}}
    kind = {"adam": "adamw", "maximize": "adamw", "nesterov": "sgd"}.get(name, name)
    for parameter, entry in plain.state.items():
        assert set(entry) == standard[kind]
        for key, value in entry.items():
            assert key == "step" or (value.shape, value.dtype) == (parameter.shape, parameter.dtype)
            assert key != "step" or value == 4
    train(model, plain, 2)
    back = saved(plain.state_dict())
    assert set(back) == {"state", "param_groups"}
    optimizer.load_state_dict(back)
    assert is_patched(optimizer) and len(optimizer.state) == 6
    assert all("memscale_state" in entry for entry in optimizer.state.values())
    if kind == "adamw":
        assert {entry["memscale_step"] for entry in optimizer.state.values()} == {6}
    train(model, optimizer, 2)


def test_hooks_of_state_dicts_see_pytorchs_form() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    take_over(optimizer)
    train(model, optimizer, 1)
    seen: list[set[str]] = []
    note = lambda _, state: seen.append(set(state["state"][0]))  # noqa: E731
    optimizer.register_state_dict_post_hook(note)
    optimizer.register_load_state_dict_pre_hook(note)
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [{"step", "exp_avg", "exp_avg_sq"}] * 2
    assert len(optimizer._optimizer_state_dict_post_hooks) == 1
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1


def test_state_dicts_that_do_not_fit() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    take_over(optimizer)
    train(model, optimizer, 1)
    state = optimizer.state_dict()
    before = [entry["memscale_state"].clone() for entry in optimizer.state.values()]
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({**state, "param_groups": []})
    with pytest.raises(ValueError, match="version is 99; allowed: 1"):
        optimizer.load_state_dict({**state, "memscale_optim": {"version": 99, "state": {}}})
    wrong = {**state["state"], 0: {**state["state"][0], "exp_avg": torch.zeros(3)}}
    with pytest.raises(ValueError, match=r"exp_avg has shape \(3,\); its parameter has shape \(40, 24\)"):
        optimizer.load_state_dict({**state, "state": wrong})
    assert equal(before, [entry["memscale_state"] for entry in optimizer.state.values()])


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion"])
@pytest.mark.parametrize("convert", [True, False])
def test_one_that_has_stepped_is_taken_over_with_its_state(name: str, convert: bool) -> None:
    (plain, model) = network(), network()
    standard, optimizer = (OPTIMIZERS[name](m.parameters()) for m in (plain, model))
    train(plain, standard, 5)
    train(model, optimizer, 5)
    assert take_over(optimizer, "fp32", convert) == ""
    assert all(("memscale_state" in entry) is convert for entry in optimizer.state.values())
    assert_close(train(plain, standard, 5, seed=2), train(model, optimizer, 5, seed=2))
    give_back(optimizer)
    for mine, theirs in zip(optimizer.state.values(), standard.state.values(), strict=True):
        assert mine.keys() == theirs.keys()
        if "step" in mine:
            assert torch.equal(mine["step"], theirs["step"]) and mine["step"].dtype == theirs["step"].dtype


def test_not_converted_and_given_back_every_bit_is_there() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 3)
    state = dict(optimizer.state)
    take_over(optimizer, convert=False)
    give_back(optimizer)
    assert all(optimizer.state[key] is entry for key, entry in state.items())


# ---- which ones --------------------------------------------------------------------------------------


class Own(torch.optim.AdamW):
    """May step differently."""


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (torch.optim.RMSprop, "only AdamW, Adam, SGD with momentum and Lion"),
        (Own, "only AdamW"),
        (lambda p: torch.optim.SGD(p, lr=0.1), "without momentum there is no state"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad is on"),
        (lambda p: torch.optim.AdamW(p, differentiable=True), "differentiable is on"),
        (lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)), "lr is a tensor"),
        (lambda p: torch.optim.AdamW([nn.Parameter(torch.ones(2, dtype=torch.complex64))]), "complex64"),
        (lambda p: torch.optim.AdamW([nn.Parameter(torch.ones(2).half())]), "float16"),
        (lambda p: torch.optim.AdamW([nn.Parameter(torch.ones(3).expand(2, 3))]), "gaps or overlaps"),
        (lambda p: torch.optim.AdamW([nn.Parameter(torch.ones(2, device="meta"))]), "on meta"),
        (lambda p: torch.optim.AdamW(nn.LazyLinear(3).parameters()), "not ordinary tensors"),
    ],
)
def test_what_stays_and_why(make: Any, reason: str) -> None:
    optimizer = make(list(network().parameters()))
    kind, attributes = type(optimizer), dict(vars(optimizer))
    assert reason in take_over(optimizer)
    assert type(optimizer) is kind and vars(optimizer) == attributes


def test_groups_that_do_not_say_how_they_decay() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    del optimizer.defaults["decoupled_weight_decay"]
    assert "before 2.7" in take_over(optimizer)


def test_a_step_of_lion_that_was_replaced() -> None:
    optimizer = Lion(network().parameters())
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    assert take_over(optimizer) == "its step has been replaced"


def test_moments_are_checked() -> None:
    with pytest.raises(ValueError, match="moments is 'int4'; allowed: code8, fp32"):
        take_over(torch.optim.AdamW(network().parameters()), "int4")
