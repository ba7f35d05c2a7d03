// SPDX-License-Identifier: Apache-2.0
// The table of runs. A page is drawn at once; the figures of a row are read when the row comes into view, a
// few at a time,
// and not twice while the run says nothing new. Rows stay where they are when a page is read again, and so
// does the focus.

import { get, isAbort, patch, remove } from "../api.js";
import { announce, button, confirm, el, named, notice, svg, time } from "../dom.js";
import { ago, bytes, duration, number, percent, signedPercent } from "../format.js";
import { errorOf, summaryOf } from "../names.js";

const AT_ONCE = 4;
const COLUMNS = [
    ["State", null, ""],
    ["Name", "name", "name"],
    ["Started", "created", ""],
    ["Last seen", "seen", ""],
    ["Duration", null, "n"],
    ["Steps", null, "n"],
    ["Peak measured", null, "n"],
    ["Predicted", null, "n"],
    ["Of the budget", null, ""],
];

/** A run's state, in a word and a colour. */
export function stateOf(run) {
    const state = el("span", { class: `state ${run.state}` }, run.state);
    if (run.state === "lost")
        state.title = "Running, but not heard of for a minute. It goes on here when it is heard of again.";
    const mark = (text) => [" ", el("span", { class: "state archived" }, text)];
    return [state, run.archived ? mark("archived") : [], run.pinned ? mark("pinned") : []].flat();
}

/** How long a run has lasted, in milliseconds. */
export function lastedMs(run) {
    const end = run.ended_ms ?? (run.state === "running" ? Date.now() : run.seen_ms);
    return Math.max(0, end - run.created_ms);
}

/** Measured against budget as a bar, with a mark where the prediction lies. */
function meter({ peak, predicted, budget }) {
    if (!(budget > 0) || !(peak > 0 || predicted > 0)) return "–";
    const share = (value) => Math.min(100, (value / budget) * 100);
    const width = share(peak ?? 0);
    const text =
        peak > 0
            ? `${percent(peak / budget)} of ${bytes(budget)}`
            : `${percent(predicted / budget)} of ${bytes(budget)} predicted`;
    return [
        svg(
            "svg",
            { class: "meter", viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" },
            svg("rect", { class: "back", width: 100, height: 8, rx: 2 }),
            svg("rect", { class: peak > budget ? "fill over" : "fill", width, height: 8, rx: 2 }),
            ...(predicted > 0
                ? [
                      svg("rect", {
                          class: "tick",
                          x: Math.max(0, share(predicted) - 1.5),
                          width: 1.5,
                          height: 8,
                      }),
                  ]
                : []),
        ),
        el("span", { class: "small soft" }, text),
    ];
}

export class RunsTable {
    #actions;
    #rows = new Map();
    #head = el("tr");
    #body = el("tbody");
    #sort = "";
    #waiting = [];
    #busy = 0;
    #leave = new AbortController();
    #watch;

    /** @param actions - sort(key), pick(id, on) → whether it may, changed() */
    constructor(actions) {
        this.#actions = actions;
        this.element = el(
            "div",
            { class: "scroll" },
            el(
                "table",
                {},
                el("caption", { class: "unseen" }, "Runs"),
                el("thead", {}, this.#head),
                this.#body,
            ),
        );
        this.#watch = new IntersectionObserver(
            (entries) => {
                for (const entry of entries)
                    if (entry.isIntersecting) this.#want(this.#rows.get(entry.target.dataset.run));
            },
            { rootMargin: "200px" },
        );
    }

    draw(runs, { sort, picked }) {
        if (sort !== this.#sort) this.#drawHead(sort);
        const rows = new Map();
        for (const run of runs) {
            const row = this.#rows.get(run.id) ?? this.#newRow(run);
            rows.set(run.id, row);
            this.#fill(row, run, picked.includes(run.id));
        }
        for (const [id, row] of this.#rows) if (!rows.has(id)) this.#watch.unobserve(row.element);
        this.#rows = rows;
        const elements = [...rows.values()].map((row) => row.element);
        const same =
            elements.length === this.#body.children.length &&
            elements.every((one, i) => one === this.#body.children[i]);
        if (!same) this.#body.replaceChildren(...elements);
        for (const row of rows.values()) this.#watch.observe(row.element);
    }

    unpick() {
        for (const row of this.#rows.values()) row.box.checked = false;
    }

    close() {
        this.#leave.abort();
        this.#watch.disconnect();
    }

    #drawHead(sort) {
        this.#sort = sort;
        const key = sort.replace("-", "");
        const heads = COLUMNS.map(([text, by, kind]) => {
            if (!by) return el("th", { scope: "col", class: kind }, text);
            const now = by === key ? (sort.startsWith("-") ? "descending" : "ascending") : null;
            const other = now === "descending" || (now === null && by === "name") ? by : `-${by}`;
            const arrow = now === null ? "" : now === "descending" ? " ↓" : " ↑";
            return el(
                "th",
                { scope: "col", class: kind, "aria-sort": now },
                button(
                    text + arrow,
                    () => {
                        this.#actions.sort(other);
                        [...this.#head.querySelectorAll("button")]
                            .find((one) => one.textContent.startsWith(text))
                            ?.focus();
                    },
                    { class: "sort" },
                ),
            );
        });
        this.#head.replaceChildren(
            el("th", { scope: "col" }, el("span", { class: "unseen" }, "Compare")),
            ...heads,
            el("th", { scope: "col" }, el("span", { class: "unseen" }, "Actions")),
        );
    }

    // ---- rows ----

    #newRow(run) {
        const row = { run, key: "", drawn: "", summary: null };
        row.box = el("input", {
            type: "checkbox",
            on: {
                change: () => {
                    if (!this.#actions.pick(row.run.id, row.box.checked)) row.box.checked = false;
                },
            },
        });
        const cell = (label, kind) => el("td", { class: kind, "data-label": label });
        row.state = el("td");
        row.name = el("th", { scope: "row", class: "name" });
        row.cells = COLUMNS.slice(2).map(([label, , kind]) => cell(label, kind || "when"));
        row.actions = el("td", { class: "rowactions" });
        row.element = el(
            "tr",
            { "data-run": run.id },
            el("td", {}, row.box),
            row.state,
            row.name,
            row.cells,
            row.actions,
        );
        return row;
    }

    #fill(row, run, picked) {
        row.run = run;
        row.box.checked = picked;
        const [started, seen, lasted] = row.cells;
        started.replaceChildren(time(run.created_ms, ago(run.created_ms)));
        seen.replaceChildren(time(run.seen_ms, ago(run.seen_ms)));
        lasted.textContent = duration(lastedMs(run));
        const drawn = JSON.stringify([run.name, run.state, run.archived, run.pinned]);
        if (drawn !== row.drawn) {
            row.drawn = drawn;
            row.box.setAttribute("aria-label", `Compare ${run.name}`);
            row.state.replaceChildren(...stateOf(run));
            row.name.replaceChildren(el("a", { href: `/runs/${run.id}` }, named(run.name)));
            row.actions.replaceChildren(
                button(run.archived ? "Restore" : "Archive", () => this.#archive(row), {
                    class: "quiet",
                    "aria-label": `${run.archived ? "Restore" : "Archive"} ${run.name}`,
                }),
                button(run.pinned ? "Unpin" : "Pin", () => this.#pin(row), {
                    class: "quiet",
                    title: "Retention leaves pinned runs alone",
                    "aria-label": `${run.pinned ? "Unpin" : "Pin"} ${run.name}`,
                }),
                button("Delete", () => this.#delete(row), {
                    class: "quiet",
                    "aria-label": `Delete ${run.name}`,
                }),
            );
        }
        if (run.summary) this.#fillFigures(row, run.summary);
        else if (row.key && row.key !== String(run.seen_ms)) this.#want(row);
    }

    #fillFigures(row, summary) {
        const [, , , steps, peak, predicted, used] = row.cells;
        const error = errorOf(summary.predicted, summary.peak);
        steps.textContent = number(summary.steps);
        peak.textContent = summary.peak === null ? "–" : bytes(summary.peak);
        predicted.replaceChildren(
            summary.predicted === null ? "–" : bytes(summary.predicted),
            ...(Number.isFinite(error)
                ? [
                      el(
                          "span",
                          { class: "small soft", title: "predicted less measured, over measured" },
                          ` ${signedPercent(error)}`,
                      ),
                  ]
                : []),
        );
        used.replaceChildren(...[meter(summary)].flat());
    }

    // ---- figures, a few at a time ----

    #want(row) {
        if (!row || row.run.summary || row.key === String(row.run.seen_ms) || this.#waiting.includes(row))
            return;
        this.#waiting.push(row);
        this.#next();
    }

    async #next() {
        if (this.#busy >= AT_ONCE) return;
        const row = this.#waiting.shift();
        if (!row) return;
        this.#busy += 1;
        try {
            row.key = String(row.run.seen_ms);
            const { series } = await get(`/runs/${row.run.id}/series`, null, this.#leave.signal);
            this.#fillFigures(row, summaryOf(series));
        } catch (error) {
            row.key = "";
            if (isAbort(error)) return;
        } finally {
            this.#busy -= 1;
        }
        this.#next();
    }

    // ---- archive, pin, delete ----

    async #archive(row) {
        const archived = !row.run.archived;
        if (
            archived &&
            !(await confirm({
                title: "Archive this run?",
                action: "Archive",
                danger: false,
                text: `“${row.run.name}” leaves this table, keeps all it has, and is found again with “Archived ones”.`,
            }))
        )
            return;
        await this.#alter(
            () => patch(`/runs/${row.run.id}`, { archived }),
            archived ? "Archived" : "Restored",
        );
    }

    #pin(row) {
        const pinned = !row.run.pinned;
        return this.#alter(() => patch(`/runs/${row.run.id}`, { pinned }), pinned ? "Pinned" : "Unpinned");
    }

    async #delete(row) {
        if (
            !(await confirm({
                title: "Delete this run?",
                action: "Delete for good",
                text: `“${row.run.name}” is deleted with its series, events and documents. This cannot be undone.`,
            }))
        )
            return;
        await this.#alter(() => remove(`/runs/${row.run.id}`), "Deleted");
        this.#actions.pick(row.run.id, false);
    }

    async #alter(change, said) {
        try {
            await change();
            announce(said);
            await this.#actions.changed();
        } catch (error) {
            notice(error.message);
        }
    }
}
