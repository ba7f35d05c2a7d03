# SPDX-License-Identifier: Apache-2.0
"""Scratch memory of CPU operators: what kernels allocate and free, against the rules in ops/scratch.py.

Each case is a piece of forward and backward over some shape and dtype. A dispatch mode stands where the
tracer stands, so an operation here is an operation of the memory graph. For each one,

    scratch = highest live bytes while it runs - live bytes before - bytes of its outputs in a fake run

is compared with the rule. A rule that is too small breaks budgets; the table lists such operators first
("over" > 0). One that is too large only wastes memory ("slack"). Operators without a rule count as rule 0.
A row is an operator and dtype: its worst case in both directions.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import scratch_cases_dense as dense
import scratch_cases_other as other
import torch
from common import Table, parser
from scratch_case import Case
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from memscale.observability.tensor_peak import quiet
from memscale.ops import op_facts
from memscale.ops import scratch as rules


@dataclass
class Call:
    """One dispatched operation.

    Attributes:
        name: the operator, as the graph names it.
        described: dtypes and shapes of its tensors, and the other arguments.
        dtype: of its first tensor.
        rule: what a trace would count, bytes: measured by ops/scratch_probe.py or bound by ops/scratch.py.
        real: bytes of the new storages that it returned.
        fake: the same in the fake run; -1 if that is not possible.
        scratch: measured, bytes.
        left: what stayed allocated beyond its outputs.
    """

    name: str
    described: str
    dtype: str
    rule: int
    real: int
    fake: int
    scratch: int = 0
    left: int = 0

    @property
    def over(self) -> int:
        """By how much the measurement exceeds what the graph would hold."""
        known = self.real if self.fake < 0 else self.fake
        return self.real + self.scratch - known - self.rule


def fresh_bytes(result: Any, known: set[int]) -> int:
    """Bytes of storages in `result` that are not in `known`."""
    seen: dict[int, int] = {}
    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in known:
            seen[leaf.untyped_storage()._cdata] = leaf.untyped_storage().nbytes()
    return sum(seen.values())


def storages(values: Any) -> set[int]:
    """Identities of the storages in `values`."""
    return {leaf.untyped_storage()._cdata for leaf in tree_leaves(values) if isinstance(leaf, Tensor)}


def describe(args: Any, kwargs: Any) -> str:
    """The arguments of a call, short."""
    parts = []
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor):
            layout = "" if leaf.is_contiguous() else "~"
            parts.append(f"{str(leaf.dtype)[6:]}{list(leaf.shape)}{layout}")
        elif leaf is not None:
            parts.append(str(leaf))
    return " ".join(parts)


class Probe(TorchDispatchMode):
    """Notes every operation and marks it in the profile.

    Args:
        bounds: compare with the bounds alone, also where an operator is measured at plan time.
    """

    def __init__(self, bounds: bool) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.bounds = bounds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operation between two marks."""
        kwargs = kwargs or {}
        info = op_facts.facts(func)
        if info.is_view:
            return func(*args, **kwargs)
        known = storages((args, kwargs))
        described = describe(args, kwargs)  # before: the operation may resize
        first = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
        mark = torch._C._profiler._RecordFunctionFast(f"scratch#{len(self.calls)}")
        with mark:
            result = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        fake = self._fake_bytes(func, info, args, kwargs)
        made = fake if fake >= 0 else fresh_bytes(result, known)
        if self.bounds:
            rule = rules.scratch_bytes(info.name, info.scratch, info.pointwise, args, outputs)
        else:
            rule = op_facts.scratch(func, info, (args, kwargs), outputs, made)
        dtype = "" if first is None else str(first.dtype)[6:]
        name = func._schema.name.split("::")[-1] + (
            f".{func._schema.overload_name}" if func._schema.overload_name else ""
        )
        self.calls.append(Call(name, described, dtype, rule, fresh_bytes(result, known), fake))
        return result

    @staticmethod
    def _fake_bytes(func: Any, info: op_facts.OpFacts, args: Any, kwargs: Any) -> int:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            converted = tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
            try:
                return fresh_bytes(op_facts.run(func, info, *converted), storages(converted))
            except Exception:  # data-dependent outputs
                return -1


def observe(run: Callable[[], object], bounds: bool = False) -> list[Call]:
    """The operations of `run`, with their scratch memory."""
    from torch.profiler import ProfilerActivity, profile

    probe = Probe(bounds)
    gc.collect()
    gc.disable()
    try:
        with quiet():
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled, probe:
                run()
            events = list(profiled.profiler.kineto_results.events())  # type: ignore[union-attr]
    finally:
        gc.enable()
    memory = sorted(
        ((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"), key=lambda event: event[0]
    )
    for event in events:
        if event.name().startswith("scratch#"):
            begin, end = event.start_ns(), event.start_ns() + event.duration_ns()
            live = peak = 0
            for when, size in memory:
                if begin <= when <= end:
                    live += size
                    peak = max(peak, live)
            call = probe.calls[int(event.name()[8:])]
            call.scratch = peak - call.real
            call.left = live - call.real
    return probe.calls


GROUPS: dict[str, Callable[[torch.dtype], Iterator[Case]]] = {
    "products": dense.products,
    "convolutions": dense.convolutions,
    "norms": dense.norms,
    "attention": dense.attention,
    "attention_modules": dense.attention_modules,
    "reductions": other.reductions,
    "losses": other.losses,
    "integers": other.integers,
    "lookups": other.lookups,
    "indexing": other.indexing,
    "spatial": other.spatial,
    "linear_algebra": other.linear_algebra,
    "recurrent": dense.recurrent,
    "pointwise": other.pointwise,
    "arithmetic": other.arithmetic,
    "several_operands": other.several_operands,
    "optimizers": other.optimizers,
}


class Survey:
    """The worst call of each operator and dtype, and the most that a rule exceeds a measurement by."""

    def __init__(self) -> None:
        self.worst: dict[tuple[str, str], Call] = {}
        self.slack: dict[tuple[str, str], int] = {}
        self.failed = 0

    def add(self, name: str, run: Callable[[], object], listed_from: int | None, bounds: bool) -> None:
        """Runs a case; lists the operations that exceed their rule by more than `listed_from` bytes."""
        try:
            with _disable_current_modes():
                calls = observe(run, bounds)
        except Exception as error:
            print(f"# {name}: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
            self.failed += 1
            return
        for call in calls:
            key = (call.name, call.dtype)
            if key not in self.worst or call.over > self.worst[key].over:
                self.worst[key] = call
            self.slack[key] = max(self.slack.get(key, 0), -call.over)
            if listed_from is not None and call.over > listed_from:
                print(
                    f"{call.name}\tover {call.over}\tscratch {call.scratch}\trule {call.rule}"
                    f"\tout {call.real}\tfake {call.fake}\tleft {call.left}\t{call.described}",
                    flush=True,
                )


COLUMNS = (
    "operator",
    "dtype",
    "threads",
    "over_bytes",
    "scratch_bytes",
    "rule_bytes",
    "output_bytes",
    "slack_bytes",
    "arguments",
)


def report(survey: Survey, least: int, dry: bool) -> None:
    """The table, worst operators first; those that have no rule and need none are left out."""
    table, threads = Table("scratch", COLUMNS, dry), torch.get_num_threads()
    for key, call in sorted(survey.worst.items(), key=lambda item: (-max(item[1].over, 0), item[0])):
        if call.over > least or call.rule:
            numbers = (call.over, call.scratch, call.rule, call.real, survey.slack[key])
            table.add(*key, threads, *numbers, call.described)
    beyond = sum(call.over > least for call in survey.worst.values())
    print(
        f"{len(survey.worst)} operators and dtypes, {beyond} beyond their rule, {survey.failed} could not run"
    )


def main() -> None:
    """Runs the chosen groups and prints the worst case per operator and dtype."""
    options = parser(__doc__)
    options.add_argument("groups", nargs="*", help=f"of {', '.join(GROUPS)} (all)")
    options.add_argument(
        "--threads", type=int, help="threads of PyTorch; some kernels keep a buffer per thread"
    )
    options.add_argument("--dtypes", default="float32,bfloat16", help="comma-separated")
    options.add_argument(
        "--all", action="store_true", help="list each operation that exceeds its rule, not the worst only"
    )
    options.add_argument(
        "--bounds",
        action="store_true",
        help="compare the bounds of ops/scratch.py alone, also for operators that are measured at plan time",
    )
    options.add_argument("--min", type=int, default=64, help="smallest excess that is reported, bytes")
    arguments = options.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    survey = Survey()
    for dtype in arguments.dtypes.split(","):
        for group in arguments.groups or GROUPS:
            for name, run in GROUPS[group](getattr(torch, dtype)):
                survey.add(f"{name} {dtype}", run, arguments.min if arguments.all else None, arguments.bounds)
    report(survey, arguments.min, arguments.dry)


if __name__ == "__main__":
    main()
