# SPDX-License-Identifier: Apache-2.0
"""The figures of README and guides: for each its rows in `bench/results` and its arithmetic.

The commits are named: the words of `measured.md` were written for those rows. After a new measurement, name
its commit here, read the words again, and run `tools/readme_figures.py --write`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator

from figures import Figure, Results, Row, Rows, in_words, median, percentile, signed

Named = Iterator[tuple[str, Figure]]

BENCHMARKS = "8b20dd82b745"
"""The commit of the rows of `memscale bench`."""

GUIDES: dict[str, tuple[str, ...]] = {
    "README.md": (
        "CPU, {truth_all} steps of 48 workloads (`truth.csv`) | median {truth_all_median}, "
        "worst under-estimate {truth_all_under} |",
        "allocated peak, {card_runs} runs (`gpu_budget.csv`) | within {card_allocated_worst} |",
        "at its peak, {by_hand_every} models (`by_hand.csv`) | {by_hand_every_median}, "
        "never above {by_hand_every_worst} |",
        "| {card_gpt2_plain} GB → {card_gpt2} GB, at {card_gpt2_time} × the step time of BF16 autocast |",
    ),
    "docs/guide/optimizer.md": (
        "| bytes, 278 k parameters, 400 steps | {bytes_end} | {bytes_fp32} | {bytes_bf16} | {bytes_none} |",
        "| shapes, 42 k, 500 steps | {shapes_end} | {shapes_fp32} | {shapes_bf16} | {shapes_none} |",
        "| copy, 88 k, 500 steps | {copy_end} | {copy_fp32} | {copy_bf16} | {copy_none} |",
        "differences are within {convergence_held_out} (`optimizer_convergence.csv`)",
    ),
    "docs/guide/published.md": (
        "| together | {published_all} | {published_all_equal} ({published_all_share}) |",
        "Of the {published_runs} rows with a figure, the median error is {published_runs_median}",
        '"+ activation checkpointing" ({published_compiled_least}).',
        'cross-entropy" ({published_compiled_worst})',
    ),
}
"""Lines that README and guides have to have, with the figures of the rows."""


def figures_of(results: Results) -> dict[str, Figure]:
    """All figures by name.

    Raises:
        FigureError: a row is not there.
    """
    groups: tuple[Callable[[Results], Named], ...] = (
        *(
            _host,
            _card,
            _standin,
            _published,
            _truth,
            _predict,
            _by_hand,
            _budgets,
            _selective,
            _planner_of_torch,
        ),
        *(_brute_force, _startup, _simulator, _snapshot, _step_time, _decision, _loss_tile, _mlp_tile),
        *(
            _attention_tile,
            _checkpoint,
            _offload,
            _engine_file,
            _hooks,
            _away,
            _weights,
            _benchmarks,
            _optimizer_step,
            _convergence,
        ),
    )
    return dict(pair for group in groups for pair in group(results))


def _one(rows: Rows, column: str, form: str, scale: float = 1.0) -> Figure:
    """A column of the only row; of several, their median."""
    return Figure(form.format(scale * median(rows.numbers(column))), rows)


def _spread(rows: Rows, column: str, form: str, scale: float = 1.0) -> Figure:
    """Lowest and highest of a column."""
    values = [scale * value for value in rows.numbers(column)]
    low, high = form.format(min(values)), form.format(max(values))
    return Figure(low if low == high else f"{low} to {high}", rows)


def _count(rows: Rows, what: Iterable[object] | None = None) -> Figure:
    return Figure(str(len(list(rows if what is None else what))), rows)


def _error_pct(row: Row, predicted: str = "predicted_bytes") -> float:
    """Predicted less measured; the column has fewer digits."""
    return 100 * (int(row[predicted]) / int(row["measured_bytes"]) - 1)


# ---- predictions -------------------------------------------------------------------------------------


def _host(results: Results) -> Named:
    rows = results.rows("truth", "bab98dfaa7b4")
    yield "cores", Figure(rows[-1]["cores"], rows)
    yield "processor", Figure(rows[-1]["machine"], rows)
    yield "torch", Figure(rows[-1]["torch"].partition("+")[0], rows)
    yield "transformers", Figure(rows[-1]["transformers"], rows)
    compiled = results.rows("c", "e6c95a211a62")
    yield "compiler", Figure(compiled[-1]["compiler"].rpartition(".")[0], compiled)


def _standin(results: Results) -> Named:
    plans = results.rows("standin", "1b88a2d8daf0", error="")
    yield "standin_plans", _count(plans)
    yield "standin_plans_models", Figure(in_words(len({_model(row) for row in plans})), plans)
    worst = max(abs(int(row["reserved_error_bytes"])) / int(row["reserved_bytes"]) for row in plans)
    yield "standin_plans_worst", Figure(f"{math.ceil(10_000 * worst) / 100:.2f} %", plans)
    yield "standin_plans_equal", Figure(in_words(len(plans.where(reserved_error_bytes=0))), plans)

    runs = results.rows("standin", ("bab98dfaa7b4", "60f46695b0d9"), error="")
    yield "standin_runs", _count(runs)
    yield "standin_models", Figure(in_words(len({_model(row) for row in runs})), runs)
    yield "standin_optimizers", Figure(in_words(len({_optimizer(row) for row in runs})), runs)
    yield "standin_equal", _count(runs.where(reserved_error_bytes=0))
    unequal = Rows(row for row in runs if row["reserved_error_bytes"] != "0")
    by_error = sorted(set(unequal.numbers("reserved_error_pct")), reverse=True)
    counts = [in_words(unequal.numbers("reserved_error_pct").count(error)) for error in by_error]
    pairs = zip(by_error, counts, strict=True)
    texts = [f"{signed(error, 1)} % in {count}" for error, count in pairs]
    yield "standin_unequal", Figure(", ".join(texts), unequal)
    yield "standin_allocated_equal", _count(runs.where(allocated_error_bytes=0))
    shares = [abs(int(row["allocated_error_bytes"])) / int(row["allocated_bytes"]) for row in runs]
    yield "standin_allocated_worst", Figure(f"{100 * max(shares):.1f} %", runs)


def _card(results: Results) -> Named:
    """What an H100 measured. Its convolutional net counts since convolutions are measured there."""
    runs = results.rows("gpu_budget", ("2feb71992e86", "9e84ac7a79cd", "c22b11ccc5ee"))
    runs = Rows(row for row in runs if row["model"] != "convnet" or row["commit"] == "c22b11ccc5ee")

    def off(kind: str) -> list[float]:
        return [int(row[f"predicted_{kind}_bytes"]) / int(row[f"{kind}_bytes"]) - 1 for row in runs]

    yield "card_runs", _count(runs)
    yield "card_allocated_worst", Figure(f"{100 * max(map(abs, off('allocated'))):.2f} %", runs)
    reserved = off("reserved")
    yield "card_reserved_equal", Figure(str(sum(share == 0 for share in reserved)), runs)
    yield "card_reserved_close", Figure(str(sum(abs(share) < 0.01 for share in reserved)), runs)
    yield "card_reserved_worst", Figure(f"{100 * max(map(abs, reserved)):.0f} %", runs)
    for name, model in (("bert", "bert-base"), ("gpt2", "gpt2-medium")):
        ways = {
            way: results.rows("benchmarks", "9e84ac7a79cd", suite="registry", model=model, way=way)
            for way in ("plain-fp32", "plain-bf16", "resident")
        }
        ours, plain = ways["resident"], ways["plain-fp32"]
        yield f"card_{name}_plain", Figure(f"{plain.numbers('allocated_bytes')[0] / 1e9:.2f}", plain)
        yield f"card_{name}", Figure(f"{ours.numbers('allocated_bytes')[0] / 1e9:.2f}", ours)
        times = ours.numbers("step_ms")[0] / ways["plain-bf16"].numbers("step_ms")[0]
        yield f"card_{name}_time", Figure(f"{times:.1f}", ours)
    launch = results.rows("gpu_card", "9e84ac7a79cd").where(name="launch_ns")
    yield "card_launch", Figure(f"{launch.numbers('measured')[0] / 1000:.0f}", launch)


def _model(row: Row) -> str:
    """gpt2:fp32:adamw, gpt2-eager:fp32: both GPT-2."""
    return row["case"].partition(":")[0].partition("-")[0]


def _optimizer(row: Row) -> str:
    words = row["case"].split(":")
    return words[2] if len(words) > 2 else "adamw"


def _published(results: Results) -> Named:
    commit = "bab98dfaa7b4"
    plain = results.rows("published", commit, set="liger", remark="")
    yield "published_operators", _count(plain)
    yield "published_operators_equal", _count(plain.where(exact=True))
    inferred = results.rows("published", commit, set="liger", remark=bool)
    yield "published_inferred", _count(inferred)
    yield "published_inferred_equal", _count(inferred.where(exact=True))
    yield "published_inferred_worst", Figure(f"+{max(inferred.numbers('error_pct')):.2f} %", inferred)
    runs = results.rows("published", commit, set="runs", exact=False)
    errors = runs.numbers("error_pct")
    yield "published_runs", _count(runs)
    yield "published_runs_median", Figure(f"{median(map(abs, errors)):.2f} %", runs)
    yield "published_runs_worst", Figure(f"+{max(errors, key=abs):.1f} %", runs)
    operators = results.rows("published", commit, set="liger")
    yield "published_all", _count(operators)
    yield "published_all_equal", _count(operators.where(exact=True))
    yield (
        "published_all_share",
        Figure(f"{100 * len(operators.where(exact=True)) / len(operators):.1f} %", operators),
    )
    compiled = results.rows("published", commit, set="runs", exact="partial")
    for name, value in (
        ("worst", max(compiled.numbers("error_pct"))),
        ("least", min(compiled.numbers("error_pct"))),
    ):
        yield f"published_compiled_{name}", Figure(f"+{value:.1f} %", compiled)
    lacking = results.rows("published", commit, set="runs", published="OOM")
    yield "published_lacking", _count(lacking)
    yield "published_lacking_fit", Figure(in_words(len(lacking.where(exact=False))), lacking)


def _truth(results: Results) -> Named:
    rows = results.rows("truth", "bab98dfaa7b4")
    plain = rows.where(mode="plain")
    yield "truth_workloads", _count(plain)
    yield "truth_budgets", Figure(in_words(len(rows.values("mode")) - 1), rows)
    yield "truth_violations", Figure("No" if not rows.where(violation=True) else "Not every", rows)
    for name, part in (
        ("all", rows),
        ("kept", rows.where(output="kept")),
        ("dropped", rows.where(output="dropped")),
        ("held_out", rows.where(split="held out")),
    ):
        errors = [_error_pct(row) for row in part]
        sizes = [abs(error) for error in errors]
        widths = [100 * (int(r["high_bytes"]) - int(r["low_bytes"])) / int(r["measured_bytes"]) for r in part]
        yield f"truth_{name}", _count(part)
        middle, high = median(sizes), percentile(sizes, 95)
        yield f"truth_{name}_median", Figure(f"{middle:.3f} %" if middle < 0.1 else f"{middle:.1f} %", part)
        yield f"truth_{name}_p95", Figure(f"{high:.2f} %" if high < 1 else f"{high:.1f} %", part)
        yield f"truth_{name}_largest", Figure(f"{max(sizes):.1f} %", part)
        yield (
            f"truth_{name}_under",
            Figure(f"{signed(min(errors), 2)} %" if min(errors) < 0 else "none", part),
        )
        inside = len(part.where(inside=True)) / len(part)
        yield f"truth_{name}_inside", Figure(f"{100 * inside:.0f} %", part)
        yield f"truth_{name}_band", Figure(f"{sum(widths) / len(widths):.1f} %", part)

    both = plain.where(peer_bytes=lambda text: text not in ("", "none"))
    theirs, ours = ([_error_pct(row, name) for row in both] for name in ("peer_bytes", "predicted_bytes"))
    yield "tracker_works", _count(both)
    yield "tracker_median", Figure(f"{median(map(abs, theirs)):.2f} %", both)
    yield "tracker_p95", Figure(f"{percentile(map(abs, theirs), 95):.1f} %", both)
    yield "tracker_under", Figure(f"{signed(min(theirs), 1)} %", both)
    yield "ours_median", Figure(f"{median(map(abs, ours)):.3f} %", both)
    yield "ours_p95", Figure(f"{percentile(map(abs, ours), 95):.1f} %", both)
    yield "ours_under", Figure(f"{signed(min(ours), 2)} %", both)


def _predict(results: Results) -> Named:
    small = results.rows("predict", "eecb64cc330c", model="gpt2-medium", tool="memscale")
    tracker = results.rows("predict", "eecb64cc330c", model="gpt2-medium", tool="tracker")
    large = results.rows("predict", "eecb64cc330c", model="llama-70b")
    for name, rows, form in (("medium", small, "{:.1f} s"), ("70b", large, "{:.0f} s")):
        yield f"predict_{name}", _one(rows, "wall_s", form)
        yield f"predict_{name}_core", _one(rows, "core_ms", "{:.0f} ms")
        yield f"predict_{name}_memory", _one(rows, "peak_mib", "{:.0f} MiB")
    yield "predict_tracker", _one(tracker, "wall_s", "{:.1f} s")


# ---- under a budget ----------------------------------------------------------------------------------


def _by_hand(results: Results) -> Named:
    rows = results.rows("by_hand", "047371afb18d")
    yield "by_hand_pairs", _count(rows)
    yield "by_hand_models", _count(rows, rows.values("model"))
    above = sum(value > 1 for value in rows.numbers("peak_ratio"))
    yield "by_hand_above", Figure("not above" if not above else f"in {above} above", rows)
    yield "by_hand_slower", Figure(f"{100 * (max(rows.numbers('time_ratio')) - 1):.1f} %", rows)
    for name, way in (
        ("every", "every block"),
        ("second", "every second"),
        ("segments", "segments"),
        ("selective", "selective"),
        ("half", "selective half"),
    ):
        part = rows.where(by_hand=way)
        ratios = part.numbers("time_ratio")
        yield f"by_hand_{name}", _count(part)
        for what, value in (("median", median(ratios)), ("best", min(ratios)), ("worst", max(ratios))):
            yield f"by_hand_{name}_{what}", Figure(f"{value:.2f}", part)


def _budgets(results: Results) -> Named:
    rows = results.rows("budgets", "1b88a2d8daf0")
    met = rows.where(fits=True)
    *shares, last = rows.values("share_pct")
    yield "budgets_shares", Figure(f"{', '.join(shares)} and {last} %", rows)
    yield "budgets_models", _count(rows, rows.values("model"))
    yield "budgets", _count(rows)
    yield "budgets_met", _count(met)
    above = sum(value > 100 for value in met.numbers("of_budget_pct"))
    yield "budgets_above", Figure("No" if not above else str(above), met)
    again = results.rows("budgets", "19fc586701e7")
    yield "budgets_again", _count(again)
    replaced = {(row["model"], row["share_pct"]) for row in again}
    last_rows = Rows([*again, *(row for row in rows if (row["model"], row["share_pct"]) not in replaced)])
    worst = max(abs(_error_pct(row)) for row in last_rows)
    yield "budgets_worst", Figure(f"{worst:.1f} %", last_rows)
    for name, model in (("bags", "recommender"), ("lstm", "lstm")):
        part = rows.where(model=model)
        yield f"budgets_{name}", Figure(f"{signed(max(map(_error_pct, part), key=abs), 1)} %", part)


def _selective(results: Results) -> Named:
    rows = results.rows("selective", "19fc586701e7")
    ratios = rows.numbers("time_ratio")
    yield "selective_models", Figure(in_words(len(rows.values("model"))), rows)
    yield "selective", _count(rows)
    yield "selective_faster", Figure(str(sum(ratio < 1 for ratio in ratios)), rows)
    yield "selective_median", Figure(f"{median(ratios):.3f}", rows)
    yield "selective_span", _spread(rows, "time_ratio", "{:.2f}")
    for model in ("gpt2", "llama", "bert"):
        yield f"selective_{model}", _one(rows.where(model=model), "time_ratio", "{:.2f}")


def _planner_of_torch(results: Results) -> Named:
    rows = results.rows("sac_ilp", "19fc586701e7")
    theirs, ours = rows.where(tool=lambda name: name.startswith("sac_ilp")), rows.where(tool="memscale")
    for blocks in ("12", "24"):
        yield f"sac_{blocks}", _spread(theirs.where(blocks=blocks), "memscale_ratio", "{:.2f}")
    yield "sac_plan", _spread(theirs, "plan_s", "{:.1f}")
    yield "sac_ours_plan", _spread(ours, "plan_s", "{:.1f}")
    half = rows.where(share_pct="50")
    fitting = [
        row for row in half if row["of_budget_pct"] not in ("", "none") and float(row["of_budget_pct"]) <= 100
    ]
    yield "sac_half", Figure("neither fits" if not fitting else "one fits", half)


def _brute_force(results: Results) -> Named:
    rows = results.rows("c", "eb86df995aa7", bench="optimal", case="all")
    yield "optimal_combinations", _one(rows, "numbers.1", "{:.1f} million", 1e-6)
    yield "optimal_budgets", _one(rows, "numbers.2", "{:.0f}")
    wrong = sum(rows.numbers(f"numbers.{index}")[0] for index in (3, 4, 5, 6, 7))
    yield "optimal_exactly", Figure("exactly" if not wrong else "not always", rows)


# ---- single measurements -----------------------------------------------------------------------------


def _startup(results: Results) -> Named:
    for name, what, form in (
        ("import", "import", "{:.1f} ms"),
        ("import_name", "import and wrap name", "{:.0f} ms"),
        ("wrap_core", "C core", "{:.0f} ms"),
    ):
        yield name, _one(results.rows("startup", "eecb64cc330c", what=what), "median_ms", form)
    yield "wrap", _one(results.rows("startup", "eecb64cc330c", what="wrap"), "median_ms", "{:.2f} s", 1e-3)


def _simulator(results: Results) -> Named:
    for name, case, kind, form in (
        ("steps", "transformer", "cuda", "{:.0f}"),
        ("random", "random", "cuda", "{:.0f}"),
        ("steps_growing", "transformer", "cuda-expandable", "{:.0f}"),
        ("random_growing", "random", "cuda-expandable", "{:.1f}"),
    ):
        rows = results.rows("c", "cebe24bed1b0", bench="sim", case=case, kind=kind)
        yield f"sim_{name}", _one(rows, "numbers.2", form)
    graphs = results.rows("c", "325324e8e65d", bench="decide", case=lambda case: case.startswith("build"))
    yield "graph_bytes", _spread(graphs, "numbers.4", "{:.0f}")


def _snapshot(results: Results) -> Named:
    rows = results.rows("c", "cebe24bed1b0", bench="snapshot")
    yield "snapshot_size", _one(rows, "numbers.0", "{:.2f} GB", 1e-3)
    yield "snapshot_events", _one(rows, "numbers.1", "{:.0f} million", 1e-6)
    yield "snapshot_time", _one(rows, "numbers.2", "{:.1f} s")
    yield "snapshot_peak", _one(rows, "numbers.4", "{:.0f} MB")
    yield "snapshot_stays", _one(rows, "numbers.5", "{:.0f} MB")


def _step_time(results: Results) -> Named:
    rows = results.rows("step_time", "19fc586701e7")
    yield "step_time_workloads", _count(rows, rows.values("workload"))
    planned = rows.where(share_percent=lambda share: share != "100")
    off = {
        share: _slowdowns_off(planned.where(share_percent=share)) for share in planned.values("share_percent")
    }
    yield "step_time_shares", Figure(" and ".join(off), planned)
    yield "step_time_off", Figure(" and ".join(f"{median(values):.1f}" for values in off.values()), planned)
    yield "step_time_worst", Figure(f"{max(max(values) for values in off.values()):.1f} %", planned)
    plain = rows.where(share_percent="100")
    errors = [100 * value for value in plain.numbers("calibrated_error")]
    yield "step_time_plain", Figure(f"{signed(median(errors), 0)} %", plain)
    yield "step_time_plain_worst", Figure(f"{signed(max(errors, key=abs), 0)} %", plain)


def _slowdowns_off(rows: Rows) -> list[float]:
    pairs = zip(rows.numbers("calibrated_slowdown"), rows.numbers("slowdown"), strict=True)
    return [100 * abs(predicted / measured - 1) for predicted, measured in pairs]


def _decision(results: Results) -> Named:
    def time_of(name: str, case: str, kind: str, blocks: str = "") -> Named:
        rows = results.rows("c", "325324e8e65d", bench="decide", case=case, kind=kind)
        rows = Rows(row for row in rows if not blocks or row["numbers"].split()[0] == blocks)
        yield name, _one(rows, "numbers.3", "{:.0f}")

    for kind in ("host", "cuda"):
        yield from time_of(f"decide_blocks_{kind}", "decide", kind, "100")
        yield from time_of(f"decide_operations_{kind}", "decide", kind, "347")
        yield from time_of(f"decide_chain_{kind}", "decide-chain", kind)
    yield from time_of("decide_12_cuda", "decide", "cuda", "12")
    memory = results.rows("c", "eb86df995aa7", bench="decide", case="decide")
    large = Rows(row for row in memory if float(row["numbers"].split()[1]) > 20_000)
    yield "decide_memory", _spread(large, "numbers.4", "{:.0f}")
    for name in ("blocks", "chain"):
        rows = results.rows("c", "eb86df995aa7", bench="decide", case=f"decide-{name}")
        yield f"decide_memory_{name}", Figure(f"{max(rows.numbers('numbers.4')):.0f}", rows)


def _loss_tile(results: Results) -> Named:
    for dtype, short in (("float32", "fp32"), ("bfloat16", "bf16")):
        rows = results.rows("loss_tile", "c706728d3171", dtype=dtype)
        for way, name in (("tile", "ours"), ("linear_cross_entropy", "theirs")):
            yield f"loss_{short}_{name}", _one(rows.where(way=way), "extra_share", "{:.1f} %", 100)
            yield f"loss_{short}_{name}_time", _one(rows.where(way=way), "time_share", "{:.2f}")


def _mlp_tile(results: Results) -> Named:
    for block in ("gpt2", "llama"):
        rows = results.rows("mlp_tile", "b72cabba518b", block=block)
        yield f"mlp_{block}", _one(rows, "less_pct", "{:.0f} %")
        yield f"mlp_{block}_time", _one(rows, "time_ratio", "{:.2f}")


def _attention_tile(results: Results) -> Named:
    for tokens, name in ((1024, "short"), (2048, "long")):
        rows = results.rows("attention_tile", "d4ecd00873dd", tokens=tokens)
        kept, tiled = rows.numbers("attention_kept")[0], rows.numbers("attention_tiled_kept")[0]
        yield f"attention_{name}", Figure(f"{kept / 1e6:.0f} → {tiled / 1e6:.0f} MB", rows)
        yield f"attention_{name}_time", _one(rows, "attention_cpu_ratio", "{:.2f}")


def _checkpoint(results: Results) -> Named:
    rows = results.rows("checkpoint_overhead", "c706728d3171")
    tiny = rows.where(block=("mlp-64", "transformer-64", "transformer-64-dropout", "convolution-8"))
    yield "checkpoint_tiny", _spread(tiny, "ratio", "{:.2f}")
    yield "checkpoint_blocks", Figure(in_words(len(tiny)), tiny)
    yield "checkpoint_convolution", _one(rows.where(block="convolution-64"), "ratio", "{:.2f}")


def _offload(results: Results) -> Named:
    rows = results.rows("offload_run", ("e6c95a211a62", "cf3c35835c8b"))
    yield "offload_models", _count(rows, rows.values("model"))
    yield "offload_plans", _count(rows)
    ratios = rows.numbers("ratio")
    yield "offload_ratio", Figure(f"{min(ratios):.2f} to {max(ratios):.4f}", rows)
    above = max(int(row["measured_bytes"]) - int(row["predicted_bytes"]) for row in rows)
    yield "offload_above", Figure(f"{above} bytes", rows)
    timed = rows.where(to_plain=lambda text: float(text) > 0)
    slower = timed.where(to_plain=lambda text: float(text) >= 1)
    yield "offload_timed", Figure(in_words(len(timed.values("model"))), timed)
    yield "offload_untimed", _count(rows.where(to_plain=lambda text: float(text) == 0))
    yield "offload_time", _spread(slower, "to_plain", "{:.2f}")
    yield "offload_disturbed", Figure(in_words(len(timed) - len(slower)), timed)


def _engine_file(results: Results) -> Named:
    rows = results.rows("c", "e6c95a211a62", bench="offload")
    for way in ("write", "read"):
        part = rows.where(case=way, kind=("engine", "dd", "plain"))
        rate = {row["kind"]: float(row["numbers"].split()[2]) for row in part}
        yield f"file_{way}_dd", Figure(f"{rate['engine'] / rate['dd']:.2f}", part)
        yield f"file_{way}_plain", Figure(f"{rate['engine'] / rate['plain']:.2f}", part)
    requests = results.rows("c", "f652f1cbcf40", bench="offload_parts", case="requests")
    later = requests.where(kind="100 steps after it")
    yield "requests", Figure(in_words(int(later.numbers("numbers.0")[0])), later)


def _hooks(results: Results) -> Named:
    rows = results.rows("offload_hooks", "e293307b6bf7", storages="own")
    leaves, least = rows.where(hooks="engine, leaves"), rows.where(hooks="detach and empty_like, builtins")
    yield "hooks_stays", _spread(rows.where(hooks="engine, stays"), "save_beyond_builtin_ns", "{:.1f}", 1e-3)
    for what in ("save", "unpack"):
        yield f"hooks_{what}", _spread(leaves, f"{what}_beyond_builtin_ns", "{:.1f}", 1e-3)
        (ours,), (theirs,) = (part.numbers(f"{what}_ns") for part in (leaves, least))
        yield f"hooks_{what}_beyond", Figure(f"{(ours - theirs) / 1000:.1f}", Rows([*leaves, *least]))


def _weights(results: Results) -> Named:
    rows = results.rows("weight_stream", "a02d491216e9")
    (weights,), (budget,) = rows.numbers("weight_bytes"), rows.numbers("budget_bytes")
    yield "weights_size", Figure(f"{weights / 1e6:.0f} MB", rows)
    yield "weights_budget", Figure(f"{budget / 1e6:.0f} MB", rows)
    yield "weights_group", _one(rows, "group_bytes", "{:.0f} MB", 1e-6)
    yield "weights_time", _one(rows, "to_plain", "{:.1f}")
    yield "weights_group_time", _one(rows, "group_to_plain", "{:.1f}")


def _benchmarks(results: Results) -> Named:
    rows = results.rows("benchmarks", BENCHMARKS, scale="reduced", device="cpu")
    registry = rows.where(suite="registry")
    for model in registry.values("model"):
        part, name = registry.where(model=model), model.replace("-", "_")
        yield f"{name}_plain", _one(part.where(way="plain-fp32"), "allocated_bytes", "{:.0f} MB", 1e-6)
        yield f"{name}_bf16_time", _one(part.where(way="plain-bf16"), "of_plain_time", "{:.2f}")
        for way in ("resident", "smallest", "wrap"):
            yield f"{name}_{way}", _one(part.where(way=way), "of_plain_memory", "{:.1f} %", 100)
            yield f"{name}_{way}_time", _one(part.where(way=way), "of_plain_time", "{:.2f}")
    ours = registry.where(way=("resident", "smallest", "wrap"))
    off = ours.numbers("predicted_off_percent")
    yield "bench_off", Figure(f"{min(off):.1f} to {max(off):.1f} %", ours)
    exact = ours.where(way="wrap", losses_equal=True, gradients_equal=True)
    yield "bench_exact", Figure(in_words(len(exact)), exact)
    yield "bench_loss", Figure(f"{max(ours.numbers('loss_off_percent')):.3f} %", ours)
    yield from rows_of_peers(rows)


def rows_of_peers(rows: Rows) -> Named:
    """Each peer beside MemScale with its peak as the budget, and which were beaten in both at once."""
    theirs = rows.where(suite="peers", status="ok", way=lambda way: not _is_ours(way))
    ours = rows.where(status="ok", way=_is_ours)
    beaten = Rows(row for row in theirs if any(_is_better(mine, row) for mine in ours))
    yield "peers_runs", _count(theirs)
    yield "peers_beaten", Figure(str(len(beaten)), theirs)
    missed = [f"`{row['way']}` on {row['model']}" for row in theirs if row not in beaten]
    yield "peers_missed", Figure(f" (not: {', '.join(missed)})" if missed else "", theirs)
    for peer in theirs.values("way"):
        pairs = [
            (mine, row)
            for row in theirs.where(way=peer)
            for mine in ours.where(suite="peers", model=row["model"], way=f"at {peer}")
        ]
        both = Rows(row for pair in pairs for row in pair)
        name = "peer_" + re.sub(r"\W", "_", peer)
        plain = [float(row["of_plain_memory"]) for _, row in pairs]
        yield f"{name}_share", Figure(_percents(plain), both)
        yield f"{name}_memory", Figure(_range([_taken(mine) / _taken(row) for mine, row in pairs]), both)
        times = [float(mine["step_ms"]) / float(row["step_ms"]) for mine, row in pairs]
        yield f"{name}_time", Figure(_range(times), both)


def _range(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def _percents(shares: list[float]) -> str:
    return f"{100 * min(shares):.0f} to {100 * max(shares):.0f} %"


def _is_ours(way: str) -> bool:
    return way.split()[0] in ("wrap", "resident", "smallest", "budget", "at")


def _is_better(mine: Row, row: Row) -> bool:
    return (
        mine["model"] == row["model"]
        and _taken(mine) <= _taken(row)
        and float(mine["step_ms"]) <= float(row["step_ms"])
    )


def _taken(row: Row) -> int:
    """Tensors, and on a CPU host what the engine has in the same memory."""
    return int(row["allocated_bytes"]) + int(row["engine_bytes"] or 0)


def _away(results: Results) -> Named:
    for name, way in (("both", "state + gradients"), ("state", "state")):
        rows = results.rows("optimizer_offload", "2ae4fa3cf602", way=way)
        share = 100 * rows.numbers("share")[0]
        yield f"away_{name}", Figure(f"{share:.1f} %" if share < 10 else f"{share:.0f} %", rows)
        yield f"away_{name}_time", _one(rows, "ratio", "{:.2f}")


def _optimizer_step(results: Results) -> Named:
    rows = results.rows("optimizer_step", "e293307b6bf7")
    narrow = results.rows("optimizer_step", "eecb64cc330c")  # of a processor without AVX-512
    for name, way in (("5_bytes", "ours bf16 + 8-bit"), ("fp32", "ours fp32")):
        for suffix, part in (("", rows.where(way=way)), ("_narrow", narrow.where(way=way))):
            ratios_of_way = " and ".join(f"{value:.2f}" for value in part.numbers("ratio"))
            yield f"step_{name}{suffix}", Figure(ratios_of_way, part)
    part = rows.where(way=("ours bf16 + fp32", "torch master"))
    speeds = (part.where(way=way).numbers("mparam_per_s") for way in ("ours bf16 + fp32", "torch master"))
    ratios = (ours / theirs for ours, theirs in zip(*speeds, strict=True))
    yield "step_master", Figure(" and ".join(f"{value:.1f}" for value in ratios), part)


def _convergence(results: Results) -> Named:
    rows = results.rows("optimizer_convergence", "a8235acedce1")
    ours = rows.where(way=lambda name: name.startswith("ours"))
    yield "convergence_tasks", Figure(in_words(len(ours.values("task"))), ours)
    held_out = max(map(abs, ours.numbers("held_excess_pct")))
    yield "convergence_held_out", Figure(f"{held_out:.2f} %", ours)
    ways = {"fp32": "ours fp32 8-bit", "bf16": "ours bf16 8-bit", "none": "torch bf16"}
    for task in rows.values("task"):
        yield f"{task}_end", _one(rows.where(task=task, way="torch fp32"), "end", "{:.4g}")
        for name, way in ways.items():
            part = rows.where(task=task, way=way)
            (excess,) = part.numbers("excess_pct")
            digits = 1 if name == "none" else 2
            sign = "+" if round(excess, digits) > 0 else ""
            yield f"{task}_{name}", Figure(f"{sign}{signed(excess, digits)} %", part)
    yield "convergence_seeds", Figure(in_words(int(ours[0]["seeds"])), ours)
    yield "convergence", Figure(f"{max(ours.numbers('excess_pct')):.2f} %", ours)
