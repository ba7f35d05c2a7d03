# SPDX-License-Identifier: Apache-2.0
"""The loss tile on models of transformers and peft, in traces, in company, and when it stands aside."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_cpu_truth import AMPLE
from test_loss_tiles import (
    CLASSES,
    WIDTH,
    Model,
    distance,
    equal,
    gradients,
    model,
    shifted_loss,
    tiled,
    tokens,
)
from torch import Tensor, nn

import memscale
from amounts import some
from memscale.techniques.checkpoint.checkpointing import CheckpointAttachment
from memscale.techniques.tiles.deferred_logits import DeferredLogits
from memscale.techniques.tiles.loss_tiles import find
from zoo.training import peak_bytes

transformers = pytest.importorskip("transformers")

VOCABULARY = 1600
_DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 128,
}  # fmt: skip


def _built(name: str, config: Any) -> Any:
    torch.manual_seed(0)
    return getattr(transformers, name)(config).train()


BUILD: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: _built(
        "GPT2LMHeadModel",
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=128, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0,
        ),
    ),
    "llama": lambda: _built("LlamaForCausalLM", transformers.LlamaConfig(**_DECODER, num_key_value_heads=2)),
    "gemma2": lambda: _built(
        "Gemma2ForCausalLM",
        transformers.Gemma2Config(
            **_DECODER, num_key_value_heads=2, head_dim=16, final_logit_softcapping=3.0
        ),
    ),
    "opt": lambda: _built(
        "OPTForCausalLM",
        transformers.OPTConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, ffn_dim=64, num_attention_heads=2,
            max_position_embeddings=128, word_embed_proj_dim=32, dropout=0.0,
        ),
    ),
    "bert": lambda: _built(
        "BertForMaskedLM",
        transformers.BertConfig(
            **_DECODER, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        ),
    ),
    "t5": lambda: _built(
        "T5ForConditionalGeneration",
        transformers.T5Config(
            vocab_size=VOCABULARY, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0.0,
            decoder_start_token_id=0,
        ),
    ),
    "bart": lambda: _built(
        "BartForConditionalGeneration",
        transformers.BartConfig(
            vocab_size=VOCABULARY, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=128,
            dropout=0.0,
        ),
    ),
}  # fmt: skip


def batch(rows: int = 4) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (rows, 100), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": torch.where(ids % 4 == 0, -100, ids)}


@pytest.mark.parametrize("way", ["plain", "autocast", "items"])
@pytest.mark.parametrize("name", BUILD)
def test_a_models_own_loss_is_tiled(name: str, way: str) -> None:
    if way == "items" and name in ("bert", "t5", "bart"):
        pytest.skip("takes no number of items")
    net = BUILD[name]()
    if name == "bart":
        net.final_logits_bias.normal_()
    more = {"num_items_in_batch": torch.tensor(250)} if way == "items" else {}
    logits = []

    def loss(net: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            output = net(**batch(), **more)
        logits.append(output.logits)
        made: Tensor = output.loss
        return made

    plain = gradients(net, loss)
    with tiled(net, used=True):
        ours = gradients(net, loss)
        assert isinstance(logits[1], DeferredLogits) and logits[1].computed is None
        assert torch.equal(logits[0].detach(), logits[1].detach())
    limit = 3e-2 if way == "autocast" else 1e-5
    assert ours.keys() == plain.keys()
    for key, value in plain.items():
        if value.norm() > 1e-6:  # keys' biases: rounding errors of zero
            assert distance(ours[key], value) < limit, key


def _adapted(name: str, bias: bool = False, **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    settings = {"r": 4, "target_modules": ["lm_head"], "lora_dropout": 0.0, "init_lora_weights": False}
    return peft.get_peft_model(BUILD[name](), peft.LoraConfig(**{**settings, **options})).train()


def test_a_lora_head_is_tiled() -> None:
    net = _adapted("llama")
    (tile,) = find(net)
    assert tile.path.endswith("lm_head")
    exact = gradients(copy.deepcopy(net).double(), lambda net: _loss_in_double(net))
    plain = gradients(net, lambda net: net(**batch()).loss)
    with tiled(net, used=True):
        ours = gradients(net, lambda net: net(**batch()).loss)
    assert ours.keys() == plain.keys() and len(plain) > 1
    for name in set(plain) - {"loss"}:
        assert distance(ours[name], exact[name]) <= 1.5 * distance(plain[name], exact[name]), name


def _loss_in_double(net: Any) -> Tensor:
    given = batch()
    logits = net(input_ids=given["input_ids"]).logits[:, :-1]
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), given["labels"][:, 1:].reshape(-1))


def test_a_lora_head_with_dropout_stays_as_it_is() -> None:
    net = _adapted("llama", lora_dropout=0.1)

    def loss(net: Any) -> Tensor:
        torch.manual_seed(3)
        made: Tensor = net(**batch()).loss
        return made

    plain = gradients(net, loss)
    with tiled(net, used=False) as tile:
        assert equal(gradients(net, loss), plain)
        assert "random" in tile.reason


# ---- in a trace --------------------------------------------------------------------------------------


def _run(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: Callable[[], None],
    config: memscale.Config | None,
) -> int:
    """Two steps with the tile; with a configuration one of them, and its predicted peak."""
    with tiled(net, used=True):
        if config is None:
            step()
            step()
            return 0
        with memscale.optimize(net, optimizer, config) as executor:
            step()
            assert executor.planned is not None and executor.planned.plan.profile == "static"
            return executor.planned.plan.predicted.allocated_peak_bytes


def _steps(name: str, config: memscale.Config | None, half: bool, autocast: bool, labels: int = 128) -> int:
    """Two steps with the tile. The predicted peak; 0 without a configuration."""
    net = BUILD[name]().to(torch.bfloat16 if half else torch.float32)
    ids = torch.randint(3, VOCABULARY, (8, 128), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids, "labels": torch.where(torch.arange(128) < labels, ids, -100)}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            output = net(**given)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return _run(net, optimizer, step, config)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "way"),
    some(
        [("gpt2", "fp32"), ("gemma2", "bf16"), ("opt", "autocast"), ("bert", "bf16")],
        [*itertools.product(("gpt2", "gemma2", "opt", "bert"), ("fp32", "bf16", "autocast"))],
    ),
)
def test_a_trace_predicts_the_peak_of_tiles(name: str, way: str) -> None:
    options = {"half": way == "bf16", "autocast": way == "autocast"}
    predicted = _steps(name, AMPLE, **options)
    truth = peak_bytes(lambda: _steps(name, None, **options))
    assert -0.002 <= predicted / truth - 1 <= 0.01


def test_a_batch_with_more_labels_takes_no_more_than_was_traced() -> None:
    predicted = _steps("gpt2", AMPLE, half=False, autocast=False, labels=5)
    assert predicted >= 0.998 * peak_bytes(lambda: _steps("gpt2", None, half=False, autocast=False))


class Crossing(nn.Module):
    """Logits in losses, and in more than that."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind, self.criterion = model(), kind, nn.CrossEntropyLoss()

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.inner(ids)
        if self.kind == "in a module":
            return self.criterion(logits.view(-1, CLASSES), ids.view(-1))
        loss = shifted_loss(logits, ids)
        if self.kind == "hooked":
            logits.register_hook(lambda grad: grad * 2)
            return loss
        if self.kind == "two losses":
            return loss + shifted_loss(logits, ids.flip(0))
        return loss + 1e-3 * logits.float().logsumexp(-1).square().mean()


def _crossing(kind: str, config: memscale.Config | None) -> int:
    net = Crossing(kind)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step() -> None:
        net(tokens(8, 128)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return _run(net, optimizer, step, config)


@pytest.mark.parametrize("kind", ["in a module", "two losses", "loss and penalty", "hooked"])
def test_a_trace_sees_what_is_computed_after_all(kind: str) -> None:
    predicted = _crossing(kind, AMPLE)
    truth = peak_bytes(lambda: _crossing(kind, None))
    assert -0.002 <= predicted / truth - 1 <= 0.01


# ---- in company --------------------------------------------------------------------------------------


class WithLoss(nn.Module):
    """A model that computes its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model()

    def forward(self, ids: Tensor) -> Tensor:
        return shifted_loss(self.inner(ids), ids)


@pytest.mark.parametrize("path", ["inner", "inner.head", "inner.body"])
def test_beneath_a_checkpoint_gradients_are_those_of_the_tile_alone(path: str) -> None:
    torch.manual_seed(0)
    net = WithLoss()
    with tiled(net, used=True):
        alone = gradients(net, lambda net: net(tokens()))
        checkpoint = CheckpointAttachment(net.get_submodule(path), path)
        checkpoint.attach()
        together = gradients(net, lambda net: net(tokens()))
        checkpoint.undo()
    assert equal(alone, together)


def test_the_loss_inside_a_checkpoint_runs_again_in_tiles() -> None:
    net = model()

    def block(ids: Tensor) -> Tensor:
        return shifted_loss(net(ids), ids)

    with tiled(net, used=True):
        alone = gradients(net, lambda net: block(tokens()))
        again = gradients(
            net, lambda net: torch.utils.checkpoint.checkpoint(block, tokens(), use_reentrant=False)
        )
    assert equal(alone, again)


def test_under_data_parallel_saves_and_anomaly_detection_it_is_the_same() -> None:
    net = model()
    with tiled(net, used=True):
        alone = gradients(net, lambda net: shifted_loss(net(tokens()), tokens()))
        with torch.autograd.set_detect_anomaly(True):
            watched = gradients(net, lambda net: shifted_loss(net(tokens()), tokens()))
        with torch.autograd.graph.save_on_cpu():
            moved = gradients(net, lambda net: shifted_loss(net(tokens()), tokens()))
    assert equal(alone, watched) and equal(alone, moved)


def test_without_training_or_gradients_it_is_the_heads_own_forward() -> None:
    net = model()
    with tiled(net, used=False):
        assert type(net.eval()(tokens())) is Tensor
        net.train()
        with torch.no_grad():
            assert type(net(tokens())) is Tensor
        assert type(torch.func.vmap(net)(tokens())) is Tensor


def test_compiled_the_head_is_its_own() -> None:
    net = model()
    with tiled(net, used=False):
        compiled = torch.compile(net, backend="eager", fullgraph=True)
        assert type(compiled(tokens())) is Tensor


def _hooked(net: Any) -> None:
    net.head.register_forward_hook(lambda module, args, output: None)


def _half(net: Any) -> None:
    net.half()


def _frozen(net: Any) -> None:
    net.requires_grad_(False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [(_hooked, "hooks"), (_half, "FP16"), (_frozen, "nothing below the loss")],
)
def test_it_stands_aside_with_a_reason(change: Callable[[Any], None], reason: str) -> None:
    net = model()
    change(net)
    with tiled(net, used=False) as tile:
        assert type(net(tokens())) is Tensor
        assert reason in tile.reason


class Mixing(nn.Module):
    """Looks like a head, but its rows depend on each other."""

    def __init__(self) -> None:
        super().__init__()
        self.in_features, self.out_features = WIDTH, CLASSES
        self.weight = nn.Parameter(torch.randn(CLASSES, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) @ self.weight.t()


class Drawing(Mixing):
    """Adds noise."""

    def forward(self, x: Tensor) -> Tensor:
        logits = x @ self.weight.t()
        return logits + torch.randn_like(logits)


@pytest.mark.parametrize(("kind", "reason"), [(Mixing, "more than its own row"), (Drawing, "random")])
def test_a_head_whose_rows_cannot_be_run_alone_stays_whole(kind: Any, reason: str) -> None:
    net = model()
    net.head = kind()

    def loss(net: Any) -> Tensor:
        torch.manual_seed(5)
        return shifted_loss(net(tokens()), tokens())

    plain = gradients(net, loss)
    with tiled(net, used=False) as tile:
        assert equal(gradients(net, loss), plain)
        assert reason in tile.reason


def test_candidates_are_heads_and_not_parts_of_blocks() -> None:
    net = nn.ModuleDict(
        {
            "blocks": nn.ModuleList(
                nn.Sequential(nn.Linear(500, 2000), nn.GELU(), nn.Linear(2000, 500)) for _ in range(2)
            ),
            "small": nn.Linear(8, 900),
            "wide": nn.Linear(800, 1500),
            "out": nn.Linear(500, 2000),
        }
    )
    assert [tile.path for tile in find(net)] == ["out"]
    assert [tile.path for tile in find(nn.Linear(8, 2000))] == []


# ---- leaving -----------------------------------------------------------------------------------------


def test_nothing_is_left_after_undo_and_copies_work() -> None:
    net = model()
    before = {name: dict(vars(module)) for name, module in net.named_modules()}
    with tiled(net, used=True):
        shifted_loss(net(tokens()), tokens()).backward()
        twin = copy.deepcopy(net)
        assert type(twin(tokens())) is Tensor and "forward" not in vars(twin.head)
    after = {name: dict(vars(module)) for name, module in net.named_modules()}
    assert {name: set(own) for name, own in before.items()} == {name: set(own) for name, own in after.items()}
    assert type(net(tokens())) is Tensor


def test_nothing_is_kept_over_200_steps() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    alive = []
    ids = tokens(1, 20)
    with tiled(net, used=True):
        gc.collect()
        gc.disable()
        try:
            for step in range(200):
                logits = net(ids)
                loss = shifted_loss(logits, ids)
                if step % 3 == 0:
                    loss = loss + logits.square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                alive.append(weakref.ref(logits))
                if step % 10 == 9:
                    count = sum(isinstance(item, Tensor) for item in gc.get_objects())
                    if step == 9:
                        first = count
            del logits, loss
            assert sum(ref() is not None for ref in alive) == 0
            assert count <= first
        finally:
            gc.enable()
