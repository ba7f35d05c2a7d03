# SPDX-License-Identifier: Apache-2.0
"""Steps in backward through the configuration: the predicted peak, every bit, and beside other techniques."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from amounts import also
from engine_samples import peak_bytes
from memscale import AsyncOffloadConfig, Config
from memscale.offload.engine import why_not as why_no_engine
from memscale.optim.spent import SpentGradient
from memscale.plans.plan import Plan
from patched import use_disk_of
from step_samples import Recurrent, words

NAME = "step_in_backward"
Batch = dict[str, Tensor]
Make = Callable[[nn.Module], torch.optim.Optimizer]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(400, 400), nn.GELU()) for _ in range(8)]
        self.body = nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(400, 10))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.body(x), labels)


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    made = transformers.GPT2Config(vocab_size=3000, n_positions=64, n_embd=192, n_layer=3, n_head=4)
    return transformers.GPT2LMHeadModel(made)  # type: ignore[no-any-return]


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    made = transformers.BertConfig(
        vocab_size=3000, hidden_size=192, num_hidden_layers=3, num_attention_heads=4, intermediate_size=768
    )
    return transformers.BertForMaskedLM(made)  # type: ignore[no-any-return]


def vit() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    made = transformers.ViTConfig(
        hidden_size=192, num_hidden_layers=3, num_attention_heads=4, intermediate_size=768,
        image_size=64, patch_size=8, num_labels=10,
    )  # fmt: skip
    return transformers.ViTForImageClassification(made)  # type: ignore[no-any-return]


MODELS: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
    "mlp": (Mlp, {"x": torch.linspace(-1, 1, 6400).view(16, 400), "labels": torch.arange(16) % 10}),
    "gpt2": (gpt2, {"input_ids": words(3000), "labels": words(3000)}),
    "bert": (bert, {"input_ids": words(3000), "labels": words(3000)}),
    "vit": (
        vit,
        {"pixel_values": torch.linspace(-1, 1, 24576).view(2, 3, 64, 64), "labels": torch.arange(2)},
    ),
    "recurrent": (Recurrent, {"x": words(2000)}),
    "rows": (Mlp, {"x": torch.linspace(-1, 1, 320_000).view(800, 400), "labels": torch.arange(800) % 10}),
    "large": (partial(Recurrent, 3000, 600), {"x": words(3000)}),
}

OPTIMIZERS: dict[str, Make] = {
    "one by one": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False),
    "lists": lambda model: torch.optim.Adam(
        model.parameters(), lr=1e-3, foreach=True, amsgrad=True, weight_decay=0.1
    ),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01),
    "8 bits": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, steps: int = 3) -> list[Tensor]:
    torch.manual_seed(3)
    found = []
    for _ in range(steps):
        output = model(**batch)
        loss = output if isinstance(output, Tensor) else output.loss
        loss.backward()
        found.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return found


def names_of(plan: Plan) -> set[str]:
    return {step.technique for step in plan.steps}


def both(name: str, how: str, plain: Config, mine: Config) -> tuple[list[int], list[Any]]:
    """Peaks, and what came of it, of a training with each configuration."""
    build, batch = MODELS[name]
    kept: list[Any] = []

    def run(config: Config) -> None:
        torch.manual_seed(0)
        model = build().train()
        optimizer = OPTIMIZERS[how](model)
        memscale.wrap(model, config, batch, optimizer=optimizer)
        kept.append((train(model, optimizer, batch), model, optimizer))

    peaks = [peak_bytes(partial(run, config)) for config in (plain, mine)]
    (expected, before, optimizer), (found, model, other) = kept
    assert all(map(torch.equal, expected, found))
    assert all(map(torch.equal, before.parameters(), model.parameters()))
    states = [item.state_dict()["state"] for item in (optimizer, other)]
    assert [*states[0]] == [*states[1]]
    for one, two in zip(states[0].values(), states[1].values(), strict=True):
        assert all(torch.equal(torch.as_tensor(one[key]), torch.as_tensor(two[key])) for key in one)
    return peaks, [before, model]


QUIET = Config(enable_logging=False, memory_budget=1 << 34)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("mlp", "SGD"),
        ("gpt2", "8 bits"),
        ("bert", "lists"),
        ("recurrent", "lists"),
        *also(("gpt2", "fused"), ("vit", "fused"), ("recurrent", "SGD")),
    ],
)
def test_the_predicted_peak_is_the_measured_one(name: str, how: str) -> None:
    more: Any = {"use_8bit_optimizer": True} if how == "8 bits" else {}
    peaks, models = both(name, how, QUIET.replace(**more), QUIET.replace(step_in_backward=True, **more))
    plan = memscale.executor_of(models[1]).plan
    assert names_of(plan) == {NAME}
    predicted = plan.predicted.device_used_peak_bytes
    assert 0.98 * predicted <= peaks[1] <= predicted
    assert peaks[1] < peaks[0]
    for model in models:
        memscale.detach(model)


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt2", "rows", *also("vit")])
def test_with_checkpoints(name: str) -> None:
    """Regions run a second time with weights that have not been stepped yet."""
    config = QUIET.replace(step_in_backward=True)
    build, batch = MODELS[name]
    model = build()
    whole = memscale.plan(model, config=config, sample_input=batch, optimizer=OPTIMIZERS["fused"](model))
    smallest, peak = whole.smallest_peak_bytes, whole.predicted.device_used_peak_bytes
    budget = smallest + (peak - smallest) // 3 + (1 << 18)
    peaks, models = both(name, "fused", QUIET, config.replace(memory_budget=budget))
    plan = memscale.executor_of(models[1]).plan
    assert plan.active and plan.fits and names_of(plan) == {NAME}
    assert peaks[1] <= plan.predicted.device_used_peak_bytes <= budget
    for item in models:
        memscale.detach(item)


@pytest.mark.skipif(why_no_engine(torch.device("cpu")) != "", reason="no offload here")
@pytest.mark.parametrize(
    ("name", "how"), [("large", "fused"), ("large", "8 bits"), *also(("large", "one by one"))]
)
def test_with_state_offloaded(name: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each parameter's pieces pass alone. Gradients are gone: releasing them is not looked at."""
    use_disk_of(monkeypatch)
    more: Any = {"use_8bit_optimizer": True} if how == "8 bits" else {}
    engine = AsyncOffloadConfig(tiers=("file",), directory=str(tmp_path))
    config = QUIET.replace(step_in_backward=True, enable_checkpointing=False, async_config=engine, **more)
    build, batch = MODELS[name]
    model = build()
    whole = memscale.plan(model, config=config, sample_input=batch, optimizer=OPTIMIZERS[how](model))
    budget = whole.predicted.device_used_peak_bytes * (85 if more else 65) // 100
    peaks, models = both(name, how, QUIET.replace(**more), config.replace(memory_budget=budget))
    plan = memscale.executor_of(models[1]).plan
    assert plan.fits and names_of(plan) == {NAME, "state_offload"}
    assert not any("gradient_offload" in note for note in plan.notes)
    predicted = plan.predicted.device_used_peak_bytes
    assert 0.98 * predicted <= peaks[1] <= predicted <= budget
    for item in models:
        memscale.detach(item)


def wrapped(**more: Any) -> tuple[Any, torch.optim.Optimizer, Batch]:
    build, batch = MODELS["mlp"]
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = QUIET.replace(step_in_backward=True, **more)
    return memscale.wrap(model, config, batch, optimizer=optimizer), optimizer, batch


def test_without_the_optimizer() -> None:
    """Nothing is promised of one that nobody knows; from its first step on it is known, and not named."""
    build, batch = MODELS["mlp"]
    model: Any = memscale.wrap(build(), QUIET.replace(step_in_backward=True), batch)
    assert not names_of(memscale.executor_of(model).plan)
    assert (
        "step_in_backward: the optimizer is not known: pass it to wrap, or use optimize"
        in memscale.executor_of(model).plan.notes
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, batch)
    model(**batch).backward()
    assert type(model.body[0][0].weight.grad) is Tensor
    memscale.detach(model)


def test_a_forward_between_backward_and_step() -> None:
    model, optimizer, batch = wrapped()
    model(**batch).backward()
    with torch.no_grad():
        model(**batch)  # which nobody differentiates
    with pytest.raises(RuntimeError, match=r"step_in_backward: a forward runs"):
        model(**batch)
    optimizer.step()
    train(model, optimizer, batch)
    memscale.detach(model)


def test_a_larger_batch_is_planned_anew() -> None:
    """Before its forward; what is in force stays so."""
    build, batch = MODELS["mlp"]
    larger = {name: torch.cat([value, value]) for name, value in batch.items()}
    runs = []
    for config in (QUIET, QUIET.replace(step_in_backward=True)):
        torch.manual_seed(0)
        model: Any = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        memscale.wrap(model, config, batch, optimizer=optimizer)
        found = [value for part in (batch, larger, batch) for value in train(model, optimizer, part, 2)]
        runs.append([*found, *model.parameters()])
        assert names_of(memscale.executor_of(model).plan) == ({NAME} if config.step_in_backward else set())
        memscale.detach(model)
    assert all(map(torch.equal, *runs))


def test_verified_on_the_spot() -> None:
    """Verification computes gradients and steps nothing."""
    model, optimizer, batch = wrapped(verify_correctness=True)
    before = [value.detach().clone() for value in model.parameters()]
    assert memscale.verify(model, batch).passed
    assert all(map(torch.equal, before, model.parameters())) and not optimizer.state
    memscale.detach(model)


def test_copies_are_plain_models() -> None:
    model, _, batch = wrapped()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        before = [value.detach().clone() for value in other.parameters()]
        other(**batch).backward()
        assert type(other.body[0][0].weight.grad) is Tensor
        assert all(map(torch.equal, before, other.parameters()))
    memscale.detach(model)


def test_detach_leaves_no_trace() -> None:
    build, _ = MODELS["mlp"]
    plain = build()
    original = torch.amp.GradScaler.scale
    model, optimizer, batch = wrapped()
    assert vars(optimizer).keys() == vars(torch.optim.AdamW(plain.parameters())).keys()
    model(**batch).backward()
    memscale.detach(model)
    assert type(optimizer) is torch.optim.AdamW and not optimizer._optimizer_step_pre_hooks
    assert torch.amp.GradScaler.scale is original and vars(model).keys() == vars(plain).keys()
    assert all(value.grad is None and not value._post_accumulate_grad_hooks for value in model.parameters())
    stepped = [value.detach().clone() for value in model.parameters()]
    optimizer.step()
    assert all(map(torch.equal, stepped, model.parameters()))
    model(**batch).backward()
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 0


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


X = torch.linspace(-1, 1, 32).view(4, 8)


def test_accelerates_optimizer() -> None:
    """A shell around the one that is stepped, and a scheduler's, too."""
    accelerate = pytest.importorskip("accelerate")
    runs = []
    for promise in (False, True):
        accelerator, model = accelerate.Accelerator(cpu=True), small()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        memscale.wrap(model, QUIET.replace(step_in_backward=promise), X, optimizer=optimizer)
        for _ in range(4):
            accelerator.backward(model(X).square().mean())
            assert isinstance(model[0].weight.grad, SpentGradient) is promise
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        runs.append([*model.parameters()])
        memscale.detach(model)
    assert all(map(torch.equal, *runs))


def test_a_compiled_model() -> None:
    runs = []
    for promise in (False, True):
        model = small()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        memscale.wrap(model, QUIET.replace(step_in_backward=promise), X, optimizer=optimizer)
        compiled = torch.compile(model, backend="aot_eager")
        for _ in range(3):
            compiled(X).square().mean().backward()
            assert isinstance(model[0].weight.grad, SpentGradient) is promise
            optimizer.step()
            optimizer.zero_grad()
        runs.append([*model.parameters()])
        memscale.detach(model)
    assert all(map(torch.equal, *runs))


def test_several_forwards_before_one_backward() -> None:
    """That is one gradient for each parameter; the forwards are those of one step."""
    runs = []
    for promise in (False, True):
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        memscale.wrap(model, QUIET.replace(step_in_backward=promise), X, optimizer=optimizer)
        for _ in range(3):
            (model(X).sum() + model(X + 1).square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append([*model.parameters()])
        memscale.detach(model)
    assert all(map(torch.equal, *runs))
