# SPDX-License-Identifier: Apache-2.0
"""Any PyTorch program traced for a card: its peaks are arithmetic on shapes, to the byte."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from trace_program import Meter, trace_program

from memscale.hardware.target import CPU, Target

A100 = Target.cuda((8, 0))
H100 = Target.cuda((9, 0))
MIB = 2**20
N = 1 << 18  # elements: 1 MiB of float32, no rounding
WORKSPACE = 8_519_680

BENCH = Path(__file__).resolve().parents[3] / "bench"


def peaks(program: object, target: Target = A100) -> list[int]:
    return trace_program(program, target).peaks()  # type: ignore[arg-type]


class TestSpans:
    def test_a_peak_is_what_is_alive_at_once(self) -> None:
        def program(meter: Meter) -> None:
            kept = torch.empty(N, device=meter.device)
            meter.reset_peak()
            result = kept + 1  # 2 MiB
            result = result * 2  # the factor's result stands beside its operand: 3 MiB
            meter.read_peak()
            meter.reset_peak()
            del kept
            result = result * 2
            meter.read_peak()

        assert peaks(program) == [3 * MIB, 2 * MIB]

    def test_what_is_freed_right_after_the_reset_counts(self) -> None:
        def program(meter: Meter) -> None:
            large = torch.empty(8 * N, device=meter.device)
            meter.reset_peak()
            del large
            small = torch.empty(N, device=meter.device)
            meter.read_peak()
            del small

        assert peaks(program) == [8 * MIB]

    def test_a_reading_without_a_reset_begins_with_the_program(self) -> None:
        def program(meter: Meter) -> None:
            torch.empty(2 * N, device=meter.device)
            meter.read_peak()

        assert peaks(program) == [2 * MIB]

    def test_nothing_ran(self) -> None:
        assert peaks(lambda meter: meter.read_peak()) == [0]

    @pytest.mark.parametrize(("elements", "taken"), [(1, 512), (128, 512), (129, 1024)])
    def test_sizes_are_those_of_the_allocator(self, elements: int, taken: int) -> None:
        def program(meter: Meter) -> None:
            meter.reset_peak()
            kept = torch.empty(elements, device=meter.device)
            meter.read_peak()
            del kept

        assert peaks(program) == [taken]
        assert peaks(program, CPU) == [elements * 4]

    def test_reserved_bytes_are_whole_segments(self) -> None:
        trace = trace_program(lambda meter: torch.empty(N, device=meter.device), A100)
        assert trace.reserved_peak_bytes() == 2 * MIB  # 1 MiB is the largest that goes to the small pool


class TestBackward:
    def test_a_gradient_that_exists_is_added_to(self) -> None:
        def program(meter: Meter) -> None:
            weight = torch.randn(N, device=meter.device, requires_grad=True)
            for _ in range(3):
                meter.reset_peak()
                torch.relu(weight).backward(torch.ones_like(weight))
                meter.read_peak()

        first, second, third = peaks(program)
        assert first == 4 * MIB  # weight, result, ones, gradient
        assert second == third == 5 * MIB  # and the one that was there before

    def test_a_retained_graph_lives_as_long_as_its_result(self) -> None:
        def program(meter: Meter) -> None:
            weight = torch.randn(N, device=meter.device, requires_grad=True)
            result = (weight * 2).exp()
            result.backward(torch.ones_like(result), retain_graph=True)
            meter.reset_peak()
            result.backward(torch.ones_like(result), retain_graph=True)
            meter.read_peak()

        # weight, gradient, result, ones, its product with exp, that times 2
        assert peaks(program) == [6 * MIB]

    def test_a_gradient_that_the_caller_holds_is_not_summed_into(self) -> None:
        def program(meter: Meter) -> None:
            weight = torch.randn(N, device=meter.device, requires_grad=True)
            given = torch.ones(N, device=meter.device)
            hidden = weight.sin()
            result = hidden * 2
            meter.reset_peak()
            torch.autograd.backward((result, hidden), (given, given))
            meter.read_peak()

        # weight, hidden, result, given; the sum, in memory of its own; cosine of the weight, their product
        assert peaks(program) == [7 * MIB]

    def test_what_gather_adds_to_is_one_tensor(self) -> None:
        def program(meter: Meter) -> None:
            scores = torch.randn(N // 64, 64, device=meter.device, requires_grad=True)
            index = torch.zeros(N // 64, 1, dtype=torch.int64, device=meter.device)
            meter.reset_peak()
            scores.gather(1, index).sum().backward()
            meter.read_peak()

        # scores, gradient, the index, the sum and its gradient; the elements are gone by then
        assert peaks(program) == [2 * MIB + N // 64 * 8 + 2 * 512]

    def test_autograd_grad_counts_too(self) -> None:
        def program(meter: Meter) -> None:
            weight = torch.randn(N, device=meter.device, requires_grad=True)
            meter.reset_peak()
            (gradient,) = torch.autograd.grad(torch.relu(weight), weight, torch.ones_like(weight))
            meter.read_peak()
            del gradient

        assert peaks(program) == [4 * MIB]


class TestAutocast:
    def test_cast_weights_are_kept_until_the_block_ends(self) -> None:
        def program(meter: Meter) -> None:
            weight = torch.randn(1024, 1024, device=meter.device, requires_grad=True)
            states = torch.randn(1024, 1024, device=meter.device)
            for _ in range(2):
                meter.reset_peak()
                with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
                    states @ weight
                meter.read_peak()
                meter.reset_peak()
                states + 1
                meter.read_peak()
                meter.reset_peak()
                with torch.autocast("cuda", torch.bfloat16):
                    loss = (states @ weight).float().sum()
                loss.backward()
                meter.read_peak()

        first, after, backward, again, after_again, backward_again = peaks(program)
        assert first == WORKSPACE + 14 * MIB  # weight, states, both in half precision, result
        assert after == WORKSPACE + 12 * MIB  # weight, states, their sum: nothing is kept
        assert backward == 2 * WORKSPACE + 14 * MIB + 1024
        assert again - first == after_again - after == WORKSPACE + 4 * MIB + 512  # with gradient and loss
        assert backward_again == 2 * WORKSPACE + 22 * MIB + 512


class TestWorkspaces:
    @pytest.mark.parametrize(("target", "size"), [(A100, WORKSPACE), (H100, 32 * MIB)])
    def test_one_at_the_first_product_of_each_thread(self, target: Target, size: int) -> None:
        def program(meter: Meter) -> None:
            weight = torch.randn(512, 512, device=meter.device, requires_grad=True)
            meter.reset_peak()
            kept = weight * 1
            meter.read_peak()
            for _ in range(2):
                meter.reset_peak()
                product = weight @ weight
                meter.read_peak()
            meter.reset_peak()
            product.backward(weight)
            meter.read_peak()
            del kept

        before, first, second, backward = peaks(program, target)
        assert before == 2 * MIB
        assert first == 3 * MIB + size
        assert second == 4 * MIB + size  # the earlier product still has its name
        # weight, kept, product; two gradients, summed in place
        assert backward == 5 * MIB + 2 * size

    def test_none_on_a_cpu(self) -> None:
        def program(meter: Meter) -> None:
            weight = torch.randn(64, 64, device=meter.device)
            meter.reset_peak()
            product = weight.mv(weight[0])
            meter.read_peak()
            del product

        assert peaks(program, CPU)[0] < MIB


class TestValues:
    def test_a_constant_is_taken_when_it_is_made_and_freed_with_it(self) -> None:
        def program(meter: Meter) -> None:
            weight = torch.ones(N, device=meter.device)
            for _ in range(3):
                meter.reset_peak()
                result = weight * torch.tensor(2.0, device=meter.device)
                meter.read_peak()
                del result

        assert len(set(peaks(program))) == 1

    def test_masks_that_are_known_choose_as_many_as_they_do(self) -> None:
        def program(meter: Meter) -> None:
            rows = torch.randn(1024, 256, device=meter.device)
            mask = torch.arange(1024, device=meter.device) < 512
            meter.reset_peak()
            chosen = rows[mask]
            meter.read_peak()
            assert chosen.shape == (512, 256)

        assert MIB + MIB // 2 < peaks(program)[0] < 2 * MIB

    def test_the_seed_decides_and_generators_are_put_back(self) -> None:
        drawn: list[float] = []

        def program(meter: Meter) -> None:
            drawn.append(torch.randint(10**6, (1,), device=meter.device).item() + random.random())

        torch.manual_seed(5)
        random.seed(5)
        state, python = torch.get_rng_state(), random.getstate()
        for seed in (0, 0, 1):
            trace_program(program, A100, seed)
        assert drawn[0] == drawn[1] != drawn[2]
        assert torch.equal(torch.get_rng_state(), state)
        assert random.getstate() == python

    def test_a_program_that_fails_leaves_pytorch_as_it_was(self) -> None:
        backward, grad = torch.autograd.backward, torch.autograd.grad

        def program(meter: Meter) -> None:
            raise KeyError("a")

        with pytest.raises(KeyError):
            trace_program(program, A100)
        assert torch.autograd.backward is backward
        assert torch.autograd.grad is grad
        assert type(torch.ones(1)) is torch.Tensor

    def test_equal_programs_have_equal_graphs(self) -> None:
        def program(meter: Meter) -> None:
            weight = torch.randn(64, 64, device=meter.device, requires_grad=True)
            F.softmax(weight @ weight, -1).sum().backward()

        digests = {trace_program(program, A100).graph.digest for _ in range(2)}
        assert len(digests) == 1


@pytest.fixture(scope="module")
def published() -> ModuleType:
    """bench/published/run.py as a module."""
    saved = list(sys.path)  # run.py adds to it as well
    sys.path[:0] = [str(BENCH / "published"), str(BENCH / "python")]
    try:
        import run  # type: ignore[import-not-found]
    finally:
        sys.path[:] = saved
    return run  # type: ignore[no-any-return]


class TestPublishedRows:
    KERNELS = ("rms_norm", "layer_norm", "softmax", "relu_squared", "swiglu", "fused_add_rms_norm")

    @pytest.mark.parametrize("kernel", KERNELS)
    def test_a_small_row_is_exact(self, published: ModuleType, kernel: str) -> None:
        rows = [row for row in published.rows_of("liger") if row["model"] == kernel]
        results = (published.run_op(row, False) for row in rows if published.expressible(row))
        result = next(results)
        assert result.predicted == result.published

    def test_every_row_is_expressed_or_has_a_reason(self, published: ModuleType) -> None:
        expressed = 0
        for row in published.rows_of("liger"):
            if published.expressible(row):
                expressed += 1
            else:
                assert "liger" in row["technique"] or "torch_compile" in row["technique"]
        assert expressed == 85
        for row in published.rows_of("runs"):
            assert published.expressible(row) or published.reason_against(row) != "not rebuilt", row
