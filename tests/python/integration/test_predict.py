# SPDX-License-Identifier: Apache-2.0
"""`memscale.predict`: what it promises of every model, device, plan and sample."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import memscale
from memscale.core.prediction_build import grouped
from memscale.core.scaling import scaled, size_of
from memscale.errors import ProfileError
from memscale.plans.plan import Holder, Prediction

WIDTH, VOCABULARY = 32, 64


class Block(nn.Module):
    """Two linear layers, a norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """The block's output."""
        wide = torch.tanh(self.up(self.norm(hidden)))  # the line that fills the memory
        return hidden + nn.functional.dropout(self.down(wide), 0.1, self.training)


class Model(nn.Module):
    """Token ids to a loss."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        """The loss, or logits without labels."""
        hidden = self.embed(ids) * self.scale
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def sample(batch: int = 8, sequence: int = 16) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (batch, sequence))
    return {"ids": ids, "labels": ids.clone()}


def predict(device: str = "cpu", budget: Any = "1GiB", **kwargs: Any) -> Prediction:
    torch.manual_seed(0)
    config = kwargs.pop("config", memscale.Config(memory_budget=budget))
    model = kwargs.pop("model", None) or Model()
    return memscale.predict(
        model, config=config, sample_input=kwargs.pop("sample", sample()), device=device, **kwargs
    )


TIGHT = 1_200_000
"""Above the smallest plan of `Model`, below its plain step."""


class TestNumbers:
    @pytest.mark.parametrize("device", ["cpu", "RTX 3090", "H100", "24GiB"])
    @pytest.mark.parametrize("budget", ["1GiB", "600MiB", TIGHT])
    def test_categories_add_up_to_the_byte(self, device: str, budget: Any) -> None:
        prediction = predict(device, budget)
        for step in (prediction, prediction.plain):
            assert step is not None
            assert sum(step.by_category.values()) == step.device_used_peak_bytes
            assert step.device_used_peak_bytes == step.reserved_peak_bytes + step.context_bytes
            assert step.allocated_peak_bytes <= step.reserved_peak_bytes
            low, high = step.error_band_bytes
            assert low <= step.device_used_peak_bytes <= high

    def test_a_host_has_neither_context_nor_fragmentation(self) -> None:
        prediction = predict()
        assert prediction.context_bytes == 0
        assert not {"context", "fragmentation", "workspace"} & set(prediction.by_category)

    def test_a_card_has_both_and_workspaces(self) -> None:
        prediction = predict("H100", "1GiB")
        assert prediction.by_category["context"] == prediction.context_bytes > 0
        assert prediction.by_category["fragmentation"] > 0
        assert prediction.by_category["workspace"] >= 2 * (32 << 20)

    def test_modules_add_up_and_children_are_not_counted_twice(self) -> None:
        prediction = predict("RTX 3090", "1GiB")
        live = sum(
            size for name, size in prediction.by_category.items() if name not in ("context", "fragmentation")
        )
        assert sum(prediction.by_module.values()) == live
        rolled = prediction.by_module_rolled_up
        assert rolled[""] == live
        inside = [name for name in prediction.by_module if name == "blocks.0" or name.startswith("blocks.0.")]
        assert rolled["blocks.0"] == sum(prediction.by_module[name] for name in inside)

    def test_a_modules_state_is_its_own(self) -> None:
        own = predict(model=Model(depth=1)).by_module["blocks.0.up"]
        state = 4 * (WIDTH + 1) * 4 * WIDTH  # weight and bias, float32
        assert own >= 3 * state  # with both moments; the rest are gradients and activations

    def test_more_batch_takes_more_and_a_budget_never_raises_the_peak(self) -> None:
        small, large = predict(sample=sample(4)), predict(sample=sample(16))
        assert small.device_used_peak_bytes < large.device_used_peak_bytes
        tight = predict(budget=TIGHT)
        assert tight.plan is not None and tight.plan.active
        assert tight.plain is not None and tight.device_used_peak_bytes < tight.plain.device_used_peak_bytes
        assert tight.device_used_peak_bytes <= TIGHT and tight.fits

    def test_it_is_the_prediction_of_the_plan(self) -> None:
        torch.manual_seed(0)
        config, batch = memscale.Config(memory_budget=TIGHT), sample()
        prediction = memscale.predict(Model(), config=config, sample_input=batch)
        plan = memscale.plan(Model(), config=config, sample_input=batch)
        assert prediction.plan is not None and prediction.plan.digest == plan.digest
        assert prediction.device_used_peak_bytes == plan.predicted.device_used_peak_bytes
        assert prediction.smallest_peak_bytes == plan.smallest_peak_bytes

    def test_the_optimizer_counts(self) -> None:
        model = Model()
        plain = torch.optim.SGD(model.parameters(), 0.1)
        assert "optimizer_state" not in predict(model=model, optimizer=plain).by_category
        parameters = predict(model=model).by_category["parameter"]
        assert predict(model=model).by_category["optimizer_state"] >= 2 * parameters

    @pytest.mark.parametrize("where", ["cpu", "meta"])
    def test_our_state_counts_on_this_machine_and_on_cards(self, where: str) -> None:
        model = Model().to(where)
        optimizer = torch.optim.AdamW(model.parameters())
        config = memscale.Config(memory_budget="1GiB", use_8bit_optimizer=True, eight_bit_backend="memscale")

        def state(device: str | None) -> int:
            prediction = memscale.predict(model, optimizer, config, sample(), device)
            return prediction.by_category["optimizer_state"]

        elements = sum(parameter.numel() for parameter in model.parameters())
        assert 2 * elements <= state("cpu") == state(None) < 3 * elements
        assert 2 * elements <= state("RTX 3090") < 3 * elements
        assert type(optimizer) is torch.optim.AdamW and not optimizer.state

    def test_the_budget_is_a_share_of_the_named_card(self) -> None:
        prediction = predict("RTX 3090", config=memscale.Config(target_gpu_utilization=0.5))
        assert prediction.budget_bytes == prediction.device_bytes // 2
        assert prediction.device == "NVIDIA GeForce RTX 3090"


class TestWhere:
    def test_the_peak_is_named(self) -> None:
        peak = predict(model=Model(depth=8), sample=sample(64)).peak
        assert peak.phase in ("forward", "backward", "optimizer") and peak.operation

    def test_a_peak_in_backward_leads_back_to_the_line_of_forward(self) -> None:
        class Wide(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(8, 4096)

            def forward(self, x: Tensor) -> Tensor:
                return torch.tanh(self.layer(x)).sum()

        model = Wide()
        optimizer = torch.optim.SGD(model.parameters())
        prediction = memscale.predict(model, optimizer, sample_input=torch.ones(512, 8))
        assert prediction.peak.phase == "backward"
        wide = [holder for holder in prediction.holders if holder.bytes == 512 * 4096 * 4]
        made_in_backward = [holder for holder in wide if holder.operation.endswith("backward")]
        assert made_in_backward
        for holder in made_in_backward:
            assert holder.source.rpartition(":")[0].endswith("test_predict.py")

    def test_holders_are_sorted_named_and_shaped(self) -> None:
        prediction = predict(sample=sample(64))
        sizes = [holder.bytes for holder in prediction.holders]
        assert sizes == sorted(sizes, reverse=True)
        wide = [holder for holder in prediction.holders if holder.operation == "tanh"]
        assert wide and all(holder.shape == (64, 16, 4 * WIDTH) for holder in wide)
        assert wide[0].dtype == "float32" and wide[0].module.startswith("blocks.")
        file, _, number = wide[0].source.rpartition(":")
        assert file.endswith("test_predict.py")
        assert "tanh" in Path(__file__).read_text().splitlines()[int(number) - 1]
        assert wide[0].bytes == 64 * 16 * 4 * WIDTH * 4

    def test_parameters_gradients_and_state_have_names(self) -> None:
        holders = predict(model=Model(depth=1), sample=sample(1, 1)).holders
        named = {(holder.category, holder.name) for holder in holders}
        for category in ("parameter", "gradient", "optimizer_state"):
            assert (category, "blocks.0.up.weight") in named

    def test_groups_put_layers_together(self) -> None:
        prediction = predict()
        group = next(group for group in prediction.groups if group.name == "blocks.*.up.weight")
        assert group.count >= 4 and group.module == "blocks.*.up"

    def test_grouping_loses_nothing(self) -> None:
        holders = [Holder(5, "activation", f"h.{i % 3}.x", "mm", "a.py:1", (5,), "int8") for i in range(7)]
        holders.append(Holder(9, "activation", "h.x", "mm", "a.py:1", (9,), "int8"))
        groups = grouped(holders)
        assert [(group.bytes, group.count, group.module) for group in groups] == [
            (35, 7, "h.*.x"),
            (9, 1, "h.x"),
        ]

    def test_a_second_run_is_called_one(self) -> None:
        prediction = predict(budget=TIGHT, model=Model(depth=6))
        assert any(holder.recompute for holder in prediction.holders) or prediction.peak.phase == "forward"

    def test_no_path_of_this_machine(self) -> None:
        text = predict().to_json()
        assert "/usr" not in text and "/home" not in text and "site-packages" not in text
        assert '"/' not in text


class TestModels:
    def test_a_model_on_meta_is_predicted_as_one_with_weights(self) -> None:
        real = predict("RTX 3090", "600MiB")
        with torch.device("meta"):
            shape_only = Model()
        assert predict("RTX 3090", "600MiB", model=shape_only) == real
        assert all(parameter.is_meta for parameter in shape_only.parameters())

    def test_one_of_fake_tensors_too(self) -> None:
        with FakeTensorMode():
            fake = Model()
        assert predict("RTX 3090", "600MiB", model=fake) == predict("RTX 3090", "600MiB")

    def test_a_batch_without_data(self) -> None:
        batch = {name: tensor.to("meta") for name, tensor in sample().items()}
        assert predict(sample=batch).device_used_peak_bytes == predict().device_used_peak_bytes

    def test_tied_weights_on_meta_count_once(self) -> None:
        with torch.device("meta"):
            model = Model()
            model.head.weight = model.embed.weight
        tied = predict(model=model).by_category["parameter"]
        assert predict().by_category["parameter"] - tied == VOCABULARY * WIDTH * 4

    def test_a_wrapped_model_is_looked_at_bare(self) -> None:
        config, batch = memscale.Config(memory_budget=TIGHT), sample()
        model = Model()
        before = memscale.predict(model, config=config, sample_input=batch)
        memscale.wrap(model, config.replace(enable_logging=False), batch)
        executor = memscale.executor_of(model)
        plan = executor.plan
        assert memscale.predict(model, config=config, sample_input=batch) == before
        assert executor.plan is plan and plan.active
        memscale.detach(model)

    def test_nothing_of_the_model_changes(self) -> None:
        model = Model()
        model.blocks[0].register_forward_hook(lambda *unused: None)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.train()
        hooks = [
            (len(m._forward_hooks), len(m._backward_hooks), "forward" in m.__dict__) for m in model.modules()
        ]
        torch.manual_seed(7)
        random.seed(7)
        generators = torch.get_rng_state(), random.getstate()
        memscale.predict(model, sample_input=sample_without_seed(), device="RTX 3090")
        assert torch.equal(torch.get_rng_state(), generators[0]) and random.getstate() == generators[1]
        assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
        assert all(
            parameter.grad is None and not parameter._backward_hooks for parameter in model.parameters()
        )
        assert hooks == [
            (len(m._forward_hooks), len(m._backward_hooks), "forward" in m.__dict__) for m in model.modules()
        ]
        assert model.training

    def test_no_cuda_is_initialised(self) -> None:
        predict("H100")
        assert not torch.cuda.is_initialized()


def hooks_of(model: nn.Module) -> list[tuple[int, int, bool]]:
    return [
        (len(module._forward_hooks), len(module._backward_hooks), "forward" in module.__dict__)
        for module in model.modules()
    ]


def sample_without_seed() -> dict[str, Tensor]:
    ids = torch.arange(8 * 16).reshape(8, 16) % VOCABULARY
    return {"ids": ids, "labels": ids.clone()}


class Undecided(nn.Module):
    """Goes another way by a computed value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """One of two ways."""
        y = self.layer(x)
        return y if y.sum() > 0 else 2 * y


class TestErrors:
    def test_a_model_that_needs_data_and_has_none(self) -> None:
        with torch.device("meta"):
            model = Undecided()
        with pytest.raises(ProfileError, match="cannot be traced without data"):
            memscale.predict(model, sample_input=torch.ones(4, 8), device="RTX 3090")

    def test_with_data_a_real_step_is_recorded(self) -> None:
        prediction = memscale.predict(Undecided(), sample_input=torch.ones(4, 8))
        assert prediction.method == "empirical" and "fake tensors" in prediction.notes[0]
        assert "empirical" in prediction.explain()

    def test_samples(self) -> None:
        with pytest.raises(TypeError, match="needs sample_input"):
            memscale.predict(Model())
        with pytest.raises(TypeError, match="sample_input is a int"):
            memscale.predict(Model(), sample_input=3)
        with pytest.raises(TypeError, match="nothing"):
            memscale.predict(Model(), sample_input={"nothing": torch.ones(2)})

    def test_devices_and_models(self) -> None:
        with pytest.raises(ValueError, match="closest"):
            predict("RTX 9090")
        with pytest.raises(TypeError, match="device is a float"):
            predict(1.5)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="target is a str"):
            memscale.predict("model", sample_input=torch.ones(1))  # type: ignore[arg-type]


class TestData:
    @pytest.mark.parametrize("budget", ["1GiB", TIGHT])
    def test_json_both_ways(self, budget: Any) -> None:
        prediction = predict("cpu", budget)
        again = Prediction.from_json(prediction.to_json(indent=1))
        assert again == prediction
        assert json.loads(prediction.to_json())["version"] == 1

    def test_what_is_no_prediction(self) -> None:
        with pytest.raises(ValueError, match="version"):
            Prediction.from_json('{"version": 99}')
        with pytest.raises(ValueError, match="not a prediction"):
            Prediction.from_json('{"version": 1, "fits": true}')
        data = predict().to_dict()
        with pytest.raises(ValueError, match="unknown fields"):
            Prediction.from_dict({**data, "extra": 1})

    def test_a_read_prediction_cannot_search(self) -> None:
        again = Prediction.from_json(predict().to_json())
        with pytest.raises(ValueError, match="largest batch"):
            again.largest_batch()
        assert again.advise() == again.advice

    def test_explain_says_it_all(self) -> None:
        prediction = predict("RTX 3090", config=memscale.Config())
        text = prediction.explain()
        for word in ("fits:", "RTX 3090", "context", "optimizer_state", "blocks.*.up", "advice", "phases"):
            assert word in text, word
        assert len(text.splitlines()) < 60
        assert "DOES NOT FIT" in predict(budget=1000).explain()
        assert (
            repr(prediction) == str(prediction) and len(repr(prediction)) < 120 and "fits" in repr(prediction)
        )


class TestWhatWouldFit:
    def test_advice_names_the_budget_that_would_do(self) -> None:
        prediction = predict(budget=100_000)
        assert not prediction.fits and "raise the budget" in prediction.advice[0]
        needed = int(prediction.advice[0].rpartition("(")[2].split()[0])
        assert predict(budget=needed).fits
        assert not predict(budget=needed - 1).fits

    @pytest.mark.parametrize("frozen", [False, True])
    def test_only_what_is_trained_could_be_trained_with_less(self, frozen: bool) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Tanh()).requires_grad_(not frozen)
        advice = "; ".join(predict(budget=1 << 19, model=model, sample=torch.ones(2, 512)).advice)
        assert "a smaller batch would not do: weights" in advice and " alone take " in advice
        assert ("fewer trainable weights" in advice) != frozen
        assert "alone take 0 B" not in advice

    @pytest.mark.parametrize("fused", [False, True], ids=["peak in the step", "peak in backward"])
    def test_a_batch_is_advised_only_where_one_would_fit(self, fused: bool) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 512))
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        sizes = torch.ones(2048, 512), torch.ones(1, 512)

        def asked(budget: int, rows: torch.Tensor) -> memscale.Prediction:
            config = memscale.Config(memory_budget=budget, enable_logging=False)
            return memscale.predict(model, optimizer, config, sample_input=rows)

        least = asked(1, sizes[1]).smallest_peak_bytes
        for budget in (least * 9 // 10, least * 3 // 2):
            advice = "; ".join(asked(budget, sizes[0]).advice)
            said = re.search(r"of about (\d+) % of this one", advice)
            assert (said is not None) == asked(budget, sizes[1]).fits, advice
            if said is not None:
                assert asked(budget, sizes[0][: 2048 * int(said[1]) // 100]).fits
            assert "8-bit optimizer state" in advice
            assert advice.index("8-bit") < advice.find("a smaller batch would not do") or said is not None

    def test_a_budget_below_the_reserve_is_not_blamed_on_weights(self) -> None:
        advice = "; ".join(predict(budget=1, model=torch.nn.Tanh(), sample=torch.ones(64, 512)).advice)
        assert "a smaller batch would not do: a plan leaves 256.00 KiB of a budget free" in advice
        assert "weights" not in advice and "optimizer" not in advice

    @pytest.mark.parametrize("with_plan", [False, True])
    @pytest.mark.parametrize("what", ["batch", "sequence"])
    def test_the_largest_is_the_largest(self, what: str, with_plan: bool) -> None:
        budget = 1_500_000
        prediction = predict(budget=budget)
        answer = getattr(prediction, f"largest_{what}")(with_plan)
        assert answer > 0

        def fits(size: int) -> bool:
            step = predict(budget=budget, sample=sample(**{what: size}))
            return step.fits if with_plan else step.plain is not None and step.plain.fits

        assert fits(answer) and not fits(answer + 1)
        assert prediction.scaling is not None and prediction.scaling.traces <= 10
        traces = prediction.scaling.traces
        getattr(prediction, f"largest_{what}")(with_plan)
        assert prediction.scaling.traces == traces  # kept

    def test_a_plan_takes_a_larger_batch(self) -> None:
        prediction = predict(budget=1_500_000)
        assert prediction.largest_batch() > prediction.largest_batch(with_plan=False)

    def test_where_not_even_one_fits(self) -> None:
        assert predict(budget=10_000).largest_batch() == 0

    def test_a_callable_is_asked(self) -> None:
        asked = []

        def make(batch: int = 8, sequence: int = 16) -> dict[str, Tensor]:
            asked.append((batch, sequence))
            return sample(batch, sequence)

        prediction = predict(budget=1_500_000, sample=make)
        assert prediction.largest_batch(False) == predict(budget=1_500_000).largest_batch(False)
        assert len(asked) > 1 and all(sequence == 16 for _, sequence in asked)

    def test_learned_positions_end_a_sequence(self) -> None:
        model = Model()
        model.config = type("Config", (), {"max_position_embeddings": 24})()  # type: ignore[assignment]
        assert predict(budget="1GiB", model=model).largest_sequence() == 24

    def test_full_advice(self) -> None:
        prediction = predict(budget=1_500_000)
        lines = prediction.advise()
        assert any(line.startswith("largest batch: ") for line in lines)
        assert any(line.startswith("largest sequence: ") for line in lines)
        text = prediction.explain(full=True)
        assert "with all below" in text and all(line in text for line in lines)

    def test_sizes_that_cannot_be_told(self) -> None:
        odd = {"ids": torch.ones(4, 8, dtype=torch.long), "labels": torch.ones(3, 8, dtype=torch.long)}
        with pytest.raises(ValueError, match="batch cannot be derived"):
            size_of(odd, ((), odd), "batch")
        with pytest.raises(ValueError, match="sequence cannot be derived"):
            size_of(torch.ones(4, 8), ((torch.ones(4, 8),), {}), "sequence")

    def test_scaled_samples(self) -> None:
        ids = torch.arange(6).reshape(2, 3)
        mask = torch.ones(2, 1, 3, 3, dtype=torch.bool)
        hidden = torch.ones(2, 3, 5)
        batch = ((ids, mask), {"hidden": hidden, "flag": True})
        (more, wider), rest = scaled(batch, "batch", 5)
        assert more.tolist() == [[0, 1, 2], [3, 4, 5]] * 2 + [[0, 1, 2]]
        assert wider.shape == (5, 1, 3, 3) and rest["hidden"].shape == (5, 3, 5) and rest["hidden"].is_meta
        (longer, square), rest = scaled(batch, "sequence", 4)
        assert longer.tolist() == [[0, 1, 2, 0], [3, 4, 5, 3]]
        assert square.shape == (2, 1, 4, 4) and rest["hidden"].shape == (2, 4, 5) and rest["flag"] is True


class Sometimes(nn.Module):
    """One of two layers gets a gradient; the state of the other one takes a MiB and more."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(256, 256), nn.Linear(256, 1024)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x).square().mean()  # type: ignore[no-any-return]


def test_state_that_no_gradient_makes_is_in_the_error_band() -> None:
    model, x = Sometimes(), torch.ones(4, 256)
    optimizer = torch.optim.AdamW(model.parameters())

    def low_and_notes() -> tuple[int, str]:
        step = memscale.predict(model, optimizer, sample_input=x, device="cpu").plain
        assert step is not None
        plan = memscale.plan(model, optimizer, sample_input=x)
        return step.device_used_peak_bytes - step.error_band_bytes[0], " ".join(plan.notes)

    idle = 2 * sum(value.nbytes for value in model.unused.parameters())
    wide, notes = low_and_notes()
    assert "parameters to which this step gives no gradient" in notes
    model.unused.requires_grad_(False)
    narrow, notes = low_and_notes()
    assert abs(wide - narrow - idle) < 0.1 * idle and "no gradient" not in notes
    model.unused.requires_grad_(True)
    (model(x) + model.unused(x).sum()).backward()
    optimizer.step()  # now there is such state
    optimizer.zero_grad()
    there, notes = low_and_notes()
    assert there < idle and "no gradient" not in notes
