# SPDX-License-Identifier: Apache-2.0
"""Which outputs a loop's loss goes through is learned: those that it does not use keep their graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memscale
from memscale.core.executor import Executor
from memscale.torchkit.output_use import LearnedUse, OutputUse, SeenUse, reached
from memscale.trace.output_use import one_alone
from zoo.training import peak_bytes

ROWS, WIDTH = 512, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Stages(nn.Module):
    """Returns what two stages make, and as a third what nothing is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(*(Block() for _ in range(3)))
        self.second = nn.Sequential(*(Block() for _ in range(3)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        early = self.first(x)
        return early, self.second(early), x.detach() + 1


def wrapped(model: nn.Module, x: Tensor, share: float) -> tuple[Executor, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    plain = memscale.predict(model, optimizer, sample_input=x).plain.allocated_peak_bytes
    config = memscale.Config(memory_budget=int(share * plain), enable_logging=False)
    memscale.wrap(model, config, sample_input=x, optimizer=optimizer)
    executor: Executor = memscale.executor_of(model)
    return executor, optimizer


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, loss_of: Callable[..., Tensor]
) -> object:
    output = model(x)
    loss_of(output).backward()
    optimizer.step()
    optimizer.zero_grad()
    return output


def measured(model: nn.Module, x: Tensor, run: Callable[[], object]) -> int:
    held = sum(tensor.nbytes for tensor in (*model.parameters(), x))
    return held + peak_bytes(run)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
def test_a_loss_of_one_output_stays_within_the_budget(place: int, share: float) -> None:
    torch.manual_seed(0)
    model, x = Stages().train(), torch.randn(ROWS, WIDTH)
    executor, optimizer = wrapped(model, x, share)
    plans = [executor.plan]

    def run() -> object:
        return step(model, optimizer, x, lambda output: output[place].square().mean())

    for _ in range(3):
        peak = measured(model, x, run)
        assert all(plan is not None for plan in plans)
        assert not plans[-1].fits or peak <= plans[-1].budget_bytes  # type: ignore[union-attr]
        plans.append(executor.plan)
    assert plans[-1] is plans[-2]  # learned once


def test_a_loop_that_changes_its_mind_is_planned_for_the_worst() -> None:
    torch.manual_seed(0)
    model, x = Stages().train(), torch.randn(ROWS, WIDTH)
    executor, optimizer = wrapped(model, x, 0.95)
    for turn in range(5):
        step(model, optimizer, x, lambda output, turn=turn: output[turn % 2].square().mean())
    assert executor.learned.use is None
    assert executor.planned is not None and executor.planned.trace.use is not None
    assert executor.planned.trace.use.used == (True, False, False)


class Translator(nn.Module):
    """A loss through its large output takes more; one through the small alone leaves more that must stay."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Block(), nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(WIDTH, 512)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        encoded = self.encoder(x)
        return self.head(self.decoder(encoded)), encoded


def cross_entropy(output: Tensor) -> Tensor:
    scores = output.flatten(0, -2)
    return nn.functional.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))


def both_outputs(output: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(output[0]) + cross_entropy(output[1])


def test_the_plain_step_is_predicted_for_the_worse_use() -> None:
    torch.manual_seed(0)
    model, x = Translator().train(), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    prediction = memscale.predict(model, optimizer, sample_input=x)
    assert prediction.plain is not None
    uses: list[Callable[..., Tensor]] = [both_outputs, lambda output: cross_entropy(output[1])]
    peaks = [measured(model, x, lambda use=use: step(model, optimizer, x, use)) for use in uses]  # type: ignore[misc]
    assert max(peaks) <= 1.001 * prediction.plain.allocated_peak_bytes <= 1.02 * max(peaks)


@pytest.mark.parametrize("share", [0.99, 0.95, 0.9, 0.8])
def test_a_budget_that_a_loss_of_one_output_would_meet_without_a_plan(share: float) -> None:
    torch.manual_seed(0)
    model, x = Translator().train(), torch.randn(ROWS, WIDTH)
    executor, optimizer = wrapped(model, x, share)
    for _ in range(2):
        plan = executor.plan
        peak = measured(model, x, lambda: step(model, optimizer, x, both_outputs))
        assert plan is not None and plan.fits
        assert peak <= plan.budget_bytes


def test_no_loss_goes_through_a_cache() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaModel(transformers.LlamaConfig(vocab_size=99, **sizes)).train()
    tokens = torch.randint(99, (8, 64))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    prediction = memscale.predict(model, optimizer, sample_input=tokens)
    assert prediction.plain is not None

    def run() -> object:
        return step(model, optimizer, tokens, lambda output: cross_entropy(output.last_hidden_state))

    run()
    peak = measured(model, tokens, run) + sum(buffer.nbytes for buffer in model.buffers())
    assert peak <= 1.001 * prediction.plain.allocated_peak_bytes <= 1.02 * peak


def seen(used: list[int]) -> SeenUse:
    found = SeenUse([torch.zeros(2)] * 2)
    found.note(used)
    return found


def test_what_differs_is_learned_and_what_varies_is_no_rule() -> None:
    learned, assumed = LearnedUse(), OutputUse((True, True))
    learned.learn(seen([]), assumed)
    learned.learn(seen([0, 1]), assumed)
    assert learned.use is None  # no backward, and as assumed
    learned.learn(seen([0]), assumed)
    assert learned.use == OutputUse((True, False))
    learned.learn(seen([0, 1]), assumed)
    learned.learn(seen([0]), assumed)
    assert learned.use is None


def test_which_outputs_a_loss_goes_through() -> None:
    early = torch.randn(4, requires_grad=True) * 2
    late = early.exp()
    for _ in range(20):
        late = late.sin()
    assert reached(early.sum(), [early, late]) == (True, False)
    assert reached(late.sum(), [early, late]) == (True, True)
    assert one_alone((early, late)) == OutputUse((True, False))
    assert one_alone((late, early)) == OutputUse((False, True))
    assert one_alone((late, late * 2)) is None
    assert one_alone(late) is None
