# SPDX-License-Identifier: Apache-2.0
"""Attention in tiles on models of transformers: whether they are found, gradients, traces, and in plans."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
from test_attention_tiles import Largest, distance
from test_cpu_truth import AMPLE
from torch import Tensor

import memscale
from memscale.techniques.checkpoint.checkpointing import CheckpointAttachment
from memscale.techniques.tiles.attention_tiles import AttentionTiles, find
from memscale.techniques.tiles.deferred_scores import DeferredScores
from zoo.training import peak_bytes

transformers = pytest.importorskip("transformers")

VOCABULARY, ROWS, LENGTH = 99, 4, 100  # two tiles
_DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_SHORT = {
    "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_PAIR = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "max_position_embeddings": 256,
}  # fmt: skip
_T5 = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2,
    "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _SHORT),
    "gpt2, upcast": ("GPT2LMHeadModel", "GPT2Config", {**_SHORT, "reorder_and_upcast_attn": True}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**_DECODER, "num_key_value_heads": 1}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**_DECODER, "num_key_value_heads": 1, "head_dim": 16}),
    "bert": ("BertForMaskedLM", "BertConfig", {**_DECODER, **_NO_DROPOUT}),
    "bart": ("BartForConditionalGeneration", "BartConfig", _PAIR),
    "t5": ("T5ForConditionalGeneration", "T5Config", _T5),
    "longt5": ("LongT5ForConditionalGeneration", "LongT5Config", {**_T5, "local_radius": 7}),
    "bloom": ("BloomForCausalLM", "BloomConfig", {**_DECODER, "n_layer": 2, "n_head": 2}),
    "deberta": (
        "DebertaV2ForMaskedLM", "DebertaV2Config",
        {**_DECODER, **_NO_DROPOUT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    "bigbird": (  # writes its first and last blocks over in place
        "BigBirdForMaskedLM", "BigBirdConfig",
        {**_DECODER, **_NO_DROPOUT, "block_size": 4, "num_random_blocks": 1},
    ),
    "codegen": ("CodeGenForCausalLM", "CodeGenConfig", {**_SHORT, "n_head": 4, "rotary_dim": 4}),
}  # fmt: skip


def built(name: str, kind: str = "eager", **more: Any) -> Any:
    torch.manual_seed(0)
    model, config, settings = MODELS[name]
    made = getattr(transformers, config)(**{**settings, **more})
    cls = getattr(transformers, model)
    if kind != "sdpa" and cls._supports_sdpa:  # others have one way only
        made._attn_implementation = kind
    return cls(made).train()


def batch(rows: int = ROWS, length: int = LENGTH) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def gradients(net: Any, autocast: bool = False, length: int = LENGTH) -> dict[str, Tensor]:
    net.zero_grad()
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        loss = net(**batch(length=length)).loss
    loss.backward()
    found = {name: part.grad.clone() for name, part in net.named_parameters() if part.grad is not None}
    return {"loss": loss.detach(), **found}


class attached(ExitStack):
    """Everything that is found, attached."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.found: list[AttentionTiles] = find(net)

    def __enter__(self) -> attached:
        for tile in self.found:
            tile.attach()
            self.callback(tile.undo)
        return self

    @property
    def used(self) -> int:
        return sum(tile.used for tile in self.found)


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


_HOW = [(name, False) for name in MODELS if name != "bigbird"] + [
    (name, True) for name in ("gpt2, upcast", "llama", "gemma2", "t5")
]


@pytest.mark.parametrize(("name", "autocast"), _HOW)
def test_every_attention_of_a_model_is_tiled(name: str, autocast: bool) -> None:
    net = built(name)
    plain = gradients(net, autocast)
    with attached(net) as tiles, Largest() as seen:
        ours = gradients(net, autocast)
        assert tiles.used == len(tiles.found) >= 2
        assert not any(tile.reason for tile in tiles.found)
    assert ours.keys() == plain.keys()
    limit = 3e-2 if autocast else 1e-5
    for key, value in plain.items():
        if value.norm() > 1e-3:  # keys' biases: rounding errors of zero
            assert distance(ours[key], value) < limit, key
    if name not in ("t5", "longt5", "deberta", "gpt2, upcast"):  # biases of that size, and an empty tensor
        assert seen.most < ROWS * net.config.num_attention_heads * LENGTH * LENGTH


def test_a_model_that_writes_over_what_its_attentions_return() -> None:
    """BigBird; some of its products meet in a `cat`, and are not tiled."""
    net = built("bigbird")
    plain = gradients(net)
    with attached(net) as tiles:
        ours = gradients(net)
        assert tiles.used == 2
    assert ours.keys() == plain.keys()
    for key, value in plain.items():
        if value.norm() > 1e-3:
            assert distance(ours[key], value) < 1e-5, key


def test_a_fused_kernel_is_left_alone() -> None:
    net = built("llama", "sdpa")
    plain = gradients(net)
    with attached(net) as tiles:
        assert equal(gradients(net), plain) and not tiles.used


def test_dropout_on_the_weights_stands_aside_and_says_so() -> None:
    net = built("gpt2", attn_pdrop=0.1)
    plain = gradients(net)
    with attached(net) as tiles:
        assert equal(gradients(net), plain) and not tiles.used
        assert {tile.reason for tile in tiles.found} == {"dropout draws random numbers"}


def test_attentions_that_are_returned_are_as_in_plain_pytorch() -> None:
    net = built("bert")
    plain = net(**batch(), output_attentions=True)
    with attached(net) as tiles:
        ours = net(**batch(), output_attentions=True)
        assert tiles.used == 2
    assert all(type(weights) is DeferredScores for weights in ours.attentions)
    assert torch.allclose(ours.loss, plain.loss, rtol=1e-6)
    for mine, theirs in zip(ours.attentions, plain.attentions, strict=True):
        assert torch.allclose(mine.detach(), theirs.detach(), atol=1e-6)
        mine.square().sum().backward(retain_graph=True)
    assert all(part.grad is not None for part in net.bert.encoder.layer[0].attention.self.query.parameters())


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_beneath_checkpoints_gradients_are_those_of_the_tiles_alone(name: str) -> None:
    net = built(name, use_cache=False)
    blocks = {"gpt2": "transformer.h", "llama": "model.layers", "t5": "encoder.block"}[name]
    with attached(net) as tiles:
        alone = gradients(net)
        for number in range(2):
            path = f"{blocks}.{number}"
            checkpoint = CheckpointAttachment(net.get_submodule(path), path)
            checkpoint.attach()
            tiles.callback(checkpoint.undo)
        assert equal(gradients(net), alone)


# ---- in traces and plans -------------------------------------------------------------------------------


def _steps(name: str, how: str, config: memscale.Config | None) -> int:
    """Two steps with tiles; with a configuration one of them, and its predicted peak."""
    net = built(name, use_cache=False).to(torch.bfloat16 if how == "bfloat16" else torch.float32)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    given = batch(8, 192)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16) if how == "autocast" else nullcontext():
            output = net(**given)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with attached(net) as tiles:
        if config is None:
            step()
            step()
            assert tiles.used
            return 0
        with memscale.optimize(net, optimizer, config) as executor:
            step()
            assert executor.planned is not None and executor.planned.plan.profile == "static"
            return executor.planned.plan.predicted.allocated_peak_bytes


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "how"),
    [("llama", "bfloat16"), ("t5", "autocast")],
)
def test_a_trace_predicts_the_peak(name: str, how: str) -> None:
    predicted = _steps(name, how, AMPLE)
    truth = peak_bytes(lambda: _steps(name, how, None))
    assert -0.002 <= predicted / truth - 1 <= 0.01


def test_a_plan_takes_it_where_it_helps_and_detach_restores() -> None:
    net = built("gpt2", use_cache=False, n_layer=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = {name: set(vars(part)) for name, part in net.named_modules()}
    plain = gradients(net, length=256)
    config = memscale.Config(memory_budget=1 << 20, enable_tiling=True, exact=False, enable_logging=False)
    with memscale.optimize(net, optimizer, config) as executor:
        ours = gradients(net, length=256)
        steps = {step.technique: step for step in executor.plan.steps}
        assert steps["attention_tile"].modules == ("transformer.h.0.attn",)
        assert steps["attention_tile"].bytes > 0 and not executor.plan.exact
    assert all(distance(ours[name], plain[name]) < 1e-4 for name in plain if plain[name].norm() > 1e-3)
    assert {name: set(vars(part)) for name, part in net.named_modules()} == before
    assert equal(gradients(net, length=256), plain)
