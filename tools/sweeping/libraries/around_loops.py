# SPDX-License-Identifier: Apache-2.0
"""Training loops that do more, or something else, than forward, backward, step."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from sweeping.libraries.around_loop import STEPS, Loop, sgd, situation
from sweeping.libraries.around_models import logits, loss


@situation("transformer", "convnet")
def plain_loop(loop: Loop) -> None:
    loop.train(loop.built())


@situation("transformer", "convnet", "gpt2")
def ema_by_hand(loop: Loop) -> None:
    model = loop.built()
    shadow = (
        copy.deepcopy(model)
        if model is None
        else {n: p.detach().clone() for n, p in model.named_parameters()}
    )
    optimizer = sgd(model)
    for number in range(STEPS):
        value = loop.loss(model, number)
        value.backward()
        optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                shadow[name].lerp_(p, 0.1)
        loop.keep(model, loss=value, **{f"shadow {name}": item for name, item in shadow.items()})
        optimizer.zero_grad()


@situation("transformer", "convnet", "llama")
def ema_of_swa_utils(loop: Loop) -> None:
    """`AveragedModel` deep-copies the wrapped model, and is evaluated between steps."""
    model = loop.built()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = sgd(model)
    for number in range(STEPS):
        value = loop.loss(model, number)
        value.backward()
        optimizer.step()
        average.update_parameters(model)
        with torch.no_grad():
            other = loop.loss(average.eval(), 50 + number)
        loop.keep(model, loss=value, other=other)
        optimizer.zero_grad()


@situation("convnet")
def swa_with_batch_norm(loop: Loop) -> None:
    model = loop.built()
    average, optimizer = AveragedModel(model), sgd(model)
    schedule = SWALR(optimizer, swa_lr=0.05)
    for number in range(STEPS):
        value = loop.loss(model, number)
        value.backward()
        optimizer.step()
        schedule.step()
        average.update_parameters(model)
        loop.keep(model, loss=value)
        optimizer.zero_grad()
    update_bn([loop.batch(number)[0] for number in range(2)], average)
    loop.keep(average)


@situation("transformer", "convnet", "llama")
def accumulation(loop: Loop) -> None:
    model = loop.built()
    optimizer = sgd(model)
    for number in range(STEPS):
        for part in range(3):
            value = loop.loss(model, 3 * number + part) / 3
            value.backward()
            loop.keep(model, loss=value)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


@situation("transformer", "convnet", "llama")
def freezing_and_unfreezing(loop: Loop) -> None:
    """The lower blocks train from the second step on; in the last step nothing but the head does."""
    model = loop.built()
    blocks = loop.blocks(model)
    for number in range(4):
        for block in blocks[: len(blocks) // 2]:
            block.requires_grad_(number == 1)
        for block in blocks[len(blocks) // 2 :]:
            block.requires_grad_(number != 3)
        loop.train(model, steps=1, first=number)


@situation("transformer", "mlp")
def frozen_in_evaluation(loop: Loop) -> None:
    """Frozen blocks are in evaluation mode, the others in training."""
    model = loop.built()
    for block in loop.blocks(model)[:2]:
        block.requires_grad_(False).eval()
    loop.train(model)


@situation("gpt2", "llama")
def generate_in_the_middle(loop: Loop) -> None:
    """Text is generated between steps, and once between a forward and its backward."""
    model: Any = loop.built()
    optimizer = sgd(model)
    for number in range(STEPS):
        inputs, _ = loop.batch(number)
        value = loop.loss(model, number)
        model.eval()
        text = model.generate(inputs[:2, :4], max_new_tokens=4, do_sample=False, pad_token_id=0)
        model.train()
        value.backward()
        loop.keep(model, loss=value, text=text)
        optimizer.step()
        optimizer.zero_grad()


@situation("gpt2", "llama")
def rollouts(loop: Loop) -> None:
    """Sampled text is what is learned from, as in reinforcement learning from feedback."""
    model: Any = loop.built()
    optimizer = sgd(model)
    for number in range(STEPS):
        inputs, _ = loop.batch(number)
        with torch.no_grad():
            text = model.generate(inputs[:, :4], max_new_tokens=6, do_sample=True, pad_token_id=0)
        chances = logits(model(text)).log_softmax(-1)[:, :-1].gather(-1, text[:, 1:, None])
        value = -(chances * (text[:, 1:, None] % 3 - 1)).mean()
        value.backward()
        loop.keep(model, loss=value, text=text)
        optimizer.step()
        optimizer.zero_grad()


@situation("transformer", "convnet")
def clipping_and_schedule(loop: Loop) -> None:
    model = loop.built()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    for number in range(STEPS):
        value = loop.loss(model, number)
        value.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        loop.keep(model, loss=value, norm=norm)
        optimizer.zero_grad()


@situation("transformer", "convnet")
def another_batch_size(loop: Loop) -> None:
    """Batches of other sizes, the last one small, as at the end of an epoch."""
    model = loop.built()
    for number, size in enumerate((8, 3, 8, 1)):
        inputs, target = loop.batch(number)
        value = loss(model(inputs[:size]), target[:size])
        value.backward()
        loop.keep(model, loss=value)
        model.zero_grad()


@situation("transformer", "convnet", "llama")
def saved_and_loaded(loop: Loop) -> None:
    """A state is loaded in the middle of training, in place and by assignment."""
    model = loop.built()
    state = copy.deepcopy(model.state_dict())
    loop.train(model, steps=2)
    model.load_state_dict(state)
    loop.train(model, steps=1, first=2)
    model.load_state_dict(copy.deepcopy(state), assign=True)
    loop.train(model, steps=1, first=3)


@situation("transformer", "mlp")
def an_exception_in_a_step(loop: Loop) -> None:
    """A forward that fails, and a graph that is never walked, leave the next steps as they are."""
    model = loop.built()
    loop.train(model, steps=1)
    try:
        model(torch.zeros(2, 3, 5))
    except Exception:
        loop.loss(model, 7)
    loop.train(model, steps=2, first=1)


@situation("mlp", "convnet")
def two_models(loop: Loop) -> None:
    """Two wrapped models in one step, as generator and discriminator."""
    first, second = loop.built(), loop.built()
    optimizers = sgd(first), sgd(second)
    for number in range(STEPS):
        a, b = loop.loss(first, number), loop.loss(second, 20 + number)
        (a + 0.5 * b + a * b).backward()
        loop.keep(first, a=a)
        loop.keep(second, b=b)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
