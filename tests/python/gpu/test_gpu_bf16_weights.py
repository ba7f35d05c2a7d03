# SPDX-License-Identifier: Apache-2.0
"""Plans for a card whose weights become BF16: predicted peaks from the first step on, bits, `detach`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu_training import context_bytes
from torch import Tensor, nn

import memscale
from memscale import Config
from memscale.core import variants
from memscale.optim import cards, is_patched
from memscale.optim.masters import is_half
from memscale.optim.offload.attach import is_offloaded
from patched import use_techniques

EVERY = variants.STEP_TECHNIQUES
WIDTH, LAYERS, WORDS = 512, 6, 3000


@pytest.fixture(autouse=True)
def kernels() -> None:
    if reason := cards.why_not(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip(reason)
    if not torch.cuda.is_bf16_supported():
        pytest.skip("the card has no BF16")


@pytest.fixture(params=["resident", "offloaded"])
def names(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Other techniques could meet the budgets, too."""
    found = {"autocast", "bf16_weights"} | ({"state_offload"} if request.param == "offloaded" else set())
    rows = tuple(technique for technique in EVERY if technique.name in found)
    use_techniques(monkeypatch, rows)
    yield found


class Words(nn.Module):
    """A language model of linear layers, with a tied head, norms and biases."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.up = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS))
        self.down = nn.ModuleList(nn.Linear(3 * WIDTH, WIDTH) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        found = self.embed(x)
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            found = found + down(nn.functional.gelu(up(norm(found))))
        return nn.functional.cross_entropy(self.head(found)[:, :-1].flatten(0, 1).float(), x[:, 1:].flatten())


def batch(number: int = 0) -> Tensor:
    return torch.randint(0, WORDS, (2, 24), generator=torch.Generator().manual_seed(number)).cuda()


def wrapped(eight_bit: bool, budget: int = 1) -> tuple[Any, torch.optim.Optimizer]:
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    model = Words().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = Config(
        memory_budget=budget, use_mixed_precision=True, exact=False, use_8bit_optimizer=eight_bit,
        enable_logging=False, async_offload=True,
    )  # fmt: skip
    memscale.wrap(model, config, batch(), optimizer=optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, begin: int = 0) -> list[Tensor]:
    found = []
    for step in range(begin, begin + steps):
        loss = model(batch(step))
        loss.backward()
        found.append(loss.detach().cpu())
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("eight_bit", [False, True])
def test_predicted_peaks(eight_bit: bool, steps: int, names: set[str]) -> None:
    model, optimizer = wrapped(eight_bit)
    plan = memscale.executor_of(model).plan
    assert {step.technique for step in plan.steps} == names
    assert all(is_half(value) == (value.dim() > 1) for value in model.parameters())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    train(model, optimizer, steps)
    torch.cuda.synchronize()
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    predicted = plan.predicted
    assert reserved <= predicted.reserved_peak_bytes
    # The allocator counts what is left over in a block that it does not split: as the one before left it.
    assert allocated <= 1.005 * predicted.allocated_peak_bytes
    assert steps == 1 or allocated >= 0.95 * predicted.allocated_peak_bytes
    memscale.detach(model)
    assert not (is_patched(optimizer) or is_offloaded(optimizer))


def test_a_budget_holds(names: set[str]) -> None:
    model, optimizer = wrapped(False, 1 << 36)
    plain = memscale.executor_of(model).plan.plain.reserved_peak_bytes
    budget = context_bytes() + plain * (45 if "state_offload" in names else 60) // 100
    del model, optimizer
    model, optimizer = wrapped(True, budget)
    plan = memscale.executor_of(model).plan
    assert plan.fits and "bf16_weights" in {step.technique for step in plan.steps}
    torch.cuda.reset_peak_memory_stats()
    train(model, optimizer, 3)
    assert context_bytes() + torch.cuda.max_memory_reserved() <= budget
    memscale.detach(model)


def test_detach_before_a_step_gives_every_bit_back(names: set[str]) -> None:
    before = [value.detach().clone() for value in Words().parameters()]
    model, _ = wrapped(True)
    saved = model.state_dict()
    assert saved["embed.weight"].dtype is torch.float32 and saved["embed.weight"].is_cpu
    assert torch.equal(saved["embed.weight"], before[0])
    model(batch()).backward()
    memscale.detach(model)
    for value, was in zip(model.parameters(), before, strict=True):
        assert value.is_cuda and value.dtype is torch.float32 and torch.equal(value.cpu(), was)


@pytest.mark.parametrize("eight_bit", [False, True])
def test_a_run_goes_on_from_what_it_saved(eight_bit: bool, names: set[str]) -> None:
    model, optimizer = wrapped(eight_bit)
    train(model, optimizer, 2)
    saved = [{key: value.clone() for key, value in model.state_dict().items()}, optimizer.state_dict()]
    expected = train(model, optimizer, 3, begin=2)
    memscale.detach(model)
    del model, optimizer
    model, optimizer = wrapped(eight_bit)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert all(map(torch.equal, expected, train(model, optimizer, 3, begin=2)))
    memscale.detach(model)


def test_state_away_has_the_bits_of_state_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for names in ({"autocast", "bf16_weights"}, {"autocast", "bf16_weights", "state_offload"}):
        rows = tuple(technique for technique in EVERY if technique.name in names)
        use_techniques(monkeypatch, rows)
        model, optimizer = wrapped(True)
        losses = train(model, optimizer, 4)
        memscale.detach(model)
        found.append((losses, [value.detach().cpu() for value in model.parameters()]))
    assert all(map(torch.equal, found[0][0], found[1][0]))
    assert all(map(torch.equal, found[0][1], found[1][1]))


def test_evaluation_computes_in_bf16(names: set[str]) -> None:
    model, _ = wrapped(False)
    seen: list[torch.dtype] = []
    model.up[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with torch.no_grad():
        loss = model(batch())
    assert seen == [torch.bfloat16] and loss.dtype is torch.float32
    memscale.detach(model)
