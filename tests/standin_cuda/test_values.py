# SPDX-License-Identifier: Apache-2.0
"""The stand-in's values and its order of work:

STANDIN_COMPUTE=1 tests/standin_cuda/run.sh -m pytest tests/standin_cuda -q
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

pytestmark = pytest.mark.skipif(
    not os.environ.get("STANDIN_COMPUTE"), reason="needs run.sh with STANDIN_COMPUTE set"
)

Program = Callable[[Callable[[Tensor], Tensor]], Tensor]


def _drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _in_place_on_a_view(to: Callable[[Tensor], Tensor]) -> Tensor:
    x = to(_drawn(6, 8))
    x[1::2, ::3].mul_(3.0).add_(1, alpha=2)
    x[0] = x[5]
    return x


def _of_a_size_that_values_decide(to: Callable[[Tensor], Tensor]) -> Tensor:
    x = to(_drawn(50).mul(3).round())
    ids, counts = x.unique(return_counts=True)
    out = torch.empty(0, dtype=torch.int64, device=x.device)
    torch.nonzero(x, out=out)
    return torch.cat((ids, counts.float(), x[x > 0], out.flatten().float(), x.nonzero().flatten().float()))


def _indices(to: Callable[[Tensor], Tensor]) -> Tensor:
    x, rows = to(_drawn(10, 4)), to(torch.tensor([1, 3, 3, 9]))
    x.index_put_((rows,), to(_drawn(4, 4)), accumulate=True)
    x = x.index_add(0, rows, to(_drawn(4, 4)), alpha=0.5).scatter_add(0, rows.view(4, 1), to(_drawn(4, 1)))
    return torch.cat(
        (x.sort(1).values, x.cumsum(0), x[rows], x.topk(4, 1).values, x.gather(0, rows.view(1, 4)))
    )


def _numbers(to: Callable[[Tensor], Tensor]) -> Tensor:
    x = to(_drawn(7, 5))
    return torch.where(x > 0, x, 0.5) + (x % 2) + x.clamp(-1, 1) ** 3 + torch.add(x, 1, alpha=2) + 1 / x


def _network(to: Callable[[Tensor], Tensor]) -> Tensor:
    torch.manual_seed(1)
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.AvgPool2d(2))
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 4 * 4, 10))
    net.to(to(torch.empty(0)).device)
    loss = F.cross_entropy(net(to(_drawn(4, 3, 12, 12))), to(torch.arange(4)))
    loss.backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()])


def _product(to: Callable[[Tensor], Tensor]) -> Tensor:
    a, b = to(_drawn(3, 16, 8)), to(_drawn(3, 8, 12))
    return torch.baddbmm(to(_drawn(12)), a, b, beta=0.5) + torch.linalg.inv(a[:, :8] @ a[:, :8].mT)[:, :1, :1]


PROGRAMS: tuple[Program, ...] = (
    _in_place_on_a_view,
    _of_a_size_that_values_decide,
    _indices,
    _numbers,
    _network,
    _product,
)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_values_are_those_of_the_cpu(program: Program) -> None:
    here, there = program(lambda tensor: tensor), program(lambda tensor: tensor.cuda())
    assert there.is_cuda
    if program is _network:  # the CPU has another convolution
        torch.testing.assert_close(here, there.cpu())
    else:
        assert torch.equal(here, there.cpu())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_cells(kind: type[nn.Module]) -> None:
    """The CPU has no such cells: close, with its gradients."""
    torch.manual_seed(0)
    net, made = kind(8, 8, batch_first=True), []
    for device in ("cpu", "cuda"):
        net.to(device).zero_grad()
        out = net(_drawn(3, 5, 8).to(device))[0]
        out.square().sum().backward()
        made.append([out.detach().cpu(), *(p.grad.cpu().clone() for p in net.parameters())])
    for here, there in zip(*made, strict=True):
        torch.testing.assert_close(here, there)


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])
@pytest.mark.parametrize("causal", [False, True])
def test_fused_attention(backend: SDPBackend, causal: bool) -> None:
    """Close to the attention that is written out; the dropout of the backward is that of the forward."""
    made = []
    for used in (SDPBackend.MATH, backend):
        inputs = [
            (_drawn(2, 3, 4, 16, 8)[i % 2] * (1 + i)).cuda().bfloat16().requires_grad_() for i in range(3)
        ]
        with sdpa_kernel(used):
            out = F.scaled_dot_product_attention(*inputs, is_causal=causal)
        out.float().square().sum().backward()
        made.append([out.detach(), *(tensor.grad for tensor in inputs)])
    for wanted, got in zip(*made, strict=True):
        torch.testing.assert_close(wanted, got, rtol=0.05, atol=0.05)
    value = torch.eye(16).repeat(1, 1, 1, 1).cuda().bfloat16().requires_grad_()
    query = torch.zeros(1, 1, 16, 16).cuda().bfloat16()
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(query, query, value, dropout_p=0.5)
    out.sum().backward()
    torch.testing.assert_close(out.detach().sum(2), value.grad[..., 0])
    assert (out == 0).any() and (out != 0).any()


def test_draws_follow_the_devices_generator() -> None:
    x = torch.ones(1000, device="cuda")
    state = torch.cuda.get_rng_state()
    first, second = F.dropout(x), F.dropout(x)
    assert not torch.equal(first, second)
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, F.dropout(x)) and torch.equal(second, F.dropout(x))
    host = torch.get_rng_state()
    torch.randn(10, device="cuda")
    assert torch.equal(host, torch.get_rng_state())
    assert abs(torch.randn(100_000, device="cuda").std().item() - 1) < 0.02


def test_allocations_are_those_of_the_original_kernels() -> None:
    x = torch.randn(256, 256, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    x.sum()
    made = x.sort().values
    assert torch.cuda.memory_allocated() - before == made.nbytes
    assert (
        torch.cuda.max_memory_allocated() - before > made.nbytes + x.numel() * 8
    )  # values, indices and scratch


# ---- order of work ----------------------------------------------------------------------------------------

_OVER = """
import torch
pinned = torch.ones(1 << 20).pin_memory()
device = torch.zeros(1 << 20, device="cuda")
torch.cuda.synchronize()
side = torch.cuda.Stream()
"""


def _run(program: str, late: str = "0", **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "STANDIN_LATE": late, **more}
    return subprocess.run(
        [sys.executable, "-c", _OVER + program], env=environment, capture_output=True, text=True, check=False
    )


def test_a_late_copy_is_late() -> None:
    done = _run("""
back = torch.zeros(1 << 20).pin_memory()
device.fill_(7)
back.copy_(device, non_blocking=True)
print(back[0].item())
torch.cuda.synchronize()
print(back[0].item())
""")
    assert done.stdout.split() == ["0.0", "7.0"], done.stderr


@pytest.mark.parametrize("late", ["0", "7"])
def test_ordered_streams_have_the_right_values(late: str) -> None:
    done = _run(
        """
total = 0
for step in range(20):
    pinned.fill_(step)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        device.copy_(pinned, non_blocking=True)
        event = side.record_event()
    torch.cuda.current_stream().wait_event(event)
    total += device.sum().item() / device.numel()
print(total)
""",
        late,
    )
    assert done.stdout.split() == ["190.0"], done.stderr


_WITHOUT_ORDER = {
    "reads too early": "with torch.cuda.stream(side): device.copy_(pinned, non_blocking=True)\ndevice.sum()",
    "writes too early": "device.sum()\nwith torch.cuda.stream(side): device.copy_(pinned, non_blocking=True)",
    "two kernels": "device.fill_(1)\nwith torch.cuda.stream(side): device.add_(1)",
    "a copy out": "device.fill_(1)\nwith torch.cuda.stream(side): pinned.copy_(device, non_blocking=True)",
}


@pytest.mark.parametrize("name", _WITHOUT_ORDER)
def test_missing_order_is_found(name: str) -> None:
    done = _run(_WITHOUT_ORDER[name])
    assert done.returncode != 0 and "without order" in done.stderr, done.stderr


def test_a_block_that_is_used_elsewhere_has_to_be_recorded() -> None:
    """The caching allocator gives memory again that another stream still reads, unless it is told."""
    program = """
torch.cuda.current_stream().synchronize()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side): pinned.copy_(device, non_blocking=True)
{}
del device
torch.ones(1 << 20, device="cuda")
"""
    assert "without order" in _run(program.format("")).stderr
    assert _run(program.format("device.record_stream(side)")).returncode == 0


def test_operators_on_many_floats_may_only_allocate() -> None:
    program = """
ids = torch.arange(1 << 20, device="cuda")
print(ids.max().item(), (ids > 5).all().item(), torch.ones(4, device="cuda").sum().item())
before = torch.cuda.memory_allocated()
made = torch.ones(1 << 20, device="cuda").sort().values
print(torch.cuda.memory_allocated() - before, made.sum().item())
"""
    done = _run(program, STANDIN_COMPUTE_BYTES="4096")
    assert done.stdout.split()[:4] == ["1048575", "False", "4.0", str(4 << 20)], done.stderr
    assert done.stdout.split()[-1] != "1048576.0"
    assert _run(program).stdout.split()[-1] == "1048576.0"


# ---- addresses --------------------------------------------------------------------------------------------


def test_wrong_ends_of_copies_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    runtime = ctypes.CDLL("libcudart.so.13")
    device, host = torch.zeros(4, device="cuda"), torch.zeros(4)
    to_device, to_host, bytes_ = 1, 2, ctypes.c_size_t(16)

    def copy(to: int, source: int, kind: int) -> int:
        return runtime.cudaMemcpy(ctypes.c_void_p(to), ctypes.c_void_p(source), bytes_, kind)

    assert copy(device.data_ptr(), host.data_ptr(), to_device) == 0
    assert copy(device.data_ptr(), host.data_ptr(), to_host) == 1
    assert "the source is not living memory of the card" in capfd.readouterr().err
    assert copy(host.data_ptr(), host.data_ptr(), to_device) == 1
    assert "the destination is not living memory of the card" in capfd.readouterr().err
    assert copy(device.data_ptr(), device.data_ptr(), to_device) == 1
    assert "the source is the card's memory" in capfd.readouterr().err
    runtime.cudaGetLastError()


def test_memory_under_a_copy_is_not_unpinned_in_silence() -> None:
    done = _run("""
import ctypes
runtime, buffer = ctypes.CDLL("libcudart.so.13"), torch.ones(1 << 20)
assert torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0) == 0
device.copy_(buffer, non_blocking=True)
torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
""")
    assert "a copy of it is under way" in done.stderr
