# SPDX-License-Identifier: Apache-2.0
"""Scratch memory of CPU operators: what kernels allocate and free inside, against the rules in core/scratch.py.

Each case is a piece of forward and backward over some shape and dtype. A dispatch mode stands where the tracer
stands, so an operation here is an operation of the memory graph. For each one,

    scratch = highest live bytes while it runs - live bytes before - bytes of the outputs, as a fake run knows them

is compared with the rule. A rule that is too small breaks budgets; the table lists such operators first
("over" > 0). One that is too large only wastes memory ("slack"). Operators without a rule count as rule 0.
A row is an operator and dtype: its worst case in both directions.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from common import Table, parser, quiet_stderr
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from memscale.core import kernels
from memscale.core import scratch as rules

BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16
Case = tuple[str, Callable[[], object]]


@dataclass
class Call:
    """One dispatched operation.

    Attributes:
        name: the operator, as the graph names it.
        described: dtypes and shapes of its tensors, and the other arguments.
        dtype: of its first tensor.
        rule: what core/scratch.py says, bytes.
        real: bytes of the new storages that it returned.
        fake: the same in the fake run; -1 if that is not possible.
        scratch: measured, bytes.
        left: what stayed allocated beyond its outputs.
    """

    name: str
    described: str
    dtype: str
    rule: int
    real: int
    fake: int
    scratch: int = 0
    left: int = 0

    @property
    def over(self) -> int:
        """By how much the measurement exceeds what the graph would hold."""
        known = self.real if self.fake < 0 else self.fake
        return self.real + self.scratch - known - self.rule


def fresh_bytes(result: Any, known: set[int]) -> int:
    """Bytes of storages in `result` that are not in `known`."""
    seen: dict[int, int] = {}
    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in known:
            seen[leaf.untyped_storage()._cdata] = leaf.untyped_storage().nbytes()
    return sum(seen.values())


def storages(values: Any) -> set[int]:
    """Identities of the storages in `values`."""
    return {leaf.untyped_storage()._cdata for leaf in tree_leaves(values) if isinstance(leaf, Tensor)}


def describe(args: Any, kwargs: Any) -> str:
    """The arguments of a call, short."""
    parts = []
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor):
            layout = "" if leaf.is_contiguous() else "~"
            parts.append(f"{str(leaf.dtype)[6:]}{list(leaf.shape)}{layout}")
        elif leaf is not None:
            parts.append(str(leaf))
    return " ".join(parts)


class Probe(TorchDispatchMode):
    """Notes every operation and marks it in the profile."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operation between two marks."""
        kwargs = kwargs or {}
        info = kernels.facts(func)
        if info.is_view:
            return func(*args, **kwargs)
        known = storages((args, kwargs))
        described = describe(args, kwargs)  # before: the operation may resize
        first = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
        mark = torch._C._profiler._RecordFunctionFast(f"scratch#{len(self.calls)}")
        with mark:
            result = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        rule = rules.scratch_bytes(info.scratch, info.pointwise, args, outputs)
        fake = self._fake_bytes(func, info, args, kwargs)
        dtype = "" if first is None else str(first.dtype)[6:]
        name = func._schema.name.split("::")[-1] + (
            f".{func._schema.overload_name}" if func._schema.overload_name else ""
        )
        self.calls.append(Call(name, described, dtype, rule, fresh_bytes(result, known), fake))
        return result

    @staticmethod
    def _fake_bytes(func: Any, info: kernels.OpFacts, args: Any, kwargs: Any) -> int:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            converted = tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
            try:
                return fresh_bytes(kernels.run(func, info, *converted), storages(converted))
            except Exception:  # data-dependent outputs
                return -1


def observe(run: Callable[[], object]) -> list[Call]:
    """The operations of `run`, with their scratch memory."""
    from torch.profiler import ProfilerActivity, profile

    probe = Probe()
    gc.collect()
    gc.disable()
    try:
        with quiet_stderr():
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled, probe:
                run()
            events = list(profiled.profiler.kineto_results.events())  # type: ignore[union-attr]
    finally:
        gc.enable()
    memory = sorted(
        ((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"), key=lambda event: event[0]
    )
    for event in events:
        if event.name().startswith("scratch#"):
            begin, end = event.start_ns(), event.start_ns() + event.duration_ns()
            live = peak = 0
            for when, size in memory:
                if begin <= when <= end:
                    live += size
                    peak = max(peak, live)
            call = probe.calls[int(event.name()[8:])]
            call.scratch = peak - call.real
            call.left = live - call.real
    return probe.calls


# ---- cases ---------------------------------------------------------------------------------------------


def leaf(*shape: int, dtype: torch.dtype = FP32, grad: bool = True) -> Tensor:
    """A random tensor."""
    return torch.randn(shape).to(dtype).requires_grad_(grad)


def through(make: Callable[[], Any]) -> Callable[[], object]:
    """Forward, then backward of the sum of all outputs that need one."""

    def run() -> None:
        made = make()
        outputs = [item for item in tree_leaves(made) if isinstance(item, Tensor) and item.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.randn_like(item) for item in outputs])

    return run


def module_case(module: nn.Module, *inputs: Tensor, dtype: torch.dtype = FP32) -> Callable[[], object]:
    """Forward and backward of a module in `dtype`."""
    module.to(dtype).train()
    return through(lambda: module(*inputs))


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


def attention(dtype: torch.dtype) -> Iterator[Case]:
    for batch, heads, length, other, width in (
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
    ):

        def qkv(
            b: int = batch, h: int = heads, s: int = length, t: int = other, d: int = width
        ) -> tuple[Tensor, ...]:
            return leaf(b, h, s, d, dtype=dtype), leaf(b, h, t, d, dtype=dtype), leaf(b, h, t, d, dtype=dtype)

        name = f"{batch} {heads} {length} {other} {width}"
        q, k, v = qkv()
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


def reductions(dtype: torch.dtype) -> Iterator[Case]:
    for shape in ((4, 256, 1000), (1024, 30522), (8, 12, 128, 128), (64, 7), (3, 2048, 768)):
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
    x = leaf(100, 4, 50, dtype=dtype)
    yield (
        "ctc",
        through(
            lambda: F.ctc_loss(
                x.log_softmax(-1).float(),
                torch.randint(1, 50, (4, 20)),
                torch.full((4,), 100),
                torch.full((4,), 20),
            )
        ),
    )
    whole = torch.randint(0, 100, (64, 1000))
    yield (
        "integers",
        lambda: (
            whole.sum(),
            whole.cumsum(-1),
            whole.sort(-1),
            whole.float().mean(),
            whole.ne(0).cumsum(1),
            whole.max(-1),
            whole.bincount if False else torch.bincount(whole.flatten()),
            whole.unique(),
            F.one_hot(whole, 100),
            (whole == 3).int().cumsum(1),
            torch.nonzero(whole),
            whole[whole > 3],
            whole.sum(-1, dtype=torch.int32),
        ),
    )


def indexing(dtype: torch.dtype) -> Iterator[Case]:
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
            f"embedding grad^T {rows} {width}",
            (
                lambda t=table, i=ids: (
                    F.embedding(i, t).backward(
                        torch.randn(i.shape[0], width, *i.shape[1:]).to(dtype).movedim(1, -1)
                    )
                    if False
                    else F.embedding(i, t)
                    .transpose(0, -1)
                    .backward(torch.randn_like(F.embedding(i, t).transpose(0, -1).contiguous()))
                )
            ),
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
            torch.arange(5000).tril_indices if False else torch.tril_indices(300, 300),
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
    if dtype == FP32:
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


def pointwise(dtype: torch.dtype) -> Iterator[Case]:
    x, y = leaf(512, 1024, dtype=dtype), leaf(512, 1024, dtype=dtype)
    row, column = leaf(1024, dtype=dtype), leaf(512, 1, dtype=dtype)
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
        torch.special.xlogy if False else torch.sgn,
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
        yield (
            f"add_ {text}",
            through(lambda o=other: (x * 1).add_(o) if o.dtype != torch.float64 or True else x),
        )
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


GROUPS: dict[str, Callable[[torch.dtype], Iterator[Case]]] = {
    "products": products,
    "convolutions": convolutions,
    "norms": norms,
    "attention": attention,
    "reductions": reductions,
    "indexing": indexing,
    "spatial": spatial,
    "recurrent": recurrent,
    "pointwise": pointwise,
    "optimizers": optimizers,
}


def main() -> None:
    """Runs the chosen groups and prints the worst case per operator and dtype."""
    options = parser(__doc__)
    options.add_argument("groups", nargs="*", choices=[*GROUPS, []], help="groups of cases (all)")
    options.add_argument(
        "--threads", type=int, help="threads of PyTorch; some kernels keep a buffer per thread"
    )
    options.add_argument("--dtypes", default="float32,bfloat16", help="comma-separated")
    options.add_argument(
        "--all", action="store_true", help="list each operation that exceeds its rule, not the worst only"
    )
    options.add_argument("--min", type=int, default=64, help="smallest excess that is reported, bytes")
    arguments = options.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    worst: dict[tuple[str, str], Call] = {}
    slack: dict[tuple[str, str], tuple[int, int]] = {}
    failed = 0
    for dtype in (getattr(torch, name) for name in arguments.dtypes.split(",")):
        for group in arguments.groups or GROUPS:
            for name, run in GROUPS[group](dtype):
                try:
                    with _disable_current_modes():
                        calls = observe(run)
                except Exception as error:
                    print(
                        f"# {name} {dtype}: {type(error).__name__}: {str(error).splitlines()[0]}",
                        file=sys.stderr,
                    )
                    failed += 1
                    continue
                for call in calls:
                    key = (call.name, call.dtype)
                    if key not in worst or call.over > worst[key].over:
                        worst[key] = call
                    if call.over < slack.get(key, (0, 0))[0]:
                        slack[key] = (call.over, call.rule)
                    if arguments.all and call.over > arguments.min:
                        print(
                            f"{call.name}\tover {call.over}\tscratch {call.scratch}\trule {call.rule}\tout {call.real}\tfake {call.fake}"
                            f"\tleft {call.left}\t{call.described}",
                            flush=True,
                        )
    columns = (
        "operator",
        "dtype",
        "threads",
        "over_bytes",
        "scratch_bytes",
        "rule_bytes",
        "output_bytes",
        "slack_bytes",
        "arguments",
    )
    table = Table("scratch", columns, arguments.dry)
    for key, call in sorted(worst.items(), key=lambda item: (-max(item[1].over, 0), item[0])):
        if call.over > arguments.min or call.rule:
            table.add(
                *key,
                torch.get_num_threads(),
                call.over,
                call.scratch,
                call.rule,
                call.real,
                -slack.get(key, (0, 0))[0],
                call.described,
            )
    beyond = sum(call.over > arguments.min for call in worst.values())
    print(f"{len(worst)} operators and dtypes, {beyond} beyond their rule, {failed} cases could not run")


if __name__ == "__main__":
    main()
