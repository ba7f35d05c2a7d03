# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: B008, B023 - a case's function runs before its generator goes on, so what it captures still holds
"""Cases of `scratch.py`: reductions, losses, indexing, images, element-wise operations, optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from scratch_case import BF16, FP16, FP32, Case, leaf, module_case, through
from torch import nn

SHAPES = ((4, 256, 1000), (1024, 30522), (8, 12, 128, 128), (64, 7), (3, 2048, 768))


def reductions(dtype: torch.dtype) -> Iterator[Case]:
    for shape in SHAPES:
        x = leaf(*shape, dtype=dtype)
        for function in (
            torch.softmax,
            torch.log_softmax,
            torch.logsumexp,
            torch.sum,
            torch.mean,
            torch.var,
            torch.std,
            torch.amax,
            torch.prod,
            torch.cumsum,
            torch.cumprod,
            torch.logcumsumexp,
            torch.argmax,
            torch.norm,
        ):
            if function is torch.norm:
                yield f"norm {shape}", through(lambda x=x: torch.linalg.vector_norm(x, dim=-1))
                yield f"norm all {shape}", through(lambda x=x: torch.linalg.vector_norm(x))
                continue
            if function in (torch.prod, torch.cumprod, torch.logcumsumexp) and x.numel() > 10**6:
                continue
            yield f"{function.__name__} {shape}", through(lambda x=x, f=function: f(x, dim=-1))
            yield f"{function.__name__} dim 0 {shape}", through(lambda x=x, f=function: f(x, dim=0))
        yield f"sum all {shape}", through(lambda x=x: x.sum())
        yield f"mean all {shape}", through(lambda x=x: x.mean())
        yield f"var all {shape}", through(lambda x=x: x.var())
        yield f"max {shape}", through(lambda x=x: x.max())
        yield f"max dim {shape}", through(lambda x=x: x.max(dim=-1).values)
        yield f"median {shape}", through(lambda x=x: x.median(dim=-1).values)
        yield f"sum FP32 {shape}", through(lambda x=x: x.sum(-1, dtype=FP32))
        yield f"softmax FP32 {shape}", through(lambda x=x: torch.softmax(x, -1, dtype=FP32))
        yield f"cumsum FP32 {shape}", through(lambda x=x: torch.cumsum(x, -1, dtype=FP32))
        yield f"topk {shape}", through(lambda x=x: x.topk(min(5, x.shape[-1])).values)
        yield f"topk dim 0 {shape}", through(lambda x=x: x.topk(2, dim=0).values)
        yield f"sort {shape}", through(lambda x=x: x.sort(dim=-1).values)
        yield f"sort dim 0 {shape}", through(lambda x=x: x.sort(dim=0).values)
        yield f"argsort {shape}", through(lambda x=x: x.argsort(dim=-1))
        yield f"kthvalue {shape}", through(lambda x=x: x.kthvalue(2, dim=-1).values)
        yield f"cummax {shape}", through(lambda x=x: x.cummax(dim=-1).values)
        yield (
            f"isnan any all {shape}",
            (
                lambda x=x: (
                    x.isnan().any(),
                    (x > 0).all(-1),
                    (x > 0).sum(),
                    (x > 0).sum(-1),
                    x.count_nonzero(),
                )
            ),
        )


def losses(dtype: torch.dtype) -> Iterator[Case]:
    for shape in SHAPES:
        x = leaf(*shape, dtype=dtype)
        labels = torch.randint(0, shape[1] if len(shape) > 1 else 2, (shape[0], *shape[2:]))
        yield f"cross entropy {shape}", through(lambda x=x, t=labels: F.cross_entropy(x, t))
        yield (
            f"cross entropy smooth {shape}",
            through(lambda x=x, t=labels: F.cross_entropy(x, t, label_smoothing=0.1, ignore_index=0)),
        )
        soft = torch.softmax(torch.randn(shape), 1).to(dtype)
        yield f"cross entropy soft {shape}", through(lambda x=x, t=soft: F.cross_entropy(x, t))
        for loss in (
            F.mse_loss,
            F.l1_loss,
            F.smooth_l1_loss,
            F.huber_loss,
            F.kl_div,
            F.binary_cross_entropy_with_logits,
        ):
            yield f"{loss.__name__} {shape}", through(lambda x=x, t=soft, f=loss: f(x, t))
    log = leaf(100, 4, 50, dtype=dtype)
    yield (
        "ctc",
        through(
            lambda: F.ctc_loss(
                log.log_softmax(-1).float(),
                torch.randint(1, 50, (4, 20)),
                torch.full((4,), 100),
                torch.full((4,), 20),
            )
        ),
    )


def integers(dtype: torch.dtype) -> Iterator[Case]:
    whole = torch.randint(0, 100, (64, 1000))
    if dtype != FP32:
        return
    yield (
        "integers",
        lambda: (
            whole.sum(),
            whole.cumsum(-1),
            whole.sort(-1),
            whole.float().mean(),
            whole.ne(0).cumsum(1),
            whole.max(-1),
            torch.bincount(whole.flatten()),
            whole.unique(),
            F.one_hot(whole, 100),
            (whole == 3).int().cumsum(1),
            torch.nonzero(whole),
            whole[whole > 3],
            whole.sum(-1, dtype=torch.int32),
        ),
    )


def lookups(dtype: torch.dtype) -> Iterator[Case]:
    for rows, width, shape in (
        (1000, 256, (4, 256)),
        (30522, 768, (2, 512)),
        (2, 768, (8, 128)),
        (512, 64, (64,)),
    ):
        ids = torch.randint(0, rows, shape)
        yield (
            f"embedding {rows} {width} {shape}",
            module_case(nn.Embedding(rows, width, padding_idx=0), ids, dtype=dtype),
        )
        table = leaf(rows, width, dtype=dtype)
        yield (
            f"embedding transposed {rows} {width}",
            through(lambda t=table, i=ids: F.embedding(i, t).transpose(0, -1).contiguous()),
        )
        yield f"index rows {rows} {width}", through(lambda t=table, i=ids: t[i])
        yield f"index_select {rows} {width}", through(lambda t=table, i=ids.flatten(): t.index_select(0, i))
        yield (
            f"index_add {rows} {width}",
            through(lambda t=table, i=ids.flatten(): t.index_add(0, i, leaf(i.numel(), width, dtype=dtype))),
        )
        yield (
            f"index_copy {rows} {width}",
            through(
                lambda t=table, n=rows: t.index_copy(
                    0, torch.randperm(n)[: n // 2], leaf(n // 2, width, dtype=dtype)
                )
            ),
        )
        yield (
            f"index_put {rows} {width}",
            through(
                lambda t=table, i=ids.flatten(): t.index_put(
                    (i,), leaf(i.numel(), width, dtype=dtype), accumulate=True
                )
            ),
        )
        yield (
            f"embedding bag {rows} {width}",
            module_case(nn.EmbeddingBag(rows, width), ids.reshape(shape[0], -1), dtype=dtype),
        )


def indexing(dtype: torch.dtype) -> Iterator[Case]:
    x = leaf(64, 512, 96, dtype=dtype)
    where = torch.randint(0, 512, (64, 512, 96))
    yield "gather", through(lambda: x.gather(1, where))
    yield "scatter", through(lambda: x.scatter(1, where, leaf(64, 512, 96, dtype=dtype)))
    yield "scatter_add", through(lambda: x.scatter_add(1, where, leaf(64, 512, 96, dtype=dtype)))
    yield (
        "scatter_reduce amax",
        through(lambda: x.scatter_reduce(1, where, leaf(64, 512, 96, dtype=dtype), "amax")),
    )
    yield (
        "scatter_reduce mean",
        through(lambda: x.scatter_reduce(1, where, leaf(64, 512, 96, dtype=dtype), "mean")),
    )
    yield "take_along_dim", through(lambda: x.take_along_dim(where, 1))
    yield "masked_fill", through(lambda: x.masked_fill(where > 100, 0.0))
    yield "masked_fill broadcast", through(lambda: x.masked_fill(where[:1, :, :1] > 100, 0.0))
    yield "masked_select", through(lambda: x.masked_select(where > 100))
    yield "masked_scatter", through(lambda: x.masked_scatter(where > 100, leaf(64, 512, 96, dtype=dtype)))
    yield "bool index", through(lambda: x[where[:, :, 0] > 100])
    yield "where", through(lambda: torch.where(where > 3, x, 0.0))
    yield "two indices", through(lambda: x[torch.randint(0, 64, (5000,)), torch.randint(0, 512, (5000,))])
    yield "tril triu", through(lambda: (x.tril(), x.triu(1)))
    yield "roll flip", through(lambda: (x.roll(3, 1), x.flip(1)))
    yield "repeat", through(lambda: x.repeat(1, 2, 1))
    yield "repeat_interleave", through(lambda: x.repeat_interleave(2, dim=1))
    yield "cat stack", through(lambda: (torch.cat([x, x], 1), torch.stack([x, x])))
    yield "split chunk", through(lambda: [p * 2 for p in x.chunk(3, -1)])
    yield (
        "pad",
        through(
            lambda: (F.pad(x, (1, 2)), F.pad(x, (1, 2), mode="reflect"), F.pad(x, (1, 2), mode="circular"))
        ),
    )
    yield "unfold", through(lambda: x.unfold(1, 8, 4) * 1.0)
    yield "im2col", through(lambda: F.unfold(x.reshape(8, 24, 128, 128), 3, padding=1))
    yield "col2im", through(lambda: F.fold(x.reshape(64, 96, 512)[:, :72, :484], (24, 24), 3))
    yield "clone permuted", through(lambda: x.permute(2, 0, 1).contiguous())
    yield "as contiguous cast", through(lambda: x.transpose(0, 1).to(FP32 if dtype != FP32 else BF16))
    yield "copy_ into slice", lambda: torch.zeros(64, 512, 96).copy_(x.detach())
    yield "copy_ into permuted", lambda: torch.zeros(96, 64, 512).permute(1, 2, 0).copy_(x.detach())
    yield (
        "diag eye tri",
        lambda: (
            torch.eye(500),
            torch.tril_indices(300, 300),
            torch.linspace(0, 1, 999),
        ),
    )


def spatial(dtype: torch.dtype) -> Iterator[Case]:
    x = leaf(4, 64, 56, 56, dtype=dtype)
    cl = leaf(4, 64, 56, 56, dtype=dtype, grad=False).to(memory_format=torch.channels_last).requires_grad_()
    for tag, y in (("", x), (" channels-last", cl)):
        yield f"max pool{tag}", through(lambda y=y: F.max_pool2d(y, 3, 2, 1))
        yield f"max pool k2{tag}", through(lambda y=y: F.max_pool2d(y, 2))
        yield f"avg pool{tag}", through(lambda y=y: F.avg_pool2d(y, 3, 2, 1))
        yield f"adaptive avg 1{tag}", through(lambda y=y: F.adaptive_avg_pool2d(y, 1))
        yield f"adaptive avg 7{tag}", through(lambda y=y: F.adaptive_avg_pool2d(y, 7))
        yield f"adaptive max{tag}", through(lambda y=y: F.adaptive_max_pool2d(y, 7))
        for mode in ("nearest", "bilinear", "bicubic", "nearest-exact", "area"):
            yield (
                f"interpolate {mode}{tag}",
                through(lambda y=y, m=mode: F.interpolate(y, scale_factor=2, mode=m)),
            )
            yield (
                f"interpolate down {mode}{tag}",
                through(lambda y=y, m=mode: F.interpolate(y, size=(20, 23), mode=m)),
            )
        for mode in ("bilinear", "bicubic"):
            yield (
                f"interpolate antialias {mode}{tag}",
                through(lambda y=y, m=mode: F.interpolate(y, size=(20, 23), mode=m, antialias=True)),
            )
        yield f"pixel shuffle{tag}", through(lambda y=y: F.pixel_shuffle(y, 2))
        yield f"pad reflect{tag}", through(lambda y=y: F.pad(y, (1, 1, 1, 1), mode="reflect"))
        yield f"pad replicate{tag}", through(lambda y=y: F.pad(y, (1, 1, 1, 1), mode="replicate"))
        yield f"pad constant{tag}", through(lambda y=y: F.pad(y, (1, 1, 1, 1)))
        grid = torch.rand(4, 40, 40, 2).to(dtype)
        yield f"grid sample{tag}", through(lambda y=y, g=grid: F.grid_sample(y, g, align_corners=False))
    z = leaf(4, 64, 500, dtype=dtype)
    yield "max pool 1d", through(lambda: F.max_pool1d(z, 3, 2))
    yield "avg pool 1d", through(lambda: F.avg_pool1d(z, 3, 2))
    yield "interpolate linear", through(lambda: F.interpolate(z, scale_factor=2, mode="linear"))
    v = leaf(2, 16, 8, 28, 28, dtype=dtype)
    yield "max pool 3d", through(lambda: F.max_pool3d(v, 2))
    yield "avg pool 3d", through(lambda: F.avg_pool3d(v, 2))
    yield "interpolate trilinear", through(lambda: F.interpolate(v, scale_factor=2, mode="trilinear"))


def linear_algebra(dtype: torch.dtype) -> Iterator[Case]:
    if dtype == FP32:
        x, z = leaf(4, 64, 56, 56), leaf(4, 64, 500)
        yield "fft", through(lambda: torch.fft.irfft(torch.fft.rfft(z)))
        yield "fft2", through(lambda: torch.fft.ifft2(torch.fft.fft2(x)).real)
        yield "fft 257", through(lambda: torch.fft.rfft(leaf(64, 257)).abs())
        yield (
            "stft",
            through(
                lambda: torch.stft(
                    leaf(4, 16000), 400, 160, window=torch.hann_window(400), return_complex=True
                ).abs()
            ),
        )
        square = leaf(16, 64, 64)
        yield (
            "linalg inv solve",
            through(
                lambda: (
                    torch.linalg.inv(square),
                    torch.linalg.solve(square, square),
                    torch.linalg.det(square),
                )
            ),
        )
        yield "linalg svd qr", through(lambda: (torch.linalg.svd(square)[1], *torch.linalg.qr(square)))
        yield (
            "linalg cholesky eigh",
            through(
                lambda: (
                    torch.linalg.cholesky(square @ square.mT + 9 * torch.eye(64)),
                    torch.linalg.eigvalsh(square + square.mT),
                )
            ),
        )
        yield (
            "cdist",
            through(
                lambda: (
                    torch.cdist(leaf(4, 300, 64), leaf(4, 200, 64)),
                    torch.cdist(leaf(20, 8), leaf(30, 8), p=1.0),
                )
            ),
        )
        yield "matrix_exp", through(lambda: torch.matrix_exp(leaf(4, 32, 32)))


def pointwise(dtype: torch.dtype) -> Iterator[Case]:
    x, row = leaf(512, 1024, dtype=dtype), leaf(1024, dtype=dtype)
    for function in (
        F.gelu,
        F.relu,
        F.silu,
        F.elu,
        F.leaky_relu,
        F.softplus,
        F.hardswish,
        F.hardsigmoid,
        F.mish,
        F.logsigmoid,
        torch.tanh,
        torch.sigmoid,
        torch.exp,
        torch.sqrt,
        torch.rsqrt,
        torch.sin,
        torch.erf,
        torch.abs,
        torch.log1p,
        torch.square,
        torch.reciprocal,
        F.relu6,
        F.selu,
        F.softsign,
        F.tanhshrink,
        F.hardtanh,
        F.celu,
        F.glu,
        torch.neg,
        torch.floor,
        torch.sgn,
    ):
        yield f"{function.__name__}", through(lambda f=function: f(x))
    yield "gelu tanh", through(lambda: F.gelu(x, approximate="tanh"))
    yield "prelu", through(lambda: F.prelu(x, leaf(1, dtype=dtype)))
    yield "prelu rows", through(lambda: F.prelu(x, row))
    yield "dropout", through(lambda: F.dropout(x, 0.1))
    yield "dropout 2d", through(lambda: F.dropout2d(x.reshape(8, 64, 32, 32), 0.1))
    yield "alpha dropout", through(lambda: F.alpha_dropout(x, 0.1, True))
    yield (
        "bernoulli rand",
        lambda: (
            torch.bernoulli(torch.full((99, 99), 0.5)),
            torch.rand(999),
            torch.randn(999),
            torch.randperm(999),
            torch.randint(5, (9, 9)),
            torch.multinomial(torch.rand(8, 1000), 3),
            torch.empty(99, 99).exponential_(),
            F.gumbel_softmax(x.float()),
        ),
    )


def arithmetic(dtype: torch.dtype) -> Iterator[Case]:
    x, y = leaf(512, 1024, dtype=dtype), leaf(512, 1024, dtype=dtype)
    row, column = leaf(1024, dtype=dtype), leaf(512, 1, dtype=dtype)
    for name, other in (
        ("same", y),
        ("row", row),
        ("column", column),
        ("scalar", 1.5),
        ("zero-dim", leaf(dtype=dtype)),
    ):
        yield f"add {name}", through(lambda o=other: x + o)
        yield f"mul {name}", through(lambda o=other: x * o)
        yield f"div {name}", through(lambda o=other: x / o)
        yield f"pow {name}", through(lambda o=other: x.abs() ** o)
        yield f"maximum {name}", through(lambda o=other: torch.maximum(x, torch.as_tensor(o, dtype=dtype)))
        yield f"sub in place {name}", through(lambda o=other: (x * 1).sub_(o))
    for other_type in {FP32, BF16, FP16, torch.float64, torch.int64, torch.bool} - {dtype}:
        other = torch.ones(512, 1024).to(other_type)
        text = str(other_type)[6:]
        yield f"add {text}", through(lambda o=other: x + o)
        yield f"mul {text}", through(lambda o=other: x * o)
        yield f"mul row {text}", through(lambda o=other: x * o[0])
        yield f"add_ {text}", through(lambda o=other: (x * 1).add_(o))
        yield f"where {text}", through(lambda o=other: torch.where(x > 0, x, o))
        yield f"lerp {text}", through(lambda o=other: torch.lerp(x, y, o) if o.dtype == x.dtype else x + 0)
        yield f"compare {text}", lambda o=other: (x > o, x == o, torch.logical_and(x, o))
        yield f"maximum {text}", through(lambda o=other: torch.maximum(x, o))
        yield f"to {text}", through(lambda o=other: x.to(o.dtype))
        yield (
            f"addcmul {text}",
            through(
                lambda o=other: torch.addcmul(x, y, o) if o.dtype not in (torch.bool, torch.int64) else x + 0
            ),
        )
        yield f"mul broadcast both {text}", through(lambda o=other: column * o[:1])


def several_operands(dtype: torch.dtype) -> Iterator[Case]:
    x, y = leaf(512, 1024, dtype=dtype), leaf(512, 1024, dtype=dtype)
    row, column = leaf(1024, dtype=dtype), leaf(512, 1, dtype=dtype)
    yield "clamp", through(lambda: x.clamp(0, 1))
    yield "clamp tensor", through(lambda: x.clamp(row, column))
    yield "addcmul addcdiv", through(lambda: (torch.addcmul(x, x, y), torch.addcdiv(x, x, y)))
    yield "non-contiguous", through(lambda: x.t() + leaf(1024, 512, dtype=dtype))
    yield "atan2 fmod", through(lambda: (torch.atan2(x, y), torch.fmod(x, 2.0), torch.remainder(x, 2.0)))
    yield (
        "complex polar",
        through(
            lambda: torch.view_as_real(
                torch.view_as_complex(x.float().reshape(512, 512, 2))
                * torch.polar(torch.ones(512), torch.ones(512))
            )
        ),
    )
    yield "logical", lambda: (x > 0) & (y > 0) | (x != y)
    yield "isin", lambda: torch.isin(torch.randint(0, 9, (512, 512)), torch.tensor([1, 2, 3]))
    yield (
        "histc bucketize",
        lambda: (
            torch.bucketize(x.detach().float(), torch.linspace(-1, 1, 9)),
            torch.searchsorted(torch.linspace(-1, 1, 9), x.detach().float()),
        ),
    )


def optimizers(dtype: torch.dtype) -> Iterator[Case]:
    for make in (
        torch.optim.AdamW,
        torch.optim.SGD,
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adadelta,
        torch.optim.Adafactor,
        lambda p: torch.optim.AdamW(p, foreach=True),
        lambda p: torch.optim.AdamW(p, foreach=False),
        lambda p: torch.optim.Adam(p, amsgrad=True, fused=True),
    ):
        weights = [nn.Parameter(leaf(300, 200, dtype=dtype)), nn.Parameter(leaf(500, dtype=dtype))]

        def run(make: Any = make, weights: list[nn.Parameter] = weights) -> None:
            optimizer = make(weights)
            for _ in range(2):
                for weight in weights:
                    weight.grad = torch.randn_like(weight)
                torch.nn.utils.clip_grad_norm_(weights, 1.0)
                optimizer.step()

        yield f"optimizer {getattr(make, '__name__', 'variant')}", run
