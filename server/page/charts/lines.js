// SPDX-License-Identifier: Apache-2.0
// Line charts by uPlot: a line for the mean of each bucket, a band from its smallest to its largest value. A
// zoom changes
// nothing here: it is reported, and the view comes back with buckets of the shorter range.

import uPlot from "../vendor/uplot/uPlot.esm.js";
import { el } from "../dom.js";
import { number, quantity, tick as tickText } from "../format.js";
import { BYTE_STEPS, chartKeys, colour, onScheme, shortStep, zoomed } from "./axis.js";

const HEIGHT = 190;
const COLOURS = 8;

/**
 * @typedef {object} Line
 * @property {string} label
 * @property {?number[]} min - with `max` a band
 * @property {?number[]} max
 * @property {number[]} mean
 * @property {number} colour - 0 to 7
 * @property {boolean} [dashed]
 */
export class LineChart {
    #options;
    #plot = null;
    #data = null;
    #at = -1;
    #body;
    #value = el("span", { class: "value" });
    #legend = el("ul", { class: "legend" });
    #ends;

    /**
     * @param {string} title
     * @param options - zoom({from, to} or null): the reader wants this range; sync: charts of one name share
     * the cursor
     */
    constructor(title, options) {
        this.#options = options;
        this.#body = el("div", { class: "chart-body" });
        this.element = el(
            "section",
            { class: "card chart", tabindex: 0, role: "group", "aria-label": `Chart of ${title}` },
            el("div", { class: "chart-head" }, el("h3", {}, el("bdi", {}, title)), this.#value),
            this.#body,
            this.#legend,
        );
        chartKeys(this.element, {
            length: () => this.#data?.x.length ?? 0,
            at: () => this.#at,
            move: (index) => this.#move(index),
            zoom: (factor) => this.#zoomBy(factor),
            reset: () => options.zoom(null),
        });
        const size = new ResizeObserver(() => this.#fit());
        size.observe(this.#body);
        const scheme = onScheme(() => this.#rebuild());
        this.#ends = () => {
            size.disconnect();
            scheme();
        };
    }

    get width() {
        return this.#body.clientWidth || 400;
    }

    /**
     * Draws other data.
     * @param {{x: number[], lines: Line[], unit: string, shown: {from, to}, all: {from, to}, note: string}}
     * data
     */
    set(data) {
        const before = this.#data;
        this.#data = data;
        const alike =
            before &&
            this.#plot &&
            before.unit === data.unit &&
            before.lines.length === data.lines.length &&
            data.lines.every(
                (line, i) =>
                    line.label === before.lines[i].label &&
                    Boolean(line.min) === Boolean(before.lines[i].min),
            );
        if (alike) {
            this.#plot.setData(this.#columns(), false);
            this.#plot.batch(() => {
                this.#plot.setScale("x", { min: data.shown.from, max: data.shown.to });
            });
        } else {
            this.#rebuild();
        }
        this.#drawLegend();
        this.#say(this.#plot?.cursor.idx ?? -1); // the pointer may rest on it
    }

    close() {
        this.#ends();
        this.#plot?.destroy();
    }

    // ---- uPlot ----

    #columns() {
        const { x, lines } = this.#data;
        return [x, ...lines.flatMap((line) => (line.min ? [line.max, line.min, line.mean] : [line.mean]))];
    }

    #rebuild() {
        this.#plot?.destroy();
        this.#plot = null;
        if (!this.#data) return;
        if (this.#data.x.length === 0) {
            this.#body.replaceChildren(el("p", { class: "none" }, "No points in this range"));
            return;
        }
        this.#body.replaceChildren();
        this.#plot = new uPlot(this.#plotOptions(), this.#columns(), this.#body);
    }

    #plotOptions() {
        const { lines, unit, shown } = this.#data;
        const series = [{}];
        const bands = [];
        for (const line of lines) {
            const stroke = colour(`s-${line.colour % COLOURS}`);
            if (line.min) {
                const edge = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
                bands.push({ series: [series.length, series.length + 1], fill: `${stroke}38` });
                series.push(edge, { ...edge });
            }
            series.push({ stroke, width: 1.6, dash: line.dashed ? [6, 4] : undefined, spanGaps: true });
        }
        const axis = {
            stroke: colour("soft"),
            grid: { stroke: colour("grid"), width: 1 },
            ticks: { show: false },
            font: "12px system-ui, sans-serif",
        };
        return {
            width: this.width,
            height: HEIGHT,
            series,
            bands,
            legend: { show: false },
            scales: {
                x: {
                    time: false,
                    min: shown.from,
                    max: shown.to,
                    auto: false,
                    range: (plot, min, max) => (min === max ? [min - 1, max + 1] : [min, max]),
                },
            },
            axes: [
                {
                    ...axis,
                    size: 28,
                    values: (plot, ticks) =>
                        ticks.map((tick) => (Number.isInteger(tick) ? shortStep(tick) : "")),
                },
                {
                    ...axis,
                    size: 72,
                    incrs: unit === "bytes" ? BYTE_STEPS : undefined,
                    values: (plot, ticks) => ticks.map((tick) => tickText(tick, unit)),
                },
            ],
            cursor: {
                y: false,
                drag: { x: true, y: false, setScale: false },
                sync: this.#options.sync ? { key: this.#options.sync, setSeries: false } : undefined,
                bind: { dblclick: () => () => this.#options.zoom(null) },
            },
            hooks: {
                setCursor: [
                    (plot) => {
                        this.#at = plot.cursor.idx ?? -1;
                        this.#say(this.#at);
                    },
                ],
                setSelect: [(plot) => this.#selected(plot)],
            },
        };
    }

    #selected(plot) {
        const { left, width } = plot.select;
        if (width < 4) return;
        const from = Math.round(plot.posToVal(left, "x"));
        const to = Math.round(plot.posToVal(left + width, "x"));
        plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        if (to > from) this.#options.zoom({ from, to });
    }

    #fit() {
        if (this.#plot && this.#plot.width !== this.width)
            this.#plot.setSize({ width: this.width, height: HEIGHT });
    }

    // ---- cursor ----

    #move(index) {
        const left = this.#plot.valToPos(this.#data.x[index], "x");
        this.#plot.setCursor({ left, top: HEIGHT / 2 });
        this.#value.setAttribute("aria-live", "polite");
    }

    #zoomBy(factor) {
        const { shown, all, x } = this.#data;
        const centre = this.#at >= 0 ? x[this.#at] : (shown.from + shown.to) / 2;
        this.#options.zoom(zoomed(shown, all, centre, factor));
    }

    #valueAt(line, index) {
        const { unit } = this.#data;
        const mean = quantity(line.mean[index], unit);
        if (!line.min || line.min[index] === null || line.min[index] === line.max[index]) return mean;
        return `${mean} (${quantity(line.min[index], unit)} to ${quantity(line.max[index], unit)})`;
    }

    #say(index) {
        const { x, lines, note } = this.#data;
        if (index < 0 || index >= x.length) {
            this.#value.textContent = note;
            lines.forEach((line, i) => this.#amount(i, ""));
            return;
        }
        const step = `step ${number(Math.round(x[index]))}`;
        this.#value.textContent = lines.length === 1 ? `${step}: ${this.#valueAt(lines[0], index)}` : step;
        if (lines.length > 1) lines.forEach((line, i) => this.#amount(i, this.#valueAt(line, index)));
    }

    #amount(line, text) {
        const place = this.#legend.children[line]?.querySelector(".amount");
        if (place) place.textContent = text;
    }

    #drawLegend() {
        const { lines } = this.#data;
        this.#legend.hidden = lines.length < 2;
        this.#legend.replaceChildren(
            ...(lines.length < 2
                ? []
                : lines.map((line) =>
                      el(
                          "li",
                          {},
                          el("span", {
                              class: `key rule ${line.dashed ? "dashed " : ""}k-s${line.colour % COLOURS}`,
                          }),
                          el("bdi", {}, line.label),
                          el("span", { class: "amount" }),
                      ),
                  )),
        );
    }
}
