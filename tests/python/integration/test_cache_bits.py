# SPDX-License-Identifier: Apache-2.0
"""The key/value caches of transformers models: every bit of plain PyTorch with the cache on, as by default.

A cache changes how keys and values lie in memory, and matrix products round by layout: with few tokens nearly
every gradient differs in its last bits between a model with and without. Shapes here are such that it shows.
"""

from __future__ import annotations

import copy
import functools
import io
import json
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache

import memscale
from memscale import Config
from memscale.errors import EmptyCacheError
from memscale.techniques.checkpoint.checkpointing import CheckpointAttachment
from memscale.techniques.checkpoint.use_cache import CacheSwitch
from technique_samples import attached
from zoo.training import same_bits

TIGHT = Config(memory_budget=1, enable_logging=False, mode="conservative")
IDS = torch.randint(99, (14, 7), generator=torch.Generator().manual_seed(1))
DECODER = {
    "vocab_size": 99, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def llama(attention: str = "eager") -> nn.Module:
    config = transformers.LlamaConfig(**DECODER, attn_implementation=attention)
    return transformers.LlamaForCausalLM(config)


def gpt2(attention: str) -> nn.Module:
    sizes = {"vocab_size": 99, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 32}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, attn_implementation=attention))


def mistral(attention: str) -> nn.Module:
    config = transformers.MistralConfig(
        **DECODER, num_key_value_heads=1, sliding_window=3, attn_implementation=attention
    )
    return transformers.MistralForCausalLM(config)


def gemma3n(attention: str) -> nn.Module:
    """Its last layers take keys and values of earlier ones."""
    config = transformers.Gemma3nTextConfig(
        **{**DECODER, "num_hidden_layers": 4, "intermediate_size": [80] * 4},
        num_key_value_heads=1, head_dim=16, num_kv_shared_layers=2, vocab_size_per_layer_input=99,
        hidden_size_per_layer_input=8, laurel_rank=4, activation_sparsity_pattern=[0.0] * 4, sliding_window=3,
        layer_types=["sliding_attention", "full_attention"] * 2, altup_num_inputs=2,
        attn_implementation=attention,
    )  # fmt: skip
    return transformers.Gemma3nForCausalLM(config)


def bart(attention: str) -> nn.Module:
    sizes = {"vocab_size": 99, "d_model": 64, "encoder_layers": 1, "decoder_layers": 2}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    feet = {"encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "max_position_embeddings": 32}
    config = transformers.BartConfig(**sizes, **heads, **feet, attn_implementation=attention)
    return transformers.BartForConditionalGeneration(config)


def t5(attention: str) -> nn.Module:
    sizes = {"vocab_size": 99, "d_model": 64, "d_kv": 32, "d_ff": 96, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, attn_implementation=attention)
    return transformers.T5ForConditionalGeneration(config)


def batch_for(build: Callable[..., nn.Module]) -> dict[str, Tensor]:
    """Without labels where the model would go without a cache if it had them."""
    if build in (bart, t5):
        return {"input_ids": IDS, "decoder_input_ids": IDS.roll(1, 1)}
    return {"input_ids": IDS, "labels": IDS}


def made(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().train()


def loss_of(output: Any, batch: dict[str, Tensor]) -> Tensor:
    if "labels" in batch:
        return output.loss
    return F.cross_entropy(output.logits.flatten(0, 1), batch["input_ids"].flatten())


def gradients(model: nn.Module, batch: dict[str, Any], run: Any = None) -> list[Tensor]:
    """Loss and gradients of a step; the output lives until backward is over, as in a loop."""
    torch.manual_seed(3)
    model.zero_grad()
    output = (model if run is None else run)(**batch)
    loss = loss_of(output, batch)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def differing(first: list[Tensor], second: list[Tensor]) -> int:
    assert len(first) == len(second) > 2
    return sum(not same_bits(a, b) for a, b in zip(first, second, strict=True))


def wrapped(model: nn.Module, batch: dict[str, Tensor]) -> nn.Module:
    memscale.wrap(model, TIGHT, sample_input=batch)
    assert any("attn" in path for path in checkpointed(model))
    return model


@contextmanager
def every_layer_checkpointed(model: nn.Module) -> Iterator[None]:
    """As a plan attaches it, without one."""
    layers = [
        CheckpointAttachment(layer, f"{path}.{name}")
        for path, layers in model.named_modules()
        if isinstance(layers, nn.ModuleList)
        for name, layer in layers.named_children()
    ]
    assert len(layers) >= 2
    with attached(CacheSwitch(model), *layers):
        yield


def checkpointed(model: nn.Module) -> set[str]:
    return {choice.module for choice in memscale.executor_of(model).plan.active}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Constructors of caches are transformers' own again."""
    own = cache_utils.Cache.__init__, EncoderDecoderCache.__init__
    yield
    assert (cache_utils.Cache.__init__, EncoderDecoderCache.__init__) == own


@pytest.fixture
def wrap() -> Iterator[Callable[..., nn.Module]]:
    """`wrapped`, detached when the test is over."""
    models = []

    def put(model: nn.Module, batch: dict[str, Tensor]) -> nn.Module:
        models.append(wrapped(model, batch))
        return model

    yield put
    for model in models:
        memscale.detach(model)


CAUSAL = {"input_ids": IDS, "labels": IDS}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("build", [llama, gpt2, mistral, gemma3n, bart, t5], ids=lambda build: build.__name__)
def test_every_bit(build: Callable[..., nn.Module], attention: str) -> None:
    batch, build = batch_for(build), functools.partial(build, attention)
    model = made(build)
    plain = gradients(model, batch)
    with every_layer_checkpointed(model):
        for _ in range(2):
            assert not differing(plain, gradients(model, batch))
        assert model.config.use_cache is True
    assert not differing(plain, gradients(model, batch))


def test_planned() -> None:
    plain, model = made(llama), made(llama)
    memscale.wrap(model, TIGHT)
    for _ in range(2):
        assert not differing(gradients(plain, CAUSAL), gradients(model, CAUSAL))
    assert any("attn" in path for path in checkpointed(model))
    memscale.detach(model)
    assert vars(model).keys() == vars(plain).keys()


def test_own_checkpoints_that_the_user_switches_off_later() -> None:
    """They make no cache, and the model makes one again without them; `detach` leaves them off."""

    def train(model: nn.Module) -> list[Tensor]:
        model.gradient_checkpointing_enable()
        seen = gradients(model, CAUSAL)
        model.gradient_checkpointing_disable()
        assert model(**CAUSAL).past_key_values is not None
        return seen + gradients(model, CAUSAL) + gradients(model, CAUSAL)

    model = memscale.wrap(made(llama), TIGHT)
    assert not differing(train(made(llama)), train(model))
    assert any("attn" in path for path in checkpointed(model))
    memscale.detach(model)
    assert not model.is_gradient_checkpointing


def test_the_shape_shows_it() -> None:
    """Else the tests above would pass with the cache switched off."""
    model = made(llama)
    plain = gradients(model, CAUSAL)
    model.config.use_cache = False
    assert differing(plain, gradients(model, CAUSAL)) > 5


def test_the_cache_of_a_forward_holds_no_memory() -> None:
    model = made(llama)
    with every_layer_checkpointed(model):
        output = model(**CAUSAL)
    assert all(
        not isinstance(value, Tensor) for layer in output.cache.layers for value in vars(layer).values()
    )


def test_transformers_may_come_after_the_first_wrapped_model(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.Sequential(
        *(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(3))
    )
    with monkeypatch.context() as before:
        before.delitem(sys.modules, "transformers.cache_utils")
        memscale.wrap(layers, TIGHT, sample_input=torch.randn(32, 16))
    assert checkpointed(layers)
    model = memscale.wrap(made(llama), TIGHT, sample_input=CAUSAL)
    cache = model(**CAUSAL).cache
    assert all(not isinstance(value, Tensor) for layer in cache.layers for value in vars(layer).values())
    assert not differing(gradients(made(llama), CAUSAL), gradients(model, CAUSAL))
    memscale.detach(layers)
    memscale.detach(model)


def test_generate_in_the_middle_of_training(wrap: Callable[..., nn.Module]) -> None:
    plain, model = made(llama), wrap(made(llama), CAUSAL)
    for _ in range(2):
        assert not differing(gradients(plain, CAUSAL), gradients(model, CAUSAL))
        tokens = [item.generate(IDS[:2], max_new_tokens=5, do_sample=False) for item in (plain, model)]
        assert torch.equal(*tokens)
        with torch.no_grad():
            cache = model(IDS[:2]).cache
        assert cache.get_seq_length() == 7 and type(cache.layers[0]) is DynamicLayer


def test_what_is_saved_and_copied_uses_the_cache(wrap: Callable[..., nn.Module], tmp_path: Path) -> None:
    model: Any = wrap(made(llama), CAUSAL)
    model(**CAUSAL).loss.backward()
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()).get("use_cache", True) is True
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), saved):
        assert twin.config.use_cache is True
        assert twin(**CAUSAL).cache.get_seq_length() == 7  # a plain model


def test_caches_of_the_caller_are_real(wrap: Callable[..., nn.Module]) -> None:
    """With a prefix in it, or empty; gradients flow through it."""

    def steps(model: nn.Module) -> list[Tensor]:
        model.zero_grad()
        first = model(IDS[:, :3], use_cache=True)
        second = model(IDS[:, 3:], labels=IDS[:, 3:], cache=first.cache)
        assert second.cache is first.cache and second.cache.get_seq_length() == 7
        second.loss.backward()
        return [second.loss.detach(), *(p.grad.clone() for p in model.parameters())]

    plain, model = made(llama), wrap(made(llama), CAUSAL)
    for _ in range(2):
        assert not differing(steps(plain), steps(model))
        assert not differing(gradients(plain, CAUSAL), gradients(model, CAUSAL))


def test_an_empty_cache_is_not_mistaken_for_a_prefix() -> None:
    model = made(llama)
    with every_layer_checkpointed(model):
        output = model(**CAUSAL)
        with pytest.raises(EmptyCacheError, match="use_cache=True"):
            model(IDS, cache=output.cache)
        with pytest.raises(EmptyCacheError):
            copy.deepcopy(output.cache).get_seq_length()
        with pytest.raises(EmptyCacheError):
            list(output.cache)
        output.loss.backward()
    with pytest.raises(EmptyCacheError):
        model(IDS, cache=output.cache)


def test_a_part_of_the_model_called_by_itself() -> None:
    """And a shallow copy: both run checkpointed layers, and nobody stands in front of them."""

    def step(model: nn.Module, run: Any) -> list[Tensor]:
        model.zero_grad()
        hidden = run(IDS)[0]
        hidden.square().mean().backward()
        return [hidden.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    model = made(llama)
    expected = step(model, model.model), step(model, model)
    with every_layer_checkpointed(model):
        assert not differing(expected[0], step(model, model.model))
        assert not differing(expected[1], step(model, copy.copy(model)))


def test_a_backward_after_everything_was_taken_off() -> None:
    model = made(llama)
    expected = gradients(model, CAUSAL)
    model.zero_grad()
    with every_layer_checkpointed(model):
        loss = model(**CAUSAL).loss
    for _ in range(2):
        model.zero_grad()
        loss.backward(retain_graph=True)
        assert not differing(expected, [loss.detach(), *(p.grad for p in model.parameters())])


def test_a_cache_that_is_switched_on_and_off() -> None:
    model = made(llama)
    expected = gradients(model, CAUSAL)
    model.config.use_cache = False
    without = gradients(model, CAUSAL)
    with every_layer_checkpointed(model):
        for on in (False, True, False):
            model.config.use_cache = on
            assert not differing(expected if on else without, gradients(model, CAUSAL))


def test_other_models_and_threads_have_real_caches() -> None:
    model, other = made(llama), made(llama)
    expected = gradients(model, CAUSAL)
    inside, done, seen = threading.Event(), threading.Event(), []

    def forward() -> None:
        inside.wait(30)
        seen.append(other(**CAUSAL).cache.get_seq_length())
        done.set()

    def wait(*unused: Any) -> None:
        inside.set()
        assert done.wait(30)

    thread = threading.Thread(target=forward)
    thread.start()
    hook = model.lm_head.register_forward_pre_hook(wait)
    try:
        with every_layer_checkpointed(model):
            assert not differing(expected, gradients(model, CAUSAL))
            assert other(**CAUSAL).cache.get_seq_length() == 7
    finally:
        hook.remove()
        thread.join()
    assert seen == [7]


@pytest.mark.parametrize("cache", ["default", "explicit"])
def test_own_checkpoints_go_without_a_cache(cache: str, tmp_path: Path) -> None:
    """A model that checkpoints itself makes none, and neither does one whose checkpoints are replaced."""
    batch = CAUSAL if cache == "default" else {**CAUSAL, "use_cache": True}
    model = made(llama)
    with_cache = gradients(model.eval(), batch)
    model.train().gradient_checkpointing_enable()
    expected = gradients(model, batch)
    assert differing(with_cache, expected)
    with every_layer_checkpointed(model):
        for _ in range(2):
            assert not differing(expected, gradients(model, batch))
        model.save_pretrained(tmp_path)
        assert not differing(with_cache, gradients(model.eval(), batch))
    assert json.loads((tmp_path / "config.json").read_text()).get("use_cache", True) is True


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*")  # the compiler's own
@pytest.mark.parametrize("attention", ["eager"])
@pytest.mark.parametrize("build", [llama, mistral, bart], ids=lambda build: build.__name__)
def test_compiled(build: Callable[..., nn.Module], attention: str) -> None:
    """`torch.compile` around: the bits of the same compile without, in one graph."""
    batch, build = batch_for(build), functools.partial(build, attention)
    torch._dynamo.reset()
    model = made(build)
    expected = gradients(model, batch, torch.compile(model, backend="aot_eager"))
    torch._dynamo.reset()
    with every_layer_checkpointed(model):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            assert not differing(expected, gradients(model, batch, compiled))
        output = compiled(**batch)
        with pytest.raises(EmptyCacheError):
            output.cache.get_seq_length()
    torch._dynamo.reset()


# ---- models that look into a cache that they have filled -------------------------------------------


class Attends(nn.Module):
    """A layer that may look into the cache before or after it has filled it."""

    def __init__(self, index: int, width: int = 64) -> None:
        super().__init__()
        self.index = index
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def look(self, cache: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return cache.update(k, v, self.index)

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        k, v = self.look(cache, k, v)
        weights = torch.softmax(q @ k.transpose(2, 3) / 8, -1)
        return x + self.out((weights @ v).transpose(1, 2).flatten(2).tanh())


class ReadsKeys(Attends):
    """The second layer takes keys and values of the first."""

    def look(self, cache: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.index == 0:
            return super().look(cache, k, v)
        return cache.layers[0].keys, cache.layers[0].values


class AsksForKeys(Attends):
    """And computes its own where there are none: nothing fails without them."""

    def look(self, cache: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        first = cache.layers[0] if len(cache.layers) else None
        keys = None if first is None else first.keys
        mine = super().look(cache, k, v)
        return mine if keys is None else (mine[0] + keys, mine[1])


class AsksForLength(Attends):
    """Positions depend on what is there already."""

    def look(self, cache: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return super().look(cache, k + cache.get_seq_length(), v)


class FillsOneLayer(Attends):
    """All layers attend to what all before them have put there."""

    def look(self, cache: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return cache.update(k, v, 0)


class Swallows(FillsOneLayer):
    """Does without what fails."""

    def look(self, cache: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        try:
            return super().look(cache, k, v)
        except Exception:
            return cache.update(k * 2, v, self.index)


class Own(nn.Module):
    """A model with a cache of transformers, and no class of theirs."""

    def __init__(self, kind: type[Attends], cache: Callable[[], Any]) -> None:
        super().__init__()
        self.config = transformers.LlamaConfig(num_hidden_layers=3)
        self.cache = cache
        self.layers = nn.ModuleList(kind(index) for index in range(3))

    def forward(self, x: Tensor) -> Any:
        cache = self.cache() if self.config.use_cache else None
        for layer in self.layers:
            x = layer(x, cache=cache)
        return {"loss": x.square().mean(), "cache": cache}


class Remembers(DynamicLayer):
    """A layer of a kind that nobody knows."""


def of_unknown_layers() -> Any:
    return cache_utils.Cache(layers=[Remembers() for _ in range(3)])


def with_content() -> Any:
    prefix = torch.ones(14, 2, 2, 32)
    return DynamicCache([(prefix, prefix)] * 3)


def filled_by_hand() -> Any:
    cache = DynamicCache()
    for layer in range(3):
        cache.update(torch.ones(14, 2, 2, 32), torch.ones(14, 2, 2, 32), layer)
    return cache


def of_a_config() -> Any:
    return DynamicCache(config=transformers.LlamaConfig(num_hidden_layers=3))


X = torch.randn(14, 7, 64, generator=torch.Generator().manual_seed(2))


def own_step(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    loss = model(X)["loss"]
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


READERS = [ReadsKeys, AsksForKeys, FillsOneLayer, Swallows]
REAL = [of_unknown_layers, with_content, filled_by_hand]


@pytest.mark.parametrize("sample", [True, False], ids=["sample", "deferred"])
@pytest.mark.parametrize(
    ("kind", "cache"),
    [(kind, cache) for kind in READERS for cache in (DynamicCache, of_a_config)]
    + [(Attends, cache) for cache in REAL],
    ids=lambda value: value.__name__,
)
def test_caches_that_must_be_real(kind: type[Attends], cache: Callable[[], Any], sample: bool) -> None:
    """Found in the trace, said in the plan; layers that are given such a cache are not checkpointed."""
    plain, model = made(lambda: Own(kind, cache)), made(lambda: Own(kind, cache))
    memscale.wrap(model, TIGHT, sample_input=(X,) if sample else None)
    for _ in range(2):
        assert not differing(own_step(plain), own_step(model))
    plan = memscale.executor_of(model).plan
    assert any(note.startswith("use_cache: stays on") for note in plan.notes)
    assert not checkpointed(model) & {"layers.0", "layers.1", "layers.2"}
    memscale.detach(model)


@pytest.mark.parametrize("kind", [Attends, AsksForLength])
@pytest.mark.parametrize("cache", [DynamicCache, of_a_config])
def test_a_model_of_ones_own_is_checkpointed(kind: type[Attends], cache: Callable[[], Any]) -> None:
    """Also where positions depend on how full the first layer is."""
    plain, model = made(lambda: Own(kind, cache)), made(lambda: Own(kind, cache))
    memscale.wrap(model, TIGHT, sample_input=(X,))
    assert {"layers.0", "layers.1"} <= checkpointed(model)
    for _ in range(2):
        assert not differing(own_step(plain), own_step(model))
    memscale.detach(model)


def test_a_look_that_the_trace_has_not_seen_is_an_error() -> None:
    """Not a wrong gradient."""
    model = made(lambda: Own(Attends, DynamicCache))
    memscale.wrap(model, TIGHT, sample_input=(X,))
    model.layers[2].__class__ = FillsOneLayer
    with pytest.raises(EmptyCacheError, match="second time"):
        model(X)
    memscale.detach(model)
