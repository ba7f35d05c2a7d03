// SPDX-License-Identifier: Apache-2.0
// Memory of a run: by category over its steps, predicted beside measured, and what the plan took off the
// peak. Below, time and loss.

import { get, points } from "../api.js";
import { button, el, svg } from "../dom.js";
import { bytes, nanoseconds, number, signedPercent, value } from "../format.js";
import {
    BUDGET,
    LIMIT,
    LOSS,
    PEAK,
    PHASES,
    PREDICTED,
    STEP_TIME,
    STEP_TIME_PREDICTED,
    categoriesOf,
    categorySeries,
    errorOf,
    phaseSeries,
    words,
} from "../names.js";
import { align, bucketsFor, carried, held } from "../charts/buckets.js";
import { LineChart } from "../charts/lines.js";
import { StackChart } from "../charts/stack.js";
import { setQuery } from "../router.js";

const MARKED = new Set(["oom", "recovery", "replan"]);
const MOST_MARKS = 60;

/** Names whose points may be few: each holds until the next. */
const isHeld = (name) =>
    name === BUDGET || name === LIMIT || name.startsWith(PREDICTED) || name === STEP_TIME_PREDICTED;

export class OverviewTab {
    #run;
    #place;
    #stack;
    #time;
    #loss;
    #kind = null;
    #marks = [];
    #bar = el("div", { class: "bar" });
    #beside = el("section", { class: "card", "aria-labelledby": "beside" });
    #fall = el("section", { class: "card", "aria-labelledby": "fall", hidden: true });

    constructor(run, place) {
        this.#run = run;
        this.#place = place;
    }

    async open(query) {
        const zoom = (range) => this.#run.zoomTo(range);
        this.#kind = query.get("of");
        this.#stack = new StackChart("memory by category over steps", {
            zoom,
            head: el("h2", { id: "stack" }, "Memory over steps"),
        });
        this.#time = new LineChart("Step time", { zoom, sync: "run" });
        this.#loss = new LineChart("Loss", { zoom, sync: "run" });
        this.#place.append(
            el("section", { class: "card", "aria-labelledby": "stack" }, this.#bar, this.#stack.element),
            el("div", { class: "pair" }, this.#beside, this.#fall),
            el("div", { class: "grid pair" }, this.#time.element, this.#loss.element),
        );
        await Promise.all([this.#draw(), this.#drawFall(), this.#readMarks()]);
    }

    close() {
        for (const chart of [this.#stack, this.#time, this.#loss]) chart?.close();
    }

    zoomed(query) {
        this.#kind = query.get("of");
        return this.#draw();
    }

    async changed({ series, events, documents }) {
        await Promise.all([
            events && this.#readMarks(),
            series && this.#draw(),
            documents && this.#drawFall(),
        ]);
    }

    async #readMarks() {
        const { events } = await get(`${this.#run.path}/events`, { limit: 500 }, this.#run.signal);
        const said = new Map();
        for (const { kind, step } of events) {
            if (MARKED.has(kind) && step !== null) said.set(step, [...(said.get(step) ?? []), kind]);
        }
        this.#marks = [...said]
            .sort((a, b) => a[0] - b[0])
            .slice(-MOST_MARKS)
            .map(([step, kinds]) => ({
                step,
                words: [...new Set(kinds)].join(", "),
                bad: kinds.includes("oom"),
            }));
        this.#stack.mark(this.#marks);
    }

    // ---- charts ----

    async #draw() {
        const { range, series } = this.#run;
        this.#drawBar();
        this.#drawBeside();
        if (!range) {
            const none = {
                x: [],
                layers: [],
                lines: {},
                shown: { from: 0, to: 1 },
                all: { from: 0, to: 1 },
                note: "no points yet",
            };
            this.#stack.set(none);
            for (const chart of [this.#time, this.#loss]) chart.set({ ...none, unit: "" });
            return;
        }
        const there = new Set(series.map((one) => one.name));
        const predicted = this.#showsPredicted();
        const categories = categoriesOf(series, predicted);
        const names = [
            PEAK,
            PREDICTED,
            BUDGET,
            LIMIT,
            STEP_TIME,
            STEP_TIME_PREDICTED,
            LOSS,
            ...categories.map((one) => categorySeries(one, predicted)),
        ].filter((name) => there.has(name));
        const read = await this.#read(names);
        this.#drawStack(read, categories, predicted);
        this.#drawLines(this.#time, read, [STEP_TIME, STEP_TIME_PREDICTED], ["measured", "predicted"]);
        this.#drawLines(this.#loss, read, [LOSS], ["loss"]);
    }

    /** All series on the axis of those that have a point for each step; the others as they hold there. */
    async #read(names) {
        const { run } = this.#run;
        const { all, shown } = this.#run.range;
        const path = run.id;
        const dense = names.filter((name) => !isHeld(name));
        const sparse = names.filter(isHeld);
        const buckets = bucketsFor(this.#stack.width, shown.from, shown.to);
        const { signal } = this.#run;
        const [some, others] = await Promise.all([
            dense.length ? points(path, dense, { buckets, ...shown }, signal) : { series: [] },
            sparse.length
                ? points(path, sparse, { buckets: 1000, from: all.from, to: shown.to }, signal)
                : { series: [] },
        ]);
        const table = align(some.series);
        let { x } = table;
        if (x.length === 0) x = this.#stepsOf(others.series, shown);
        const columns = new Map(table.series.map((one) => [one.name, one]));
        for (const one of others.series)
            columns.set(one.name, { name: one.name, unit: one.unit, mean: held(one, x), nans: 0 });
        return { x, columns, shown, all };
    }

    /** Where only predictions are recorded: the ends, and both sides of each change. */
    #stepsOf(series, { from, to }) {
        const steps = new Set([from, to]);
        for (const one of series)
            for (const step of one.from) if (step > from && step <= to) steps.add(step - 1).add(step);
        return [...steps].sort((a, b) => a - b);
    }

    #drawStack({ x, columns, shown, all }, categories, predicted) {
        const layers = categories.map((name) => ({
            name,
            values: carried(columns.get(categorySeries(name, predicted))?.mean ?? []),
        }));
        const lines = {};
        const add = (name, values) => {
            if (values) lines[name] = values;
        };
        add("measured", columns.get(PEAK)?.max);
        add("predicted", columns.get(PREDICTED)?.mean);
        add("budget", columns.get(BUDGET)?.mean);
        add("limit", columns.get(LIMIT)?.mean);
        this.#stack.set({ x, layers, lines, shown, all, note: "" });
    }

    #drawLines(chart, { x, columns, shown, all }, names, labels) {
        const there = names.map((name) => columns.get(name)).filter(Boolean);
        const unit = there[0]?.unit ?? "";
        const lines = there.map((one) => ({
            label: labels[names.indexOf(one.name)],
            mean: one.mean,
            min: one.single ? null : one.min,
            max: one.single ? null : one.max,
            colour: names.indexOf(one.name),
            dashed: names.indexOf(one.name) > 0,
        }));
        const nans = there.reduce((sum, one) => sum + one.nans, 0);
        chart.set({
            x: there.length ? x : [],
            lines,
            unit,
            shown,
            all,
            note: nans ? `${number(nans)} of them NaN` : "",
        });
    }

    // ---- above the stack ----

    #showsPredicted() {
        const { series } = this.#run;
        if (categoriesOf(series, false).length === 0) return true;
        return this.#kind === "predicted" && categoriesOf(series, true).length > 0;
    }

    #drawBar() {
        const { series, zoom } = this.#run;
        const both = categoriesOf(series, true).length > 0 && categoriesOf(series, false).length > 0;
        const predicted = this.#showsPredicted();
        const choice = (text, on, of) =>
            button(
                text,
                () => {
                    setQuery({ of }, { push: true });
                    this.#kind = of;
                    this.#draw();
                },
                { "aria-pressed": String(on) },
            );
        const had = this.#bar.contains(document.activeElement) ? document.activeElement.textContent : null;
        this.#bar.replaceChildren(
            el(
                "span",
                { class: "soft small" },
                predicted
                    ? "By category as the plan predicts it, below the measured peak of each step."
                    : "By category as measured.",
            ),
            ...(both
                ? [
                      el(
                          "span",
                          { class: "actions" },
                          choice("Measured", !predicted, null),
                          choice("Predicted", predicted, "predicted"),
                      ),
                  ]
                : []),
            zoom
                ? el(
                      "span",
                      { class: "zoomed push" },
                      `Steps ${number(zoom.from)} to ${number(zoom.to)}`,
                      button("Show all steps", () => this.#run.zoomTo(null)),
                  )
                : el("span", { class: "soft small push" }, "Drag over a part to see it in more detail."),
        );
        if (had) [...this.#bar.querySelectorAll("button")].find((one) => one.textContent === had)?.focus();
    }

    // ---- predicted beside measured ----

    #drawBeside() {
        const found = new Map(this.#run.series.map((one) => [one.name, one]));
        const rows = [
            ["Peak of a step", PREDICTED, PEAK, bytes],
            ...PHASES.map((phase) => [
                `Peak in ${phase}`,
                phaseSeries(phase, true),
                phaseSeries(phase, false),
                bytes,
            ]),
            ["Step time, last", STEP_TIME_PREDICTED, STEP_TIME, nanoseconds],
        ]
            .map(([text, predicted, measured, show]) => {
                const mostOrLast = show === bytes ? "max" : "last";
                return [
                    text,
                    value(found.get(predicted)?.last ?? null),
                    value(found.get(measured)?.[mostOrLast] ?? null),
                    show,
                ];
            })
            .filter(([, predicted, measured]) => predicted !== null || measured !== null);
        this.#beside.hidden = rows.length === 0;
        this.#beside.replaceChildren(
            el("h2", { id: "beside" }, "Predicted beside measured"),
            el(
                "div",
                { class: "scroll" },
                el(
                    "table",
                    {},
                    el(
                        "thead",
                        {},
                        el(
                            "tr",
                            {},
                            el("td"),
                            ["Predicted", "Measured, highest", "Error"].map((head) =>
                                el("th", { scope: "col", class: "n" }, head),
                            ),
                        ),
                    ),
                    el(
                        "tbody",
                        {},
                        rows.map(([text, predicted, measured, show]) =>
                            el(
                                "tr",
                                {},
                                el("th", { scope: "row" }, text),
                                el("td", { class: "n" }, predicted === null ? "–" : show(predicted)),
                                el("td", { class: "n" }, measured === null ? "–" : show(measured)),
                                el("td", { class: "n" }, signedPercent(errorOf(predicted, measured))),
                            ),
                        ),
                    ),
                ),
            ),
            el(
                "p",
                { class: "hint" },
                "The error is predicted less measured, over measured: with a minus the step took more than the plan promised.",
            ),
        );
    }

    // ---- from the plain peak to the planned one ----

    async #drawFall() {
        const plan = await this.#run.document("plan");
        const [plain, planned] = [plan?.plain?.by_category, plan?.predicted?.by_category];
        this.#fall.hidden = !plain || !planned;
        if (this.#fall.hidden) return;
        this.#fall.replaceChildren(
            el("h2", { id: "fall" }, "What the plan takes off the peak"),
            fall(plain, planned),
        );
    }
}

/** Bars from one peak to another, by category. */
function fall(plain, planned) {
    const total = (parts) => Object.values(parts).reduce((sum, size) => sum + size, 0);
    const changes = Object.keys({ ...plain, ...planned })
        .map((name) => [name, (planned[name] ?? 0) - (plain[name] ?? 0)])
        .filter(([, change]) => change !== 0)
        .sort((a, b) => a[1] - b[1]);
    const most = Math.max(total(plain), total(planned), 1);
    const bar = (from, to, kind) =>
        svg(
            "svg",
            { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
            svg("rect", {
                class: `swatch k-${kind}`,
                x: (Math.min(from, to) / most) * 100,
                width: (Math.abs(to - from) / most) * 100,
                height: 10,
            }),
        );
    const row = (text, from, to, kind, amount) => [
        el("span", {}, text),
        bar(from, to, kind),
        el("span", { class: "n" }, amount),
    ];
    let now = total(plain);
    const rows = changes.map(([name, change]) => {
        const before = now;
        now += change;
        return row(words(name), before, now, name, `${change > 0 ? "+" : ""}${bytes(change)}`);
    });
    return el(
        "div",
        { class: "bars" },
        row("plain step", 0, total(plain), "limit", bytes(total(plain))),
        rows,
        row("planned step", 0, total(planned), "predicted", bytes(total(planned))),
    );
}
