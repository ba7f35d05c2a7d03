# SPDX-License-Identifier: Apache-2.0
"""What libraries do with modules: adapters, pruning, parametrizations, tied weights, per-sample gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from sweeping.libraries.around_loop import STEPS, Loop, linears, sgd, situation
from sweeping.libraries.around_models import loss


def _with_parts(model: nn.Module, change: Any) -> None:
    for _, module in list(linears(model)):
        change(module)


@situation("transformer", "mlp")
def spectral_norm(loop: Loop) -> None:
    """Its power iteration changes buffers in every forward of training."""
    loop.train(loop.built(lambda model: _with_parts(model, parametrizations.spectral_norm)))


@situation("transformer", "mlp")
def old_spectral_norm(loop: Loop) -> None:
    loop.train(loop.built(lambda model: _with_parts(model, nn.utils.spectral_norm)))


@situation("transformer", "mlp")
def weight_norm(loop: Loop) -> None:
    loop.train(loop.built(lambda model: _with_parts(model, parametrizations.weight_norm)))


@situation("transformer", "mlp")
def old_weight_norm(loop: Loop) -> None:
    loop.train(loop.built(lambda model: _with_parts(model, nn.utils.weight_norm)))


@situation("mlp")
def orthogonal(loop: Loop) -> None:
    loop.train(loop.built(lambda model: _with_parts(model, parametrizations.orthogonal)))


@situation("transformer", "mlp")
def cached_parametrization(loop: Loop) -> None:
    model = loop.built(lambda model: _with_parts(model, parametrizations.weight_norm))
    loop.train(model, lambda number: parametrize.cached())


@situation("transformer", "mlp")
def parametrized_in_the_middle(loop: Loop) -> None:
    """Parametrizations come and go while the model is wrapped."""
    model = loop.built()
    loop.train(model, steps=1)
    _with_parts(model, parametrizations.weight_norm)
    loop.train(model, steps=1, first=1)
    for _, module in [*model.named_modules()]:
        if parametrize.is_parametrized(module):
            parametrize.remove_parametrizations(module, "weight")
    loop.train(model, steps=1, first=2)


@situation("transformer", "convnet")
def pruning(loop: Loop) -> None:
    """Masks from the start, more of them in the middle, made permanent at the end."""

    def prune_all(model: nn.Module, amount: float) -> None:
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                prune.l1_unstructured(module, "weight", amount)

    model = loop.built(lambda model: prune_all(model, 0.3))
    loop.train(model, steps=2)
    prune_all(model, 0.2)
    loop.train(model, steps=1, first=2)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            prune.remove(module, "weight")
    loop.train(model, steps=1, first=3)


@situation("tied")
def tied_weights(loop: Loop) -> None:
    loop.train(loop.built())


@situation("transformer")
def shared_blocks(loop: Loop) -> None:
    """One block stands in several places, as in ALBERT."""

    def share(model: nn.Module) -> None:
        blocks: Any = model.get_submodule("blocks")
        blocks[2], blocks[3] = blocks[0], blocks[0]

    loop.train(loop.built(share))


class Adapted(nn.Module):
    """A linear layer with several low-rank adapters, one of them active: by an attribute, as in peft."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.active, self.merged, self.scaling = "a", False, {"a": 1.0, "b": 0.5}
        self.down = nn.ModuleDict({name: nn.Linear(base.in_features, 4, bias=False) for name in "ab"})
        self.up = nn.ModuleDict({name: nn.Linear(4, base.out_features, bias=False) for name in "ab"})

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        if self.active not in self.down:
            return out
        added: Tensor = self.up[self.active](self.down[self.active](x))
        return out + added * self.scaling[self.active]


def _adapt(model: nn.Module) -> None:
    for name, module in list(linears(model)):
        parent, _, key = name.rpartition(".")
        if parent:
            setattr(model.get_submodule(parent), key, Adapted(module))


def _activate(model: nn.Module, name: str) -> None:
    for module in model.modules():
        if isinstance(module, Adapted):
            module.active = name


@situation("transformer", "mlp")
def adapters(loop: Loop) -> None:
    """One adapter a step."""
    model = loop.built(_adapt)
    for number, name in enumerate(("a", "b", "none", "a")):
        _activate(model, name)
        value = loop.loss(model, number)
        if value.requires_grad:
            value.backward()
        loop.keep(model, loss=value)
        model.zero_grad()


@situation("transformer", "mlp")
def adapters_switched_before_backward(loop: Loop) -> None:
    """Two forwards with an adapter each, then one backward."""
    model = loop.built(_adapt)
    for number in range(STEPS):
        _activate(model, "a")
        first = loop.loss(model, 2 * number)
        _activate(model, "b")
        second = loop.loss(model, 2 * number + 1)
        _activate(model, "none")
        (first + second).backward()
        loop.keep(model, first=first, second=second)
        model.zero_grad()


@situation("transformer", "mlp")
def adapter_scaled_for_one_forward(loop: Loop) -> None:
    model = loop.built(_adapt)
    for number in range(STEPS):
        found = [module for module in model.modules() if isinstance(module, Adapted)]
        for module in found:
            module.scaling["a"] = 0.25 + number
        value = loop.loss(model, number)
        for module in found:
            module.scaling["a"] = 1.0
        value.backward()
        loop.keep(model, loss=value)
        model.zero_grad()


@situation("gpt2", "llama", needs="peft")
def peft_adapters(loop: Loop) -> None:
    """Preference training: the base model speaks with its adapters off, in the same step."""
    import peft

    from sweeping.subject import seed

    seed(0)
    names = ["c_attn"] if loop.kind.block.startswith("transformer") else ["q_proj", "v_proj", "down_proj"]
    config = peft.LoraConfig(r=4, target_modules=names, lora_dropout=0.1, init_lora_weights=False)
    model: Any = peft.get_peft_model(loop.kind.build().train(), config)
    model.add_adapter("other", config)
    model.set_adapter("default")
    loop.wrap(model)
    loop.model = model
    optimizer = sgd(model)
    for number in range(STEPS):
        model.set_adapter("default")
        value = loop.loss(model, number)
        with torch.no_grad(), model.disable_adapter():
            base = loop.loss(model, number)
        model.set_adapter("other")
        other = loop.loss(model, 30 + number)
        (value - base + other).backward()
        loop.keep(model, loss=value, base=base, other=other)
        optimizer.step()
        optimizer.zero_grad()


@situation("mlp", "transformer")
def per_sample_gradients_by_func(loop: Loop) -> None:
    """`torch.func` over the wrapped model."""
    from torch.func import functional_call, grad, vmap

    model = loop.built().eval()
    for number in range(2):
        weights = {name: p.detach() for name, p in model.named_parameters()}

        def one(weights: Any, x: Tensor, target: Tensor) -> Tensor:
            return loss(functional_call(model, weights, (x[None],)), target[None])

        inputs, target = loop.batch(number)
        found = vmap(grad(one), in_dims=(None, 0, 0))(weights, inputs, target)
        loop.keep(model, **{name.replace(".", "_"): item for name, item in found.items()})
    model.train()
    loop.train(model, steps=2)


@situation("mlp", "transformer")
def per_sample_gradients_by_hooks(loop: Loop) -> None:
    """Activations from forward hooks and gradients from backward hooks make `grad_sample` of each weight."""
    model = loop.built()
    for _, module in linears(model):
        module.register_forward_hook(lambda module, args, out: setattr(module, "seen", args[0].detach()))
        module.register_full_backward_hook(_of_each_sample)
    for number in range(STEPS):
        value = loop.loss(model, number)
        value.backward()
        weights: dict[str, Any] = {name: module.weight for name, module in linears(model)}
        kept = {name.replace(".", "_"): weight.grad_sample for name, weight in weights.items()}
        loop.keep(model, loss=value, **kept)
        model.zero_grad()


def _of_each_sample(module: Any, inside: Any, outside: Any) -> None:
    seen, out = module.seen, outside[0]
    if seen.dim() == 2:
        seen, out = seen[:, None], out[:, None]
    module.weight.grad_sample = torch.einsum("bti,bto->boi", seen, out)
    del module.seen


@situation("transformer", "convnet")
def steps_in_hooks_of_gradients(loop: Loop) -> None:
    """An optimizer per weight steps as soon as its gradient is there."""
    model = loop.built()
    optimizers = {p: torch.optim.SGD([p], lr=1e-2) for p in model.parameters()}

    def step(p: Any) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in optimizers:
        p.register_post_accumulate_grad_hook(step)
    for number in range(STEPS):
        value = loop.loss(model, number)
        value.backward()
        loop.keep(model, loss=value)


@situation("transformer", "convnet")
def stateless_call(loop: Loop) -> None:
    """Other weights for one call, as meta-learning has them."""
    model = loop.built()
    for number in range(STEPS):
        weights = {name: (p * 0.9).detach().requires_grad_() for name, p in model.named_parameters()}
        inputs, target = loop.batch(number)
        value = loss(torch.func.functional_call(model, weights, (inputs,)), target)
        found = torch.autograd.grad(value, list(weights.values()))
        loop.keep(model, loss=value, **{f"found{index}": item for index, item in enumerate(found)})


@situation("transformer", "convnet")
def layers_dropped(loop: Loop) -> None:
    """A block is left out at random, by a hook that skips or by the loop."""
    model: Any = loop.built()
    whole = model.blocks
    for number in range(4):
        seed_of_step = torch.Generator().manual_seed(number)
        chosen = [block for block in whole if torch.rand((), generator=seed_of_step) > 0.4]
        model.blocks = nn.ModuleList(chosen)
        loop.train(model, steps=1, first=number)
    model.blocks = whole


@situation("transformer", "mlp")
def grown(loop: Loop) -> None:
    """A block is put on top while the model trains."""
    model: Any = loop.built()
    loop.train(model, steps=1)
    model.blocks.append(
        type(model.blocks[0])()
        if not isinstance(model.blocks[0], nn.Sequential)
        else nn.Sequential(nn.Linear(32, 32))
    )
    loop.train(model, steps=2, first=1)
