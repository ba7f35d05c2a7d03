// SPDX-License-Identifier: Apache-2.0
// The server's buckets as columns of a chart.
//
//   points of each step              ─► align ─► one axis of steps, null where a series has no point
//   points only where a value changes ─► held  ─► the value at each of those steps

import { value } from "../format.js";

const finite = (raw) => {
    const number = value(raw);
    return Number.isFinite(number) ? number : null;
};

/**
 * Several series over one axis.
 * @param {Array} series - of one or several answers that were asked for with the same from, to and buckets
 * @returns {{x: number[], series: Array<{name, unit, min, max, mean, single: boolean, nans: number}>}}
 */
export function align(series) {
    const spans = new Map(); // bucket → its smallest and largest step
    for (const one of series) {
        one.index.forEach((bucket, i) => {
            const span = spans.get(bucket);
            if (!span) spans.set(bucket, [one.from[i], one.to[i]]);
            else spans.set(bucket, [Math.min(span[0], one.from[i]), Math.max(span[1], one.to[i])]);
        });
    }
    const buckets = [...spans.keys()].sort((a, b) => a - b);
    const places = new Map(buckets.map((bucket, i) => [bucket, i]));
    return {
        x: buckets.map((bucket) => (spans.get(bucket)[0] + spans.get(bucket)[1]) / 2),
        series: series.map((one) => columns(one, places, buckets.length)),
    };
}

function columns(one, places, length) {
    const column = (from) => {
        const filled = new Array(length).fill(null);
        one.index.forEach((bucket, i) => {
            filled[places.get(bucket)] = finite(from[i]);
        });
        return filled;
    };
    return {
        name: one.name,
        unit: one.unit,
        min: column(one.min),
        max: column(one.max),
        mean: column(one.mean),
        single: one.count.every((count) => count === 1),
        nans: one.nans.reduce((sum, count) => sum + count, 0),
    };
}

/**
 * The values of a series that holds each until the next one, at given steps.
 * @param {object} one - its buckets from its first point on
 * @param {number[]} steps - rising
 * @returns {Array<?number>} null before the first point
 */
export function held(one, steps) {
    let next = 0;
    let now = null;
    return steps.map((step) => {
        while (next < one.index.length && one.from[next] <= step) {
            now = finite(one.last[next]);
            next += 1;
        }
        return now;
    });
}

/** A column whose gaps have the value before; those in front the first one. */
export function carried(values) {
    let now = values.find((one) => one !== null) ?? null;
    return values.map((one) => {
        now = one ?? now;
        return now;
    });
}

/** How many buckets a chart of so many pixels asks for, where the run has so many steps. */
export function bucketsFor(width, from, to) {
    const most = Math.max(100, Math.min(1000, Math.round(width / 2)));
    return Math.min(most, Math.max(1, to - from + 1));
}

/** The first and the last step of all series; null where there is no point. */
export function rangeOf(series) {
    const there = series.filter((one) => one.count > 0);
    if (there.length === 0) return null;
    return {
        from: there.reduce((least, one) => Math.min(least, one.first_step), Infinity),
        to: there.reduce((most, one) => Math.max(most, one.last_step), -Infinity),
    };
}
