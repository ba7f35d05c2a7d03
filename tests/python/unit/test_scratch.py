# SPDX-License-Identifier: Apache-2.0
"""What CPU kernels allocate: measured at plan time, bound otherwise; the error band over a prediction."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import memscale
from calls import beside
from memscale.ops import op_facts, scratch, scratch_convolution, scratch_probe, scratch_run
from memscale.ops.scratch_probe import measured_scratch
from memscale.plans.error_band import error_band
from memscale.torchkit.described_calls import Shape, describe
from memscale.trace.fake_optimizer import each_pair
from processors import why_no_bf16_lstm
from zoo.training import peak_bytes

aten = torch.ops.aten
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _nothing_known() -> None:
    scratch_run.forget()


LIMITS = scratch_convolution.Limits(slow=scratch_convolution.Limits().part)
"""No less is measured on processors that are slow in BF16."""

FORWARD = functools.partial(scratch_convolution.forward, limits=LIMITS)


def convolution(batch: int, channels: int = 64, side: int = 28, dtype: torch.dtype = torch.float32) -> Any:
    """Arguments of a 3 x 3 convolution, on the meta device."""
    source = torch.empty(batch, channels, side, side, dtype=dtype, device="meta")
    weight = torch.empty(2 * channels, channels, 3, 3, dtype=dtype, device="meta")
    return (source, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def outputs_of(func: Any, args: Any) -> int:
    """Bytes that a call returns."""
    made = func(*args)
    return int(made.numel() * made.element_size())


def seen_by_profiler(func: Any, args: Any) -> int:
    """The peak of a real call, by PyTorch's profiler."""
    real = [torch.zeros(arg.shape, dtype=arg.dtype) if isinstance(arg, torch.Tensor) else arg for arg in args]
    return peak_bytes(lambda: func(*real))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_measured_is_what_the_profiler_sees(dtype: torch.dtype) -> None:
    args = convolution(2, dtype=dtype)
    func = aten.convolution.default
    outputs = outputs_of(func, args)
    found = measured_scratch(FORWARD, func, args, {}, outputs)
    assert found == seen_by_profiler(func, args) - outputs


def test_product_is_what_the_profiler_sees() -> None:
    args = (
        torch.empty(256, 300, dtype=BF16, device="meta"),
        torch.empty(300, 200, dtype=BF16, device="meta"),
    )
    func = aten.mm.default
    outputs = outputs_of(func, args)
    found = measured_scratch(scratch_probe.MEASURES["aten::mm"], func, args, {}, outputs)
    assert found == seen_by_profiler(func, args) - outputs


def test_batch_beyond_the_limit_follows_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    func, args = aten.convolution.default, convolution(32)
    outputs = outputs_of(func, args)
    whole = measured_scratch(FORWARD, func, args, {}, outputs)
    flops = 2 * 64 * 9 * outputs // 4
    limits = LIMITS._replace(part=flops // 4, whole=flops // 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # as many images are enough for one each
    scratch_run.forget()
    parts = functools.partial(scratch_convolution.forward, limits=limits)
    assert measured_scratch(parts, func, args, {}, outputs) == whole
    sizes = {given[0].size[0] for _, given, _ in scratch_run.remembered()}
    assert sizes == {8, 4}


LARGE_IMAGES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "2-d": ((1, 32, 64, 48), (64, 32, 3, 3), {}),
    "two of them": ((2, 32, 64, 48), (64, 32, 3, 3), {}),
    "dilated": ((1, 64, 64, 32), (32, 64, 3, 3), {"dilation": 4}),
    "3-d": ((1, 16, 32, 16, 16), (32, 16, 3, 3, 3), {}),
    "strided": ((1, 32, 96, 48), (64, 32, 5, 5), {"stride": 2}),
    "lines": ((4, 128, 1024), (128, 128, 7), {"dilation": 4}),
    "transposed": ((4, 64, 32, 32), (64, 64, 4, 4), {"stride": 2, "transposed": True}),
    "large weight": ((4, 512, 16, 16), (512, 512, 3, 3), {}),
    "unfolded": ((2, 32, 64, 48), (64, 32, 3, 3), {"dtype": torch.float64}),
}


def large_image(name: str, backward: bool) -> tuple[Any, tuple[Any, ...], int, int]:
    """Operator, arguments, bytes of its outputs, and what one image takes to compute."""
    size, kernel, options = LARGE_IMAGES[name]
    sides, transposed, dtype = len(size) - 2, options.get("transposed", False), options.get("dtype")
    source, weight = (torch.empty(shape, dtype=dtype, device="meta") for shape in (size, kernel))
    dilation, padding = options.get("dilation", 1), 1 if transposed else kernel[2] // 2
    rest = [[options.get("stride", 1)] * sides, [padding * dilation] * sides, [dilation] * sides]
    rest += [transposed, [0] * sides, 1]
    args: tuple[Any, ...] = (source, weight, None, *rest)
    made = aten.convolution.default(*args)
    flops = 2 * (source if transposed else made).numel() // size[0] * weight[0].numel()
    if not backward:
        return aten.convolution.default, args, made.nbytes, flops
    args = (made, source, weight, None, *rest, [True, True, False])
    return aten.convolution_backward.default, args, source.nbytes + weight.nbytes, 2 * flops


@pytest.mark.parametrize("name", [*LARGE_IMAGES])
@pytest.mark.parametrize("backward", [False, True])
def test_parts_of_an_image_that_is_too_large(name: str, backward: bool) -> None:
    func, args, outputs, flops = large_image(name, backward)
    measure = scratch_convolution.backward if backward else scratch_convolution.forward
    whole = measured_scratch(functools.partial(measure, limits=LIMITS), func, args, {}, outputs)
    scratch_run.forget()
    limits = scratch_convolution.Limits(*[flops // 2] * 4)
    found = measured_scratch(functools.partial(measure, limits=limits), func, args, {}, outputs)
    if found is None and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("oneDNN's kernel for this processor changes with the size of the part")
    assert whole is not None and found is not None
    assert whole + outputs <= 1.005 * (found + outputs)
    assert found + outputs <= 1.1 * (whole + outputs)


def test_a_few_large_images_are_measured_by_channels() -> None:
    """Their gradient lies otherwise than they do, so the kernel copies all that it has."""
    source = torch.zeros(2, 64, 224, 224)
    made, places = aten.max_pool2d_with_indices.default(source, [2, 2], [2, 2])
    gradient = torch.zeros_like(made, memory_format=torch.channels_last)
    args = (gradient, source, [2, 2], [2, 2], [0, 0], [1, 1], False, places)
    func, outputs = aten.max_pool2d_with_indices_backward.default, source.nbytes
    seen = peak_bytes(lambda: func(*args))
    assert seen > outputs  # there is scratch
    measure = scratch_probe.measure_of(func)
    assert measure is not None
    assert measured_scratch(measure, func, args, {}, outputs) == seen - outputs


def test_an_image_that_is_far_too_large_is_not_measured() -> None:
    measure = functools.partial(scratch_convolution.forward, limits=scratch_convolution.Limits(*[1000] * 3))
    assert measured_scratch(measure, aten.convolution.default, convolution(2), {}, 1 << 20) is None
    assert not scratch_run.remembered()


def test_large_product_runs_smaller() -> None:
    most = 2 * 64 * 64 * 128
    measure = functools.partial(scratch_probe.product, flops=most, slow=most)
    bias = torch.empty(512, dtype=BF16, device="meta")
    args = (
        bias,
        *(torch.empty(256, 128, dtype=BF16, device="meta"), torch.empty(128, 512, dtype=BF16, device="meta")),
    )
    found = measured_scratch(measure, aten.addmm.default, args, {}, 256 * 512 * 2)
    ((_, given, _),) = scratch_run.remembered()
    shapes = [value.size for value in given if isinstance(value, Shape)]
    assert shapes == [(64,), (64, 128), (128, 64)]
    assert found is not None and found >= scratch_probe.SHRUNK_MARGIN_BYTES


def test_fp32_products_are_not_run() -> None:
    args = (torch.empty(64, 64, device="meta"), torch.empty(64, 64, device="meta"))
    assert measured_scratch(scratch_probe.MEASURES["aten::mm"], aten.mm.default, args, {}, 64 * 64 * 4) == 0
    assert not scratch_run.remembered()


def test_same_signature_runs_once() -> None:
    runs: list[Any] = []
    args = convolution(2)
    transposed = (args[0].transpose(2, 3), *args[1:])
    with beside({scratch_run.run_aside: lambda *call: runs.append(call)}):
        for _ in range(2):
            measured_scratch(FORWARD, aten.convolution.default, args, {}, 1 << 20)
        assert len(runs) == 1
        measured_scratch(FORWARD, aten.convolution.default, transposed, {}, 1 << 20)
    assert len(runs) == 2


def test_refused_call_is_not_measured() -> None:
    args = (torch.empty(3, 4, dtype=BF16, device="meta"), torch.empty(5, 6, dtype=BF16, device="meta"))
    assert measured_scratch(scratch_probe.light, aten.mm.default, args, {}, 0) is None


def test_measuring_leaves_the_caller_alone() -> None:
    torch.manual_seed(3)
    state, threads = torch.get_rng_state(), threading.active_count()
    with (
        torch.autocast("cpu", BF16),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled,
    ):
        args = convolution(2)
        measured_scratch(
            scratch_probe.MEASURES["aten::convolution"], aten.convolution.default, args, {}, 1 << 20
        )
        assert torch.is_autocast_enabled("cpu")
    assert len(scratch_run.remembered()) == 1
    assert torch.equal(torch.get_rng_state(), state)
    assert threading.active_count() == threads
    assert all("conv" not in event.name for event in profiled.events())  # type: ignore[union-attr]


def test_description_is_a_key() -> None:
    source = torch.empty(2, 3, 4, device="meta")
    call = describe(aten.add.Tensor, [source, [source, 2]], {"alpha": 2}, 7)
    assert hash(call) == hash(describe(aten.add.Tensor, (source, (source, 2)), {"alpha": 2}, 7))
    assert call.args[0] == Shape((2, 3, 4), (12, 4, 1), torch.float32)


def test_shape_of_a_broadcast_takes_one_row() -> None:
    assert Shape((1000, 8), (0, 1), torch.float32).bytes == 32
    assert Shape((0, 8), (8, 1), torch.float32).bytes == 0
    assert Shape((2, 8), (20, 1), BF16).zeros().untyped_storage().nbytes() == 56


@pytest.mark.parametrize(
    ("name", "dtypes", "result", "expected"),
    [
        ("add.Tensor", (torch.float32, torch.float32), torch.float32, 0),
        ("add.Tensor", (torch.float32, BF16), torch.float32, 100 * 4),
        ("add_.Tensor", (BF16, torch.float16), BF16, 3 * 100 * 4),
        ("mul.Tensor", (BF16, torch.int64), BF16, 100 * 2),
        ("gt.Tensor", (BF16, torch.float16), torch.bool, 2 * 100 * 4),
        ("where.self", (torch.bool, torch.float32), torch.float32, 0),
        ("mul.Tensor", (torch.bool, torch.float32), torch.float32, 100 * 4),
    ],
)
def test_pointwise_casts(name: str, dtypes: Any, result: torch.dtype, expected: int) -> None:
    args = [torch.empty(100, dtype=dtype, device="meta") for dtype in dtypes]
    outputs = [torch.empty(100, dtype=result, device="meta")]
    assert scratch.scratch_bytes(name, None, True, args, outputs) == expected


def test_strided_operand_is_copied() -> None:
    source = torch.empty(4, 8, 16, device="meta").transpose(1, 2)
    rule = scratch.RULES["aten::native_layer_norm"]
    assert rule([source], [source]) == 4 * 8 * 16 * 4
    assert rule([source.contiguous()], [source]) == 0


UNLISTED: dict[str, tuple[Any, Callable[[], tuple[Any, ...]]]] = {
    "repeated triangles": (aten.tril.default, lambda: (torch.zeros(1, 32, 32).expand(512, 32, 32),)),
    "inverse FFT in two dimensions": (
        aten._fft_c2r.default,
        lambda: (torch.zeros(4, 16, 64, 33, dtype=torch.complex64), [2, 3], 2, 64),
    ),
    "Cholesky": (aten.cholesky_solve.default, lambda: (torch.zeros(300, 1), torch.eye(300))),
    "a grid": (aten.affine_grid_generator.default, lambda: (torch.zeros(8, 2, 3), [8, 3, 64, 64], False)),
    "conjugated matrices": (aten.bmm.default, lambda: (complex_matrices().mT, complex_matrices().mH)),
    "repeated row": (aten.mm.default, lambda: (torch.zeros(1, 1).expand(1, 512), torch.zeros(512, 128))),
    "GELU of a transposed gradient": (
        aten.gelu_backward.default,
        lambda: (torch.zeros(8, 100, 64).mT, torch.zeros(8, 64, 100)),
    ),
    "many repeated triangles": (aten.tril.default, lambda: (torch.zeros(1, 64, 64).expand(2048, 64, 64),)),
}


def complex_matrices() -> torch.Tensor:
    return torch.zeros(16, 16, 16, dtype=torch.complex64).permute(1, 2, 0)


@pytest.mark.parametrize("name", UNLISTED)
def test_what_no_rule_is_about_is_measured(name: str) -> None:
    func, made = UNLISTED[name]
    args = made()
    outputs = [func(*args)]
    size = outputs[0].untyped_storage().nbytes()
    found = op_facts.scratch(func, op_facts.facts(func), (args, {}), outputs, size)
    truth = peak_bytes(lambda: func(*args)) - size
    assert truth > 0 and truth <= found <= 1.01 * truth


def test_what_zeros_would_not_tell_is_not_measured() -> None:
    assert scratch_probe.measure_of(aten.nonzero.default) is None
    assert scratch_probe.measure_of(aten.bernoulli.default) is None
    assert scratch_probe.measure_of(aten.mul.Tensor) is None


def test_every_pair_of_neighbours_is_chosen() -> None:
    keys = ["a", "b", "c", "a", "b", "c", "a", "c"]
    chosen = sorted(each_pair(keys))
    pairs = {(keys[i - 1], keys[i]) for i in range(1, len(keys))}
    kept = {(keys[i - 1], keys[i]) for i in chosen if i - 1 in chosen}
    assert kept == pairs
    assert len(each_pair(["w", "b"] * 50)) < 6


def test_backward_is_traced_outside_autocast() -> None:
    """A plan that is made inside the caller's autocast block: the casts it caches end with the block."""
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]).train()
    batch = torch.randn(8, 256)
    settings = memscale.Config(memory_budget=1 << 40, enable_logging=False)
    with memscale.optimize(model, config=settings) as executor, torch.autocast("cpu", BF16):
        model(batch)
        planned = executor.planned
    assert planned is not None
    names = [op[0] for op in planned.trace.graph.ops()]
    backward = names[names.index("ones_like") :]
    casts = backward.count("_to_copy")
    assert casts <= 2 * 4 + 2  # each gradient once, to FP32; autocast would cast every operand again


def band(peak: int, output: int, context: int = 0, gradients: bool = True) -> tuple[int, int]:
    """The band of a prediction: a loop may drop the output, or without gradients hold the one before, too."""
    return error_band(peak, context, *((output, 0) if gradients else (0, output)))


def test_band_holds_the_peak_and_the_dropped_output() -> None:
    low, high = band(100 << 20, 20 << 20)
    assert low < (80 << 20) < (100 << 20) < high
    assert high - (100 << 20) < (1 << 20)


def test_band_without_gradients_holds_the_output_of_the_forward_before() -> None:
    low, high = band(100 << 20, 20 << 20, gradients=False)
    assert (99 << 20) < low < (120 << 20) < high < (121 << 20)


def test_band_of_a_small_peak_is_not_empty() -> None:
    low, high = band(1000, 0)
    assert low == 0 and high > 1000


def test_band_does_not_count_the_context() -> None:
    context = 400 << 20
    low, high = band(context + (100 << 20), 0, context)
    plain_low, plain_high = band(100 << 20, 0)
    assert (low - context, high - context) == (plain_low, plain_high)


@pytest.mark.parametrize("shape", [(4, 16, 64), (1, 200, 64), (3, 7, 256)])
@pytest.mark.parametrize("hidden", [32, 600])
@pytest.mark.parametrize("masked", [False, True])
def test_the_rule_of_fused_encoder_layers_is_a_bound(
    shape: tuple[int, int, int], hidden: int, masked: bool
) -> None:
    layer = nn.TransformerEncoderLayer(shape[2], 4, hidden, batch_first=True).eval().requires_grad_(False)
    attention = layer.self_attn
    mask = (torch.zeros(shape[:2], dtype=torch.bool), 1) if masked else ()
    args = (
        *(torch.zeros(shape), shape[2], 4, attention.in_proj_weight, attention.in_proj_bias),
        *(attention.out_proj.weight, attention.out_proj.bias, False, False, 1e-5),
        *(layer.norm1.weight, layer.norm1.bias, layer.norm2.weight, layer.norm2.bias),
        *(layer.linear1.weight, layer.linear1.bias, layer.linear2.weight, layer.linear2.bias, *mask),
    )
    operator = aten._transformer_encoder_layer_fwd.default
    with torch.no_grad():
        output = operator(*args)
    measure = scratch_probe.MEASURES["aten::_transformer_encoder_layer_fwd"]
    measured = measured_scratch(measure, operator, args, {}, output.nbytes)
    assert measured is not None
    assert measured <= scratch.encoder_layer(args, [output]) < 3 * measured + (64 << 10)


def _lstm_calls(
    steps: int, batch: int, features: int, hidden: int, dtype: torch.dtype
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Arguments of a layer's forward and of its backward, which has a transposed gradient and lacks two."""
    source = torch.zeros(steps, batch, features, dtype=dtype, requires_grad=True)
    weights = [parameter.detach() for parameter in nn.LSTM(features, hidden, dtype=dtype).parameters()]
    state = torch.zeros(batch, hidden, dtype=dtype)
    forward = (source, *weights, state, state, False, [], 2, hidden, 1, True, False, False, True)
    output, last, cell, workspace = (t.detach() for t in aten.mkldnn_rnn_layer(*forward))
    grad = torch.zeros(batch, steps, hidden, dtype=dtype).transpose(0, 1)
    saved = (source.detach(), *weights, state, state, output, last, cell, grad, None, None)
    return forward, (*saved, False, 2, hidden, 1, True, True, False, [], False, workspace)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(
    "sizes", [(64, 8, 32, 64), (40, 20, 650, 650), (7, 200, 33, 65), (128, 1, 256, 8), (16, 64, 300, 512)]
)
def test_recurrent_layers_stay_under_their_bounds(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    if dtype is BF16 and (reason := why_no_bf16_lstm()):
        pytest.skip(reason)
    calls = _lstm_calls(*sizes, dtype)
    for name, args in zip(("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"), calls, strict=True):
        func = getattr(aten, name).default
        made: list[Any] = []
        peak = peak_bytes(lambda: made.extend(func(*args)))  # noqa: B023 - runs here and now
        outputs = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in made if t is not None
        }
        truth = peak - sum(outputs.values())
        assert truth <= scratch.RULES[f"aten::{name}"](args, made) <= 1.5 * truth + 16384, name
