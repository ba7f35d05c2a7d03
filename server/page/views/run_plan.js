// SPDX-License-Identifier: Apache-2.0
// The plan in force: what is done where, by which rule, what it frees and costs. It is the run's document
// "plan".

import { button, el } from "../dom.js";
import { bytes, count, nanoseconds, number, signedPercent } from "../format.js";
import { words } from "../names.js";
import { setQuery } from "../router.js";

const MOST_ROWS = 500;

/** What a choice does, in words. */
export function actionOf(choice) {
    const done = (choice.techniques ?? []).map(words);
    if (choice.boundary) done.push("inputs offloaded");
    if (choice.joined) done.push("joined with the one before");
    return done.join(", ") || "kept";
}

const isApplied = (choice) => (choice.techniques ?? []).length > 0;
const moduleOf = (path) => (path === "" ? "the model" : path);
const list = (value) => (Array.isArray(value) ? value : []);

/** Time that a choice adds, with its sign. */
const added = (ns) => (Number.isFinite(ns) ? `${ns > 0 ? "+" : ""}${nanoseconds(ns)}` : "–");

export class PlanTab {
    #run;
    #place;
    #plan = null;

    constructor(run, place) {
        this.#run = run;
        this.#place = place;
    }

    async open() {
        this.#plan = await this.#run.document("plan");
        this.#draw();
    }

    zoomed() {
        this.#draw();
    }

    changed({ documents }) {
        return documents ? this.open() : null;
    }

    #draw() {
        const plan = this.#plan;
        if (!plan) {
            this.#place.replaceChildren(
                el(
                    "p",
                    { class: "card" },
                    "This run has recorded no plan: its model was not wrapped, or its first batch has not come yet.",
                ),
            );
            return;
        }
        this.#place.replaceChildren(this.#head(plan), ...this.#steps(plan), this.#choices(plan));
    }

    #head(plan) {
        const { predicted = {}, plain = {} } = plan;
        const fact = (name, text, more) =>
            el("div", {}, el("dt", {}, name), el("dd", {}, text, more ? el("small", {}, more) : null));
        const slower = predicted.step_time_ns / plain.step_time_ns - 1;
        return el(
            "section",
            { class: "card", "aria-labelledby": "plan" },
            el("h2", { id: "plan" }, "Plan ", el("code", {}, String(plan.digest ?? ""))),
            el(
                "dl",
                { class: "facts" },
                fact(
                    "Peak with the plan",
                    bytes(predicted.device_used_peak_bytes),
                    `plain ${bytes(plain.device_used_peak_bytes)}`,
                ),
                fact("Budget", bytes(plan.budget_bytes), plan.budget_source),
                fact(
                    "Fits",
                    plan.fits ? "yes" : "no",
                    `the smallest peak of any plan is ${bytes(plan.smallest_peak_bytes)}`,
                ),
                fact(
                    "Step time",
                    nanoseconds(predicted.step_time_ns),
                    `${signedPercent(slower)} against the plain step`,
                ),
                fact("Mode", String(plan.mode || "–"), plan.profile ? `${plan.profile} trace` : null),
            ),
            ...[
                ["Advice", list(plan.advice)],
                ["Notes", list(plan.notes)],
            ]
                .filter(([, lines]) => lines.length)
                .map(([title, lines]) => [
                    el("h3", {}, title),
                    el(
                        "ul",
                        {},
                        lines.map((line) => el("li", { class: "wrap" }, String(line))),
                    ),
                ])
                .flat(),
        );
    }

    #steps(plan) {
        const steps = list(plan.steps);
        if (steps.length === 0) return [];
        return [
            el(
                "section",
                { class: "card", "aria-labelledby": "steps" },
                el("h2", { id: "steps" }, "Techniques that change how the step computes"),
                el(
                    "div",
                    { class: "scroll", tabindex: 0, role: "group", "aria-labelledby": "steps" },
                    el(
                        "table",
                        {},
                        el(
                            "thead",
                            {},
                            el(
                                "tr",
                                {},
                                [
                                    ["Technique", ""],
                                    ["Where", ""],
                                    ["Exact", ""],
                                    ["Frees", "n"],
                                    ["Adds", "n"],
                                    ["Why", ""],
                                ].map(([text, kind]) => el("th", { scope: "col", class: kind }, text)),
                            ),
                        ),
                        el(
                            "tbody",
                            {},
                            steps.map((step) =>
                                el(
                                    "tr",
                                    {},
                                    el("th", { scope: "row" }, words(String(step.technique))),
                                    el(
                                        "td",
                                        { class: "wrap" },
                                        list(step.modules).length > 1
                                            ? count(step.modules.length, "module")
                                            : moduleOf(String(step.modules?.[0] ?? "")),
                                    ),
                                    el("td", {}, step.exact ? "yes" : "no"),
                                    el("td", { class: "n" }, bytes(step.bytes)),
                                    el("td", { class: "n" }, added(step.ns)),
                                    el("td", { class: "wrap" }, String(step.reason)),
                                ),
                            ),
                        ),
                    ),
                ),
            ),
        ];
    }

    #choices(plan) {
        const choices = list(plan.choices);
        const applied = choices.filter(isApplied);
        const all = new URLSearchParams(location.search).get("modules") === "all" || applied.length === 0;
        const shown = (all ? choices : applied).slice(0, MOST_ROWS);
        const toggle = button(
            all ? "Only what is changed" : "All modules",
            () => {
                setQuery({ modules: all ? null : "all" });
                this.#draw();
                this.#place.querySelector("[data-toggle]")?.focus();
            },
            { "data-toggle": true },
        );
        return el(
            "section",
            { class: "card", "aria-labelledby": "choices" },
            el(
                "div",
                { class: "bar" },
                el("h2", { id: "choices" }, "Modules"),
                el(
                    "span",
                    { class: "soft small" },
                    `${number(applied.length)} of ${number(choices.length)} are changed`,
                ),
                applied.length > 0 && applied.length < choices.length ? toggle : null,
            ),
            el(
                "div",
                { class: "scroll", tabindex: 0, role: "group", "aria-labelledby": "choices" },
                el(
                    "table",
                    {},
                    el(
                        "thead",
                        {},
                        el(
                            "tr",
                            {},
                            [
                                ["Module", ""],
                                ["Class", ""],
                                ["Action", ""],
                                ["Frees", "n"],
                                ["Adds", "n"],
                                ["Calls", "n"],
                                ["Why", ""],
                            ].map(([text, kind]) => el("th", { scope: "col", class: kind }, text)),
                        ),
                    ),
                    el(
                        "tbody",
                        {},
                        shown.map((choice) =>
                            el(
                                "tr",
                                {},
                                el(
                                    "th",
                                    { scope: "row", class: "mono wrap" },
                                    moduleOf(String(choice.module)),
                                ),
                                el("td", {}, String(choice.type)),
                                el("td", {}, actionOf(choice)),
                                el("td", { class: "n" }, isApplied(choice) ? bytes(choice.bytes) : "–"),
                                el("td", { class: "n" }, isApplied(choice) ? added(choice.ns) : "–"),
                                el("td", { class: "n" }, number(choice.calls)),
                                el("td", { class: "wrap" }, String(choice.reason)),
                            ),
                        ),
                    ),
                ),
            ),
            (all ? choices : applied).length > MOST_ROWS
                ? el("p", { class: "hint" }, `The first ${MOST_ROWS} are shown; the document “plan” has all.`)
                : null,
        );
    }
}
