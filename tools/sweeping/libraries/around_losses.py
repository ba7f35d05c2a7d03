# SPDX-License-Identifier: Apache-2.0
"""Training loops with several forwards or backwards in a step: attacks, penalties, distillation."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from sweeping.libraries.around_loop import STEPS, Loop, sgd, situation
from sweeping.libraries.around_models import logits, loss


@situation("convnet", "mlp")
def fgsm(loop: Loop) -> None:
    """Adversarial training: gradients of inputs, then a step on what they make."""
    model = loop.built()
    optimizer = sgd(model)
    for number in range(STEPS):
        inputs, target = loop.batch(number)
        inputs = inputs.requires_grad_()
        (found,) = torch.autograd.grad(loss(model(inputs), target), inputs)
        value = loss(model((inputs + 0.03 * found.sign()).detach()), target)
        value.backward()
        loop.keep(model, loss=value, found=found)
        optimizer.step()
        optimizer.zero_grad()


@situation("convnet", "transformer")
def pgd(loop: Loop) -> None:
    """Several rounds on inputs with frozen weights in evaluation mode."""
    model = loop.built()
    for number in range(2):
        inputs, target = loop.batch(number)
        start = model.get_submodule("embedding")(inputs).detach() if inputs.dtype == torch.long else inputs
        model.eval().requires_grad_(False)
        changed = start.clone()
        for _ in range(3):
            changed.requires_grad_()
            value = loss(model(changed), target)
            (found,) = torch.autograd.grad(value, changed)
            changed = (changed + 0.01 * found.sign()).clamp(start - 0.03, start + 0.03).detach()
            loop.keep(model, loss=value, found=found)
        model.train().requires_grad_(True)
        loop.train(model, steps=1, first=number)


@situation("mlp", "convnet")
def lbfgs(loop: Loop) -> None:
    """An optimizer that calls forward and backward several times in a step."""
    model = loop.built()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=3)
    for number in range(STEPS):

        def closure(number: int = number) -> Tensor:
            optimizer.zero_grad()
            value = loop.loss(model, number)
            value.backward()
            return value

        value = optimizer.step(closure)
        loop.keep(model, loss=value)


@situation("convnet", "transformer")
def sharpness_aware(loop: Loop) -> None:
    """Two passes, the second at weights moved along the gradient (SAM)."""
    model = loop.built()
    optimizer = sgd(model)
    for number in range(STEPS):
        loop.loss(model, number).backward()
        moves = [(p, 0.05 * p.grad.sign()) for p in model.parameters() if p.grad is not None]
        with torch.no_grad():
            for p, move in moves:
                p.add_(move)
        optimizer.zero_grad()
        value = loop.loss(model, number)
        value.backward()
        with torch.no_grad():
            for p, move in moves:
                p.sub_(move)
        loop.keep(model, loss=value)
        optimizer.step()
        optimizer.zero_grad()


@situation("mlp")
def gradient_penalty(loop: Loop) -> None:
    """Double backward through the model, as WGAN-GP does."""
    model = loop.built()
    optimizer = sgd(model)
    for number in range(STEPS):
        inputs, target = loop.batch(number)
        inputs = inputs.requires_grad_()
        scores = model(inputs)
        (found,) = torch.autograd.grad(scores.sum(), inputs, create_graph=True)
        value = loss(scores, target) + 0.1 * (found.norm(2, 1) - 1).square().mean()
        value.backward()
        loop.keep(model, loss=value, found=found)
        optimizer.step()
        optimizer.zero_grad()


@situation("transformer", "convnet", "llama")
def two_losses(loop: Loop) -> None:
    """Two backward passes through one graph."""
    model = loop.built()
    for number in range(STEPS):
        inputs, target = loop.batch(number)
        scores = logits(model(inputs))
        first, second = loss(scores, target), scores.square().mean()
        first.backward(retain_graph=True)
        loop.keep(model, loss=first)
        second.backward()
        loop.keep(model, loss=second)
        model.zero_grad()


@situation("transformer", "convnet")
def gradients_by_grad(loop: Loop) -> None:
    """`torch.autograd.grad` instead of backward, for some of the weights."""
    model = loop.built()
    for number in range(STEPS):
        weights = list(model.parameters())[::2]
        value = loop.loss(model, number)
        found = torch.autograd.grad(value, weights)
        loop.keep(model, loss=value, **{f"found{index}": item for index, item in enumerate(found)})


@situation("transformer", "llama")
def two_forwards_one_backward(loop: Loop) -> None:
    """Siamese: the graphs of two forwards are alive together."""
    model = loop.built()
    for number in range(STEPS):
        first, second = loop.loss(model, 2 * number), loop.loss(model, 2 * number + 1)
        (first * second).backward()
        loop.keep(model, first=first, second=second)
        model.zero_grad()


@situation("transformer", "convnet")
def backward_much_later(loop: Loop) -> None:
    """Other forwards, with and without gradients, come between a forward and its backward."""
    model = loop.built()
    for number in range(STEPS):
        first = loop.loss(model, 2 * number)
        second = loop.loss(model, 2 * number + 1)
        with torch.no_grad():
            third = loop.loss(model, 90 + number)
        second.backward()
        first.backward()
        loop.keep(model, first=first, second=second, third=third)
        model.zero_grad()


@situation("transformer", "convnet", "llama")
def distillation(loop: Loop) -> None:
    """A frozen copy of the wrapped model teaches it."""
    model = loop.built()
    teacher = copy.deepcopy(model).requires_grad_(False).eval()
    optimizer = sgd(model)
    for number in range(STEPS):
        inputs, _ = loop.batch(number)
        with torch.no_grad():
            wanted = logits(teacher(inputs)).softmax(-1)
        value = F.kl_div(logits(model(inputs)).log_softmax(-1), wanted, reduction="batchmean")
        value.backward()
        loop.keep(model, loss=value)
        optimizer.step()
        optimizer.zero_grad()
