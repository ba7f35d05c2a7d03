# SPDX-License-Identifier: Apache-2.0
"""Steps that run out of memory: repeated with every bit, or refused, never half-done."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from calls import beside
from calls import failing as raising
from earlier_models import forget_earlier_models
from memscale.errors import MemScaleError
from memscale.observability.tensor_peak import TensorPeak
from memscale.survival.memory_now import memory_now
from memscale.torchkit import backward_calls
from oom_samples import HOST_TEXT, SAMPLES, STEPPERS, FailingAt, dense, run

COMBINATIONS = [
    ("dense", 1, "fp32", "adamw"),
    ("dense", 2, "bf16", "foreach"),
    ("images", 2, "scaler", "fused"),
    ("words", 1, "bf16", "adamw"),
    ("words", 4, "fp32", "sgd"),
    ("recurrent", 1, "fp32", "fused"),
]

OUTSIDE = "backward of the loop itself, or its scaler, has failed before the model's"


def refuse_to_allocate(*unused: Any) -> None:
    raise RuntimeError(HOST_TEXT.format(1 << 20))


class TestEveryBit:
    @pytest.mark.long
    @pytest.mark.parametrize(("name", "accumulate", "precision", "optimizer"), COMBINATIONS)
    def test_an_operation_fails(self, name: str, accumulate: int, precision: str, optimizer: str) -> None:
        how = (accumulate, precision, optimizer)
        plain = run(SAMPLES[name], None, *how)
        quiet = run(SAMPLES[name], FailingAt(), *how, on_oom="survive")
        assert quiet.equals(plain) and not quiet.recoveries
        survived = 0
        for at in range(1, quiet.count + 1, max(1, quiet.count // 5)):
            try:
                ran = run(SAMPLES[name], FailingAt(at), *how, on_oom="survive")
            except RuntimeError as error:  # loss.backward() makes its first gradient, the scaler its product
                assert "DefaultCPUAllocator" in str(error)
                continue
            assert ran.equals(plain) and ran.recoveries == 1
            survived += 1
        assert survived >= 4

    def test_several_fail_one_after_the_other(self) -> None:
        plain = run(SAMPLES["dense"])
        ran = run(SAMPLES["dense"], FailingAt(5, 40), on_oom="survive", memory_budget="1GiB")
        assert ran.equals(plain) and ran.recoveries == 2

    def test_loss_and_metrics_outside_of_the_model(self) -> None:
        results = []
        for fields in ({}, {"on_oom": "survive", "enable_logging": False}):
            torch.manual_seed(0)
            model = dense().body  # type: ignore[attr-defined]
            if fields:
                memscale.wrap(model, **fields)
            for failing in (FailingAt(), FailingAt(), FailingAt(5) if fields else FailingAt(), FailingAt()):
                with failing:
                    out = model(torch.randn(8, 16))
                (out.sigmoid() ** 2).sum().backward()
            results.append([*(value.grad for value in model.parameters()), *model.buffers()])
        assert memscale.executor_of(model).oom.recoveries == 1
        assert all(map(torch.equal, *results))

    def test_two_losses_and_a_graph_that_is_kept(self) -> None:
        results = []
        for fields in ({}, {"on_oom": "survive", "enable_logging": False}):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 8), nn.Tanh())
            if fields:
                memscale.wrap(model, **fields)
            for place in range(3):
                out = model(torch.randn(4, 8))
                out.sum().backward(retain_graph=True)
                with FailingAt(10) if fields and place == 1 else FailingAt():
                    (out * out).mean().backward()
            results.append([*(value.grad for value in model.parameters())])
        assert memscale.executor_of(model).oom.recoveries == 1
        assert all(map(torch.equal, *results))

    def test_an_input_that_needs_a_gradient(self, caplog: pytest.LogCaptureFixture) -> None:
        """The forward is repeated. A boundary would count an input twice that comes twice."""

        class Twice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(8, 8)

            def forward(self, one: Tensor, other: Tensor) -> Tensor:
                return self.layer(one).tanh() + other

        results = []
        for fields in ({}, {"on_oom": "survive", "enable_logging": False}):
            torch.manual_seed(0)
            model = Twice()
            if fields:
                memscale.wrap(model, **fields)
            for place in range(4):
                leaf = torch.randn(4, 8, requires_grad=True)
                with FailingAt(2) if fields and place == 2 else FailingAt():
                    loss = model(leaf, leaf).sum()
                loss.backward()
            assert leaf.grad is not None
            results.append([leaf.grad, *(value.grad for value in model.parameters())])
        assert memscale.executor_of(model).oom.recoveries == 1
        assert all(map(torch.equal, *results))
        loss = model(leaf, leaf).sum()
        with pytest.raises(RuntimeError, match="DefaultCPUAllocator"), FailingAt(5):
            loss.backward()
        assert "an input needs a gradient" in caplog.text

    def test_a_penalty_that_begins_later(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        memscale.wrap(model, on_oom="survive", enable_logging=False)
        model(torch.randn(2, 4)).sum().backward()
        penalty = sum(value.pow(2).sum() for value in model.parameters())
        loss = model(torch.randn(2, 4)).sum() + penalty
        with pytest.raises(RuntimeError, match=r'on_oom="report"'):
            loss.backward()

    def test_an_output_that_the_loop_changes_in_place(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
        memscale.wrap(model, on_oom="survive", enable_logging=False)
        model(torch.randn(2, 4)).sum().backward()
        out = model(torch.randn(2, 4))
        out.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


class TestRefused:
    @pytest.mark.parametrize("what", ["weights", "twice"])
    @pytest.mark.parametrize("from_the_start", [False, True], ids=["late", "from the start"])
    def test_backwards_that_go_past_the_boundary(self, what: str, from_the_start: bool) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        memscale.wrap(model, on_oom="survive", enable_logging=False)

        def step() -> None:
            loss = model(torch.randn(2, 4)).sum()
            if what == "weights":
                torch.autograd.grad(loss, [*model.parameters()])
            else:
                loss.backward(create_graph=True)

        if from_the_start:  # seen in the first step, so there is no boundary
            step()
            step()
            return
        model(torch.randn(2, 4)).sum().backward()
        model.zero_grad()
        loss = model(torch.randn(2, 4)).sum()
        with pytest.raises(RuntimeError, match=r'on_oom="report"'):
            step()
        assert all(value.grad is None for value in model.parameters())
        loss.backward()  # nothing has been computed

    def test_hooks_fire_once(self, caplog: pytest.LogCaptureFixture) -> None:
        calls = []
        model = dense()
        model.body[0].register_forward_hook(lambda *unused: calls.append(1))  # type: ignore[index]
        memscale.wrap(model, on_oom="survive", enable_logging=False)
        for _ in range(2):
            model(torch.randn(8, 16)).backward()
        calls.clear()
        with pytest.raises(RuntimeError, match="DefaultCPUAllocator"), FailingAt(8):
            model(torch.randn(8, 16))
        assert len(calls) == 1
        assert "'body.0' has a hook, which would fire twice" in caplog.text
        assert "survival   not possible: 'body.0' has a hook" in caplog.text

    def test_every_try_fails(self, caplog: pytest.LogCaptureFixture) -> None:
        model = dense()
        memscale.wrap(model, on_oom="survive", enable_logging=False)
        model(torch.randn(8, 16)).backward()
        model.body[4].forward = refuse_to_allocate  # type: ignore[index]
        state = torch.get_rng_state()
        before = [tensor.clone() for tensor in model.buffers()]
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
        with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
            model(x)
        assert memscale.executor_of(model).oom.recoveries <= 4
        assert "MemScale: out of memory" in caplog.text
        del model.body[4].forward  # type: ignore[index]
        torch.set_rng_state(state)
        for tensor, value in zip(model.buffers(), before, strict=True):
            tensor.copy_(value)
        model(x).backward()


class TestLeftBehind:
    def test_what_failed_is_freed(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        memscale.wrap(model, on_oom="survive", enable_logging=False)
        model(torch.randn(4, 8)).sum().backward()
        alive: list[weakref.ref[Tensor]] = []

        def note(module: nn.Module, args: Any, output: Tensor) -> None:
            alive.append(weakref.ref(output))

        out = model(torch.randn(4, 8))
        with FailingAt(9):
            out.sum().backward()
        assert memscale.executor_of(model).oom.recoveries == 1
        del out
        gc.collect()
        storages = [item for item in gc.get_objects() if isinstance(item, Tensor) and item.shape == (4, 8)]
        assert not storages and not alive and note is not None

    def test_detach_puts_everything_back(self) -> None:
        forget_earlier_models()
        backward, hook = backward_calls.run_backward, sys.excepthook
        model = dense()
        for mode in ("report", "survive"):
            memscale.wrap(model, on_oom=mode, enable_logging=False)
            assert torch.autograd._engine_run_backward is not backward
            memscale.detach(model)
            assert torch.autograd._engine_run_backward is backward
            assert torch.autograd.graph._engine_run_backward is backward
            assert sys.excepthook is hook

    def test_a_model_that_goes_takes_its_watch_with_it(self) -> None:
        forget_earlier_models()
        backward = backward_calls.run_backward
        model = dense()
        memscale.wrap(model, on_oom="survive", enable_logging=False)
        model(torch.randn(8, 16)).backward()
        assert torch.autograd._engine_run_backward is not backward
        del model
        gc.collect()
        assert torch.autograd._engine_run_backward is backward


class TestBytes:
    @pytest.mark.parametrize("on_oom", ["report", "survive"])
    def test_gradients_of_outputs_are_counted(self, on_oom: str) -> None:
        """They are held until the model's own backward is over, which has its peak where it begins."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 2000), nn.GELU(), nn.Linear(2000, 32), nn.Linear(32, 400))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch, labels = torch.randn(500, 32), torch.randint(400, (500,))
        with TensorPeak([*model.parameters(), batch, labels]) as peak:
            memscale.wrap(model, optimizer=optimizer, on_oom=on_oom, enable_logging=False, sample_input=batch)
            for _ in range(2):
                peak.mark()
                out = model(batch)
                loss = nn.functional.cross_entropy(out, labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                del out, loss
            measured, _ = peak.end()
        predicted = memscale.executor_of(model).plan.predicted.allocated_peak_bytes
        assert 0 <= predicted + labels.nbytes - measured < 0.01 * measured


class TestStep:
    @pytest.mark.parametrize("optimizer", ["adamw", "foreach", "fused", "sgd"])
    def test_state_is_made_first(self, optimizer: str) -> None:
        results = []
        for at in (0, 3):
            torch.manual_seed(0)
            model = dense()
            stepper = STEPPERS[optimizer].make([*model.parameters()])
            if at:
                memscale.wrap(model, optimizer=stepper, on_oom="survive", enable_logging=False)
            model(torch.ones(8, 16)).backward()
            if at and optimizer != "sgd":
                weights = [value.detach().clone() for value in model.parameters()]
                with pytest.raises(RuntimeError, match="DefaultCPUAllocator"), FailingAt(*range(at, 99)):
                    stepper.step()
                assert all(map(torch.equal, weights, model.parameters()))
            stepper.step()
            state = [value for entry in stepper.state.values() for value in entry.values()]
            results.append([*model.parameters(), *(value for value in state if isinstance(value, Tensor))])
        assert all(map(torch.equal, *results))

    def test_half_a_step_is_not_passed_over(self) -> None:
        model = dense()
        stepper = STEPPERS["foreach"].make([*model.parameters()])
        memscale.wrap(model, optimizer=stepper, on_oom="survive", enable_logging=False)
        for _ in range(2):
            model(torch.ones(8, 16)).backward()
            stepper.step()
        model(torch.ones(8, 16)).backward()
        with pytest.raises(RuntimeError, match="DefaultCPUAllocator"), FailingAt(10):
            stepper.step()
        with pytest.raises(MemScaleError, match="some weights may have changed"):
            model(torch.ones(8, 16))
        model(torch.ones(8, 16))  # said once


class TestReport:
    @pytest.mark.parametrize("phase", ["forward", "backward", "a forward without gradients"])
    def test_says_where_it_was(self, phase: str, caplog: pytest.LogCaptureFixture) -> None:
        model = dense()
        memscale.wrap(model, enable_logging=False)
        for _ in range(2):
            model(torch.randn(8, 16)).backward()
        with caplog.at_level(logging.ERROR, "memscale"), pytest.raises(RuntimeError, match="DefaultCPUAll"):
            if phase == "forward":
                with FailingAt(8):
                    model(torch.randn(8, 16))
            elif phase == "backward":
                loss = model(torch.randn(8, 16))
                with FailingAt(9):
                    loss.backward()
            else:
                with torch.no_grad(), FailingAt(8):
                    model(torch.randn(8, 16))
        (record,) = [item for item in caplog.records if "out of memory" in item.getMessage()]
        lines = record.getMessage().splitlines()[1:-1]
        assert 5 <= len(lines) <= 14 and f"where      {phase}" in lines[0]
        text = "\n".join(lines)
        assert (
            "asked      1.00 MiB, refused by the host's allocator" in text and "optimizer state" not in text
        )
        assert "filled by" in text and "RLIMIT_DATA" not in text and "survive" not in text

    def test_no_snapshot_without_a_card(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        model = dense()
        memscale.wrap(model, oom_snapshot=str(tmp_path), enable_logging=False)
        for _ in range(2):
            model(torch.randn(8, 16)).backward()
        with pytest.raises(RuntimeError, match="DefaultCPUAllocator"), FailingAt(8):
            model(torch.randn(8, 16))
        assert "snapshot   none: PyTorch records allocations of cards alone" in caplog.text
        assert not [*tmp_path.iterdir()]

    def test_with_gradients_that_are_spent(self, caplog: pytest.LogCaptureFixture) -> None:
        model = dense()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        memscale.wrap(model, optimizer=optimizer, step_in_backward=True, enable_logging=False)
        for _ in range(2):
            model(torch.randn(8, 16)).backward()
            optimizer.step()
        loss = model(torch.randn(8, 16))
        with pytest.raises(RuntimeError, match="DefaultCPUAllocator"), FailingAt(20):
            loss.backward()
        assert "MemScale: out of memory" in caplog.text

    def test_a_report_that_fails_does_not_hide_the_error(self, caplog: pytest.LogCaptureFixture) -> None:
        model = dense()
        memscale.wrap(model, enable_logging=False)
        for _ in range(2):
            model(torch.randn(8, 16)).backward()
        fails = beside({memory_now: raising(ZeroDivisionError)})
        with fails, pytest.raises(RuntimeError, match="DefaultCPUAllocator"), FailingAt(8):
            model(torch.randn(8, 16))
        assert "ZeroDivisionError" in caplog.text

    def test_other_errors_are_none_of_its_business(self, caplog: pytest.LogCaptureFixture) -> None:
        model = dense()
        memscale.wrap(model, enable_logging=False)
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            model(torch.randn(8, 3))
        assert "out of memory" not in caplog.text

    def test_the_loop_itself(self) -> None:
        program = """
            import torch, memscale
            model = torch.nn.Linear(4, 4)
            memscale.wrap(model, sample_input=torch.ones(2, 4))
            model(torch.ones(2, 4)).sum().backward()
            torch.empty(1 << 60, dtype=torch.uint8)
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 1 and "where      the loop at <string>" not in done.stderr
        assert "where      the loop" in done.stderr and "1024.00 PiB" in done.stderr, done.stderr
        assert done.stderr.index("out of memory") < done.stderr.index("Traceback")


class TestTrainer:
    def test_a_step_of_a_trainer(self, tmp_path: Path) -> None:
        from trainer_samples import trained, weights

        class Failing:
            """Its third training step fails once, in forward or in backward."""

            def __init__(self, at: int) -> None:
                self.at, self.steps = at, 0

            def __call__(self, trainer: Any) -> None:
                step = trainer.training_step

                def failing(*args: Any, **kwargs: Any) -> Any:
                    self.steps += 1
                    with FailingAt(self.at) if self.steps == 3 else FailingAt():
                        return step(*args, **kwargs)

                trainer.training_step = failing

        plain = trained(tmp_path / "plain", None)
        config = memscale.Config(on_oom="survive", enable_logging=False)
        for at in (100, 400):  # planning has its own before
            survived = trained(tmp_path / str(at), config, prepare=Failing(at))
            assert survived.executor.oom.recoveries == 1
            assert survived.losses == plain.losses
            pairs = zip(weights(plain.model), weights(survived.model), strict=True)
            assert all(torch.equal(mine, theirs) for (_, mine), (_, theirs) in pairs)

    def test_steps_of_lightning_are_refused(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        from lightning_samples import fitted
        from memscale.integrations.lightning import MemScaleCallback

        fitted(tmp_path, [MemScaleCallback(on_oom="survive", enable_logging=False)])
        assert "a Lightning step logs, and would log twice" in caplog.text


LIMITED = """
    import resource, sys, torch, memscale
    from torch import nn

    def limit(more):
        with open("/proc/self/status") as file:
            now = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (now + more, resource.getrlimit(resource.RLIMIT_DATA)[1]))

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [layer for _ in range(12) for layer in (nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1))]
    model = nn.Sequential(*layers, nn.Linear(256, 1))
    for value in model.parameters():
        value.grad = torch.zeros_like(value)
    model(torch.randn(64, 256)).sum().backward()
    if sys.argv[1] == "survive":
        memscale.wrap(model, on_oom="survive", memory_budget="4GiB", sample_input=torch.randn(24000, 256))
    x = torch.randn(24000, 256, generator=torch.Generator().manual_seed(2))
    torch.manual_seed(1)
    if sys.argv[1] != "free":
        limit(int(sys.argv[2]))
    try:
        model(x).sum().backward()
    except RuntimeError as error:
        print("failed", "DefaultCPUAllocator" in str(error))
    else:
        print(sum(float(value.grad.double().sum()) for value in model.parameters()).hex())
"""


class TestRealLimit:
    @pytest.mark.long
    def test_a_step_that_plain_cannot_finish(self) -> None:
        """What is saved takes 24,000 × 256 × 4 bytes × (3 × 12); a checkpointed step a quarter of that."""
        limit = 24_000 * 256 * 4 * 22

        def ran(mode: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-c", textwrap.dedent(LIMITED), mode, str(limit)]
            return subprocess.run(command, capture_output=True, text=True, check=False)

        free, plain, survived = ran("free"), ran("plain"), ran("survive")
        assert plain.stdout == "failed True\n", plain.stderr
        assert survived.stdout == free.stdout, survived.stderr
        assert "a step would take more memory than there is: a tighter plan" in survived.stderr
