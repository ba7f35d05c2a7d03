// SPDX-License-Identifier: Apache-2.0
// What both kinds of chart share: ticks, colours that follow the reader's scheme, keys.

/** A colour of charts.css. */
export function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** Calls back when light becomes dark or the other way round; returns what ends it. */
export function onScheme(change) {
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", change);
    return () => dark.removeEventListener("change", change);
}

/** Distances between ticks of sizes: powers of two. */
export const BYTE_STEPS = Array.from({ length: 60 }, (_, power) => 2 ** power);

/** Ticks of sizes from 0 up to `most`, four to eight. */
export function byteTicks(most) {
    const step = BYTE_STEPS.find((one) => one >= most / 8) ?? most / 5;
    const ticks = [];
    for (let tick = 0; tick <= most; tick += step) ticks.push(tick);
    return ticks;
}

/** Whole-numbered ticks between two steps of a run, about `wanted`. */
export function stepTicks(from, to, wanted) {
    const raw = Math.max(1, (to - from) / Math.max(1, wanted));
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = Math.max(1, power * [1, 2, 5, 10].find((n) => n * power >= raw));
    const ticks = [];
    for (let tick = Math.ceil(from / step) * step; tick <= to; tick += step) ticks.push(tick);
    return ticks;
}

/** A step of a run as an axis shows it: 1500, 20k, 1.5M. */
export function shortStep(step) {
    const size = Math.abs(step);
    if (size >= 1e6) return `${Number((step / 1e6).toPrecision(4))}M`;
    if (size >= 1e4) return `${Number((step / 1e3).toPrecision(4))}k`;
    return String(step);
}

/**
 * Keys of a chart that has the focus: arrows move the cursor, + zooms in around it, − out, Escape shows all.
 * @param chart - length(), at() → index or −1, move(index), zoom(factor), reset()
 */
export function chartKeys(element, chart) {
    const jump = () => Math.max(1, Math.round(chart.length() / 20));
    const moves = {
        ArrowLeft: (now, last) => (now < 0 ? last : now - 1),
        ArrowRight: (now) => now + 1,
        PageUp: (now, last) => (now < 0 ? last : now - jump()),
        PageDown: (now) => now + jump(),
        Home: () => 0,
        End: (now, last) => last,
    };
    element.addEventListener("keydown", (event) => {
        if (event.ctrlKey || event.metaKey || event.altKey) return;
        const last = chart.length() - 1;
        const move = moves[event.key];
        if (move && last >= 0) chart.move(Math.max(0, Math.min(last, move(chart.at(), last))));
        else if (event.key === "+" || event.key === "=") chart.zoom(0.5);
        else if (event.key === "-") chart.zoom(2);
        else if (event.key === "Escape") chart.reset();
        else return;
        event.preventDefault();
    });
}

/** A range around a step, so many times as long as the one shown, within all; null: that is everything. */
export function zoomed(shown, all, centre, factor) {
    const length = (shown.to - shown.from) * factor;
    const from = Math.max(all.from, Math.round(centre - length / 2));
    const to = Math.min(all.to, Math.round(centre + length / 2));
    if (to - from >= all.to - all.from) return null;
    return to > from ? { from, to } : { from: shown.from, to: shown.to };
}
