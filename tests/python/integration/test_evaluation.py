# SPDX-License-Identifier: Apache-2.0
"""Forwards without gradients: predicted to the byte, said before one runs that does not fit, untouched."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import memscale
from memscale import AsyncOffloadConfig
from memscale.benchmarks.memory import cpu_peaks
from memscale.core.evaluation import Evaluations
from memscale.errors import ProfileError
from memscale.optim.release.gradient import ReleasedGradient, bytes_here
from memscale.plans.budget import budget_for
from memscale.plans.plan import Prediction

transformers = pytest.importorskip("transformers")

WIDTH = 256


def stack(depth: int = 4, width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    parts = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*parts, nn.Linear(width, 8))


def gpt2(**fields: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=120, n_embd=32, n_layer=2, n_head=2, n_positions=256, bos_token_id=1, eos_token_id=None,
        pad_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **fields,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def t5() -> Any:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=120, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(100, 64), nn.LSTM(64, 128, 2, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.lstm(self.embed(ids))[0]  # type: ignore[no-any-return]


class Asking(nn.Module):
    """Cannot be traced without data."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return x * 2 if x.sum() > 0 else x


def ids(rows: int = 2, length: int = 32) -> Tensor:
    return torch.randint(2, 100, (rows, length), generator=torch.Generator().manual_seed(1))


def images() -> Tensor:
    return torch.randn(4, 3, 32, 32)


def convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.Flatten()
    )


def encoder() -> nn.TransformerEncoder:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2)


def evaluations(model: nn.Module) -> Evaluations:
    executor: Any = memscale.executor_of(model)
    found: Evaluations = executor.evaluations
    return found


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [line for line in lines if "without gradients" in line]


def trained(model: nn.Module, sample: tuple[Tensor, ...]) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        output = model.train()(*sample)
        (output if isinstance(output, Tensor) else output[0]).float().square().mean().backward()
        optimizer.step()
    return optimizer


# ---- predicted -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trains", [False, True], ids=["alone", "in training"])
@pytest.mark.parametrize(
    ("build", "sample"),
    [
        (stack, lambda: torch.randn(64, WIDTH)),
        (convolutions, images),
        (Recurrent, ids),
        (encoder, lambda: torch.randn(4, 16, 64)),
        (gpt2, ids),
    ],
    ids=["stack", "convolutions", "lstm", "fused encoder layers", "gpt2"],
)
def test_the_predicted_peak_is_the_measured_one(
    build: Callable[[], nn.Module], sample: Callable[[], Tensor], trains: bool
) -> None:
    made: list[Any] = []

    def run(mark: Callable[[], None]) -> None:
        model, batch = build(), sample()
        optimizer = trained(model, (batch,)) if trains else None
        model.eval()
        with torch.no_grad():
            model(batch)
            mark()
            model(batch)
        made.extend((model, batch, optimizer))

    measured = cpu_peaks(run).allocated_bytes
    model, batch, optimizer = made
    prediction = memscale.predict(model, optimizer, sample_input=batch, training=False)
    assert prediction.allocated_peak_bytes == measured
    low, high = prediction.error_band_bytes
    assert low <= measured < high
    assert set(prediction.timeline.phase_peaks()) == {"forward"}


def test_a_step_of_generation_is_predicted_and_its_cache_stays_as_it_is() -> None:
    found: list[Prediction] = []

    def run(mark: Callable[[], None]) -> None:
        model, new = gpt2().eval(), ids(2, 1)
        with torch.no_grad():
            cache = model(ids(), use_cache=True).past_key_values
            before = [layer.keys.clone() for layer in cache.layers]
            sample = {"input_ids": new, "past_key_values": cache}
            found.append(memscale.predict(model, sample_input=sample, training=False))
            assert all(torch.equal(layer.keys, was) for layer, was in zip(cache.layers, before, strict=True))
            before.clear()
            mark()
            model(**sample)

    measured = cpu_peaks(run).allocated_bytes
    assert found[0].allocated_peak_bytes == measured


def test_nothing_of_training_counts_but_what_is_there() -> None:
    model, batch = stack(), torch.randn(32, WIDTH)
    alone = memscale.predict(model, sample_input=batch, training=False)
    assert not {"gradient", "optimizer_state"} & alone.by_category.keys()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    beside = memscale.predict(
        model, torch.optim.AdamW(model.parameters()), sample_input=batch, training=False
    )
    state = beside.by_category["optimizer_state"]
    assert 2 * weights <= state < 2.01 * weights
    assert beside.allocated_peak_bytes == alone.allocated_peak_bytes + state
    assert all(part.training for part in model.modules())


def test_a_prediction_of_a_forward_is_one_like_others() -> None:
    made = memscale.predict(
        stack(), sample_input=torch.randn(32, WIDTH), training=False, memory_budget="4MiB", device="RTX 3090"
    )
    assert not made.training
    assert not made.fits
    assert Prediction.from_json(made.to_json()) == made
    assert "a forward without gradients" in made.explain()
    assert "checkpoint" not in made.explain()
    roomy = memscale.predict(
        stack(), sample_input=torch.randn(32, WIDTH), training=False, memory_budget="16MiB"
    )
    most = roomy.largest_batch()
    assert f"largest batch: {most} (this sample: 32)" in roomy.advise()
    assert most > 32
    with_gradients = memscale.predict(stack(), sample_input=torch.randn(32, WIDTH), memory_budget="16MiB")
    assert most > with_gradients.largest_batch()


def test_a_model_that_asks_for_values_is_run() -> None:
    made = memscale.predict(Asking(), sample_input=torch.randn(8, WIDTH), training=False)
    assert made.method == "empirical"
    assert set(made.timeline.phase_peaks()) == {"forward"}


def test_nested_tensors_are_refused_in_words() -> None:
    mask = torch.zeros(4, 16, dtype=torch.bool)
    mask[0, 9:] = True
    sample = {"src": torch.randn(4, 16, 64), "src_key_padding_mask": mask}
    with pytest.raises(ProfileError, match="nested tensors inside"):
        memscale.predict(encoder(), sample_input=sample, training=False)


# ---- said before it runs ---------------------------------------------------------------------------------


def test_one_line_before_a_batch_runs_that_does_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    model = stack()
    memscale.wrap(model, memory_budget="8MiB")
    said: list[int] = []
    model[0].register_forward_hook(lambda *unused: said.append(len(warnings_in(caplog))))
    with torch.no_grad():
        for rows in (8, 16, 4096, 4096, 5000):
            model.eval()(torch.randn(rows, WIDTH))
    memscale.detach(model)
    (line,) = warnings_in(caplog)
    assert "[4096, 256]" in line
    assert "budget is 8.00 MiB" in line
    assert "batch" in line
    assert said == [0, 0, 1, 1, 1]


def test_small_batches_are_traced_once_whatever_their_size(caplog: pytest.LogCaptureFixture) -> None:
    model = stack()
    memscale.wrap(model, memory_budget="1GiB")
    with torch.no_grad():
        for rows in (8, 3, 40, 9, 64, 100):
            model(torch.randn(rows, WIDTH))
    assert evaluations(model).traced == 1
    assert not warnings_in(caplog)
    memscale.detach(model)


def test_an_output_that_the_loop_still_holds_counts(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(WIDTH, 16 * WIDTH)
    batch = torch.randn(512, WIDTH)
    peak = memscale.predict(model, sample_input=batch, training=False).allocated_peak_bytes
    output = 512 * 16 * WIDTH * 4
    memscale.wrap(model, memory_budget=peak + output // 2)
    with torch.no_grad():
        for _ in range(2):
            model(batch)
        assert not warnings_in(caplog)
        memscale.wrap(model, memory_budget=peak + output // 2)
        for _ in range(2):
            held = model(batch)
    assert len(warnings_in(caplog)) == 1
    memscale.detach(model)
    del held


def test_state_that_has_come_since_counts(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = stack(), torch.randn(16, WIDTH)
    alone = memscale.predict(model, sample_input=batch, training=False).allocated_peak_bytes
    memscale.wrap(model, memory_budget=alone + (1 << 20))
    with torch.no_grad():
        model(batch)
    assert not warnings_in(caplog)
    optimizer = trained(model, (batch,))
    with torch.no_grad():
        model(batch)
    memscale.detach(model)
    assert len(warnings_in(caplog)) == 1
    del optimizer


def test_beside_a_graph_that_waits_nothing_is_said() -> None:
    model, batch = stack(), torch.randn(16, WIDTH)
    memscale.wrap(model, memory_budget="1GiB")
    loss = model(batch).sum()
    with torch.no_grad():
        model(batch)
    assert evaluations(model).traced == 0
    loss.backward()
    with torch.no_grad():
        model(batch)
    assert evaluations(model).traced == 1
    memscale.detach(model)


def test_inside_a_training_forward_nothing_is_looked_at() -> None:
    class Conditioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = stack()

        def forward(self, x: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                with torch.no_grad():
                    x = x + self(x).mean()
            return self.inner(x)  # type: ignore[no-any-return]

    model, batch = Conditioned(), torch.randn(16, WIDTH)
    memscale.wrap(model, memory_budget="1GiB")
    model(batch).sum().backward()
    assert evaluations(model).traced == 0
    with torch.no_grad():
        model(batch)
    assert evaluations(model).traced == 1
    memscale.detach(model)


def test_a_model_that_cannot_be_traced_runs_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    model = Asking()
    calls: list[int] = []
    model.inner.register_forward_hook(lambda *unused: calls.append(1))
    memscale.wrap(model, memory_budget="1MiB")
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(64, WIDTH))
    assert evaluations(model).traced == 1
    assert len(calls) == 3  # the trace has not run it for real, nor called the hook
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    memscale.detach(model)


# ---- nothing is changed ----------------------------------------------------------------------------------


def run(model: Any, generate: dict[str, Any], wrapped: str | None) -> list[Tensor]:
    """Trains with generation and evaluation in between; everything that came of it."""
    torch.manual_seed(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if wrapped is not None:
        memscale.wrap(model, memory_budget=wrapped)
    made: list[Tensor] = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model.train()(input_ids=ids(), labels=ids()).loss
        loss.backward()
        optimizer.step()
        made.append(loss.detach())
        model.eval()
        made.append(model.generate(ids(2, 6), **generate))
        with torch.no_grad():
            made.append(model(input_ids=ids(), labels=ids()).loss)
    return [*made, *(parameter.detach().clone() for parameter in model.parameters())]


@pytest.mark.long
@pytest.mark.parametrize(
    "generate",
    [
        {"max_new_tokens": 40, "do_sample": False},
        {"max_new_tokens": 20, "do_sample": True, "num_return_sequences": 2},
        {"max_new_tokens": 12, "num_beams": 3, "do_sample": False},
        {"max_new_tokens": 20, "do_sample": False, "use_cache": False},
    ],
    ids=["greedy", "sampled", "beams", "no cache"],
)
@pytest.mark.parametrize("build", [gpt2, t5], ids=["gpt2", "t5"])
def test_generation_in_the_middle_of_training(build: Callable[[], Any], generate: dict[str, Any]) -> None:
    plain = run(build(), generate, None)
    model = build()
    wrapped = run(model, generate, "1GiB")
    assert all(torch.equal(one, other) for one, other in zip(plain, wrapped, strict=True))
    assert 1 <= evaluations(model).traced <= 5
    memscale.detach(model)


def test_a_text_that_grows_to_the_budget_is_traced_a_few_times(caplog: pytest.LogCaptureFixture) -> None:
    model = gpt2().eval()
    plain = model.generate(ids(4, 6), max_new_tokens=200, do_sample=False)
    short = memscale.predict(model, sample_input=ids(4, 6), training=False).device_used_peak_bytes
    memscale.wrap(model, memory_budget=budget_for(short + (200 << 10)))
    with torch.inference_mode():
        wrapped = model.generate(ids(4, 6), max_new_tokens=200, do_sample=False)
    assert torch.equal(plain, wrapped)
    assert len(warnings_in(caplog)) == 1
    assert evaluations(model).traced <= 16
    memscale.detach(model)


def test_what_counts_calls_or_names_texts_is_no_other_kind() -> None:
    class Told(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, step: int, text: str) -> Tensor:
            return self.inner(x)  # type: ignore[no-any-return]

    model = Told()
    memscale.wrap(model, memory_budget="64MiB")
    with torch.no_grad():
        for step in range(30):
            model(torch.randn(4, WIDTH), step, f"text {step}")
    assert evaluations(model).traced == 9
    memscale.detach(model)


def test_nothing_of_a_look_is_left() -> None:
    model = gpt2().eval()
    attributes = {name: dict(part.__dict__) for name, part in model.named_modules()}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    memscale.wrap(model, memory_budget="1GiB")
    state = torch.get_rng_state()
    with torch.no_grad():
        output = model(ids(), use_cache=True)
        model(ids(2, 1), past_key_values=output.past_key_values)
    assert evaluations(model).traced == 2
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(isinstance(layer.keys, FakeTensor) for layer in output.past_key_values.layers)
    memscale.detach(model)
    gc.collect()
    assert not [item for item in gc.get_objects() if type(item) is FakeTensor]
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    for name, part in model.named_modules():
        assert part.__dict__.keys() == attributes[name].keys()


def test_gradients_that_have_left_stay_where_they_are(tmp_path: Path) -> None:
    model, batch = stack(10, 512), torch.randn(16, 512)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = AsyncOffloadConfig(tiers=("file",), directory=str(tmp_path))
    memscale.wrap(model, memory_budget="20MiB", async_offload=True, async_config=engine, optimizer=optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    offloaded = [item for item in gradients if isinstance(item, ReleasedGradient)]
    assert offloaded
    here = sum(map(bytes_here, gradients))
    with torch.no_grad():
        model(batch)
    assert evaluations(model).traced == 1
    assert sum(map(bytes_here, gradients)) == here < sum(parameter.nbytes for parameter in model.parameters())
    memscale.detach(model)


@pytest.mark.parametrize("training", [None, "no", 0])
def test_training_is_true_or_false(training: Any) -> None:
    with pytest.raises(TypeError, match=r"training is .*; allowed: True or False"):
        memscale.predict(nn.Linear(8, 8), sample_input=torch.ones(4, 8), training=training)
