// SPDX-License-Identifier: Apache-2.0
// Two to eight runs beside each other: /compare?runs=a,b&series=loss,time%2Fstep&from=…&to=…&all=1
//
// Figures in a table, series overlaid on one axis of steps, then what differs in plan, parameters and
// environment.

import { get, isAbort, points } from "../api.js";
import { announce, button, el, named, notice, time } from "../dom.js";
import { ago, bytes, duration, nanoseconds, number, percent, signedPercent, value } from "../format.js";
import { LOSS, PEAK, STEP_TIME, errorOf, summaryOf } from "../names.js";
import { setQuery } from "../router.js";
import { align, bucketsFor, rangeOf } from "../charts/buckets.js";
import { LineChart } from "../charts/lines.js";
import { differences } from "./compare_plan.js";
import { lastedMs, stateOf } from "./runs_table.js";

const FEWEST = 2;
const MOST = 8;
const AT_FIRST = [PEAK, STEP_TIME, LOSS];
const ID = /^[A-Za-z0-9_-]{8,64}$/;

export async function show({ place, query, signal }) {
    const ids = [...new Set((query.get("runs") ?? "").split(","))].filter((id) => ID.test(id)).slice(0, MOST);
    if (ids.length < FEWEST) {
        place.classList.add("narrow");
        place.append(
            el("h1", {}, "Compare runs"),
            el("p", {}, "Choose two to eight runs in the table of a project, then “Compare”."),
            el("a", { class: "button primary", href: "/" }, "All projects"),
        );
        return {};
    }
    const found = await Promise.all(ids.map((id) => read(id, signal)));
    const runs = found.filter(Boolean).map((one, i) => ({ ...one, colour: i }));
    const view = new Comparison(place, runs, signal);
    if (runs.length < ids.length)
        notice(`${ids.length - runs.length} of these runs are not there, or belong to another account.`);
    return view;
}

async function read(id, signal) {
    try {
        const [run, { series }] = await Promise.all([
            get(`/runs/${id}`, null, signal),
            get(`/runs/${id}/series`, null, signal),
        ]);
        const stepTime = series.some((one) => one.name === STEP_TIME && one.count > 0)
            ? (await points(id, [STEP_TIME], { buckets: 1 }, signal)).series[0]?.mean[0]
            : null;
        return { run, series, ...summaryOf(series), stepNs: value(stepTime ?? null) };
    } catch (error) {
        if (error.status === 404) return null;
        throw error;
    }
}

class Comparison {
    #runs;
    #signal;
    #zoom = null;
    #charts = new Map();
    #picker;
    #bar = el("div", { class: "bar" });
    #grid = el("div", { class: "grid" });

    constructor(place, runs, signal) {
        this.#runs = runs;
        this.#signal = signal;
        const differ = el("div");
        place.append(
            el("div", { class: "bar" }, el("h1", {}, `Compare ${runs.length} runs`)),
            el(
                "section",
                { class: "card", "aria-labelledby": "figures" },
                el("h2", { id: "figures" }, "Memory and time"),
                this.#figures(),
            ),
            el("section", { "aria-labelledby": "overlaid" }, this.#bar, this.#grid),
            differ,
        );
        this.#drawBar();
        differences(differ, runs, signal).catch((error) => {
            if (!isAbort(error)) notice(error.message);
        });
    }

    close() {
        for (const chart of this.#charts.values()) chart.close();
    }

    update(query) {
        const whole = (text) => (/^-?\d{1,15}$/.test(text ?? "") ? Number(text) : null);
        const [from, to] = [whole(query.get("from")), whole(query.get("to"))];
        this.#zoom = from !== null && to !== null && from <= to ? { from, to } : null;
        const there = new Set(this.#runs.flatMap(({ series }) => series.map((one) => one.name)));
        const asked = query.has("series")
            ? query.getAll("series").flatMap((one) => one.split("\n"))
            : AT_FIRST;
        this.#draw(asked.filter((name) => there.has(name)));
    }

    // ---- figures ----

    #figures() {
        const runs = this.#runs;
        const best = (pick) => {
            const there = runs.map(pick).filter((one) => one > 0);
            return new Set(there).size > 1 ? Math.min(...there) : null;
        };
        const [least, fastest] = [best((one) => one.peak), best((one) => one.stepNs)];
        const size = (one) => (one === null ? "–" : bytes(one));
        const beside = (now, first) =>
            now > 0 && first > 0 && now !== first ? ` ${signedPercent(now / first - 1)}` : "";
        const rows = [
            ["State", (one) => stateOf(one.run)],
            ["Started", (one) => time(one.run.created_ms, ago(one.run.created_ms))],
            ["Duration", (one) => duration(lastedMs(one.run))],
            ["Steps", (one) => number(one.steps)],
            ["Budget", (one) => size(one.budget)],
            [
                "Peak measured",
                (one) => [size(one.peak), small(beside(one.peak, runs[0].peak))],
                (one) => least !== null && one.peak === least,
            ],
            ["Peak predicted", (one) => size(one.predicted)],
            ["Error of prediction", (one) => signedPercent(errorOf(one.predicted, one.peak))],
            [
                "Of the budget",
                (one) => (one.budget > 0 && one.peak > 0 ? percent(one.peak / one.budget) : "–"),
            ],
            [
                "Step time, mean",
                (one) => [
                    one.stepNs === null ? "–" : nanoseconds(one.stepNs),
                    small(beside(one.stepNs, runs[0].stepNs)),
                ],
                (one) => fastest !== null && one.stepNs === fastest,
            ],
        ];
        const small = (text) => (text ? el("span", { class: "small soft" }, text) : null);
        const remove = (one) => {
            const rest = runs.filter((other) => other !== one).map((other) => other.run.id);
            return el(
                "a",
                {
                    class: "small",
                    href: `/compare?runs=${rest.join(",")}`,
                    "aria-label": `Take ${one.run.name} out`,
                },
                "take out",
            );
        };
        return el(
            "div",
            { class: "scroll", tabindex: 0, role: "group", "aria-labelledby": "figures" },
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
                        runs.map((one) =>
                            el(
                                "th",
                                { scope: "col", class: "wrap" },
                                el("span", { class: `key k-s${one.colour}` }),
                                " ",
                                el("a", { href: `/runs/${one.run.id}` }, named(one.run.name)),
                                runs.length > FEWEST ? [el("br"), remove(one)] : null,
                            ),
                        ),
                    ),
                ),
                el(
                    "tbody",
                    {},
                    rows.map(([text, cell, isBest]) =>
                        el(
                            "tr",
                            {},
                            el("th", { scope: "row" }, text),
                            runs.map((one) =>
                                el(
                                    "td",
                                    {
                                        class: isBest?.(one) ? "good-text" : "",
                                        title: isBest?.(one) ? "the lowest" : null,
                                    },
                                    cell(one),
                                ),
                            ),
                        ),
                    ),
                ),
            ),
        );
    }

    // ---- series ----

    #drawBar() {
        const names = [
            ...new Set(
                this.#runs.flatMap(({ series }) => series.filter((one) => one.count).map((one) => one.name)),
            ),
        ].sort();
        this.#picker = el(
            "select",
            { on: { change: () => this.#add(this.#picker.value) } },
            el("option", { value: "" }, "Add a series…"),
            names.map((name) => el("option", { value: name }, name)),
        );
        this.#bar.replaceChildren(
            el("h2", { id: "overlaid" }, "Series"),
            names.length
                ? el("label", {}, el("span", { class: "unseen" }, "Add a series"), this.#picker)
                : el("span", { class: "soft" }, "No points yet."),
            el("span", { class: "zoomed push", hidden: true }),
        );
    }

    #shown = () => [...this.#charts.keys()];

    #choose(names) {
        setQuery({ series: names.join("\n") || null });
        this.update(new URLSearchParams(location.search));
    }

    #add(name) {
        this.#picker.value = "";
        if (name && !this.#charts.has(name)) this.#choose([...this.#shown(), name]);
    }

    #zoomTo(range) {
        setQuery({ from: range?.from, to: range?.to }, { push: true });
        this.update(new URLSearchParams(location.search));
        announce(range ? `Steps ${range.from} to ${range.to}` : "All steps");
    }

    #draw(names) {
        for (const [name, chart] of this.#charts) {
            if (names.includes(name)) continue;
            chart.close();
            this.#charts.delete(name);
        }
        for (const name of names) {
            if (this.#charts.has(name)) continue;
            this.#charts.set(
                name,
                new LineChart(name, { zoom: (range) => this.#zoomTo(range), sync: "compare" }),
            );
        }
        const cards = names.map((name) => this.#charts.get(name).element);
        if (
            cards.some((card, i) => card !== this.#grid.children[i]) ||
            cards.length !== this.#grid.children.length
        )
            this.#grid.replaceChildren(...cards);
        const zoom = this.#bar.querySelector(".zoomed");
        zoom.hidden = !this.#zoom;
        zoom.replaceChildren(
            ...(this.#zoom
                ? [
                      `Steps ${number(this.#zoom.from)} to ${number(this.#zoom.to)}`,
                      button("Show all steps", () => this.#zoomTo(null)),
                  ]
                : []),
        );
        this.#load(names).catch((error) => {
            if (!isAbort(error)) notice(error.message);
        });
    }

    /** The same buckets of the same steps of every run. */
    async #load(names) {
        if (names.length === 0) return;
        const all = rangeOf(
            this.#runs.flatMap(({ series }) => series.filter((one) => names.includes(one.name))),
        );
        if (!all) return;
        const zoom = this.#zoom;
        const shown = zoom ? { from: Math.max(all.from, zoom.from), to: Math.min(all.to, zoom.to) } : all;
        if (shown.from > shown.to) Object.assign(shown, all);
        const buckets = bucketsFor(this.#charts.get(names[0]).width, shown.from, shown.to);
        const answers = await Promise.all(
            this.#runs.map(async ({ run, series }) => {
                const there = names.filter((name) => series.some((one) => one.name === name));
                return there.length
                    ? (await points(run.id, there, { buckets, ...shown }, this.#signal)).series
                    : [];
            }),
        );
        if (zoom !== this.#zoom) return;
        for (const name of names) this.#overlay(name, answers, shown, all);
    }

    #overlay(name, answers, shown, all) {
        const members = answers
            .map((series, i) => ({ one: series.find((other) => other.name === name), run: this.#runs[i] }))
            .filter(({ one }) => one && one.index.length);
        const { x, series } = align(members.map(({ one }) => one));
        const few = members.length <= 3; // more bands would hide each other
        const lines = members.map(({ run }, i) => {
            const { mean, min, max, single } = series[i];
            const band = few && !single;
            return {
                label: run.run.name,
                mean,
                min: band ? min : null,
                max: band ? max : null,
                colour: run.colour,
            };
        });
        this.#charts.get(name)?.set({ x, lines, unit: series[0]?.unit ?? "", shown, all, note: "" });
    }
}
