// SPDX-License-Identifier: Apache-2.0
// Memory over steps, stacked by category, on a canvas: uPlot has no stacking.
//
//   limit    ─ ─ ─ ─ ─ ─ ─ ─      lines over it: budget, limit of the device, predicted and measured peak
//   budget   ───────────────
//   measured ~~~~/\~~~~~~~~       the highest of each bucket, so that no peak is lost
//   ▒▒ temporary ▒▒▒▒▒▒▒▒▒▒       layers, from below in the order given
//   ██ parameter ██████████
//
// Pixels are CSS pixels; `#place` maps steps and bytes to them. The legend has the values at the cursor and
// is what a screen
// reader reads.

import { el } from "../dom.js";
import { bytes, number, tick as tickText } from "../format.js";
import { words } from "../names.js";
import { byteTicks, chartKeys, colour, onScheme, shortStep, stepTicks, zoomed } from "./axis.js";

const HEIGHT = 320;
const EDGE = { left: 70, right: 12, top: 14, bottom: 26 };
const HEADROOM = 1.06;
const LEAST_DRAG = 4;
const LINES = {
    limit: { colour: "limit", width: 1.5, dash: [2, 3], style: "dotted" },
    budget: { colour: "budget", width: 2, dash: [7, 4], style: "dashed" },
    predicted: { colour: "predicted", width: 1.75, dash: [], style: "" },
    measured: { colour: "measured", width: 1.75, dash: [], style: "" },
};

/** How far up the chart goes: over what is stacked and measured. A limit that is far above is left out. */
function highest(layers, lines, length) {
    const sums = Array.from({ length }, (_, i) =>
        layers.reduce((sum, layer) => sum + (layer.values[i] ?? 0), 0),
    );
    const most = (values) => values.reduce((high, one) => (one > high ? one : high), 0);
    const drawn = Math.max(most(sums), ...["predicted", "measured"].map((name) => most(lines[name] ?? [])));
    const near = ["budget", "limit"]
        .map((name) => most(lines[name] ?? []))
        .filter((one) => one <= 2.5 * drawn || drawn === 0);
    return Math.max(drawn, ...near, 1) * HEADROOM;
}

export class StackChart {
    #options;
    #data = null;
    #marks = [];
    #at = -1;
    #drag = null;
    #canvas = el("canvas", { "aria-hidden": "true" });
    #body;
    #value = el("span", { class: "value" });
    #legend = el("ul", { class: "legend" });
    #ends;

    /** @param options - zoom({from, to} or null): the reader wants this range */
    constructor(title, options) {
        this.#options = options;
        this.#body = el("div", { class: "chart-body stack" }, this.#canvas);
        this.element = el(
            "div",
            { class: "chart", tabindex: 0, role: "group", "aria-label": `Chart of ${title}` },
            el("div", { class: "chart-head" }, options.head, this.#value),
            this.#body,
            this.#legend,
        );
        this.#listen();
        const size = new ResizeObserver(() => this.#draw());
        size.observe(this.#body);
        const scheme = onScheme(() => this.#draw());
        this.#ends = () => {
            size.disconnect();
            scheme();
        };
    }

    get width() {
        return this.#body.clientWidth || 800;
    }

    /**
     * Draws other data.
     * @param {{x: number[], layers: Array<{name: string, values: number[]}>, lines: Object<string, number[]>,
     *   shown: {from, to}, all: {from, to}, note: string}} data - `lines` by the names of LINES
     */
    set(data) {
        const step = this.#at >= 0 ? this.#data.x[this.#at] : null;
        this.#data = { ...data, most: highest(data.layers, data.lines, data.x.length) };
        this.#at = step === null ? -1 : this.#nearest(step); // the pointer may rest on it
        this.#drawLegend();
        this.#draw();
        this.#say();
    }

    /**
     * Draws upright lines at some steps.
     * @param {Array<{step: number, words: string, bad: boolean}>} marks - rising
     */
    mark(marks) {
        this.#marks = marks;
        this.#draw();
    }

    close() {
        this.#ends();
    }

    // ---- pointer and keys ----

    #listen() {
        const place = (event) => event.clientX - this.#canvas.getBoundingClientRect().left;
        this.#canvas.addEventListener("pointermove", (event) => {
            if (!this.#data) return;
            if (this.#drag) this.#drag.to = place(event);
            this.#cursor(this.#nearest(this.#stepAt(place(event))));
        });
        this.#canvas.addEventListener("pointerdown", (event) => {
            if (event.button !== 0 || event.pointerType === "touch") return;
            this.#drag = { from: place(event), to: place(event) };
            this.#canvas.setPointerCapture(event.pointerId);
        });
        this.#canvas.addEventListener("pointerup", () => this.#endDrag());
        this.#canvas.addEventListener("pointercancel", () => {
            this.#drag = null;
            this.#draw();
        });
        this.#canvas.addEventListener("pointerleave", () => this.#cursor(-1));
        this.#canvas.addEventListener("dblclick", () => this.#options.zoom(null));
        chartKeys(this.element, {
            length: () => this.#data?.x.length ?? 0,
            at: () => this.#at,
            move: (index) => {
                this.#value.setAttribute("aria-live", "polite");
                this.#cursor(index);
            },
            zoom: (factor) => {
                const { shown, all, x } = this.#data;
                this.#options.zoom(
                    zoomed(shown, all, this.#at >= 0 ? x[this.#at] : (shown.from + shown.to) / 2, factor),
                );
            },
            reset: () => this.#options.zoom(null),
        });
    }

    #endDrag() {
        const drag = this.#drag;
        this.#drag = null;
        if (!drag || Math.abs(drag.to - drag.from) < LEAST_DRAG) {
            this.#draw();
            return;
        }
        const [from, to] = [drag.from, drag.to]
            .map((left) => Math.round(this.#stepAt(left)))
            .sort((a, b) => a - b);
        const { shown } = this.#data;
        if (to > from) this.#options.zoom({ from: Math.max(from, shown.from), to: Math.min(to, shown.to) });
    }

    #cursor(index) {
        if (index === this.#at && !this.#drag) return;
        this.#at = index;
        this.#draw();
        this.#say();
    }

    // ---- places ----

    #span() {
        const { from, to } = this.#data.shown;
        return from === to ? [from - 0.5, to + 0.5] : [from, to];
    }

    #place(step, size) {
        const [from, to] = this.#span();
        const across = this.width - EDGE.left - EDGE.right;
        const down = HEIGHT - EDGE.top - EDGE.bottom;
        return [
            EDGE.left + ((step - from) / (to - from)) * across,
            EDGE.top + (1 - size / this.#data.most) * down,
        ];
    }

    #stepAt(left) {
        const [from, to] = this.#span();
        return from + ((left - EDGE.left) / (this.width - EDGE.left - EDGE.right)) * (to - from);
    }

    #nearest(step) {
        const { x } = this.#data;
        let low = 0;
        let high = x.length;
        while (low < high) {
            const middle = (low + high) >> 1;
            if (x[middle] < step) low = middle + 1;
            else high = middle;
        }
        if (low > 0 && (low === x.length || step - x[low - 1] < x[low] - step)) low -= 1;
        return x.length ? low : -1;
    }

    // ---- drawing ----

    #draw() {
        if (!this.#data || !this.element.isConnected) return;
        const scale = devicePixelRatio || 1;
        const width = this.width;
        const pixels = [Math.round(width * scale), Math.round(HEIGHT * scale)];
        if (this.#canvas.width !== pixels[0] || this.#canvas.height !== pixels[1])
            [this.#canvas.width, this.#canvas.height] = pixels;
        const pen = this.#canvas.getContext("2d");
        pen.setTransform(scale, 0, 0, scale, 0, 0);
        pen.clearRect(0, 0, width, HEIGHT);
        pen.font = "12px system-ui, sans-serif";
        this.#drawAxes(pen);
        pen.save();
        pen.beginPath();
        pen.rect(EDGE.left, 0, width - EDGE.left - EDGE.right, HEIGHT - EDGE.bottom);
        pen.clip();
        this.#drawLayers(pen);
        for (const name of Object.keys(LINES)) this.#drawLine(pen, name);
        this.#drawMarks(pen);
        this.#drawCursor(pen);
        pen.restore();
    }

    #drawAxes(pen) {
        const right = this.width - EDGE.right;
        pen.fillStyle = colour("soft");
        pen.strokeStyle = colour("grid");
        pen.lineWidth = 1;
        pen.textAlign = "right";
        pen.textBaseline = "middle";
        for (const tick of byteTicks(this.#data.most)) {
            const y = Math.round(this.#place(0, tick)[1]) + 0.5;
            pen.beginPath();
            pen.moveTo(EDGE.left, y);
            pen.lineTo(right, y);
            pen.stroke();
            pen.fillText(tick === 0 ? "0" : tickText(tick, "bytes"), EDGE.left - 8, y);
        }
        pen.textAlign = "center";
        pen.textBaseline = "top";
        const { from, to } = this.#data.shown;
        for (const tick of stepTicks(from, to, this.width / 110)) {
            pen.fillText(
                shortStep(tick),
                Math.min(right - 8, this.#place(tick, 0)[0]),
                HEIGHT - EDGE.bottom + 8,
            );
        }
    }

    /** Corners of a line of values; one value alone goes over the whole width. */
    #corners(values) {
        const { x } = this.#data;
        const corners = [];
        values.forEach((size, i) => {
            if (size !== null && size !== undefined) corners.push(this.#place(x[i], size));
        });
        if (corners.length && x.length === 1)
            return [
                [EDGE.left, corners[0][1]],
                [this.width - EDGE.right, corners[0][1]],
            ];
        return corners;
    }

    #drawLayers(pen) {
        const { x, layers } = this.#data;
        let floor = new Array(x.length).fill(0);
        for (const layer of layers) {
            const top = floor.map((below, i) => below + (layer.values[i] ?? 0));
            const corners = [...this.#corners(top), ...this.#corners(floor).reverse()];
            pen.beginPath();
            corners.forEach(([left, y], i) => (i ? pen.lineTo(left, y) : pen.moveTo(left, y)));
            pen.closePath();
            pen.fillStyle = colour(`c-${layer.name}`);
            pen.fill();
            floor = top;
        }
    }

    #drawLine(pen, name) {
        const values = this.#data.lines[name];
        if (!values) return;
        const line = LINES[name];
        pen.beginPath();
        this.#corners(values).forEach(([left, y], i) => (i ? pen.lineTo(left, y) : pen.moveTo(left, y)));
        pen.setLineDash(line.dash);
        pen.lineJoin = "round";
        pen.lineWidth = line.width + 2;
        pen.strokeStyle = colour("card"); // a rim, so that it is seen on every layer
        if (line.dash.length === 0) pen.stroke();
        pen.lineWidth = line.width;
        pen.strokeStyle = colour(line.colour);
        pen.stroke();
        pen.setLineDash([]);
    }

    #drawMarks(pen) {
        pen.textAlign = "left";
        pen.textBaseline = "top";
        let free = -Infinity; // where the next word has room
        for (const { step, words: said, bad } of this.#marks) {
            const [left] = this.#place(step, 0);
            if (left < EDGE.left || left > this.width - EDGE.right) continue;
            pen.fillStyle = colour(bad ? "bad" : "ink");
            pen.fillRect(Math.round(left), EDGE.top, 1.5, HEIGHT - EDGE.top - EDGE.bottom);
            if (left < free) continue;
            pen.fillText(said, left + 4, 1);
            free = left + 12 + pen.measureText(said).width;
        }
    }

    #drawCursor(pen) {
        if (this.#drag) {
            const { from, to } = this.#drag;
            pen.fillStyle = `${colour("accent")}33`;
            pen.fillRect(Math.min(from, to), EDGE.top, Math.abs(to - from), HEIGHT - EDGE.top - EDGE.bottom);
        }
        if (this.#at < 0) return;
        const [left] = this.#place(this.#data.x[this.#at], 0);
        pen.fillStyle = colour("ink");
        pen.fillRect(Math.round(left), EDGE.top, 1, HEIGHT - EDGE.top - EDGE.bottom);
    }

    // ---- legend ----

    #drawLegend() {
        const { layers, lines } = this.#data;
        const entry = (name, key) =>
            el(
                "li",
                { "data-name": name },
                el("span", { class: key }),
                words(name),
                el("span", { class: "amount" }),
            );
        this.#legend.replaceChildren(
            ...Object.keys(LINES)
                .filter((name) => lines[name])
                .reverse()
                .map((name) => entry(name, `key rule ${LINES[name].style} k-${name}`)),
            ...[...layers].reverse().map((layer) => entry(layer.name, `key k-${layer.name}`)),
        );
    }

    /** The values at the cursor; without one those of the highest moment. */
    #say() {
        const { x, layers, lines, note } = this.#data;
        let at = this.#at;
        if (at < 0) {
            const tops = lines.measured ?? lines.predicted ?? [];
            at = tops.reduce((best, one, i) => ((one ?? -1) > (tops[best] ?? -1) ? i : best), 0);
        }
        this.#value.textContent =
            x.length === 0
                ? note
                : `${this.#at < 0 ? "highest at step" : "step"} ${number(Math.round(x[at]))}`;
        const values = new Map([
            ...layers.map((layer) => [layer.name, layer.values]),
            ...Object.entries(lines),
        ]);
        for (const item of this.#legend.children) {
            const size = values.get(item.dataset.name)?.[at];
            item.querySelector(".amount").textContent =
                size === null || size === undefined ? "" : bytes(size);
        }
    }
}
