# SPDX-License-Identifier: Apache-2.0
"""Models with gradient checkpointing of their own: replaced by the plan or left alone, never doubled."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memscale
import tallies
from memscale import AsyncOffloadConfig, Config
from memscale.techniques.checkpoint.use_cache import CacheSwitch
from zoo.models import Case, case
from zoo.training import SMALLEST, Loop, assert_same, built, call, reference, same_bits, seed, train

AMPLE = Config(memory_budget="1GiB", enable_logging=False)


def flags(model: nn.Module) -> dict[str, bool]:
    """Path → whether the module checkpoints itself."""
    found = (
        (path, getattr(module, "gradient_checkpointing", None)) for path, module in model.named_modules()
    )
    return {path: value for path, value in found if value is not None}


def switch_on(model: nn.Module, **settings: bool) -> None:
    """Starts the model's own checkpoints; transformers before 5 has another name for it."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings or None)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings or None)


def enabled(case: Case, **settings: bool) -> nn.Module:
    """The case's model with its own checkpointing on."""
    model = built(case)
    switch_on(model, **settings)
    assert any(flags(model).values())
    seed()
    return model


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """How often each normalisation runs, by the module's id: in the class, beneath all that stands in."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    for kind in (nn.LayerNorm, LlamaRMSNorm, T5LayerNorm):

        def counting(self: nn.Module, *args: Any, original: Any = kind.forward) -> Any:
            tallies.add(id(self))
            return original(self, *args)

        monkeypatch.setattr(kind, "forward", counting)


def most_runs(model: nn.Module, case: Case) -> int:
    """Most runs of one module in a step for which there is a plan, which knows the loop since the second."""
    for number in range(3):
        model.zero_grad()
        tallies.clear()
        case.loss(call(model, case.batch(number))).backward()
    return tallies.highest()


NAMES = ["gpt2", "llama", "t5", "bert", "vit"]


@pytest.mark.long
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("sample", [False, True], ids=["deferred", "sample"])
@pytest.mark.parametrize("name", NAMES)
def test_replaced(name: str, sample: bool, reentrant: bool, runs: None) -> None:
    """No module runs more than twice, and `detach` switches the model's own checkpoints on again."""
    subject = case(name)
    model = enabled(subject, use_reentrant=reentrant)
    before = flags(model)
    memscale.wrap(model, SMALLEST, subject.batch(0) if sample else None)
    subject.loss(call(model, subject.batch(0))).backward()
    assert memscale.executor_of(model).plan.active and not any(flags(model).values())
    assert most_runs(model, subject) == 2
    memscale.detach(model)
    assert flags(model) == before
    assert most_runs(model, subject) == 2


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_equal(name: str) -> None:
    subject = case(name)

    def build() -> nn.Module:
        model = subject.build()
        switch_on(model)
        return model

    own = Case(name, build, subject.batch, subject.loss)
    assert_same(reference(subject, Loop(steps=3)), train(own, Loop(steps=3), SMALLEST))


def test_switched_on_after_wrap(runs: None) -> None:
    """A trainer does so when its training begins."""
    subject = case("gpt2")
    model = memscale.wrap(built(subject), SMALLEST, subject.batch(0))
    switch_on(model)
    on = flags(model)
    assert most_runs(model, subject) == 2 and not any(flags(model).values())
    memscale.detach(model)
    assert flags(model) == on


def test_some_layers_only() -> None:
    subject = case("gpt2")
    model = enabled(subject)
    model.transformer.h[
        1
    ].gradient_checkpointing = False  # what `every_n_layers=2` does, where transformers has it
    before = flags(model)
    assert len(set(before.values())) == 2
    memscale.wrap(model, SMALLEST, subject.batch(0))
    assert not any(flags(model).values())
    memscale.detach(model)
    assert flags(model) == before


def test_left_alone_where_nothing_need_be_done(runs: None) -> None:
    subject = case("gpt2")
    model = enabled(subject)
    before = flags(model)
    memscale.wrap(model, AMPLE, subject.batch(0))
    assert not memscale.executor_of(model).plan.active and flags(model) == before
    assert most_runs(model, subject) == 2


def test_left_alone_where_checkpointing_is_switched_off() -> None:
    subject = case("gpt2")
    model = enabled(subject)
    memscale.wrap(model, SMALLEST.replace(enable_checkpointing=False), subject.batch(0))
    assert any(flags(model).values())


def test_the_plan_is_that_of_the_model_without_its_own() -> None:
    """And without its cache, which it does not make while it checkpoints itself."""
    subject = case("t5")
    bare = built(subject)
    bare.config.use_cache = False
    for part in bare.modules():
        if hasattr(part, "config"):
            part.config.use_cache = False
    plain = memscale.plan(bare, config=SMALLEST, sample_input=subject.batch(0))
    own = memscale.plan(enabled(subject), config=SMALLEST, sample_input=subject.batch(0))
    assert [choice.module for choice in own.active] == [choice.module for choice in plain.active]


def test_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    subject = case("bert")
    with caplog.at_level(logging.INFO, "memscale"):
        memscale.wrap(enabled(subject), Config(memory_budget=1), subject.batch(0))
    assert "replaces   the model's own gradient checkpointing" in caplog.text


def test_copies_and_lifetime() -> None:
    subject = case("gpt2")
    model = memscale.wrap(enabled(subject), SMALLEST, subject.batch(0))
    twin = copy.deepcopy(model)
    assert any(flags(twin).values()) and not any(flags(model).values())
    memscale.detach(model)
    switch = CacheSwitch(model)
    assert switch.checkpoints > 0
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()
    switch.undo()


def test_without_the_attribute_nothing_happens() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    switch = CacheSwitch(model)
    assert not switch.is_needed and switch.lines == []
    switch.attach()
    switch.hold()
    switch.undo()
    assert torch.equal(model(torch.zeros(1, 4)), model(torch.zeros(1, 4)))


def jamba() -> nn.Module:
    """Attention and recurrent layers; with its cache on, as by default, the latter compute otherwise."""
    from transformers import JambaConfig, JambaForCausalLM

    seed()
    config = JambaConfig(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        num_experts=2,
        mamba_d_state=4,
    )
    return JambaForCausalLM(config).train()


def gradients(model: nn.Module, tokens: torch.Tensor) -> list[torch.Tensor]:
    model(input_ids=tokens, labels=tokens).loss.backward()
    return [item.grad for item in model.parameters() if item.grad is not None]


def test_a_cache_of_recurrent_layers_stays_on() -> None:
    seed(1)
    tokens = torch.randint(0, 64, (2, 33))
    plain, other = gradients(jamba(), tokens), jamba()
    other.config.use_cache = False
    without = gradients(other, tokens)
    assert not all(map(torch.equal, plain, without))  # else this model shows nothing
    model = memscale.wrap(jamba(), SMALLEST, {"input_ids": tokens, "labels": tokens})
    executor = memscale.executor_of(model)
    assert executor.plan.active and any(
        note.startswith("use_cache: stays on") for note in executor.plan.notes
    )
    assert model.config.use_cache is True
    assert all(map(torch.equal, plain, gradients(model, tokens)))


BLOCKS = 3
"""Of the small GPT-2."""


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Blocks under transformers' own offload, which pins memory: this host, without a card, has none."""
    from transformers import modeling_utils

    seen: list[str] = []

    def on_cpu(pin_memory: bool, device_type: str) -> Any:
        seen.append(device_type)
        return torch.autograd.graph.save_on_cpu()

    if not hasattr(modeling_utils, "save_on_cpu"):
        pytest.skip("transformers before 5.17 has no offload of its own")
    monkeypatch.setattr(modeling_utils, "save_on_cpu", on_cpu)
    return seen


@pytest.mark.parametrize("engine", [False, True], ids=["checkpoints", "offload"])
def test_an_offload_of_its_own_is_found_and_not_doubled(
    engine: bool, copies: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What its checkpoints hold would wait in host memory under ours, too."""
    gpt2 = case("gpt2")

    def step(config: Config | None) -> list[torch.Tensor]:
        model = built(gpt2)
        model.activation_checkpointing_enable(offload=True)
        if config is not None:
            memscale.wrap(model, config)
        seed()
        loss = call(model, gpt2.batch(0)).loss
        loss.backward()
        assert config is None or memscale.executor_of(model).plan.does_something
        return [loss.detach(), *(value.grad for value in model.parameters())]

    settings: dict[str, Any] = {"memory_budget": 1}
    if engine:
        offload = AsyncOffloadConfig(tiers=("file",), directory=str(tmp_path))
        settings |= {"async_offload": True, "async_config": offload}
    plain = step(None)
    assert len(copies) == BLOCKS
    assert all(map(same_bits, plain, step(Config(**settings))))
    assert len(copies) == BLOCKS
    assert (
        f"own gradient checkpointing ({BLOCKS + 1} modules), and its offload of what they hold" in caplog.text
    )


def test_an_offload_of_its_own_stays_where_nothing_is_planned(copies: list[str]) -> None:
    model = built(case("gpt2"))
    model.activation_checkpointing_enable(offload=True)
    memscale.wrap(model, AMPLE)
    call(model, case("gpt2").batch(0)).loss.backward()
    before = len(copies)
    call(model, case("gpt2").batch(0)).loss.backward()
    assert not memscale.executor_of(model).plan.does_something and len(copies) == before + BLOCKS
