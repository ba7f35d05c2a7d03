// SPDX-License-Identifier: Apache-2.0
// The names that runs record: docs/design/server.md, "Names that runs record".

export const PEAK = "memory/peak";
export const PREDICTED = "memory/predicted";
export const BUDGET = "memory/budget";
export const LIMIT = "memory/limit";
export const STEP_TIME = "time/step";
export const STEP_TIME_PREDICTED = "time/predicted";
export const LOSS = "loss";

const MEASURED_CATEGORY = "memory/category/";
const PREDICTED_CATEGORY = "memory/predicted/category/";

/** In the order in which they are stacked, from below. */
export const CATEGORIES = [
    "context",
    "parameter",
    "buffer",
    "optimizer_state",
    "gradient",
    "input",
    "activation",
    "workspace",
    "temporary",
    "fragmentation",
    "other",
];
export const PHASES = ["forward", "backward", "optimizer"];

export const phaseSeries = (phase, predicted) => `memory/${predicted ? "predicted/" : ""}phase/${phase}`;
export const categorySeries = (category, predicted) =>
    (predicted ? PREDICTED_CATEGORY : MEASURED_CATEGORY) + category;

/** The categories that a run has recorded. */
export function categoriesOf(series, predicted) {
    const there = new Set(series.map((one) => one.name));
    return CATEGORIES.filter((category) => there.has(categorySeries(category, predicted)));
}

/** Words for a category or a phase: "optimizer state". */
export const words = (name) => name.replaceAll("_", " ");

/** Predicted less measured, over measured. */
export const errorOf = (predicted, measured) =>
    measured > 0 && predicted > 0 ? predicted / measured - 1 : NaN;

/**
 * The figures of a run that its table and header show.
 * @param {Array} series - as the server lists them
 * @returns {{steps: ?number, peak: ?number, predicted: ?number, budget: ?number, limit: ?number}}
 */
export function summaryOf(series) {
    const found = new Map(series.map((one) => [one.name, one]));
    const last = (name) => found.get(name)?.last ?? null;
    const steps = series.reduce((most, one) => (one.count ? Math.max(most, one.last_step + 1) : most), 0);
    return {
        steps: steps || null,
        peak: found.get(PEAK)?.max ?? null,
        predicted: last(PREDICTED),
        budget: last(BUDGET),
        limit: last(LIMIT),
    };
}
