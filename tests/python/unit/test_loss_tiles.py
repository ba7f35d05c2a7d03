# SPDX-License-Identifier: Apache-2.0
"""The loss tile: as exact as plain PyTorch, plain PyTorch's bits at anything but a loss, and never a wrong
gradient without an error."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from memscale.techniques.tiles.deferred_logits import DeferredLogits
from memscale.techniques.tiles.loss_tiles import LossTileAttachment, find

CLASSES, WIDTH = 1200, 24


class Model(nn.Module):
    """Tokens to logits."""

    def __init__(self, bias: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.tokens, self.body = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.body(self.tokens(ids))))
        return logits


def model(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options)


def tokens(rows: int = 3, length: int = 100) -> Tensor:
    return torch.randint(CLASSES, (rows, length), generator=torch.Generator().manual_seed(1))


@contextmanager
def tiled(net: nn.Module, used: bool | None = None) -> Iterator[LossTileAttachment]:
    """With the technique attached to the one head that is found."""
    (tile,) = find(net)
    tile.attach()
    try:
        yield tile
        assert used is None or tile.used is used, tile.reason
    finally:
        tile.undo()


def shifted_loss(logits: Tensor, ids: Tensor) -> Tensor:
    logits = logits[..., :-1, :]
    if logits.dtype != torch.float64:
        logits = logits.float()
    return F.cross_entropy(logits.contiguous().view(-1, CLASSES), ids[..., 1:].reshape(-1))


def gradients(net: nn.Module, loss: Callable[[Any], Tensor]) -> dict[str, Tensor]:
    """Loss and gradients of a step."""
    net.zero_grad()
    value = loss(net)
    value.backward()
    made = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    return {"loss": value.detach(), **made}


def distance(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact.double()).norm() / exact.double().norm())


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# ---- accuracy ----------------------------------------------------------------------------------------


WEIGHT = torch.rand(CLASSES, generator=torch.Generator().manual_seed(2)) + 0.5


def _ignored(ids: Tensor) -> Tensor:
    return torch.where(ids % 3 == 0, -100, ids)


LOSSES: dict[str, Callable[[Any], Tensor]] = {
    "causal": lambda net: shifted_loss(net(tokens()), tokens()),
    "sum": lambda net: F.cross_entropy(net(tokens()).flatten(0, 1), tokens().flatten(), reduction="sum"),
    "ignored": lambda net: F.cross_entropy(net(tokens()).view(-1, CLASSES), _ignored(tokens()).view(-1)),
    "smoothed": lambda net: F.cross_entropy(
        net(tokens()).view(-1, CLASSES), _ignored(tokens()).view(-1), label_smoothing=0.1
    ),
    "weighted": lambda net: F.cross_entropy(
        net(tokens()).view(-1, CLASSES), tokens().view(-1), weight=WEIGHT.to(net.head.weight.dtype)
    ),
    "both": lambda net: F.cross_entropy(
        net(tokens()).view(-1, CLASSES),
        _ignored(tokens()).view(-1),
        weight=WEIGHT.to(net.head.weight.dtype),
        label_smoothing=0.2,
    ),
    "soft-cap": lambda net: shifted_loss(torch.tanh(net(tokens()) / 3.0) * 3.0, tokens()),
    "scaled": lambda net: shifted_loss(net(tokens()) * torch.tensor(0.3), tokens()),
    "bias-later": lambda net: shifted_loss(net(tokens()) + WEIGHT.to(net.head.weight.dtype)[None], tokens()),
    "turned": lambda net: F.cross_entropy(net(tokens()).transpose(1, 2), tokens()),
    "twice": lambda net: (
        shifted_loss(net(tokens()), tokens()) + shifted_loss(net(tokens()), tokens().flip(0))
    ),
    "same-logits-twice": lambda net: (
        lambda x: shifted_loss(x, tokens()) + shifted_loss(x, tokens().flip(0))
    )(net(tokens())),
    "last": lambda net: F.cross_entropy(
        net(tokens())[:, -40:].reshape(-1, CLASSES), tokens()[:, -40:].reshape(-1)
    ),
}


@pytest.mark.parametrize("options", [{}, {"bias": True}, {"tied": True}], ids=["plain", "bias", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("loss", LOSSES)
def test_errors_are_no_larger_than_plain_pytorchs(loss: str, dtype: torch.dtype, options: Any) -> None:
    net = model(**options).to(dtype)
    exact = gradients(copy.deepcopy(net).double(), LOSSES[loss])
    plain = gradients(net, LOSSES[loss])
    with tiled(net, used=True):
        ours = gradients(net, LOSSES[loss])
    for name in plain:
        mine, theirs = distance(ours[name], exact[name]), distance(plain[name], exact[name])
        # A single number may happen to be rounded to what is exact.
        least = 2 * torch.finfo(plain[name].dtype).eps if name == "loss" else 0
        assert mine <= 1.5 * theirs + least, f"{name}: {mine} against {theirs}"
        assert ours[name].dtype == plain[name].dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_few_rows_are_as_exact_as_many(dtype: torch.dtype) -> None:
    net = model().to(dtype)

    def loss(net: Any) -> Tensor:
        return F.cross_entropy(net(tokens(1))[:, -1].double(), tokens(1)[:, -1])

    exact = gradients(copy.deepcopy(net).double(), loss)
    with tiled(net, used=True):
        ours = gradients(net, loss)
    assert all(distance(ours[name], exact[name]) < 3 * torch.finfo(dtype).eps for name in exact)


@pytest.mark.parametrize("part", ["head", "body", "everything-else"])
def test_only_what_trains_gets_a_gradient(part: str) -> None:
    net = model(bias=True)
    net.requires_grad_(part == "everything-else")
    if part == "everything-else":
        net.head.requires_grad_(False)
    else:
        net.get_submodule(part).requires_grad_(True)
    plain = gradients(net, LOSSES["causal"])
    with tiled(net, used=True):
        ours = gradients(net, LOSSES["causal"])
    assert ours.keys() == plain.keys()
    assert all(distance(ours[name], plain[name]) < 1e-5 for name in plain)


def test_without_a_valid_label_it_is_plain_pytorchs_nan_and_zeros() -> None:
    net = model()
    ids = torch.full((300,), -100)

    def loss(net: nn.Module) -> Tensor:
        return F.cross_entropy(net(tokens()).view(-1, CLASSES), ids)

    plain = gradients(net, loss)
    with tiled(net, used=True):
        ours = gradients(net, loss)
    assert ours.pop("loss").isnan() and plain.pop("loss").isnan()
    assert equal(ours, plain)


def test_autocast_of_the_call_holds_in_the_tiles() -> None:
    net = model(bias=True)

    def loss(net: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = net(tokens())
            assert logits.dtype == torch.bfloat16
        return shifted_loss(logits, tokens())

    exact = gradients(copy.deepcopy(net).double(), LOSSES["causal"])
    plain = gradients(net, loss)
    with tiled(net, used=True):
        ours = gradients(net, loss)
    for name in plain:
        mine, theirs = distance(ours[name], exact[name]), distance(plain[name], exact[name])
        assert mine <= 1.5 * theirs + 1e-6, f"{name}: {mine} against {theirs}"
        assert ours[name].dtype == plain[name].dtype


def test_a_grad_scaler_and_accumulation_see_the_same_gradients() -> None:
    net = model()
    scaled: list[dict[str, Tensor]] = []
    for attached in (False, True):
        net.zero_grad()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        with tiled(net) if attached else nullcontext():
            for ids in (tokens(), tokens().flip(1)):
                scaler.scale(shifted_loss(net(ids), ids) / 2).backward()
            scaler.unscale_(optimizer)
        scaled.append({name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None})
    assert all(distance(scaled[1][name], scaled[0][name]) < 1e-5 for name in scaled[0])


# ---- plain PyTorch's bits at anything else -----------------------------------------------------------


class _Cube(torch.autograd.Function):
    """Somebody's own function, which comes past `__torch_function__`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


def _written(net: Any) -> Tensor:
    logits = net(tokens())
    shifted = logits[..., :-1, :]
    logits[..., 7] = 0.5  # before the view is used
    return F.cross_entropy(shifted.reshape(-1, CLASSES), tokens()[..., 1:].reshape(-1))


def _written_view(net: Any) -> Tensor:
    logits = net(tokens())
    logits[:, 1:].mul_(2)
    return logits.square().mean()


def _hooked_before(net: Any) -> Tensor:
    logits = net(tokens())
    logits.register_hook(lambda grad: grad * 2)
    return logits.square().mean()


def _accuracy_first(net: Any) -> Tensor:
    logits = net(tokens())
    assert logits.argmax(-1).shape == (3, 100)
    return F.cross_entropy(logits.view(-1, CLASSES), tokens().view(-1))


def _past_torch_function(net: Any) -> Tensor:
    logits = net(tokens())
    with torch._C.DisableTorchFunctionSubclass():
        return torch.ops.aten.mul.Tensor(logits, logits).mean()


PLAIN: dict[str, Callable[[Any], Tensor]] = {
    "sum": lambda net: net(tokens()).sum(),
    "square": lambda net: net(tokens()).square().mean(),
    "logsumexp": lambda net: net(tokens())[:, 1:].float().logsumexp(-1).mean(),
    "log-softmax": lambda net: -F.log_softmax(net(tokens()) / 2, -1)[..., 5].mean(),
    "cat": lambda net: torch.cat([net(tokens())[:, :2], net(tokens())[:, 5:]], 1).tanh().mean(),
    "no-reduction": lambda net: F.cross_entropy(
        net(tokens()).view(-1, CLASSES), tokens().view(-1), reduction="none"
    ).mean(),
    "probabilities": lambda net: F.cross_entropy(
        net(tokens()).view(-1, CLASSES), F.one_hot(tokens().view(-1), CLASSES).float()
    ),
    "own-function": lambda net: _Cube.apply(net(tokens())).mean(),
    "own-function-of-view": lambda net: _Cube.apply(net(tokens())[:, 3:] * 0.5).mean(),
    "written": _written,
    "written-view": _written_view,
    "in-place": lambda net: net(tokens()).mul_(3).square().mean(),
    "hooked-before": _hooked_before,
    "accuracy-first": _accuracy_first,
    "past-torch-function": _past_torch_function,
    "classes-sliced": lambda net: net(tokens())[..., :100].square().mean(),
    "einsum": lambda net: torch.einsum("btc,c->bt", net(tokens()), WEIGHT).mean(),
    "chunks": lambda net: sum(part.square().mean() for part in net(tokens()).chunk(2)),  # type: ignore[misc]
    "masked": lambda net: net(tokens())[_ignored(tokens()) > 0].square().mean(),
    "checkpointed": lambda net: torch.utils.checkpoint.checkpoint(
        lambda ids: net(ids).tanh().mean(), tokens(), use_reentrant=False
    ),
}


@pytest.mark.parametrize("options", [{}, {"bias": True}, {"tied": True}], ids=["plain", "bias", "tied"])
@pytest.mark.parametrize("loss", PLAIN)
def test_anything_but_a_loss_keeps_every_bit(loss: str, options: Any) -> None:
    net = model(**options)
    plain = gradients(net, PLAIN[loss])
    with tiled(net, used=False):
        ours = gradients(net, PLAIN[loss])
    assert equal(ours, plain), {name: distance(ours[name], plain[name]) for name in plain}


def _values(logits: Tensor) -> Iterator[Any]:
    """What a loop may look at."""
    yield logits.detach()
    yield logits.data
    yield logits.argmax(-1)
    yield logits.max()
    yield logits.tolist()
    yield pickle.loads(pickle.dumps(logits.detach()))
    yield copy.deepcopy(logits.detach())
    yield logits.detach().numpy().copy()
    yield logits[0, 0, 0].item()
    yield torch.topk(logits, 3).indices
    yield logits.to(torch.float64)
    yield logits.clone()
    yield [row.sum() for row in logits]
    yield logits[..., -1:, :].float()
    yield logits == logits
    with torch.no_grad():
        yield logits * 2
        yield logits[:, 1:]


@pytest.mark.parametrize("index", range(17))
@pytest.mark.parametrize("after", ["nothing", "loss", "backward"])
def test_who_looks_at_logits_sees_plain_pytorchs(index: int, after: str) -> None:
    net = model()

    def look() -> Any:
        logits = net(tokens())
        if after != "nothing":
            loss = shifted_loss(logits, tokens())
            if after == "backward":
                loss.backward()
        return list(_values(logits))[index]

    plain = look()
    with tiled(net, used=after != "nothing"):
        ours = look()
    plain, ours = (value if isinstance(value, list) else [value] for value in (plain, ours))
    for first, second in zip(plain, ours, strict=True):
        both = isinstance(first, Tensor)
        assert (
            torch.equal(first, second) and first.requires_grad == second.requires_grad
            if both
            else ((first == second).all() if hasattr(first, "all") else first == second)
        )


def test_what_a_tensor_says_of_itself_computes_nothing() -> None:
    net = model()
    plain = net(tokens())
    with tiled(net):
        logits = net(tokens())
        for ours, theirs in (
            (logits, plain),
            (logits[:, 1:], plain[:, 1:]),
            (logits[:, 1:].half(), plain[:, 1:].half()),
        ):
            assert isinstance(ours, DeferredLogits) and isinstance(ours, Tensor) and torch.is_tensor(ours)
            for question in (
                lambda t: (
                    t.shape,
                    t.size(),
                    t.size(-1),
                    t.dtype,
                    t.device,
                    t.dim(),
                    t.ndim,
                    t.numel(),
                    len(t),
                ),
                lambda t: (t.stride(), t.is_contiguous(), t.is_leaf, t.requires_grad, t.is_floating_point()),
                lambda t: (t.layout, t.is_cuda, t.element_size(), t.itemsize, t.nbytes, t.grad, t._version),
            ):
                assert question(ours) == question(theirs)
            assert ours.computed is None and ours.grad_fn is not None
        assert "grad_fn" in repr(logits)
    with pytest.raises(RuntimeError, match="Only Tensors created explicitly"):
        copy.deepcopy(logits)


def test_a_view_that_plain_pytorch_refuses_is_refused() -> None:
    net = model()
    with tiled(net), pytest.raises(RuntimeError, match="view size is not compatible"):
        net(tokens())[..., :-1, :].view(-1, CLASSES)


# ---- gradients of logits -----------------------------------------------------------------------------


def _retained(net: Any) -> Tensor:
    logits = net(tokens())
    logits.retain_grad()
    shifted = logits[:, :-1].float()
    shifted.retain_grad()
    F.cross_entropy(shifted.reshape(-1, CLASSES), tokens()[:, 1:].reshape(-1)).backward()
    return torch.cat([logits.grad.flatten(), shifted.grad.flatten()])


def _asked(net: Any) -> Tensor:
    logits = net(tokens())
    halves = logits * 0.5
    made = torch.autograd.grad(shifted_loss(halves, tokens()), [halves, logits])
    return torch.cat([part.flatten() for part in made])


def _seen_by_hook(net: Any) -> Tensor:
    logits, seen = net(tokens()), []
    capped = torch.tanh(logits / 5)
    loss = shifted_loss(capped, tokens())
    capped.register_hook(lambda grad: seen.append(grad.clone()))
    logits.register_hook(lambda grad: seen.append(grad.clone()))
    loss.backward()
    return torch.cat([part.flatten() for part in seen])


@pytest.mark.parametrize("ask", [_retained, _asked, _seen_by_hook])
def test_gradients_of_logits_are_plain_pytorchs(ask: Callable[[Any], Tensor]) -> None:
    net = model()
    plain = ask(net)
    with tiled(net, used=True):
        ours = ask(net)
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("where", ["logits", "view", "cast"])
def test_hooks_that_change_the_gradient_of_logits_count(when: str, where: str) -> None:
    net = model()

    def loss(net: Any) -> Tensor:
        logits = net(tokens())
        view = logits[:, 1:]
        cast = view.double()
        hooked = {"logits": logits, "view": view, "cast": cast}[where]
        if when == "before":
            hooked.register_hook(lambda grad: grad * 3)
        made = F.cross_entropy(cast.reshape(-1, CLASSES), tokens()[:, 1:].reshape(-1))
        if when == "after":
            hooked.register_hook(lambda grad: grad * 3)
        return made

    plain = gradients(net, loss)
    with tiled(net, used=True):
        ours = gradients(net, loss)
    assert all(distance(ours[name], plain[name]) < 1e-6 for name in plain)
    assert distance(ours["head.weight"], gradients(net, LOSSES["causal"])["head.weight"]) > 1


@pytest.mark.parametrize("first", [True, False], ids=["loss-first", "loss-last"])
@pytest.mark.parametrize("of", ["logits", "view"])
def test_logits_in_a_loss_and_in_something_else(first: bool, of: str) -> None:
    net = model()

    def loss(net: Any) -> Tensor:
        logits = net(tokens())
        view = logits[:, :-1]
        other = logits if of == "logits" else view
        penalty = None if first else other.float().logsumexp(-1).square().mean()
        made = F.cross_entropy(view.reshape(-1, CLASSES), tokens()[:, 1:].reshape(-1))
        if penalty is None:
            penalty = other.float().logsumexp(-1).square().mean()
        return made + penalty

    plain = gradients(net, loss)
    with tiled(net, used=first):
        ours = gradients(net, loss)
    assert all(distance(ours[name], plain[name]) < 1e-5 for name in plain)
    assert first or equal(ours, plain)


def test_retain_graph_gives_the_same_gradients_again() -> None:
    net = model()
    with tiled(net, used=True):
        loss = shifted_loss(net(tokens()), tokens()) * 3
        loss.backward(retain_graph=True)
        once = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
        net.zero_grad()
        loss.backward(retain_graph=True)
        again = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
        loss.backward()
        both = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
        assert equal(once, again) and all(torch.equal(both[name], 2 * once[name]) for name in once)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


def test_second_derivatives_are_refused() -> None:
    net = model()
    with tiled(net, used=True):
        loss = shifted_loss(net(tokens()), tokens())
        (grad,) = torch.autograd.grad(loss, net.body.weight, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivatives"):
            grad.square().sum().backward()


def test_anything_but_a_loss_has_its_second_derivatives() -> None:
    net = model(bias=True)

    def penalty(net: Any) -> Tensor:
        value = (net(tokens())[:, 1:] * 0.5).square().mean()
        first = torch.autograd.grad(value, [net.body.weight, net.head.weight], create_graph=True)
        return value + sum(part.square().sum() for part in first)

    plain = gradients(net, penalty)
    with tiled(net, used=False):
        ours = gradients(net, penalty)
    assert all(distance(ours[name], plain[name]) < 1e-6 for name in plain)


@pytest.mark.parametrize("first", [True, False], ids=["loss-first", "loss-last"])
def test_logits_given_to_a_checkpoint_go_the_same_way_twice(first: bool) -> None:
    net = model()

    def both(logits: Tensor) -> Tensor:
        mean = 0 if first else logits.mean()
        loss = F.cross_entropy((logits * 2).view(-1, CLASSES), tokens().view(-1))
        return loss + (logits.mean() if first else mean)

    def loss(net: Any) -> Tensor:
        made: Tensor = torch.utils.checkpoint.checkpoint(both, net(tokens()), use_reentrant=False)
        return made

    plain = gradients(net, loss)
    with tiled(net, used=first):
        ours = gradients(net, loss)
    assert all(distance(ours[name], plain[name]) < 1e-5 for name in plain)


def test_labels_that_are_no_classes_are_plain_pytorchs_error() -> None:
    net = model()
    with tiled(net, used=False), pytest.raises(IndexError, match="out of bounds"):
        F.cross_entropy(net(tokens()).view(-1, CLASSES), tokens().view(-1) + CLASSES)


def test_weights_changed_before_logits_are_looked_at_are_an_error() -> None:
    net = model()
    with tiled(net):
        logits = net(tokens())
        shifted_loss(logits, tokens()).backward()
        torch.optim.SGD(net.parameters(), lr=0.1).step()
        with pytest.raises(RuntimeError, match=r"has been changed since .*optimizer's step"):
            logits.argmax(-1)
        hidden = torch.zeros(2, 5, WIDTH, requires_grad=True) * 1
        logits = net.head(hidden)
        hidden.add_(1)
        with pytest.raises(RuntimeError, match="input was changed in place"):
            shifted_loss(logits, tokens(2, 5))


def test_writing_to_a_view_after_its_loss_is_an_error() -> None:
    net = model()
    with tiled(net):
        view = net(tokens())[:, 1:]
        F.cross_entropy(view.reshape(-1, CLASSES), tokens()[:, 1:].reshape(-1))
        with pytest.raises(RuntimeError, match="cannot follow"):
            view.zero_()


def test_functional_call_with_other_weights_computes_with_those() -> None:
    net = model()
    other = {name: (p.detach() * 2).requires_grad_() for name, p in net.named_parameters()}

    def look() -> tuple[Tensor, Tensor]:
        logits = torch.func.functional_call(net, other, (tokens(),))
        loss = shifted_loss(logits, tokens())
        return logits.detach(), torch.autograd.grad(loss, other["head.weight"])[0]

    plain = look()
    with tiled(net, used=True):
        ours = look()
    assert torch.equal(plain[0], ours[0]) and distance(ours[1], plain[1]) < 1e-5


class Tempered(nn.Linear):
    """A head with a learned temperature, which is one number."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__(width, classes)
        self.temperature = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) * self.temperature


@pytest.mark.parametrize("head", [nn.Linear, Tempered])
@pytest.mark.parametrize("is_tiled", [True, False])
def test_hooks_on_a_heads_weights_see_their_gradient_once(head: Any, is_tiled: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), head(16, 1200))
    seen: list[int] = []
    x, target = torch.randn(300, 16), torch.randint(0, 1200, (300,))
    for value in net[1].parameters():
        value.register_hook(lambda gradient: seen.append(1) or gradient * 0.1)

    def loss(model: Any) -> Tensor:
        logits = model(x)
        own = F.cross_entropy(logits, target)
        return own if is_tiled else own + 1e-2 * logits.logsumexp(-1).square().mean()

    plain = {name: value.clone() for name, value in gradients(net, loss).items()}
    calls = len(seen)
    (tile,) = find(net)
    tile.attach()
    tiled = gradients(net, loss)
    assert tile.used and len(seen) == 2 * calls
    assert all(distance(tiled[name], plain[name]) < 1e-5 for name in plain)


class LearnedStep(nn.Linear):
    """A head that rounds its input to a learned step, whose gradient is divided by the number of elements."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__(width, classes)
        self.step = nn.Parameter(torch.tensor(0.05))

    def forward(self, x: Tensor) -> Tensor:
        small = self.step * (x.numel() * 127) ** -0.5
        step = (self.step - small).detach() + small
        scaled = (x / step).clamp(-128, 127)
        return F.linear(((scaled.round() - scaled).detach() + scaled) * step, self.weight, self.bias)


def test_a_head_whose_gradients_are_no_sums_over_rows_stays_whole() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), LearnedStep(16, 1200))
    x, target = torch.randn(300, 16), torch.randint(0, 1200, (300,))
    plain = {k: v.clone() for k, v in gradients(net, lambda model: F.cross_entropy(model(x), target)).items()}
    (tile,) = find(net)
    tile.attach()
    assert equal(gradients(net, lambda model: F.cross_entropy(model(x), target)), plain)
    assert "no sums over rows" in tile.reason
