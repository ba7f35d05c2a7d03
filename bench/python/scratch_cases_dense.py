# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: B008 - a case's function runs before its generator goes on, so what it captures still holds
"""Cases of `scratch.py`: products, convolutions, normalisation, attention, recurrent layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from scratch_case import FP32, Case, leaf, module_case, through
from torch import nn


def products(dtype: torch.dtype) -> Iterator[Case]:
    for m, k, n in (
        (1, 64, 64),
        (8, 256, 1000),
        (64, 64, 64),
        (256, 256, 256),
        (1024, 256, 1024),
        (1024, 1024, 256),
        (2048, 768, 3072),
        (2048, 3072, 768),
        (4096, 128, 128),
        (128, 128, 4096),
        (128, 4096, 128),
        (33, 65, 129),
        (1000, 7, 1000),
        (512, 512, 30522),
    ):
        a, b = leaf(m, k, dtype=dtype), leaf(k, n, dtype=dtype)
        yield f"mm {m} {k} {n}", through(lambda a=a, b=b: a @ b)
        w, c = leaf(n, k, dtype=dtype), leaf(n, dtype=dtype)
        yield f"linear {m} {k} {n}", through(lambda a=a, w=w, c=c: F.linear(a, w, c))
    for b_, m, k, n in (
        (4, 64, 64, 64),
        (16, 256, 64, 256),
        (48, 128, 64, 128),
        (2, 1024, 32, 1024),
        (64, 17, 33, 19),
        (1, 512, 512, 512),
    ):
        a, b = leaf(b_, m, k, dtype=dtype), leaf(b_, k, n, dtype=dtype)
        yield f"bmm {b_} {m} {k} {n}", through(lambda a=a, b=b: torch.bmm(a, b))
        t = leaf(b_, n, k, dtype=dtype)
        yield f"bmm^T {b_} {m} {k} {n}", through(lambda a=a, t=t: torch.bmm(a, t.transpose(1, 2)))
        c = leaf(b_, m, n, dtype=dtype)
        yield f"baddbmm {b_} {m} {k} {n}", through(lambda a=a, b=b, c=c: torch.baddbmm(c, a, b, alpha=0.5))
    a, b = leaf(8, 128, 4, 32, dtype=dtype), leaf(8, 96, 4, 32, dtype=dtype)
    yield "einsum bqhd,bkhd->bhqk", through(lambda: torch.einsum("bqhd,bkhd->bhqk", a, b))
    c, d = leaf(16, 64, 128, dtype=dtype), leaf(4, 128, 96, dtype=dtype)
    yield "einsum bsd,edf->ebsf", through(lambda: torch.einsum("bsd,edf->ebsf", c, d))
    v, w2 = leaf(2048, 512, dtype=dtype), leaf(512, dtype=dtype)
    yield "mv", through(lambda: v @ w2)
    yield "outer", through(lambda: torch.outer(w2, w2))
    yield "dot", through(lambda: torch.dot(w2, w2))
    x, y, z = leaf(2048, 512, dtype=dtype), leaf(512, 512, dtype=dtype), leaf(2048, 512, dtype=dtype)
    yield "addmm 2-d bias", through(lambda: torch.addmm(z, x, y))


def convolutions(dtype: torch.dtype) -> Iterator[Case]:
    specs: list[tuple[str, nn.Module, tuple[int, ...]]] = [
        ("1d k3", nn.Conv1d(64, 128, 3, padding=1), (4, 64, 512)),
        ("1d k10 s5 1ch", nn.Conv1d(1, 128, 10, 5, bias=False), (2, 1, 16000)),
        ("1d k3 s2 128", nn.Conv1d(128, 128, 3, 2, bias=False), (2, 128, 3199)),
        ("1d grouped pos", nn.Conv1d(256, 256, 128, padding=64, groups=16), (2, 256, 99)),
        ("1d depthwise causal", nn.Conv1d(512, 512, 4, padding=3, groups=512), (2, 512, 256)),
        ("2d k3 3ch", nn.Conv2d(3, 64, 3, padding=1), (8, 3, 64, 64)),
        ("2d k7 s2 3ch", nn.Conv2d(3, 64, 7, 2, 3, bias=False), (4, 3, 224, 224)),
        ("2d k3 64", nn.Conv2d(64, 64, 3, padding=1, bias=False), (8, 64, 56, 56)),
        ("2d k3 s2", nn.Conv2d(64, 128, 3, 2, 1, bias=False), (8, 64, 56, 56)),
        ("2d k1", nn.Conv2d(64, 256, 1, bias=False), (8, 64, 28, 28)),
        ("2d k1 s2", nn.Conv2d(256, 512, 1, 2, bias=False), (4, 256, 28, 28)),
        ("2d k3 512 7x7", nn.Conv2d(512, 512, 3, padding=1, bias=False), (2, 512, 7, 7)),
        ("2d 20ch odd", nn.Conv2d(20, 37, 3, padding=1), (4, 20, 31, 33)),
        ("2d 1->8", nn.Conv2d(1, 8, 5), (64, 1, 28, 28)),
        ("2d grouped 32x4d", nn.Conv2d(128, 128, 3, padding=1, groups=32, bias=False), (4, 128, 56, 56)),
        ("2d depthwise", nn.Conv2d(96, 96, 7, padding=3, groups=96), (4, 96, 56, 56)),
        ("2d depthwise s2", nn.Conv2d(96, 96, 3, 2, 1, groups=96, bias=False), (4, 96, 56, 56)),
        ("2d dilated", nn.Conv2d(64, 64, 3, padding=2, dilation=2), (4, 64, 56, 56)),
        ("2d patch 16", nn.Conv2d(3, 192, 16, 16), (4, 3, 224, 224)),
        ("2d patch 4", nn.Conv2d(3, 96, 4, 4), (4, 3, 224, 224)),
        ("2d batch 1", nn.Conv2d(64, 64, 3, padding=1), (1, 64, 128, 128)),
        ("3d k3", nn.Conv3d(3, 32, 3, padding=1), (2, 3, 16, 56, 56)),
        ("3d k3 32", nn.Conv3d(32, 32, 3, padding=1), (1, 32, 8, 28, 28)),
        ("3d patch", nn.Conv3d(3, 192, (2, 16, 16), (2, 16, 16)), (2, 3, 16, 112, 112)),
        ("t1d", nn.ConvTranspose1d(64, 32, 4, 2, 1), (4, 64, 256)),
        ("t2d k2 s2", nn.ConvTranspose2d(128, 64, 2, 2), (4, 128, 28, 28)),
        ("t2d k4 s2", nn.ConvTranspose2d(64, 32, 4, 2, 1), (4, 64, 32, 32)),
        ("t2d k3 s2 grouped", nn.ConvTranspose2d(64, 64, 3, 2, 1, 1, groups=8), (2, 64, 28, 28)),
        ("t3d", nn.ConvTranspose3d(32, 16, 2, 2), (1, 32, 8, 14, 14)),
    ]
    for name, module, shape in specs:
        yield f"conv {name}", module_case(module, leaf(*shape, dtype=dtype), dtype=dtype)
        x = leaf(*shape, dtype=dtype, grad=False)
        yield f"conv {name} no input grad", module_case(module, x, dtype=dtype)
        if len(shape) == 4:
            y = leaf(*shape, dtype=dtype, grad=False).to(memory_format=torch.channels_last).requires_grad_()
            yield f"conv {name} channels-last", module_case(module, y, dtype=dtype)


def norms(dtype: torch.dtype) -> Iterator[Case]:
    for shape in ((8, 64, 56, 56), (4, 3, 224, 224), (64, 512, 7, 7), (256, 128), (4, 96, 500)):
        kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
        for mixed in (False, True) if dtype != FP32 else (False,):
            module = kind(shape[1])
            yield (
                f"batch norm {shape} mixed={mixed}",
                module_case(module, leaf(*shape, dtype=dtype), dtype=FP32 if mixed else dtype),
            )
        frozen = kind(shape[1])
        yield (
            f"batch norm eval {shape}",
            (lambda m=frozen.to(dtype).eval(), x=leaf(*shape, dtype=dtype): through(lambda: m(x))()),
        )
        if len(shape) == 4:
            x = leaf(*shape, dtype=dtype, grad=False).to(memory_format=torch.channels_last).requires_grad_()
            yield f"batch norm {shape} channels-last", module_case(kind(shape[1]), x, dtype=dtype)
    for shape in ((4, 256, 256), (2, 1024, 768), (8, 128, 4096), (3, 7, 33), (4096, 16)):
        yield (
            f"layer norm {shape}",
            module_case(nn.LayerNorm(shape[-1]), leaf(*shape, dtype=dtype), dtype=dtype),
        )
        yield f"rms norm {shape}", module_case(nn.RMSNorm(shape[-1]), leaf(*shape, dtype=dtype), dtype=dtype)
        if dtype != FP32:
            yield f"layer norm mixed {shape}", module_case(nn.LayerNorm(shape[-1]), leaf(*shape, dtype=dtype))
    for shape, groups in (((4, 64, 32, 32), 8), ((2, 512, 399), 512), ((2, 320, 16, 16), 32)):
        yield (
            f"group norm {shape}",
            module_case(nn.GroupNorm(groups, shape[1]), leaf(*shape, dtype=dtype), dtype=dtype),
        )
        if len(shape) == 4:
            x = leaf(*shape, dtype=dtype, grad=False).to(memory_format=torch.channels_last).requires_grad_()
            yield (
                f"group norm {shape} channels-last",
                module_case(nn.GroupNorm(groups, shape[1]), x, dtype=dtype),
            )
    yield (
        "instance norm",
        module_case(nn.InstanceNorm2d(32, affine=True), leaf(4, 32, 64, 64, dtype=dtype), dtype=dtype),
    )
    yield (
        "weight norm",
        module_case(
            nn.utils.parametrizations.weight_norm(nn.Conv1d(64, 64, 16, padding=8, groups=4), dim=2),
            leaf(2, 64, 99, dtype=dtype),
            dtype=dtype,
        ),
    )
    yield (
        "spectral norm",
        module_case(
            nn.utils.parametrizations.spectral_norm(nn.Linear(256, 256)),
            leaf(32, 256, dtype=dtype),
            dtype=dtype,
        ),
    )


ATTENTION_SHAPES = (
    (4, 4, 256, 256, 64),
    (2, 12, 512, 512, 64),
    (1, 4, 1024, 1024, 64),
    (2, 4, 191, 191, 64),
    (2, 4, 192, 192, 32),
    (2, 4, 767, 767, 64),
    (2, 4, 768, 768, 128),
    (4, 4, 197, 197, 64),
    (8, 4, 20, 20, 64),
    (2, 4, 128, 1024, 64),
    (2, 4, 1024, 128, 64),
    (1, 2, 2048, 2048, 64),
    (4, 4, 64, 64, 80),
    (2, 4, 300, 300, 40),
    (2, 2, 100, 513, 96),
    (1, 1, 1, 512, 64),
)


def attention(dtype: torch.dtype) -> Iterator[Case]:
    for batch, heads, length, other, width in ATTENTION_SHAPES:
        name = f"{batch} {heads} {length} {other} {width}"
        q = leaf(batch, heads, length, width, dtype=dtype)
        k, v = (leaf(batch, heads, other, width, dtype=dtype) for _ in range(2))
        yield f"sdpa {name}", through(lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v))
        if length == other:
            yield (
                f"sdpa causal {name}",
                through(lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
            )
        if length > 1:
            yield (
                f"sdpa dropout {name}",
                through(lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)),
            )
        mask = torch.zeros(batch, 1, length, other, dtype=dtype)
        yield (
            f"sdpa mask {name}",
            through(lambda q=q, k=k, v=v, m=mask: F.scaled_dot_product_attention(q, k, v, attn_mask=m)),
        )
        bools = torch.ones(batch, 1, length, other, dtype=torch.bool)
        yield (
            f"sdpa bool mask {name}",
            through(lambda q=q, k=k, v=v, m=bools: F.scaled_dot_product_attention(q, k, v, attn_mask=m)),
        )
        if dtype != FP32:
            wide = torch.zeros(batch, 1, length, other)
            yield (
                f"sdpa FP32 mask {name}",
                through(lambda q=q, k=k, v=v, m=wide: F.scaled_dot_product_attention(q, k, v, attn_mask=m)),
            )


def attention_modules(dtype: torch.dtype) -> Iterator[Case]:
    q, k, v = (
        leaf(2, 8, 256, 64, dtype=dtype),
        leaf(2, 2, 256, 64, dtype=dtype),
        leaf(2, 2, 256, 64, dtype=dtype),
    )
    yield (
        "sdpa grouped",
        through(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)),
    )
    swapped = [leaf(2, 256, 4, 64, dtype=dtype) for _ in range(3)]
    yield (
        "sdpa transposed",
        through(lambda: F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in swapped))),
    )
    yield (
        "multi-head module",
        module_case(
            nn.MultiheadAttention(128, 4, batch_first=True, dropout=0.1),
            *[leaf(2, 100, 128, dtype=dtype)] * 3,
            dtype=dtype,
        ),
    )
    yield (
        "encoder layer",
        module_case(
            nn.TransformerEncoderLayer(128, 4, 256, batch_first=True),
            leaf(2, 100, 128, dtype=dtype),
            dtype=dtype,
        ),
    )


def recurrent(dtype: torch.dtype) -> Iterator[Case]:
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        for width, hidden, layers, both, batch, steps in (
            (128, 256, 2, False, 4, 64),
            (64, 64, 1, False, 16, 50),
            (256, 512, 1, True, 8, 32),
            (32, 128, 2, True, 2, 100),
            (300, 100, 1, False, 32, 30),
            (512, 512, 1, False, 1, 64),
        ):
            module = kind(
                width,
                hidden,
                layers,
                batch_first=True,
                bidirectional=both,
                dropout=0.1 if layers > 1 else 0.0,
            )
            yield (
                f"{kind.__name__} {width} {hidden} {layers} {both} {batch} {steps}",
                module_case(module, leaf(batch, steps, width, dtype=dtype), dtype=dtype),
            )
    for cell in (nn.LSTMCell, nn.GRUCell, nn.RNNCell):
        yield cell.__name__, module_case(cell(128, 256), leaf(64, 128, dtype=dtype), dtype=dtype)
