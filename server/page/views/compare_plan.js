// SPDX-License-Identifier: Apache-2.0
// What differs between the documents of runs: plan, parameters, configuration, environment. What is the same
// everywhere is
// left out, and a table that has nothing left says so.

import { get } from "../api.js";
import { el, named } from "../dom.js";
import { bytes, nanoseconds, number } from "../format.js";
import { words } from "../names.js";
import { actionOf } from "./run_plan.js";
import { plainText } from "./run_documents.js";

const MOST_ROWS = 400;
const NONE = "–";

/** Fills a place with the tables. */
export async function differences(place, runs, signal) {
    const documents = await Promise.all(
        ["plan", "params", "config", "environment"].map((name) => readAll(name, runs, signal)),
    );
    const [plans, ...flat] = documents;
    place.replaceChildren(
        ...(plans.some(Boolean)
            ? [
                  section("plan-differs", "Plan: what differs", runs, planRows(plans)),
                  section(
                      "peak-differs",
                      "Predicted peak by category: what differs",
                      runs,
                      categoryRows(plans),
                  ),
                  section("modules-differ", "Modules: what differs", runs, moduleRows(plans)),
              ]
            : []),
        ...["Parameters", "Configuration", "Environment"]
            .map((title, i) =>
                flat[i].some(Boolean)
                    ? section(
                          `${title.toLowerCase()}-differ`,
                          `${title}: what differs`,
                          runs,
                          flatRows(flat[i]),
                      )
                    : null,
            )
            .filter(Boolean),
    );
}

function readAll(name, runs, signal) {
    return Promise.all(
        runs.map(({ run }) =>
            run.documents.some((one) => one.name === name)
                ? get(`/runs/${run.id}/documents/${name}`, null, signal)
                : null,
        ),
    );
}

function section(id, title, runs, rows) {
    const differing = rows.filter(([, cells]) => cells.some((cell) => cell !== cells[0]));
    const same = rows.length - differing.length;
    const heading = el("h2", { id }, title);
    if (differing.length === 0) {
        return el(
            "section",
            { class: "card", "aria-labelledby": id },
            heading,
            el("p", { class: "soft" }, rows.length ? "Nothing: they are the same." : "Nothing was recorded."),
        );
    }
    return el(
        "section",
        { class: "card", "aria-labelledby": id },
        heading,
        el(
            "div",
            { class: "scroll", tabindex: 0, role: "group", "aria-labelledby": id },
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
                        runs.map(({ run, colour }) =>
                            el(
                                "th",
                                { scope: "col", class: "wrap" },
                                el("span", { class: `key k-s${colour}` }),
                                " ",
                                named(run.name),
                            ),
                        ),
                    ),
                ),
                el(
                    "tbody",
                    {},
                    differing.slice(0, MOST_ROWS).map(([key, cells]) =>
                        el(
                            "tr",
                            {},
                            el("th", { scope: "row", class: "wrap" }, named(key)),
                            cells.map((cell) =>
                                el(
                                    "td",
                                    { class: "wrap" },
                                    cell === NONE ? el("span", { class: "soft" }, NONE) : named(cell),
                                ),
                            ),
                        ),
                    ),
                ),
            ),
        ),
        same > 0
            ? el("p", { class: "hint" }, `${number(same)} more ${same === 1 ? "is" : "are"} the same.`)
            : null,
    );
}

function planRows(plans) {
    const row = (text, read) => [text, plans.map((plan) => (plan ? read(plan) : NONE))];
    return [
        row("digest", (plan) => String(plan.digest)),
        row("mode", (plan) => String(plan.mode || NONE)),
        row("budget", (plan) => bytes(plan.budget_bytes)),
        row("predicted peak", (plan) => bytes(plan.predicted?.device_used_peak_bytes)),
        row("peak of the plain step", (plan) => bytes(plan.plain?.device_used_peak_bytes)),
        row("predicted step time", (plan) => nanoseconds(plan.predicted?.step_time_ns)),
        row("changed modules", (plan) =>
            number((plan.choices ?? []).filter((one) => one.techniques?.length).length),
        ),
        ...[...new Set(plans.flatMap((plan) => (plan?.steps ?? []).map((one) => String(one.technique))))].map(
            (technique) =>
                row(words(technique), (plan) =>
                    (plan.steps ?? []).some((one) => one.technique === technique) ? "yes" : "no",
                ),
        ),
    ];
}

function categoryRows(plans) {
    const names = [...new Set(plans.flatMap((plan) => Object.keys(plan?.predicted?.by_category ?? {})))];
    const sizes = names.map((name) => [
        name,
        plans.map((plan) => plan?.predicted?.by_category?.[name] ?? null),
    ]);
    return sizes
        .filter(([, row]) => row.some((size) => size > 0))
        .sort((a, b) => Math.max(...b[1]) - Math.max(...a[1]))
        .map(([name, row]) => [words(name), row.map((size) => (size === null ? NONE : bytes(size)))]);
}

function moduleRows(plans) {
    const actions = plans.map(
        (plan) => new Map((plan?.choices ?? []).map((one) => [String(one.module), actionOf(one)])),
    );
    const modules = [...new Set(actions.flatMap((one) => [...one.keys()]))];
    return modules.map((module) => [module || "the model", actions.map((one) => one.get(module) ?? NONE)]);
}

function flatRows(documents) {
    const keys = [...new Set(documents.flatMap((one) => Object.keys(one ?? {})))].sort();
    const text = (key, value) =>
        value !== null && typeof value === "object" ? JSON.stringify(value) : plainText(key, value);
    return keys.map((key) => [
        key,
        documents.map((one) => (one && Object.hasOwn(one, key) ? text(key, one[key]) : NONE)),
    ]);
}
