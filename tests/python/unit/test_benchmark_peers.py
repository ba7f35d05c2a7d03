# SPDX-License-Identifier: Apache-2.0
"""Peers as their documentation sets them up, seen by stand-ins for what is not installed."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from memscale.benchmarks import BENCHMARK_MODELS, Shape, child, loops, machine, peers
from memscale.benchmarks.job import Job

GPT = BENCHMARK_MODELS[0].tiny
BERT = Shape("bert", 2, 64, 2, 512, 2, 64)


def job(way: str, shape: Shape = GPT, device: str = "cpu") -> Job:
    return Job("peers", "m", "tiny", shape, way, "bf16-amp", steps=3, warm_up=1, device=device)


def checkpoints(model: Any) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


class Needed:
    """A peer's class that notes what it was given."""

    given: dict[str, Any]

    def __init__(self, parameters: Any, *_: Any, **given: Any) -> None:
        self.parameters = list(parameters)
        type(self).given = given


def test_the_optimizer_is_fused_on_a_card_as_the_trainers_of_hugging_face_make_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.optim, "AdamW", Needed)
    for device, expected in (("cuda", True), ("cpu", None)):
        peers.prepare_peer(job("save-on-cpu", device=device), nn.Linear(2, 2))
        assert Needed.given == {"lr": peers.LEARNING_RATE, "weight_decay": 0.01, "fused": expected}


@pytest.mark.parametrize("shape", [GPT, BERT])
def test_trl_gets_accelerates_state_and_no_warning_of_a_head(
    monkeypatch: pytest.MonkeyPatch, shape: Shape
) -> None:
    calls: list[Any] = []

    def manager(model: nn.Module, **given: Any) -> Any:
        calls.append(given)
        return nullcontext()

    model = loops.fresh_model(job("trl-offload", shape))
    accelerate = SimpleNamespace(PartialState=lambda: calls.append("state"))
    monkeypatch.setitem(sys.modules, "accelerate", accelerate)
    trl = SimpleNamespace(get_act_offloading_ctx_manager=manager)
    monkeypatch.setitem(sys.modules, "trl.models.activation_offloading", trl)
    peers.prepare_peer(job("trl-offload", shape), model)
    assert calls == ["state", {"warn_if_no_head": shape is GPT}] and checkpoints(model)


def test_torchaos_offloading_comes_in_its_own_bf16_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", SimpleNamespace(CPUOffloadOptimizer=Needed))
    for way, dtype in (("torchao-offload", torch.float32), ("torchao-offload-bf16", torch.bfloat16)):
        run, _ = child.begin(job(way))
        assert {parameter.dtype for parameter in run.loop.model.parameters()} == {dtype}
        assert run.loop.autocast == (dtype == torch.float32) and Needed.given["weight_decay"] == 0.01
        assert run.forward(run.data[0])[0].isfinite()


@pytest.mark.parametrize("way", ["deepspeed-zero2", "deepspeed-zero3"])
def test_deepspeed_checkpoints_and_decays_as_the_others(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}

    def initialize(model: nn.Module, config: dict[str, Any]) -> Any:
        found.update(model=model, config=config)
        return SimpleNamespace(backward=None, step=None), None, None, None

    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(initialize=initialize))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that what it sets does not stay
    child.begin(job(way))
    assert checkpoints(found["model"]) and found["config"]["optimizer"]["params"]["weight_decay"] == 0.01


def test_liger_gets_one_type(monkeypatch: pytest.MonkeyPatch) -> None:
    types = set()

    def fused(weight: Any, hidden: Any, labels: Any, bias: Any = None) -> torch.Tensor:
        types.update(value.dtype for value in (weight, hidden, bias))
        return hidden.sum()

    kernels = SimpleNamespace(LigerFusedLinearCrossEntropyLoss=lambda: fused)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", kernels)
    run, _ = child.begin(job("liger", BERT))
    run.forward(run.data[0])
    assert types == {torch.bfloat16}


def test_the_commit_of_a_staged_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSCALE_COMMIT", "0123456789ab+")
    assert machine.commit() == "0123456789ab+"
