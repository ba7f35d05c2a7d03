# SPDX-License-Identifier: Apache-2.0
"""Calls of single operators, as data that both builds of PyTorch can make tensors for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

F32, BF16, F16, I64, BOOL = torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool


@dataclass(frozen=True)
class T:
    """A tensor to be made: shape, dtype, and the permutation or step of a view of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype = F32
    permute: tuple[int, ...] = ()
    expand: tuple[int, ...] = ()

    def make(self, device: str) -> torch.Tensor:
        """The tensor, with zeros in it where values matter."""
        exact = not self.dtype.is_floating_point
        tensor = (torch.zeros if exact else torch.empty)(self.shape, dtype=self.dtype, device=device)
        if self.expand:
            tensor = tensor.expand(self.expand)
        return tensor.permute(self.permute) if self.permute else tensor


@dataclass(frozen=True)
class Call:
    """A call of an operator overload."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


def _c(name: str, *args: Any, **kwargs: Any) -> Call:
    return Call(name, args, kwargs)


def _reductions() -> list[Call]:
    calls = []
    shapes = [
        ((1024, 2304), [0]),
        ((1024, 768), [0]),
        ((4096, 768), [0]),
        ((1024, 768), [1]),
        ((50257, 64), [0]),
        ((64, 1 << 20), [1]),
        ((1 << 22,), [0]),
        ((8, 128, 30522), [0, 1]),
        ((4, 12, 256, 256), [3]),
        ((16, 64, 32, 32), [0, 2, 3]),
        ((7, 33, 5), [1]),
        ((2048, 32000), [0]),
        ((512, 4096), [0]),
    ]
    for shape, dims in shapes:
        for dtype in (F32, BF16):
            calls.append(_c("sum.dim_IntList", T(shape, dtype), dims, True))
    for shape in ((), (100,), (1 << 20,), (1000, 1000), (4, 512, 32000)):
        for name in ("sum.default", "mean.default", "max.default", "any.default", "all.default"):
            if shape != () or name != "x":
                calls.append(_c(name, T(shape, F32)))
    calls += [_c("mean.dim", T((4, 512, 1024), dtype), [-1], True) for dtype in (F32, BF16)]
    calls += [_c("sum.dim_IntList", T((1024, 768), F32, expand=()), [0], False, dtype=F32)]
    calls += [_c("sum.dim_IntList", T((1024, 768), BF16), [0], False, dtype=F32)]
    calls += [
        _c("linalg_vector_norm.default", T(shape, F32)) for shape in ((768,), (1000, 1000), (50257, 768))
    ]
    calls += [_c("_foreach_norm.Scalar", [T((768,)), T((1000, 1000)), T((50257, 768)), T((3, 5))])]
    calls += [_c("argmax.default", T((64, 32000)), -1), _c("amax.default", T((64, 32000)), [-1])]
    calls += [_c("max.dim", T((64, 32000)), -1), _c("logsumexp.default", T((512, 8000)), [-1])]
    calls += [_c("var_mean.correction", T((16, 64, 32, 32)), [0, 2, 3])]
    calls += [_c("all.default", T((8, 128), BOOL)), _c("any.default", T((8, 512, 512), BOOL))]
    calls += [_c("sum.default", T((8, 128), I64)), _c("sum.dim_IntList", T((8, 128), I64), [-1])]
    return calls


def _norms() -> list[Call]:
    calls = []
    for rows, width in (
        (1024, 768),
        (4096, 1024),
        (64, 768),
        (8192, 4096),
        (16, 64),
        (600, 1600),
        (200000, 96),
    ):
        for dtype in (F32, BF16):
            weight = T((width,), dtype)
            x, stat = T((rows, width), dtype), T((rows, 1), F32)
            calls.append(_c("native_layer_norm.default", x, [width], weight, weight, 1e-5))
            full = [True, True, True]
            calls.append(
                _c("native_layer_norm_backward.default", x, x, [width], stat, stat, weight, weight, full)
            )
    calls.append(
        _c(
            "native_layer_norm_backward.default",
            T((1024, 768)),
            T((1024, 768)),
            [768],
            T((1024, 1)),
            T((1024, 1)),
            T((768,)),
            T((768,)),
            [True, False, False],
        )
    )
    for rows, width in ((1024, 768), (4096, 1024), (64, 768)):
        for dtype in (F32, BF16):
            x, stat, weight = T((rows, width), dtype), T((rows, 1), F32), T((width,), dtype)
            calls.append(_c("_fused_rms_norm.default", x, [width], weight, 1e-5))
            calls.append(_c("_fused_rms_norm_backward.default", x, x, [width], stat, weight, [True, True]))
    for shape, groups in (((16, 64, 32, 32), 8), ((4, 320, 64, 64), 32), ((2, 128, 16), 4)):
        n, c, hw = shape[0], shape[1], 1
        for size in shape[2:]:
            hw *= size
        for dtype in (F32, BF16):
            x, stat, weight = T(shape, dtype), T((n, groups), dtype), T((c,), dtype)
            calls.append(_c("native_group_norm.default", x, weight, weight, n, c, hw, groups, 1e-5))
            calls.append(
                _c(
                    "native_group_norm_backward.default",
                    x,
                    x,
                    stat,
                    stat,
                    weight,
                    n,
                    c,
                    hw,
                    groups,
                    [True, True, True],
                )
            )
    for shape in ((16, 32, 64, 64), (64, 128), (8, 256, 7, 7), (4, 16, 8, 8, 8)):
        c = (shape[1],)
        for dtype in (F32, BF16):
            x, p = T(shape, dtype), T(c, F32)
            calls.append(_c("native_batch_norm.default", x, p, p, p, p, True, 0.1, 1e-5))
            calls.append(
                _c("native_batch_norm_backward.default", x, x, p, p, p, p, p, True, 1e-5, [True] * 3)
            )
    return calls


def _losses() -> list[Call]:
    calls = []
    for rows, words in ((1024, 50257), (64, 1000), (2047, 32000)):
        for dtype in (F32, BF16):
            x, t = T((rows, words), dtype), T((rows,), I64)
            calls.append(_c("_log_softmax.default", x, 1, False))
            calls.append(_c("_log_softmax_backward_data.default", x, x, 1, dtype))
            calls.append(_c("nll_loss_forward.default", x, t, None, 1, -100))
            calls.append(_c("nll_loss_backward.default", T((), dtype), x, t, None, 1, -100, T((), dtype)))
            calls.append(_c("_softmax.default", x, 1, False))
            calls.append(_c("_softmax_backward_data.default", x, x, 1, dtype))
            calls.append(_c("argmax.default", x, -1))
    calls.append(_c("_softmax.default", T((4, 12, 256, 256), F16), -1, True))
    calls.append(_c("_softmax_backward_data.default", T((4, 12, 256, 256)), T((4, 12, 256, 256)), -1, F16))
    for name in ("mse_loss.default", "smooth_l1_loss.default", "huber_loss.default"):
        for shape in ((1000, 1000), (16, 10)):
            calls.append(_c(name, T(shape), T(shape)))
    calls.append(_c("mse_loss_backward.default", T(()), T((1000, 1000)), T((1000, 1000)), 1))
    calls.append(_c("binary_cross_entropy_with_logits.default", T((1000, 1000)), T((1000, 1000))))
    calls.append(_c("binary_cross_entropy.default", T((1000, 1000)), T((1000, 1000))))
    return calls


def _indexing() -> list[Call]:
    calls = []
    for tokens, words, width in (
        (1024, 50257, 768),
        (64, 2000, 256),
        (8192, 32000, 1024),
        (3072, 512, 64),
        (3073, 512, 64),
        (2048, 2, 768),
        (100000, 1000, 16),
    ):
        for dtype in (F32, BF16):
            calls.append(
                _c(
                    "embedding_dense_backward.default",
                    T((tokens, width), dtype),
                    T((tokens,), I64),
                    words,
                    -1,
                    False,
                )
            )
    calls.append(_c("embedding_dense_backward.default", T((1024, 768)), T((1024,), I64), 1000, 0, False))
    calls.append(
        _c(
            "embedding_dense_backward.default",
            T((768, 1024), permute=(1, 0)),
            T((1024,), I64),
            1000,
            0,
            False,
        )
    )
    for dtype in (I64, F32, BF16):
        for shape in ((1000,), (4, 512), (8, 30000), (1 << 21,)):
            calls.append(_c("cumsum.default", T(shape, dtype), -1))
            calls.append(_c("sort.default", T(shape, dtype), -1))
        calls.append(_c("topk.default", T((1024, 8), dtype), 2, -1))
        calls.append(_c("topk.default", T((64, 32000), dtype), 50, -1))
    calls += [_c("cumsum.default", T((8, 128), BOOL), -1), _c("argsort.default", T((4096,), I64))]
    for rows in (512, 5000):
        source, where = T((2048, 256)), T((rows,), I64)
        calls.append(_c("index.Tensor", source, [where]))
        calls.append(_c("index_select.default", source, 0, where))
        calls.append(_c("index_add_.default", source, 0, where, T((rows, 256))))
        calls.append(_c("index_add.default", source, 0, where, T((rows, 256))))
        calls.append(_c("index_put.default", source, [where], T((rows, 256)), True))
        calls.append(_c("index_put_.default", source, [where], T((rows, 256)), True))
        calls.append(_c("index_put_.default", source, [where], T((rows, 256)), False))
        calls.append(_c("_index_put_impl_.default", source, [where], T((rows, 256)), True, False))
        calls.append(
            _c("_index_put_impl_.default", T((2048, 256), BF16), [where], T((rows, 256), BF16), True, False)
        )
        calls.append(_c("gather.default", source, 1, T((2048, 4), I64)))
        calls.append(_c("scatter_add.default", source, 1, T((2048, 4), I64), T((2048, 4))))
        calls.append(_c("scatter.value", source, 1, T((2048, 4), I64), 1.0))
    calls += [
        _c("index.Tensor", T((64, 32, 16)), [None, T((5,), I64)]),
        _c("index.Tensor", T((64, 32)), [T((64,), I64), T((64,), I64)]),
    ]
    calls += [_c("index.Tensor", T((1024, 256)), [T((1024,), BOOL)]), _c("nonzero.default", T((1024,), BOOL))]
    calls += [
        _c("nonzero.default", T((64, 1024), BOOL)),
        _c("masked_select.default", T((1024, 64)), T((1024, 64), BOOL)),
    ]
    calls += [_c("unique_consecutive.default", T((1024,), I64)), _c("bincount.default", T((1024,), I64))]
    calls += [_c("histc.default", T((1024,)), 8, 0, 8), _c("repeat_interleave.Tensor", T((1024,), I64))]
    calls += [
        _c("masked_fill.Scalar", T((64, 64)), T((64, 64), BOOL), 0.0),
        _c("searchsorted.Tensor", T((100,)), T((10,))),
    ]
    return calls


def _attention() -> list[Call]:
    calls = []
    for b, h, s, d in (
        (4, 12, 256, 64),
        (2, 16, 512, 64),
        (1, 8, 100, 64),
        (8, 12, 128, 64),
        (1, 4, 2048, 128),
        (2, 8, 197, 80),
        (2, 8, 256, 96),
        (1, 2, 64, 256),
        (4, 16, 512, 40),
    ):
        for layout in ((), (0, 2, 1, 3)):
            shape = (b, h, s, d) if not layout else (b, s, h, d)
            for dtype, drop, causal in (
                (BF16, 0.0, True),
                (BF16, 0.1, False),
                (F32, 0.0, True),
                (F32, 0.1, False),
            ):
                q = T(shape, dtype, layout)
                lse = T((b, h, -(-s // 32) * 32))
                if dtype is BF16:
                    calls.append(_c("_scaled_dot_product_flash_attention.default", q, q, q, drop, causal))
                    calls.append(
                        _c(
                            "_scaled_dot_product_flash_attention_backward.default",
                            q,
                            q,
                            q,
                            q,
                            q,
                            T((b, h, s)),
                            None,
                            None,
                            s,
                            s,
                            drop,
                            causal,
                            T((2,), torch.uint64),
                            T((), torch.uint64),
                        )
                    )
                calls.append(
                    _c("_scaled_dot_product_efficient_attention.default", q, q, q, None, True, drop, causal)
                )
                calls.append(
                    _c(
                        "_scaled_dot_product_efficient_attention_backward.default",
                        q,
                        q,
                        q,
                        q,
                        None,
                        q,
                        lse,
                        T((), I64),
                        T((), I64),
                        drop,
                        [True, True, True, False],
                        causal,
                    )
                )
        q, mask = T((b, h, s, d), BF16), T((b, 1, s, s), BF16, expand=(b, h, s, s))
        calls.append(_c("_scaled_dot_product_efficient_attention.default", q, q, q, mask, True, 0.0, False))
        calls.append(
            _c(
                "_scaled_dot_product_efficient_attention_backward.default",
                q,
                q,
                q,
                q,
                mask,
                q,
                T((b, h, -(-s // 32) * 32)),
                T((), I64),
                T((), I64),
                0.0,
                [True, True, True, False],
                False,
            )
        )
    q, k = T((2, 512, 16, 64), BF16, (0, 2, 1, 3)), T((2, 512, 4, 64), BF16, (0, 2, 1, 3))
    calls.append(_c("_scaled_dot_product_flash_attention.default", q, k, k, 0.0, True))
    calls.append(
        _c(
            "_scaled_dot_product_flash_attention_backward.default",
            q,
            q,
            k,
            k,
            q,
            T((2, 16, 512)),
            None,
            None,
            512,
            512,
            0.0,
            True,
            T((2,), torch.uint64),
            T((), torch.uint64),
        )
    )
    return calls


def _matrices() -> list[Call]:
    calls = []
    for dtype in (F32, BF16):
        wide = T((64, 1), dtype, expand=(64, 512))
        calls += [
            _c("mm.default", T((64, 512), dtype), T((512, 128), dtype)),
            _c("mm.default", wide, T((512, 128), dtype)),
            _c("mm.default", T((128, 64), dtype), wide),
            _c("addmm.default", T((128,), dtype), T((64, 512), dtype), T((512, 128), dtype)),
            _c("addmm.default", T((128,), dtype), wide, T((512, 128), dtype)),
            _c("bmm.default", T((8, 64, 32), dtype), T((8, 32, 64), dtype)),
            _c("bmm.default", T((64, 32, 8), dtype, (2, 0, 1)), T((8, 32, 64), dtype)),
            _c("bmm.default", T((8, 64, 32), dtype), T((64, 32, 8), dtype, (2, 1, 0))),
            _c("bmm.default", T((1, 1, 1), dtype, expand=(8, 64, 32)), T((8, 32, 64), dtype)),
            _c("bmm.default", T((8, 32, 64), dtype, (0, 2, 1)), T((8, 64, 32), dtype, (0, 2, 1))),
            _c("bmm.default", T((8, 64, 32), dtype), T((8, 32, 1), dtype)),
            _c("bmm.default", T((8, 64, 32), dtype), T((1, 32, 64), dtype, expand=(8, 32, 64))),
            _c("baddbmm.default", T((8, 64, 64), dtype), T((8, 64, 32), dtype), T((8, 32, 64), dtype)),
            _c("mv.default", T((64, 512), dtype), T((512,), dtype)),
            _c("mv.default", T((64, 512), dtype), T((1,), dtype, expand=(512,))),
            _c("dot.default", T((512,), dtype), T((512,), dtype)),
        ]
    return calls


def _pointwise() -> list[Call]:
    calls = [
        _c("add.Tensor", T((64, 1000), BF16), T((64, 1000), F32)),
        _c("mul.Tensor", T((64, 1000), F32), T((64, 1000), BF16)),
        _c("add_.Tensor", T((64, 1000), F32), T((64, 1000), BF16)),
        _c("add_.Tensor", T((64, 1000), BF16), T((64, 1000), F32)),
        _c("where.self", T((64, 1000), BOOL), T((64, 1000), F32), T((64, 1000), BF16)),
        _c("where.self", T((64, 1000), BOOL), T((64, 1000), F32), T((), F32)),
        _c("gelu.default", T((64, 1000))),
        _c("gelu_backward.default", T((64, 1000)), T((64, 1000))),
        _c("silu_backward.default", T((64, 1000)), T((64, 1000))),
        _c("native_dropout.default", T((64, 1000)), 0.1, True),
        _c("native_dropout_backward.default", T((64, 1000)), T((64, 1000), BOOL), 1.1),
        _c("cat.default", [T((64, 1000)), T((64, 24))], 1),
        _c("cat.default", [T((64, 1000), BF16), T((64, 24))], 1),
        _c("cat.default", [T((64, 10))] * 200, 0),
        _c("stack.default", [T((64, 10))] * 5, 0),
        _c("tril.default", T((64, 64))),
        _c("copy_.default", T((64, 1000)), T((64, 1000), BF16)),
        _c("copy_.default", T((64, 1000)), T((1000, 64), F32, (1, 0))),
        _c("_to_copy.default", T((64, 1000)), dtype=BF16),
        _c("clone.default", T((64, 1000), F32, (1, 0))),
        _c("masked_fill_.Scalar", T((64, 64)), T((64, 64), BOOL), 0.0),
        _c("flip.default", T((64, 1000)), [1]),
        _c("roll.default", T((64, 1000)), [3], [1]),
        _c("constant_pad_nd.default", T((64, 1000)), [0, 7]),
        _c("bernoulli.p", T((64, 1000)), 0.5),
        _c("randperm.default", 5000, device="cuda"),
        _c("multinomial.default", T((8, 1000)), 3, True),
        _c("lerp_.Scalar", T((1000,)), T((1000,)), 0.1),
    ]
    group = [T((768,)), T((1000, 1000)), T((3, 5))]
    calls += [
        _c("_foreach_sqrt.default", group),
        _c("_foreach_add_.Scalar", group, 1.0),
        _c("_foreach_mul.Scalar", group, 2.0),
        _c("_foreach_addcdiv_.Scalar", group, group, group, 0.1),
        _c("_foreach_norm.Scalar", [T((768,), BF16), T((1000, 1000), BF16)]),
        _c("_foreach_norm.Scalar", [T((70000,))] * 100),
    ]
    return calls


def _spatial() -> list[Call]:
    calls = []
    for dtype in (F32, BF16):
        x = T((16, 32, 64, 64), dtype)
        calls += [
            _c("max_pool2d_with_indices.default", x, [2, 2], [2, 2]),
            _c(
                "max_pool2d_with_indices_backward.default",
                T((16, 32, 32, 32), dtype),
                x,
                [2, 2],
                [2, 2],
                [0, 0],
                [1, 1],
                False,
                T((16, 32, 32, 32), I64),
            ),
            _c("avg_pool2d.default", x, [2, 2], [2, 2]),
            _c(
                "avg_pool2d_backward.default",
                T((16, 32, 32, 32), dtype),
                x,
                [2, 2],
                [2, 2],
                [0, 0],
                False,
                True,
                None,
            ),
            _c("_adaptive_avg_pool2d.default", x, [7, 7]),
            _c("_adaptive_avg_pool2d_backward.default", T((16, 32, 7, 7), dtype), x),
            _c("upsample_nearest2d.default", x, [128, 128]),
            _c(
                "upsample_nearest2d_backward.default",
                T((16, 32, 128, 128), dtype),
                [128, 128],
                [16, 32, 64, 64],
            ),
            _c("upsample_bilinear2d.default", x, [128, 128], False),
            _c(
                "upsample_bilinear2d_backward.default",
                T((16, 32, 128, 128), dtype),
                [128, 128],
                [16, 32, 64, 64],
                False,
            ),
            _c("upsample_bicubic2d.default", x, [128, 128], False),
            _c("grid_sampler_2d.default", x, T((16, 64, 64, 2), dtype), 0, 0, False),
            _c("im2col.default", x, [3, 3], [1, 1], [1, 1], [1, 1]),
            _c("col2im.default", T((16, 288, 4096), dtype), [64, 64], [3, 3], [1, 1], [1, 1], [1, 1]),
        ]
    return calls


CALLS: list[Call] = [
    *_reductions(),
    *_norms(),
    *_losses(),
    *_indexing(),
    *_attention(),
    *_matrices(),
    *_pointwise(),
    *_spatial(),
]
"""Every call that is measured."""
