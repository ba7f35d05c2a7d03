// SPDX-License-Identifier: Apache-2.0
// Every series of a run as a chart. Only charts that are in view ask for points, all of them in one request.

import { points } from "../api.js";
import { button, el } from "../dom.js";
import { count, number, quantity, value } from "../format.js";
import { setQuery } from "../router.js";
import { align, bucketsFor } from "../charts/buckets.js";
import { LineChart } from "../charts/lines.js";

const AT_FIRST = 48;
const TYPING_MS = 150;
const OURS = ["time", "memory", "offload"];

/** The user's own series first, then what MemScale records of every run. */
function order(a, b) {
    const rank = (name) => OURS.indexOf(groupOf(name));
    return rank(a.name) - rank(b.name) || (a.name < b.name ? -1 : 1);
}

/** What stands before the first "/" of a name; "" if nothing does. */
const groupOf = (name) => name.slice(0, Math.max(0, name.indexOf("/")));

/** Series by group; those that are alone in theirs stand together. */
function grouped(shown) {
    const groups = new Map([["", []]]);
    const size = (group) => shown.filter((one) => groupOf(one.name) === group).length;
    for (const one of shown) {
        const own = groupOf(one.name);
        const group = own && size(own) > 1 ? own : "";
        groups.set(group, [...(groups.get(group) ?? []), one]);
    }
    return [...groups].filter(([, members]) => members.length);
}

export class SeriesTab {
    #run;
    #place;
    #charts = new Map();
    #most = AT_FIRST;
    #find = "";
    #input;
    #count = el("span", { class: "soft small", role: "status" });
    #zoom = el("span", { class: "zoomed push" });
    #body = el("div");
    #watch;

    constructor(run, place) {
        this.#run = run;
        this.#place = place;
        this.#watch = new IntersectionObserver(
            (entries) => {
                for (const entry of entries) {
                    const one = this.#charts.get(entry.target.dataset.series);
                    if (one) one.visible = entry.isIntersecting;
                }
                this.#load();
            },
            { rootMargin: "150px" },
        );
    }

    open(query) {
        let typing;
        this.#input = el("input", {
            type: "search",
            placeholder: "part of a name",
            autocomplete: "off",
            spellcheck: "false",
            on: {
                input: () => {
                    clearTimeout(typing);
                    typing = setTimeout(() => {
                        setQuery({ find: this.#input.value });
                        this.#find = this.#input.value;
                        this.#draw();
                    }, TYPING_MS);
                },
            },
        });
        this.#place.append(
            el(
                "form",
                {
                    class: "filters",
                    role: "search",
                    "aria-label": "Series",
                    on: { submit: (event) => event.preventDefault() },
                },
                el("label", {}, "Search", this.#input),
                this.#count,
                this.#zoom,
            ),
            this.#body,
        );
        this.zoomed(query);
    }

    close() {
        this.#watch.disconnect();
        for (const { chart } of this.#charts.values()) chart.close();
    }

    zoomed(query) {
        this.#find = query.get("find") ?? "";
        if (document.activeElement !== this.#input) this.#input.value = this.#find;
        for (const one of this.#charts.values()) one.stale = true;
        this.#draw();
    }

    changed({ series }) {
        if (!series) return;
        for (const one of this.#charts.values()) one.stale = true;
        this.#draw();
    }

    // ---- which charts ----

    #draw() {
        const { series, zoom } = this.#run;
        const find = this.#find.toLowerCase();
        const found = series
            .filter((one) => one.count > 0 && one.name.toLowerCase().includes(find))
            .sort(order);
        const shown = found.slice(0, this.#most);
        this.#count.textContent = count(found.length, "series", "series");
        this.#zoom.replaceChildren(
            ...(zoom
                ? [
                      `Steps ${number(zoom.from)} to ${number(zoom.to)}`,
                      button("Show all steps", () => this.#run.zoomTo(null)),
                  ]
                : []),
        );
        const wanted = new Set(shown.map((one) => one.name));
        for (const [name, { chart }] of this.#charts) {
            if (wanted.has(name)) continue;
            this.#watch.unobserve(chart.element);
            chart.close();
            this.#charts.delete(name);
        }
        for (const one of shown)
            if (!this.#charts.has(one.name)) this.#charts.set(one.name, this.#newChart(one));
        this.#layOut(shown, found.length);
        this.#load();
    }

    #newChart({ name }) {
        const chart = new LineChart(name, { zoom: (range) => this.#run.zoomTo(range), sync: "run" });
        chart.element.dataset.series = name;
        this.#watch.observe(chart.element);
        return { chart, visible: false, stale: true };
    }

    #layOut(shown, all) {
        const key = JSON.stringify([shown.map((one) => one.name), all]);
        if (this.#body.dataset.key === key) return;
        this.#body.dataset.key = key;
        const sections = grouped(shown).map(([group, members]) =>
            el(
                "section",
                {},
                group ? el("h2", {}, el("bdi", {}, group)) : el("h2", { class: "unseen" }, "Without a group"),
                el(
                    "div",
                    { class: "grid" },
                    members.map((one) => this.#charts.get(one.name).chart.element),
                ),
            ),
        );
        this.#body.replaceChildren(
            ...(sections.length
                ? sections
                : [
                      el(
                          "p",
                          { class: "card" },
                          all === 0 && this.#find ? "No series matches." : "No points yet.",
                      ),
                  ]),
        );
        if (all > shown.length) {
            this.#body.append(
                button(`Show ${Math.min(AT_FIRST, all - shown.length)} more`, () => {
                    this.#most += AT_FIRST;
                    this.#draw();
                }),
            );
        }
    }

    // ---- their points ----

    async #load() {
        const range = this.#run.range;
        const wanted = [...this.#charts].filter(([, one]) => one.visible && one.stale);
        if (!range || wanted.length === 0) return;
        for (const [, one] of wanted) one.stale = false;
        const { shown, all } = range;
        const buckets = bucketsFor(wanted[0][1].chart.width, shown.from, shown.to);
        try {
            const answer = await points(
                this.#run.run.id,
                wanted.map(([name]) => name),
                { buckets, ...shown },
                this.#run.signal,
            );
            const found = new Map(answer.series.map((one) => [one.name, one]));
            const listed = new Map(this.#run.series.map((one) => [one.name, one]));
            for (const [name, { chart }] of wanted)
                this.#show(chart, found.get(name), listed.get(name), shown, all);
        } catch (error) {
            for (const [, one] of wanted) one.stale = true;
            throw error;
        }
    }

    #show(chart, found, listed, shown, all) {
        const {
            x,
            series: [one],
        } = found ? align([found]) : { x: [], series: [] };
        const lines = one
            ? [
                  {
                      label: one.name,
                      mean: one.mean,
                      min: one.single ? null : one.min,
                      max: one.single ? null : one.max,
                      colour: 0,
                  },
              ]
            : [];
        const nans = one?.nans ? `, ${number(one.nans)} of them NaN` : "";
        const note = listed ? `last ${quantity(value(listed.last), listed.unit)}${nans}` : "";
        chart.set({ x, lines, unit: listed?.unit ?? "", shown, all, note });
    }
}
