# SPDX-License-Identifier: Apache-2.0
"""The published operator benchmarks as plain PyTorch programs.

Each program is what the benchmark's source says in shapes, dtypes, operations, and in what is measured how
often; `measurements.csv` names the source of every row. A program runs wherever a `Meter` can read a peak:
on a card, or traced without one (`trace_program`).

Common to all of them: a process builds what both contestants need (so the weights of the one that does not
run are in memory too), then runs forward and backward ten times. The peak is reset before each run and read
after it; the published figure is the median. Gradients are never cleared, so from the recompute on a fresh
gradient stands beside the accumulated one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from trace_program import Meter

Program = Callable[[Meter], None]

RUNS = 10
"""Forward and backward passes of a benchmark."""


@dataclass(frozen=True)
class OpRow:
    """One published figure.

    Attributes:
        kernel: name of the benchmark.
        provider: who does the work: "huggingface" and "torch" are plain PyTorch.
        x: the size that the benchmark varies.
        config: the sizes that it does not.
    """

    kernel: str
    provider: str
    x: int
    config: Mapping[str, Any]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the row names; float32 where it names none."""
        return getattr(torch, str(self.config.get("dtype", "torch.float32")).removeprefix("torch."))


def _measure(meter: Meter, once: Callable[[], None], runs: int = RUNS) -> None:
    for _ in range(runs):
        meter.reset_peak()
        once()
        meter.read_peak()


def _idle_weights(meter: Meter, *counts: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Parameters of the contestant that does not run."""
    return [torch.ones(count, dtype=dtype, device=meter.device) for count in counts]


# ---- losses ------------------------------------------------------------------------------------------


def cross_entropy(row: OpRow, meter: Meter) -> None:
    """Cross-entropy of B·T rows of V float32 logits, which are the leaf."""
    tokens, vocabulary = row.config["B"] * row.config["T"], row.x
    logits = torch.randn(tokens, vocabulary, requires_grad=True, device=meter.device)
    target = torch.randint(vocabulary, (tokens, 1), device=meter.device).squeeze(1)
    _measure(meter, lambda: F.cross_entropy(logits, target).backward())


def fused_linear_cross_entropy(row: OpRow, meter: Meter) -> None:
    """A linear head without bias and its cross-entropy, both in the row's dtype; two heads in memory."""
    hidden, vocabulary = row.config["H"], row.config["V"]
    head = nn.Linear(hidden, vocabulary, bias=False, dtype=row.dtype, device=meter.device)
    idle = nn.Linear(hidden, vocabulary, bias=False, dtype=row.dtype, device=meter.device)
    states = torch.randn(row.x, hidden, requires_grad=True, dtype=row.dtype, device=meter.device)
    target = torch.randint(vocabulary, (row.x, 1), device=meter.device).squeeze(1)
    _measure(meter, lambda: F.cross_entropy(head(states), target).backward())
    del idle


def _mean_logps(logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """Mean log-probability of each sequence's labels; (batch, time, vocabulary) → (batch,)."""
    mask = labels != ignored
    labels = torch.where(labels == ignored, 0, labels)
    per_token = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    return (per_token * mask).sum(-1) / mask.sum(-1)


def _left_by_chunks(row: OpRow, meter: Meter) -> list[Tensor]:
    """What the other contestant's compiled closure had left in memory; read off the rows, not in the source.

    The weight and its sum of gradients, five chunks of two sequences' states and three of their labels: the
    same for both lengths.
    """
    tokens, hidden, vocabulary = 2 * row.config["T"], row.config["H"], row.config["V"]
    left = [torch.empty(vocabulary, hidden, dtype=row.dtype, device=meter.device) for _ in range(2)]
    left += [torch.empty(tokens, hidden, dtype=row.dtype, device=meter.device) for _ in range(5)]
    left.append(torch.zeros((), device=meter.device))  # its sum of losses
    return left + [torch.empty(tokens, dtype=torch.int64, device=meter.device) for _ in range(3)]


def fused_linear_orpo_loss(row: OpRow, meter: Meter) -> None:
    """Odds-ratio preference loss of a head's logits, first half of the batch chosen.

    The rows of 4096 tokens were recorded before the source was published, which makes float32 copies of the
    logits first: those rows grow with the batch as logits in the head's own dtype do.
    """
    shape = (row.x, row.config["T"])
    upcast = row.config["T"] != 4096
    left = _left_by_chunks(row, meter)
    hidden, vocabulary = row.config["H"], row.config["V"]
    head = nn.Linear(hidden, vocabulary, bias=False, dtype=row.dtype, device=meter.device)
    idle = nn.Linear(hidden, vocabulary, bias=False, dtype=row.dtype, device=meter.device)
    states = torch.randn(*shape, hidden, requires_grad=True, dtype=row.dtype, device=meter.device)
    target = torch.randint(vocabulary, shape, device=meter.device)
    chosen = row.x // 2

    def forward() -> tuple[Tensor, ...]:
        product = states @ head.weight.t()
        logits = product.float() if upcast else product
        likelihood = F.cross_entropy(logits[:chosen].view(-1, vocabulary), target[:chosen].view(-1))
        logps = _mean_logps(logits, target, -100)
        return logps[:chosen], logps[chosen:], logits[:chosen], logits[chosen:], likelihood

    def loss() -> Tensor:
        good, bad, *_logits, likelihood = forward()
        odds = (good - bad) - (torch.log1p(-torch.exp(good)) - torch.log1p(-torch.exp(bad)))
        return likelihood - (0.1 * F.logsigmoid(odds)).mean()

    _measure(meter, lambda: loss().backward())
    del idle, left


_LEFT_BY_KTO = 1_326_977_024
"""Bytes that the other contestant's compiled closure had left in memory: read off the row of batch 4."""


def kto_loss(row: OpRow, meter: Meter) -> None:
    """Unpaired preference loss with a reference head; heads with bias; the states are no leaves."""
    sizes = (2, 4, 8, 16, 32)
    for size in sizes:  # the timing part of the same process, whose blocks stay in the cache
        _kto_loss(replace(row, x=size), meter)
    left = torch.empty(_LEFT_BY_KTO, dtype=torch.uint8, device=meter.device)
    _kto_loss(row, meter, RUNS)
    del left


def _kto_loss(row: OpRow, meter: Meter, runs: int = 0) -> None:
    shape = (row.x, row.config["T"])
    hidden, vocabulary, ignored = row.config["H"], row.config["V"], row.config["ignore_index"]
    heads = [
        nn.Linear(hidden, vocabulary, bias=row.config["bias"], dtype=row.dtype, device=meter.device)
        for _ in range(4)  # policy and reference, of both contestants
    ]
    policy, reference = heads[:2]
    states = torch.randn(*shape, hidden, device=meter.device, dtype=row.dtype)
    target = torch.randint(vocabulary, shape, device=meter.device)
    preferred = torch.randint(2, (row.x,), dtype=torch.bool, device=meter.device)
    divergence = torch.randn(1, device=meter.device, dtype=row.dtype)
    reference_states = torch.randn(*shape, hidden, device=meter.device, dtype=row.dtype)

    def forward() -> tuple[Tensor, ...]:
        product = states @ policy.weight.t()
        product = product + policy.bias
        logits = product.float()
        likelihood = torch.tensor(0.0, device=meter.device)
        logps = _mean_logps(logits, target, ignored)
        good, bad = logps[preferred], logps[~preferred]
        return good, bad, logits[preferred], logits[~preferred], likelihood  # product lives until here

    def expected() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            logits = reference_states @ reference.weight.t()
            logits = logits + reference.bias
            logps = _mean_logps(logits, target, ignored)
            return logps[preferred], logps[~preferred]

    def loss() -> tuple[Tensor, tuple[Tensor, ...]]:
        good, bad, good_logits, bad_logits, likelihood = forward()
        expected_good, expected_bad = expected()
        good_ratio, bad_ratio = good - expected_good, bad - expected_bad
        losses = torch.cat(
            (
                1 - F.sigmoid(0.1 * (good_ratio - divergence)),
                1 - F.sigmoid(0.1 * (divergence - bad_ratio)),
            )
        )
        rewards = (0.1 * good_ratio).sum(), (0.1 * bad_ratio).sum()
        total = likelihood * 1.0 + losses.mean()
        sums = tuple(part.detach().sum() for part in (good, bad, good_logits, bad_logits))
        return total, (*sums, *rewards)

    if not runs:
        loss()[0].backward()
    _measure(meter, lambda: loss()[0].backward(), runs)


# ---- normalisation and activation functions ----------------------------------------------------------


class _RootMeanSquareNorm(nn.Module):
    """Normalises in float32 and scales in the parameter's dtype."""

    def __init__(self, width: int, epsilon: float, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, device=device))
        self.epsilon = epsilon

    def forward(self, states: Tensor) -> Tensor:
        given = states.dtype
        states = states.to(torch.float32)
        variance = states.pow(2).mean(-1, keepdim=True)
        states = states * torch.rsqrt(variance + self.epsilon)
        return self.weight * states.to(given)


class _AddAndNorm(_RootMeanSquareNorm):
    """The same after a residual sum, which is returned too."""

    def forward(self, states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        given = states.dtype
        states = states.to(torch.float32)
        residual = residual.to(torch.float32)
        states = states + residual
        residual = states
        variance = states.pow(2).mean(-1, keepdim=True)
        states = states * torch.rsqrt(variance + self.epsilon)
        return self.weight * states.to(given), residual.to(given)


def layer_norm(row: OpRow, meter: Meter) -> None:
    """Layer norm of (M, N), gradient given, graph retained."""
    idle = _idle_weights(meter, row.x, row.x)
    norm = nn.LayerNorm(row.x, eps=row.config["eps"], device=meter.device)
    states = torch.randn(row.config["M"], row.x, dtype=row.dtype, device=meter.device)
    gradient = torch.randn_like(states)
    states.requires_grad_(True)

    def once() -> None:
        result = norm(states)
        result.backward(gradient, retain_graph=True)

    _measure(meter, once)
    del idle


def rms_norm(row: OpRow, meter: Meter) -> None:
    """Root-mean-square norm of (M, H) written out in PyTorch, gradient given, graph retained."""
    idle = _idle_weights(meter, row.x)
    norm = _RootMeanSquareNorm(row.x, row.config["eps"], meter.device)
    states = torch.randn(row.config["M"], row.x, dtype=row.dtype, device=meter.device)
    gradient = torch.randn_like(states)
    states.requires_grad_(True)

    def once() -> None:
        result = norm(states)
        result.backward(gradient, retain_graph=True)

    _measure(meter, once)
    del idle


def fused_add_rms_norm(row: OpRow, meter: Meter) -> None:
    """Residual sum and norm, both results with a given gradient; three contestants in memory."""
    idle = _idle_weights(meter, row.x, row.x, row.x)
    norm = _AddAndNorm(row.x, row.config["eps"], meter.device)
    shape = (row.config["M"], row.x)
    states = torch.randn(shape, dtype=row.dtype, device=meter.device)
    residual = torch.randn(shape, dtype=row.dtype, device=meter.device)
    gradients = torch.randn_like(states), torch.randn_like(residual)
    states.requires_grad_(True)
    residual.requires_grad_(True)

    def once() -> None:
        normed, total = norm(states, residual)
        torch.autograd.backward((normed, total), gradients)

    _measure(meter, once)
    del idle


def _of_a_vector(row: OpRow, meter: Meter, function: Callable[[Tensor], Tensor]) -> None:
    """A function of a vector of N elements (the row's M has no part in it), gradient made in each run."""
    states = torch.randn(row.x, device=meter.device, dtype=row.dtype, requires_grad=True)

    def once() -> None:
        result = function(states)
        result.backward(torch.ones_like(result), retain_graph=True)

    _measure(meter, once)


def softmax(row: OpRow, meter: Meter) -> None:
    """Softmax of a vector."""
    _of_a_vector(row, meter, nn.Softmax(dim=-1))


def relu_squared(row: OpRow, meter: Meter) -> None:
    """Square of the positive part of a vector."""
    _of_a_vector(row, meter, lambda states: torch.square(F.relu(states)))


def swiglu(row: OpRow, meter: Meter) -> None:
    """The gated MLP of Llama on (B, T, hidden), gradient made in each run, graph retained; one contestant."""
    hidden, inner = row.config["hidden_size"], row.config["intermediate_size"]
    shape = (row.config["B"], row.x, hidden)
    states = torch.randn(*shape, device=meter.device, dtype=row.dtype, requires_grad=True)
    gate, up = (nn.Linear(hidden, inner, False, meter.device, row.dtype) for _ in range(2))
    down = nn.Linear(inner, hidden, False, meter.device, row.dtype)

    def once() -> None:
        result = down(F.silu(gate(states)) * up(states))
        result.backward(torch.randn_like(result), retain_graph=True)

    _measure(meter, once)


def _left_by_compiled(row: OpRow) -> int:
    """Bytes of what earlier parts of the embedding benchmark's process had left in memory.

    The process compiles a module of each vocabulary (1024 … 131072), and every compiled module stays alive
    with its gradient: one copy of the weights from the forward timing and two (weight, gradient) from the
    timing of both passes, at 4096 features; then two at 768 features from that memory benchmark.
    """
    rows = sum(1 << power for power in range(10, 18))
    left = 3 * rows * 4096 * 4
    return left + 2 * rows * 768 * 4 if row.config["D"] == 4096 else left


def _cached(meter: Meter, size_bytes: int = 16 << 30) -> None:
    """Leaves free memory in the allocator's cache, as the timing part of the same process did.

    What is then taken is cut to size, where a fresh segment would be rounded to 2 MiB and may be left uncut.
    """
    free = torch.empty(size_bytes, dtype=torch.uint8, device=meter.device)
    del free


def embedding(row: OpRow, meter: Meter) -> None:
    """An embedding of (B, T) random ids, gradient made in each run; two embeddings and leftovers held."""
    width = row.config["D"]
    _cached(meter)
    left = torch.empty(_left_by_compiled(row), dtype=torch.uint8, device=meter.device)
    table = nn.Embedding(row.x, width, device=meter.device, dtype=row.dtype)
    idle = nn.Embedding(row.x, width, device=meter.device, dtype=row.dtype)
    ids = torch.randint(0, row.x, (row.config["B"], row.config["T"]), device=meter.device)

    def once() -> None:
        result = table(ids)
        result.backward(torch.randn_like(result))

    _measure(meter, once)
    del left, idle


PROGRAMS: dict[str, Callable[[OpRow, Meter], None]] = {
    "cross_entropy": cross_entropy,
    "embedding": embedding,
    "fused_add_rms_norm": fused_add_rms_norm,
    "fused_linear_cross_entropy": fused_linear_cross_entropy,
    "fused_linear_orpo_loss": fused_linear_orpo_loss,
    "kto_loss": kto_loss,
    "layer_norm": layer_norm,
    "relu_squared": relu_squared,
    "rms_norm": rms_norm,
    "softmax": softmax,
    "swiglu": swiglu,
}
"""Program of each benchmark, for the providers that are plain PyTorch."""

PLAIN_PROVIDERS = ("huggingface", "torch")

REASONS = {
    "liger": "Triton kernels: a package that is not plain PyTorch, with its own scratch memory",
    "torch_compile": "torch.compile: the compiler fuses, plans buffers and keeps modules alive",
}
"""Why the other providers' rows cannot be expressed, by the first words of the provider."""


INFERRED = {
    "embedding": "what compiled modules left in the process: counted from the order of the runs",
    "fused_linear_orpo_loss": "what a compiled closure left in the process, and a dtype: for eight rows",
    "kto_loss": "what a compiled closure left in the process: one number, for five rows",
}
"""Programs whose process held more than the source shows: what that is was read off the rows themselves."""


def program_of(row: OpRow) -> Program | None:
    """The row as a program, or None for one that cannot be expressed."""
    if row.provider not in PLAIN_PROVIDERS or row.kernel not in PROGRAMS:
        return None
    build = PROGRAMS[row.kernel]
    return lambda meter: build(row, meter)


def reason_against(row: OpRow) -> str:
    """Why a row cannot be expressed."""
    for start, reason in REASONS.items():
        if row.provider.startswith(start):
            return reason
    return f"no program for {row.kernel}"
