# SPDX-License-Identifier: Apache-2.0
"""Attention in tiles of queries: ways to write it, gradients, what looks at scores, and what may go wrong."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from memscale.techniques.checkpoint.checkpointing import CheckpointAttachment
from memscale.techniques.tiles.attention_run import tile_rows
from memscale.techniques.tiles.attention_steps import Form, Found, step_of
from memscale.techniques.tiles.attention_tiles import AttentionTiles, find
from memscale.techniques.tiles.deferred_scores import DeferredScores

BATCH, HEADS, LENGTH, WIDTH = 2, 2, 150, 8  # three tiles, the last one shorter
SCALE = WIDTH**-0.5


class Attention(nn.Module):
    """q, k and v of x, an attention written in some way, and a projection."""

    def __init__(self, core: Callable[..., Tensor], keys: int = LENGTH) -> None:
        super().__init__()
        width = HEADS * WIDTH
        self.q, self.kv, self.out = (
            nn.Linear(width, width),
            nn.Linear(width, 2 * width),
            nn.Linear(width, width),
        )
        self.bias = nn.Parameter(torch.randn(1, HEADS, LENGTH, keys) / 2)
        self.by_key = nn.Parameter(torch.randn(HEADS, 1, keys))
        self.heat = nn.Parameter(torch.rand(HEADS, 1, 1) + 0.5)
        self.drop, self.softmax = nn.Dropout(0.0), nn.Softmax(-1)
        self.register_buffer("causal", torch.ones(LENGTH, keys, dtype=torch.bool).tril())
        self.core, self.keys = core, keys

    def forward(self, x: Tensor) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.view(len(y), -1, HEADS, WIDTH).transpose(1, 2)

        q, (k, v) = heads(self.q(x)), map(heads, self.kv(x[:, : self.keys]).chunk(2, -1))
        # softmax(q @ k) @ v, by a function that is not written here
        made = self.core(self, q, k, v)
        return self.out(made.transpose(1, 2).reshape(x.shape))


def _operator(it: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(WIDTH)
    return it.drop(it.softmax(scores.masked_fill(~it.causal, -math.inf))) @ v


def _biased(it: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(-2, -1)) * it.heat + it.by_key
    return torch.matmul(F.softmax(it.bias + scores, dim=-1), v)


def _flattened(it: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    flat = [part.reshape(-1, part.shape[-2], WIDTH) for part in (q * SCALE, k, v)]
    scores = torch.bmm(flat[0], flat[1].transpose(1, 2)).view(BATCH, HEADS, LENGTH, it.keys)
    scores = (scores + it.bias).view(BATCH * HEADS, LENGTH, it.keys)
    weights = F.dropout(F.softmax(scores, dim=2), p=0.3, training=False)
    return torch.bmm(weights, flat[2]).view(BATCH, HEADS, LENGTH, WIDTH)


def _baddbmm(it: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    flat = [part.reshape(-1, part.shape[-2], WIDTH) for part in (q, k, v)]
    added = it.by_key.repeat(BATCH, 1, 1)
    scores = torch.baddbmm(added, flat[0], flat[1].mT, beta=0.5, alpha=SCALE)
    return torch.bmm(torch.softmax(scores, -1), flat[2]).view(BATCH, HEADS, LENGTH, WIDTH)


def _empty_baddbmm(it: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    flat = [part.reshape(-1, part.shape[-2], WIDTH) for part in (q, k, v)]
    nothing = torch.full((1, 1, 1), math.nan, dtype=q.dtype)
    scores = torch.baddbmm(
        nothing.expand(BATCH * HEADS, LENGTH, it.keys), flat[0], flat[1].mT, beta=0, alpha=SCALE
    )
    scores = scores.reshape(BATCH, HEADS, LENGTH, it.keys) + it.bias
    return torch.matmul(scores.softmax(dim=-1).to(v.dtype), v)


def _einsum(it: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", q.transpose(1, 2), k.transpose(1, 2)) * SCALE + it.bias
    return torch.einsum("b h q k, b k h d -> b q h d", scores.softmax(-1), v.transpose(1, 2)).transpose(1, 2)


def _in_place(it: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    scores *= SCALE
    scores += it.bias
    scores.masked_fill_(~it.causal, -math.inf)
    return scores.softmax(-1) @ v


def _capped(it: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.tanh(torch.matmul(q, k.mT) / 3.0) * 3.0
    scores = torch.where(it.causal, scores, torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype))
    return F.softmax(scores, dim=-1, dtype=torch.float32).type_as(q) @ v


def _grouped(it: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = k[:, :1], v[:, :1]  # one head of keys for all of queries: expanded, then copied
    k, v = (part[:, :, None].expand(-1, 1, HEADS, -1, -1).reshape(BATCH, HEADS, -1, WIDTH) for part in (k, v))
    return (q @ k.mT * SCALE + it.bias).float().softmax(-1).to(q.dtype) @ v


def _broadcast(it: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k[:, :1].mT * SCALE - it.bias).softmax(-1) @ v[:, :1]


WAYS = (
    _operator, _biased, _flattened, _baddbmm, _empty_baddbmm, _einsum, _in_place, _capped, _grouped,
    _broadcast,
)  # fmt: skip


class Largest(TorchDispatchMode):
    """Counts products, and finds the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self.products = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.products += func in (torch.ops.aten.bmm.default, torch.ops.aten.baddbmm_.default)
        if isinstance(made, Tensor):
            self.most = max(self.most, made.untyped_storage().nbytes() // made.element_size())
        return made


def model(core: Callable[..., Tensor] = _operator, keys: int = LENGTH) -> Attention:
    torch.manual_seed(0)
    return Attention(core, keys)


def batch() -> Tensor:
    return torch.randn(BATCH, LENGTH, HEADS * WIDTH, generator=torch.Generator().manual_seed(1))


@contextmanager
def tiled(net: nn.Module, used: bool = True) -> Iterator[AttentionTiles]:
    (tile,) = _attach(net)
    try:
        yield tile
        assert tile.used is used, tile.reason
    finally:
        tile.undo()


def _attach(net: nn.Module) -> list[AttentionTiles]:
    found = [AttentionTiles(part, path) for path, part in net.named_modules() if isinstance(part, Attention)]
    for tile in found:
        tile.attach()
    return found


def gradients(
    net: nn.Module, run: Callable[[Any, Tensor], Tensor] = lambda net, x: net(x), autocast: bool = False
) -> dict[str, Tensor]:
    """Loss and gradients of a step."""
    dtype = next(net.parameters()).dtype
    x = batch().to(dtype).requires_grad_()
    net.zero_grad()
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        made = run(net, x)
    weights = torch.linspace(0.5, 1, made.numel(), dtype=torch.float64).view(made.shape).to(made.dtype)
    (made * weights).sum().backward()
    assert x.grad is not None
    found = {name: part.grad.clone() for name, part in net.named_parameters() if part.grad is not None}
    return {"output": made.detach(), "x": x.grad, **found}


def distance(found: Tensor, true: Tensor) -> float:
    return float((found.double() - true.double()).norm() / true.double().norm().clamp_min(1e-300))


def assert_close(ours: dict[str, Tensor], plain: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    assert ours.keys() == plain.keys() == exact.keys()
    for name, value in plain.items():
        assert ours[name].dtype == value.dtype and ours[name].shape == value.shape
        unit = torch.finfo(value.dtype).eps
        assert distance(ours[name], exact[name]) <= 1.5 * distance(value, exact[name]) + unit / 8, name


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("how", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_write_it_is_tiled_and_as_exact(way: Any, how: str) -> None:
    net = model(way)
    if how == "bfloat16":
        net = net.bfloat16()
    exact = gradients(copy.deepcopy(net).double())
    plain = gradients(net, autocast=how == "autocast")
    with tiled(net) as tile, Largest() as seen:
        ours = gradients(net, autocast=how == "autocast")
        assert not tile.reason
    assert_close(ours, plain, exact)
    largest = BATCH * HEADS * LENGTH * LENGTH  # of the scores: only the bias's gradient has half as many
    assert seen.most < largest, "all scores were there at once"


def test_steps_of_a_tile_run_under_the_autocast_that_was_in_force() -> None:
    """On a card it decides on the precision of softmax."""
    scores, seen = torch.zeros(2, 3, 4), []

    def softmax(scores: Tensor, dim: int) -> Tensor:
        seen.append(torch.is_autocast_enabled("cpu"))
        return scores.softmax(dim)

    form = Form(scores.shape, scores.dtype, scores.device)
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found = step_of(torch.softmax, (scores, -1), {}, scores, form)
        assert isinstance(found, Found)
        replace(found.step, func=softmax).run(scores, [])
    assert seen == [False, True] and not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("signs", [False, True], ids=["one sign", "two signs"])
def test_sums_over_many_tiles_in_half_precision_are_as_exact(signs: bool) -> None:
    """Of keys and values, which all tiles add to; and of a bias, where the tiles nearly cancel."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.bfloat16)

    tensors = [random(8, 1024, 8), random(8, 16, 8), random(8, 16, 8), random(1, 16)]
    weights = random(1, 8).expand(1024, 8).clone()
    if signs:
        weights[512:] *= -1

    class Core(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
            return (q @ k.mT + bias).softmax(-1) @ v

    def run(dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
        leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in tensors]
        (core(*leaves) * weights.to(dtype)).sum().backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    core = Core()
    exact, plain = run(torch.float64), run()
    tile = AttentionTiles(core, "")
    tile.attach()
    ours = run()
    tile.undo()
    assert tile.used and len(ours) == 4
    for number in [0, 3] if signs else [0, 1, 2, 3]:
        mine, theirs = distance(ours[number], exact[number]), distance(plain[number], exact[number])
        assert mine <= 1.2 * theirs, (number, mine, theirs)


def test_there_are_fewer_keys_than_queries() -> None:
    net = model(_biased, keys=40)
    exact, plain = gradients(copy.deepcopy(net).double()), gradients(net)
    with tiled(net):
        assert_close(gradients(net), plain, exact)


def test_rows_of_tiles() -> None:
    assert [tile_rows(queries) for queries in (1, 64, 1024, 4096)] == [64, 64, 64, 256]


# ---- what looks at scores ------------------------------------------------------------------------------


class Squashed(torch.autograd.Function):
    """A function of the caller's own, which Python's hooks for tensor subclasses do not see."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        made = scores.sigmoid()
        ctx.save_for_backward(made)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (made,) = ctx.saved_tensors
        return grads[0] * made * (1 - made)


def _with_scores(look: Callable[[Any, Tensor], Tensor]) -> Callable[..., Tensor]:
    def core(it: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return look(it, q @ k.mT * SCALE + it.bias).softmax(-1) @ v

    return core


def _hooked(it: Any, scores: Tensor) -> Tensor:
    scores.register_hook(lambda grad: grad * 2)
    return scores


def _changed_view(it: Any, scores: Tensor) -> Tensor:
    flat = scores.view(-1, LENGTH, LENGTH)
    scores *= 2
    return flat.view(BATCH, HEADS, LENGTH, LENGTH)


def _changed_first(it: Any, scores: Tensor) -> Tensor:
    scores *= 2
    scores += it.by_key
    return scores - scores.mean(-2, keepdim=True)


LOOKS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a sum over queries": lambda it, scores: scores - scores.mean(-2, keepdim=True),
    "a maximum": lambda it, scores: scores - scores.amax(-1, keepdim=True).detach(),
    "dropout": lambda it, scores: F.dropout(scores, 0.5, training=True),
    "a hook": _hooked,
    "an index": lambda it, scores: scores[:, :, torch.arange(LENGTH)],
    "other rows": lambda it, scores: scores + scores.flip(-2),
    "a transpose": lambda it, scores: scores.transpose(-1, -2),
    "a view of what is changed": _changed_view,
    "a sum after changes in place": _changed_first,
    "another mask": lambda it, scores: scores.repeat(1, 2, 1, 1)[:, :HEADS],
}


@pytest.mark.parametrize("look", LOOKS)
def test_who_looks_gets_plain_scores(look: str) -> None:
    net = model(_with_scores(LOOKS[look]))

    def run(net: Any, x: Tensor) -> Tensor:
        torch.manual_seed(2)
        return net(x)

    plain = gradients(net, run)
    with tiled(net, used=False) as tile:
        assert equal(gradients(net, run), plain)
        assert tile.reason


def test_an_autograd_function_of_the_callers_own_gets_its_gradient_through() -> None:
    net = model(_with_scores(lambda it, scores: Squashed.apply(scores)))
    plain = gradients(net)
    with tiled(net, used=False):
        ours = gradients(net)
    assert ours.keys() == plain.keys()
    assert all(distance(ours[name], plain[name]) < 1e-5 for name in plain)


def test_a_look_that_changes_in_place_is_a_part_of_it() -> None:
    def look(it: Any, scores: Tensor) -> Tensor:
        assert not bool(scores.isnan().any())
        scores[:, 0] *= 3
        scores += it.by_key
        return scores

    net = model(_with_scores(look))
    plain = gradients(net)
    with tiled(net, used=False):
        assert equal(gradients(net), plain)


class Returning(nn.Module):
    """An attention whose weights are returned, and looked at behind it."""

    def __init__(self, use: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.use = model(self._core), use

    def _core(self, it: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * SCALE + it.bias
        self.found = scores, scores.softmax(-1)
        return self.found[1] @ v

    def forward(self, x: Tensor) -> Tensor:
        made = self.inner(x)
        scores, weights = self.found
        del self.found
        assert scores.shape == weights.shape == (BATCH, HEADS, LENGTH, LENGTH)
        return made + self.use(weights)


def test_weights_that_are_looked_at_afterwards_have_their_own_gradient() -> None:
    net = Returning(lambda weights: (weights * weights.detach().log()).sum(-1).mean())
    exact, plain = gradients(copy.deepcopy(net).double()), gradients(net)
    with tiled(net):
        assert_close(gradients(net), plain, exact)


def test_the_gradient_of_weights_behind_their_product_is_refused() -> None:
    def hooked(weights: Tensor) -> Tensor:
        weights.retain_grad()
        return weights.new_zeros(())

    net = Returning(hooked)
    with tiled(net), pytest.raises(RuntimeError, match=r"gradient of its scores .* enable_tiling=False"):
        net(batch())


def test_weights_that_nobody_looks_at_are_never_computed() -> None:
    net = Returning(lambda weights: torch.zeros(()))
    with tiled(net), Largest() as seen:
        gradients(net)
    assert seen.most < BATCH * HEADS * LENGTH * LENGTH


@pytest.mark.parametrize(
    "use", [repr, copy.deepcopy, pickle.dumps, lambda t: t.tolist(), lambda t: t.detach()]
)
def test_anything_can_be_done_with_weights(use: Callable[[Tensor], Any]) -> None:
    net = Returning(lambda weights: torch.zeros(()))
    found = []

    def keep(weights: Tensor) -> Tensor:
        found.append(weights)
        return torch.zeros(())

    net.use = keep
    plain = net(batch())
    with tiled(net):
        assert torch.allclose(net(batch()), plain, atol=1e-6)
    assert type(found[0]) is Tensor and type(found[1]) is DeferredScores
    with torch.no_grad():
        weights = found[1].clone()
    assert type(weights) is Tensor and torch.equal(weights, found[0])
    use(found[1].detach())


def test_queries_changed_in_place_are_an_error() -> None:
    def core(it: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        q.mul_(2)
        return scores.softmax(-1) @ v

    with tiled(model(core), used=False) as tile, pytest.raises(RuntimeError, match="changed in place"):
        tile.module(batch())


def test_a_mask_changed_in_place_before_backward_is_an_error() -> None:
    mask = torch.zeros(LENGTH, LENGTH)

    def core(it: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT + mask).softmax(-1) @ v

    net = model(core)
    with tiled(net):
        made = net(batch()).sum()
        mask += 1
        with pytest.raises(RuntimeError, match="inplace operation"):
            made.backward()


# ---- backward ------------------------------------------------------------------------------------------


def test_a_second_backward_gives_the_same_again() -> None:
    net = model(_biased)
    with tiled(net):
        made = net(batch()).square().mean()
        first = torch.autograd.grad(made, list(net.parameters()), retain_graph=True, allow_unused=True)
        again = torch.autograd.grad(made, list(net.parameters()), allow_unused=True)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_there_is_no_second_derivative_and_it_says_so() -> None:
    net = model()
    x = batch().requires_grad_()
    plain = torch.autograd.grad(net(x).square().mean(), x)[0]
    with tiled(net):
        (first,) = torch.autograd.grad(net(x).square().mean(), x, create_graph=True)
        assert distance(first, plain) < 1e-5
        with pytest.raises(RuntimeError, match="no second derivative"):
            first.square().sum().backward()


@pytest.mark.parametrize("frozen", ["q", "kv", "q kv", "bias", "q kv bias heat by_key"])
def test_frozen_parts_get_no_gradient_and_the_others_theirs(frozen: str) -> None:
    net = model(_biased)
    for name, part in net.named_parameters():
        part.requires_grad_(name.split(".")[0] not in frozen.split())
    exact, plain = gradients(copy.deepcopy(net).double()), gradients(net)
    with tiled(net):
        assert_close(gradients(net), plain, exact)


def test_only_values_that_need_a_gradient() -> None:
    def core(it: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q.detach() @ k.detach().mT).softmax(-1) @ v

    net = model(core)
    plain = gradients(net)
    with tiled(net):
        ours = gradients(net)
    assert ours.keys() == plain.keys() and all(distance(ours[name], plain[name]) < 1e-5 for name in plain)


@pytest.mark.parametrize("reentrant", [False, True])
def test_around_it_a_checkpoint_runs_it_again(reentrant: bool) -> None:
    net = model(_biased)
    with tiled(net):
        alone = gradients(net)
        assert equal(gradients(net, lambda net, x: checkpoint(net, x, use_reentrant=reentrant)), alone)


def test_beneath_memscales_checkpoint_it_runs_twice_in_forward() -> None:
    """Once in the block's first run and once in its second; backward makes its scores a third time."""
    net = model()
    with tiled(net):
        with Largest() as seen:
            alone = gradients(net)
        outer = CheckpointAttachment(net, "")
        outer.attach()
        with Largest() as twice:
            again = gradients(net)
        outer.undo()
    assert equal(alone, again)
    assert twice.products == seen.products + 2 * 3, "two products of each of three tiles"


def test_a_checkpoint_inside_is_left_alone() -> None:
    def part(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v

    net = model(lambda it, q, k, v: checkpoint(part, q, k, v, use_reentrant=False))
    plain = gradients(net)
    with tiled(net, used=False):
        assert equal(gradients(net), plain)


def test_scores_that_go_into_a_checkpoint() -> None:
    def part(scores: Tensor, v: Tensor) -> Tensor:
        return F.dropout(scores.softmax(-1), 0.1, training=True) @ v

    net = model(lambda it, q, k, v: checkpoint(part, q @ k.mT, v, use_reentrant=False))

    def run(net: Any, x: Tensor) -> Tensor:
        torch.manual_seed(2)
        return net(x)

    plain = gradients(net, run)
    with tiled(net, used=False):
        assert equal(gradients(net, run), plain)


# ---- standing aside, and leaving -----------------------------------------------------------------------


def test_without_gradients_it_is_the_modules_own_forward() -> None:
    net = model()
    x = batch()
    with torch.no_grad():
        plain = net(x)
    with tiled(net, used=False), torch.no_grad():
        assert torch.equal(net(x), plain)


def test_functorch_and_the_compiler_see_the_module_itself() -> None:
    net = model(_operator)
    x = batch()
    params = dict(net.named_parameters())

    def loss(params: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(net, params, (x,)).square().mean()

    plain = torch.func.grad(loss)(params, x), net(x)
    with tiled(net, used=False):
        ours = torch.func.grad(loss)(params, x)
        compiled = torch.compile(net, backend="eager", fullgraph=True)(x)
    assert all(torch.equal(ours[name], plain[0][name]) for name in ours)
    assert torch.equal(compiled, plain[1])


def test_transforms_inside_a_forward_see_plain_products() -> None:
    def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v

    net = model(lambda it, q, k, v: torch.func.vmap(one)(q, k, v))
    plain = gradients(net)
    with tiled(net, used=False):
        assert equal(gradients(net), plain)


def test_after_an_exception_it_goes_on() -> None:
    fails = [False]

    def core(it: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT).softmax(-1)
        if fails[0]:
            raise ValueError("in the middle")
        return scores @ v

    net = model(core)
    with tiled(net):
        before = gradients(net)
        fails[0] = True
        with pytest.raises(ValueError, match="in the middle"):
            net(batch())
        assert type(batch() @ batch().mT) is Tensor, "nothing is put off outside"
        fails[0] = False
        assert equal(gradients(net), before)


def test_undo_leaves_nothing_and_copies_are_plain() -> None:
    net = model()
    before = dict(vars(net))
    plain = gradients(net)
    with tiled(net):
        gradients(net)
        twin = copy.deepcopy(net)
        assert "forward" not in vars(twin) and equal(gradients(twin), plain)
    assert vars(net).keys() == before.keys() and equal(gradients(net), plain)


class Twice(nn.Module):
    """An attention in an attention, both watched."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model(_biased)
        self.outer = model(lambda it, q, k, v: (q @ k.mT).softmax(-1) @ v)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x))


def test_the_innermost_module_is_the_one_that_is_used() -> None:
    net = Twice()
    around = AttentionTiles(net, "")
    around.attach()
    with tiled(net.inner) as tile:
        ours = gradients(net)
        assert tile.used and around.used  # the outer attention belongs to the model itself
    around.undo()
    plain = gradients(net)
    assert all(distance(ours[name], plain[name]) < 1e-4 for name in plain)


class Linear(nn.Module):
    """No attention: products without a softmax."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ x.mT @ x


class Wrapped(nn.Module):
    """An attention in a function that the forward calls."""

    def _attend(self, x: Tensor) -> Tensor:
        return torch.einsum("bqk,bkd->bqd", F.softmax(torch.einsum("bqd,bkd->bqk", x, x), -1), x)

    def forward(self, x: Tensor) -> Tensor:
        return self._attend(x)


def test_candidates_are_modules_whose_code_could_attend() -> None:
    nets = {
        "linear": Linear(), "wrapped": Wrapped(), "layer": nn.Linear(8, 8), "softmax": nn.Softmax(-1),
        "mlp": nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)), "lstm": nn.LSTM(8, 8),
    }  # fmt: skip
    assert [tile.path for tile in find(nn.ModuleDict(nets))] == ["wrapped"]


def test_nothing_is_kept_over_200_steps() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def use(weights: Tensor) -> Tensor:
        alive.extend(map(weakref.ref, (weights, weights.tensors[0])))  # type: ignore[attr-defined]
        return torch.zeros(())

    net = Returning(use)
    with tiled(net):
        gc.collect()
        gc.disable()
        try:
            for _ in range(200):
                gradients(net)
            assert len(alive) == 400 and not any(tensor() is not None for tensor in alive)
        finally:
            gc.enable()
