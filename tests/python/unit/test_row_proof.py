# SPDX-License-Identifier: Apache-2.0
"""Which modules run in tiles of rows, and why others do not."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memscale.state import model_state
from memscale.techniques.tiles import row_facts, row_search

WIDTH = 16


class Mlp(nn.Module):
    """Up, something in between, down."""

    def __init__(self, between: Callable[[Tensor], Tensor] = nn.functional.gelu, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x)))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 40, bias=False), nn.Linear(WIDTH, 40, bias=False)
        self.down = nn.Linear(40, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.drop = nn.LayerNorm(WIDTH), Mlp(), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.mlp(self.norm(x)))


class Around(nn.Module):
    """A model around one module."""

    def __init__(self, it: nn.Module) -> None:
        super().__init__()
        self.it = it

    def forward(self, x: Tensor) -> Tensor:
        return self.it(x)


def found(module: nn.Module) -> list[str]:
    return [tiles.path for tiles in row_search.find(Around(module))]


def reason(module: nn.Module) -> str:
    return row_search.reasons(Around(module)).get("it", "")


def soft(x: Tensor) -> Tensor:
    return x.softmax(-1)


def squared(x: Tensor) -> Tensor:
    return x.relu().square()


def halves(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * b.sigmoid(), a], dim=-1)


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).tanh().view(x.shape)


ROW_WISE: dict[str, Callable[[], nn.Module]] = {
    "gelu": Mlp,
    "gated": Gated,
    "residual": Residual,
    "softmax over features": lambda: Mlp(soft),
    "squared relu": lambda: Mlp(squared),
    "halves": lambda: Mlp(halves),
    "norm in between": lambda: Mlp(rms),
    "flattened": lambda: Mlp(flat),
    "sequential": lambda: nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(inplace=True), nn.Linear(64, WIDTH)),
    "layer norm": lambda: nn.Sequential(
        nn.Linear(WIDTH, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, WIDTH)
    ),
}


@pytest.mark.parametrize("name", ROW_WISE)
def test_what_treats_each_row_alone_is_found(name: str) -> None:
    torch.manual_seed(0)
    assert found(ROW_WISE[name]()) == ["it"], reason(ROW_WISE[name]())


class Centred(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mlp, self.dim = Mlp(), dim

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) - x.mean(self.dim, keepdim=True)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mlp(x).chunk(3, -1)
        return self.out((q @ k.transpose(-1, -2)).softmax(-1) @ v)


class Routed(nn.Module):
    """A small mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList([Mlp(), Mlp()])

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        chosen = self.router(rows).argmax(-1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            places = torch.where(chosen == number)[0]
            out[places] = expert(rows[places])
        return out.view(x.shape)


class Counted(Mlp):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Positions(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.arange(x.shape[1], dtype=x.dtype)[None, :, None]


class PerToken(Mlp):
    """Divides by the number of tokens: each row alone, and yet another number in a tile."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / x.shape[1]


class Borrowed(Mlp):
    """Uses a weight that is not its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lent = [nn.Parameter(torch.ones(WIDTH))]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.lent[0]


class Noting(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1  # type: ignore[operator]
        return super().forward(x)


class Constrained(Mlp):
    """Keeps the norms of its weights down."""

    def forward(self, x: Tensor) -> Tensor:
        self.up.weight.data = torch.renorm(self.up.weight.data, 2, 0, 0.5)
        return super().forward(x)


class InPlace(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.norm = Mlp(), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.mlp(x).transpose(1, 2)).transpose(1, 2)


MIXED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "mean over rows": (lambda: Centred(1), "mean.dim combines its rows"),
    "mean over the batch": (lambda: Centred(0), "mean.dim combines its rows"),
    "attention": (Attention, "bmm"),
    "sum over rows": (lambda: Mlp(lambda x: x.cumsum(1)), "cumsum"),
    "flipped": (lambda: Mlp(lambda x: x.flip(1)), "flip"),
    "shifted": (lambda: Mlp(lambda x: torch.cat([x[:, 1:], x[:, :1]], 1)), "takes its rows apart"),
    "rolled": (lambda: Mlp(lambda x: x.roll(1, 1)), "roll"),
    "scrambled": (
        lambda: Mlp(lambda x: x.reshape(x.shape[0], 4 * WIDTH, -1).transpose(1, 2)),
        "takes its rows apart",
    ),
    "positions": (Positions, "number of its rows"),
    "per token": (PerToken, "number of its rows"),
    "batch norm": (Norms, ""),
    "counter": (Counted, "changes its own state"),
    "constrained": (Constrained, "exchanges its weights"),
    "buffer": (Noting, "writes to what it did not make"),
    "input in place": (InPlace, "writes to what it did not make"),
    "borrowed weight": (Borrowed, "parameters of another module"),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_rows_is_not_found(name: str) -> None:
    build, why = MIXED[name]
    module = build()
    assert "it" not in found(module)
    assert why in reason(module)


def test_experts_are_found_but_not_what_routes_to_them() -> None:
    assert found(Routed()) == ["it.experts.0", "it.experts.1"]


def test_a_container_of_blocks_is_left_to_its_blocks() -> None:
    blocks = nn.Sequential(Residual(), Residual())
    assert found(blocks) == ["it.0", "it.1"]


def test_a_module_in_two_places_is_found_once() -> None:
    shared = Mlp()
    assert [tiles.path for tiles in row_search.find(nn.ModuleList([shared, Around(shared)]))] == ["0"]


def test_the_model_itself_is_no_candidate() -> None:
    assert [tiles.path for tiles in row_search.find(Mlp())] == []


def test_random_numbers_and_writes_to_buffers_end_the_proof() -> None:
    noise, power = nn.Sequential(Mlp(), nn.RReLU()), Mlp()
    nn.utils.parametrizations.spectral_norm(
        next(part for part in power.modules() if isinstance(part, nn.Linear))
    )
    assert found(noise) == ["it.0"]  # without what draws around it
    assert found(power) == []
    reasons = row_search.reasons(nn.ModuleDict({"noise": noise, "power": power}))
    assert "random numbers" in reasons["noise"] and "writes to what it did not make" in reasons["power"]


def test_functions_among_the_attributes_tell_modules_apart_that_are_built_alike() -> None:
    good, bad = Mlp(nn.functional.gelu), Mlp(lambda x: x.cumsum(1))
    assert [tiles.path for tiles in row_search.find(nn.ModuleList([good, bad]))] == ["0"]
    assert [tiles.path for tiles in row_search.find(nn.ModuleList([bad, good]))] == ["1"]


def test_narrow_modules_are_not_worth_it() -> None:
    assert found(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))) == []


def test_modules_with_hooks_inside_or_a_replaced_forward_are_left_alone() -> None:
    hooked, replaced = Mlp(), Mlp()
    hooked.up.register_forward_hook(lambda *_: None)
    replaced.forward = lambda x: x  # type: ignore[method-assign]
    assert (found(hooked), found(replaced)) == ([], [])
    assert "hooks" in reason(hooked) and "replaced" in reason(replaced)


def test_looking_leaves_no_trace() -> None:
    model = Around(Residual())
    before = {name: (value, value._version) for name, value in model.named_parameters()}
    state, structure = torch.get_rng_state(), model_state.structure_of(model)[model]
    names = {name: sorted(module.__dict__) for name, module in model.named_modules()}
    model.eval()
    row_search.find(model)
    assert not model.training and not model.it.mlp.training
    model.train()
    assert torch.equal(state, torch.get_rng_state())
    assert structure == model_state.structure_of(model)[model]
    assert all(value is before[name][0] for name, value in model.named_parameters())
    assert all(value._version == before[name][1] for name, value in model.named_parameters())
    assert names == {name: sorted(module.__dict__) for name, module in model.named_modules()}


def test_models_without_data_are_looked_at() -> None:
    with torch.device("meta"):
        model = Around(Mlp())
    assert [tiles.path for tiles in row_search.find(model)] == ["it"]


def test_real_rows_are_looked_at_too() -> None:
    """What takes another way on real numbers than on fakes is found by running it."""

    def odd(x: Tensor) -> Tensor:
        return x * 2 if type(x) is Tensor and x.shape[:2] == (2, 3) else x

    assert found(Mlp(odd)) == []
    assert "not independent" in reason(Mlp(odd))


def test_facts_say_how_wide_it_is() -> None:
    facts = row_facts.prove(module := Mlp(), module.forward)
    assert facts.width == WIDTH
    assert facts.outer_bytes == 2 * WIDTH * 4
    assert facts.inner_bytes == 2 * 4 * WIDTH * 4  # before and after the activation
    assert facts.dims == {2, 3, 4}


def hugging_face() -> dict[str, tuple[Callable[[], Any], list[str]]]:
    """Models by family, with the dropout that they have by default: what is tiled in each."""
    import transformers as hf

    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 96}
    words = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    t5 = {"d_model": 32, "d_ff": 96, "num_layers": 1, "num_heads": 2, "d_kv": 16}
    gpt2 = {"n_embd": 32, "n_layer": 1, "n_head": 2}
    opt = {"hidden_size": 32, "ffn_dim": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    return {
        "gpt2": (lambda: hf.GPT2Model(hf.GPT2Config(**gpt2, **words)), ["h.0.mlp"]),
        "llama": (lambda: hf.LlamaModel(hf.LlamaConfig(**size, **words)), ["layers.0.mlp"]),
        "t5": (
            lambda: hf.T5Model(hf.T5Config(**t5, **words)),
            ["encoder.block.0.layer.1", "decoder.block.0.layer.2"],
        ),
        "bert": (lambda: hf.BertModel(hf.BertConfig(**size, vocab_size=50)), ["encoder.layer.0"]),
        "opt": (lambda: hf.OPTModel(hf.OPTConfig(**opt, word_embed_proj_dim=32, **words)), []),
        "vit": (lambda: hf.ViTModel(hf.ViTConfig(**size, image_size=32)), ["layers.0.mlp"]),
    }


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "bert", "opt", "vit"])
def test_hugging_face_families(name: str) -> None:
    pytest.importorskip("transformers")
    build, paths = hugging_face()[name]
    assert [tiles.path for tiles in row_search.find(build())] == paths


class LearnedStep(nn.Module):
    """Rounds activations to a learned step, whose gradient is divided by the number of elements (LSQ)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 128), nn.Linear(128, 16)
        self.step = nn.Parameter(torch.tensor(0.05))

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.gelu(self.up(x))
        small = self.step * (x.numel() * 127) ** -0.5
        step = (self.step - small).detach() + small
        scaled = (x / step).clamp(-128, 127)
        return self.down(((scaled.round() - scaled).detach() + scaled) * step)


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] / grads[0].norm()


class NormedGradient(nn.Module):
    """Rows that meet in backward: in a function, or in a hook."""

    def __init__(self, by_hook: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 128), nn.Linear(128, 16)
        self.by_hook = by_hook

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.gelu(self.up(x))
        if not self.by_hook:
            return self.down(_Normed.apply(x))  # type: ignore[no-untyped-call,no-any-return]
        if x.requires_grad:
            x.register_hook(lambda grad: grad / grad.norm())
        return self.down(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [LearnedStep, lambda: NormedGradient(False), lambda: NormedGradient(True)])
def test_rows_that_meet_in_backward_are_no_rows_alone(make: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), make())
    assert not row_search.find(model) and row_search.reasons(model)


def test_a_refusal_holds_no_frame() -> None:
    """Models are looked at inside a training step, whose frames would stay until garbage is collected."""

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, 4 * WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x) @ self.up(x).transpose(-1, -2)

    def look() -> weakref.ref[Tensor]:
        module, held = Attending(), torch.ones(1)
        with suppress(row_facts.NotRowWiseError):
            row_facts.prove(module, module.forward)
            pytest.fail("it is refused")
        return weakref.ref(held)

    look()  # imports what it needs
    gc.collect()
    gc.disable()
    try:
        assert look()() is None
    finally:
        gc.enable()
