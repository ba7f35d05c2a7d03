# SPDX-License-Identifier: Apache-2.0
"""MemScale beside PyTorch's own planner, `torch.distributed._tools.sac_ilp`: same model, same budgets.

That tool is a library of parts, used here as its tests use it: MemTracker, RuntimeEstimator and SACEstimator
run the step on fake tensors, `aggregate_stats` and `parse_module_info` put their figures together, and
`sac_milp` says which modules to checkpoint and how much of their activations to discard. Which operations of
a module to save is then the answer of its greedy order (of which the trade-off curves of the program are
made), or of `get_optimal_checkpointing_policy_per_module`; both are tried. It is carried out by
`torch.utils.checkpoint.create_selective_checkpoint_contexts`.

Where it needs help, it gets it, and none of it is counted as its time:

* both of its estimates of an operation's time need a CUDA device; here each operation is timed on this
  machine's CPU, on random tensors, once per shape (`clock_s`)
* it counts neither the optimizer's state nor the loss; what the plain step takes beyond its own figure for it
  is measured, and taken off its budget beforehand

It needs `pip install pulp pwlf` beside PyTorch. A model like GPT-2, with 12 blocks and with 24. The memory
that both take is measured (`contest.py`), and their steps run in turn; "memscale_ratio" is MemScale's step
over the tool's.
"""

from __future__ import annotations

import copy
import importlib.util
import io
import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import architectures
import torch
from common import Table, calibrate, median, parser
from contest import Measured, Prepare, Run, as_it_is, duel, measure, under
from hand import one_region
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import memscale

SHARES = (75, 60, 50)
BLOCKS = (12, 24)
NEEDS = ("pulp", "pwlf", "numpy", "scipy")

COLUMNS = (
    "blocks",
    "share_pct",
    "budget_bytes",
    "tool",
    "plan_s",
    "trace_s",
    "solve_s",
    "clock_s",
    "predicted_bytes",
    "measured_bytes",
    "of_budget_pct",
    "step_ms",
    "memscale_step_ms",
    "memscale_ratio",
    "plain_ms",
    "regions",
    "rounds",
)

Policy = dict[str, list[int]]
"""Of each checkpointed module, by name: whether the output of each of its operations is saved."""


def model(blocks: int) -> architectures.Entry:
    """What is planned for."""
    return architectures.Entry(
        lambda: architectures.Decoder(blocks, 256, 4, 2000, 256),
        lambda: (torch.randint(0, 2000, (4, 256)),),
        architectures.tokens,
    )


# ---- its figures -------------------------------------------------------------------------------------------


class Clock:
    """Times operations on this machine's CPU, in place of an estimate that needs a CUDA device.

    Attributes:
        seconds: spent on it.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._known: dict[Any, float] = {}

    def __call__(self, operation: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        """The operation's fake result, and its milliseconds."""
        from torch.utils._runtime_estimation import _VIEW_OPS

        kwargs = kwargs or {}
        key = (operation, str(tree_map(_described, (args, kwargs))))
        if operation._overloadpacket in _VIEW_OPS:
            self._known[key] = 0.0
        if key not in self._known:
            began = time.perf_counter()
            self._known[key] = self._time(operation, args, kwargs)
            self.seconds += time.perf_counter() - began
        return operation(*args, **kwargs), self._known[key]

    @staticmethod
    def _time(operation: Any, args: Any, kwargs: Any) -> float:
        with no_dispatch():
            args, kwargs = tree_map(_real, (args, kwargs))
            operation(*args, **kwargs)
            spent = []
            for _ in range(5):
                began = time.perf_counter()
                operation(*args, **kwargs)
                spent.append(time.perf_counter() - began)
        return 1e3 * min(spent)


def _described(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype, leaf.stride()) if isinstance(leaf, Tensor) else leaf


def _real(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    room = 1 + sum((size - 1) * step for size, step in zip(leaf.shape, leaf.stride(), strict=True))
    made = torch.ones(max(room, 0), dtype=leaf.dtype)
    if leaf.dtype.is_floating_point:
        made.uniform_()
    return made.as_strided(leaf.shape, leaf.stride())


@dataclass(frozen=True)
class Facts:
    """What the tool knows of a step.

    Attributes:
        graph: for the solver.
        stats: operations per module, and the order in which to discard their results.
        plain_bytes: the plain step's peak, by its own reckoning.
        trace_s: seconds for it, without `clock_s`.
        clock_s: seconds spent on timing operations.
    """

    graph: Any
    stats: Any
    plain_bytes: int
    trace_s: float
    clock_s: float


def collect(entry: architectures.Entry) -> Facts:
    """The step on fake tensors, under each of the tool's trackers."""
    from torch.distributed._tools.ilp_utils import (
        aggregate_stats,
        get_peak_memory_runtime_baseline,
        parse_module_info,
    )

    clock, began = Clock(), time.perf_counter()
    with FakeTensorMode(allow_non_fake_inputs=True), redirect_stdout(io.StringIO()):
        made, batch = entry.build().train(), entry.batch()
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-4)

        def forward() -> Tensor:
            return entry.loss(architectures.call(made, batch))

        def step() -> None:
            forward().backward()
            optimizer.step()
            optimizer.zero_grad()

        memory = _memory(forward, made, optimizer)
        runtime = _runtime(step, clock)
        stats = _stats(forward, clock)
        info = aggregate_stats(made, memory, runtime, stats, torch.device("cpu"))
    graph = parse_module_info(info)
    plain, _ = get_peak_memory_runtime_baseline(graph)
    return Facts(graph, stats, plain, time.perf_counter() - began - clock.seconds, clock.seconds)


def _memory(forward: Callable[[], Tensor], made: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    from torch.distributed._tools.mem_tracker import MemTracker, _ModState

    tracker = MemTracker()
    tracker.track_external(made, optimizer)
    with tracker:
        for index in range(2):  # the optimizer's state appears in the first
            forward().backward()
            if index:
                last = tracker.get_tracker_snapshot("current")
            optimizer.step()
            optimizer.zero_grad()
            if not index:
                tracker.reset_mod_stats()
    for stats in tracker.memory_tracking.values():
        # A module whose inputs need no gradient is not called after its backward: the tool's tests do this.
        stats.snapshots.setdefault(_ModState.POST_BW, [copy.deepcopy(last)])
    return tracker


def _runtime(step: Callable[[], None], clock: Clock) -> Any:
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator

    step()
    estimator = RuntimeEstimator()
    estimator("operator-level-cost-model")
    estimator._estimate = clock
    with estimator:
        step()
    return estimator


def _stats(forward: Callable[[], Tensor], clock: Clock) -> Any:
    from torch.distributed._tools.sac_estimator import SACEstimator

    estimator = SACEstimator()
    estimator("operator-level-cost-model")
    estimator._estimate_runtime = clock
    with estimator:
        loss = forward()
    loss.backward()
    return estimator


# ---- its answer, and carrying it out ----------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What it decided.

    Attributes:
        discard: module → share of its activations to discard.
        peak_bytes: by its own reckoning, what it cannot see added; -1: it found no solution.
        seconds: for the solver.
    """

    discard: dict[str, float]
    peak_bytes: int
    seconds: float


def solve(facts: Facts, budget: int, unseen: int) -> Answer:
    """The integer program, for a budget in bytes of which a part is taken by what it does not see."""
    from torch.distributed._tools.sac_ilp import sac_milp

    logging.getLogger("torch.distributed._tools.sac_ilp").setLevel(logging.CRITICAL)
    began = time.perf_counter()
    discard, _, peak = sac_milp(copy.deepcopy(facts.graph), (budget - unseen) / 2**30)
    return Answer(discard, peak if peak < 0 else peak + unseen, time.perf_counter() - began)


def greedy(facts: Facts, discard: dict[str, float]) -> Policy:
    """Discards in the tool's order, most bytes per millisecond first, until the share is reached."""
    return {name: _greedy(facts.stats, name, share) for name, share in discard.items()}


def _greedy(stats: Any, name: str, share: float) -> list[int]:
    module, order = stats.sac_mod_stats[name], stats.sac_mod_greedy_order_meta[name]
    saved = [1] * len(module.memory)
    for index in order.recomputed_ops:
        saved[index] = 0
    goal, gone = share * sum(module.memory), 0
    for candidate in order.msps_meta:
        if gone >= goal:
            break
        gone += candidate.memory
        group = order.inplace_op_groups.get(candidate.op_idx, set())
        for index in {candidate.op_idx} | group | order.random_ops_group.get(candidate.op_idx, set()):
            saved[index] = 0
    return saved


def optimal(facts: Facts, discard: dict[str, float]) -> Policy:
    """An integer program per module; one for modules that are alike."""
    from torch.distributed._tools.sac_ilp import get_optimal_checkpointing_policy_per_module

    known: dict[str, list[int]] = {}
    made: Policy = {}
    for name, share in discard.items():
        stats = facts.stats.sac_mod_stats[name]
        key = f"{share} {stats}"
        if key not in known:
            known[key] = get_optimal_checkpointing_policy_per_module(stats, 1 - share)
        made[name] = known[key]
    return made


def carried_out(policy: Policy, stats: Any) -> Prepare:
    """Checkpoints the modules, saving what the policy says.

    Raises:
        RuntimeError: the operations of a run are not those that were planned for.
    """

    def prepare(made: nn.Module) -> None:
        for name, saved in policy.items():
            names = stats.sac_mod_stats[name].func_names
            module = made.get_submodule(name.partition(".")[2])
            one_region([module], _contexts(saved, names))

    return prepare


def _contexts(saved: Sequence[int], names: Sequence[str]) -> Callable[[], Any]:
    from torch.distributed._tools.sac_estimator import OPS_TO_ALWAYS_SKIP

    def contexts() -> Any:
        position = 0

        def keep(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            nonlocal position
            if operation in OPS_TO_ALWAYS_SKIP:
                return CheckpointPolicy.PREFER_RECOMPUTE
            index, position = position, position + 1
            if index >= len(names) or names[index] != operation._overloadpacket.__name__:
                raise RuntimeError(f"operation {index} is {operation}, which was not planned for")
            return CheckpointPolicy.MUST_SAVE if saved[index] else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(keep)

    return contexts


# ---- comparing --------------------------------------------------------------------------------------------


def planned(entry: architectures.Entry, budget: int) -> tuple[Any, float]:
    """MemScale's plan, and the seconds that it takes."""
    torch.manual_seed(0)
    made, batch = entry.build().train(), entry.batch()
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-4)
    began = time.perf_counter()
    plan = memscale.plan(made, optimizer, memscale.Config(memory_budget=budget, enable_logging=False), batch)
    return plan, time.perf_counter() - began


class Comparison:
    """One model under several budgets."""

    def __init__(self, blocks: int, rounds: int, table: Table) -> None:
        self.blocks, self.rounds, self.table = blocks, rounds, table
        self.entry = model(blocks)
        self.plain = measure(self.entry)
        bare = Run(self.entry)
        bare.warm()
        for _ in range(rounds):
            bare.step()
        self.plain_ms = 1e3 * median(bare.seconds)
        self.facts = collect(self.entry)

    def at(self, share: int) -> None:
        """Both tools at one budget."""
        budget = self.plain.peak_bytes * share // 100
        plan, plan_s = planned(self.entry, budget)
        ours = measure(self.entry, under(budget))
        answer = solve(self.facts, budget, self.plain.peak_bytes - self.facts.plain_bytes)
        for name, choose in (("greedy", greedy), ("optimal", optimal)):
            if answer.peak_bytes < 0:
                self._row(share, budget, f"sac_ilp {name}", self._seconds(answer, 0.0), -1, None, None, 0)
                continue
            began = time.perf_counter()
            policy = choose(self.facts, answer.discard)
            seconds = self._seconds(answer, time.perf_counter() - began)
            prepare = carried_out(policy, self.facts.stats)
            theirs = measure(self.entry, prepare)
            if theirs.losses != self.plain.losses:
                raise SystemExit(f"sac_ilp {name}: the loss is {theirs.losses} and not {self.plain.losses}")
            times = duel(Run(self.entry, prepare), Run(self.entry, under(budget)), self.rounds)
            self._row(
                share, budget, f"sac_ilp {name}", seconds, answer.peak_bytes, theirs, times, len(policy)
            )
        mine = (plan_s, "", "", "")
        times = duel(Run(self.entry, as_it_is), Run(self.entry, under(budget)), self.rounds)
        self._row(
            share,
            budget,
            "memscale",
            mine,
            plan.predicted.allocated_peak_bytes,
            ours,
            times,
            len(plan.active),
        )

    def _seconds(self, answer: Answer, policy_s: float) -> tuple[float, float, float, float]:
        solve_s = answer.seconds + policy_s
        return self.facts.trace_s + solve_s, self.facts.trace_s, solve_s, self.facts.clock_s

    def _row(
        self,
        share: int,
        budget: int,
        tool: str,
        seconds: tuple[Any, ...],
        predicted: int,
        measured: Measured | None,
        times: Any,
        regions: int,
    ) -> None:
        if measured is None or times is None:
            cells: list[Any] = ["none", "", "", "", "", ""]
        else:
            used = 100 * measured.peak_bytes / budget
            mine = tool == "memscale"
            step = 1e3 * (times.second if mine else times.first)
            against = ["", ""] if mine else [1e3 * times.second, times.ratio]
            cells = [predicted, measured.peak_bytes, used, step, *against]
        self.table.add(
            self.blocks, share, budget, tool, *seconds, *cells, self.plain_ms, regions, self.rounds
        )


def main() -> None:
    """Compares on both models."""
    options = parser(__doc__)
    options.add_argument("--blocks", type=int, action="append", help="12 and 24")
    options.add_argument("--share", type=int, action="append", help=f"budgets in %% of plain {SHARES}")
    options.add_argument("--rounds", type=int, default=9, help="steps of each that count (9)")
    arguments = options.parse_args()
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"torch.distributed._tools.sac_ilp needs {', '.join(missing)}: pip install pulp pwlf"
        )
    calibrate()
    table = Table("sac_ilp", COLUMNS, arguments.dry)
    for blocks in arguments.blocks or BLOCKS:
        print(f"# {blocks} blocks", file=sys.stderr, flush=True)
        comparison = Comparison(blocks, arguments.rounds, table)
        for share in arguments.share or SHARES:
            comparison.at(share)


if __name__ == "__main__":
    main()
