// SPDX-License-Identifier: Apache-2.0
// One run: /runs/<id>?tab=series&from=100&to=200. The header and the tabs are here; each tab is a class that
// draws into its
// panel when it is opened, and again when the run says something new.
//
//   Live ─► changed ─► series are read ─► header, tab.changed()
//   zoom ─► from, to in the URL ─► tab.zoomed()

import { get, isAbort, patch, remove } from "../api.js";
import { announce, button, confirm, el, named, notice, time } from "../dom.js";
import { ago, bytes, duration, number, percent, signedPercent } from "../format.js";
import { Live } from "../live.js";
import { errorOf, summaryOf } from "../names.js";
import { navigate, setQuery } from "../router.js";
import { rangeOf } from "../charts/buckets.js";
import { DocumentsTab } from "./run_documents.js";
import { EventsTab } from "./run_events.js";
import { OverviewTab } from "./run_overview.js";
import { PlanTab } from "./run_plan.js";
import { SeriesTab } from "./run_series.js";
import { lastedMs, stateOf } from "./runs_table.js";

const TABS = [
    ["overview", "Memory and time", OverviewTab],
    ["series", "Series", SeriesTab],
    ["plan", "Plan", PlanTab],
    ["events", "Events", EventsTab],
    ["documents", "Documents", DocumentsTab],
];

export async function show({ place, params, signal }) {
    const path = `/runs/${params[0]}`;
    const [run, { series }, { projects }] = await Promise.all([
        get(path, null, signal),
        get(`${path}/series`, null, signal),
        get("/projects", null, signal),
    ]);
    return new Run(place, { run, series, project: projects.find((one) => one.id === run.project) }, signal);
}

class Run {
    #signal;
    #live;
    #clock;
    #tab = null;
    #name = "";
    #mayChange;
    #head = el("div", { class: "bar" });
    #facts = el("dl", { class: "facts" });
    #how = el("span", { class: "live" });
    #tabs;
    #panel = el("div", { role: "tabpanel", id: "panel" });

    /** Tabs read run, series, range and zoom. */
    constructor(place, { run, series, project }, signal) {
        this.#signal = signal;
        this.#mayChange = project?.role !== "viewer";
        this.run = run;
        this.series = series;
        this.signal = signal;
        this.zoom = null;
        this.#tabs = this.#tabList();
        place.append(
            el(
                "nav",
                { class: "crumbs", "aria-label": "Where you are" },
                el("a", { href: "/" }, "Projects"),
                " / ",
                project ? el("a", { href: `/projects/${project.id}` }, named(project.name)) : null,
            ),
            this.#head,
            this.#facts,
            this.#tabs,
            this.#panel,
        );
        this.#drawHead();
        this.#live = new Live(run.id, run.version, {
            changed: (change) => this.#changed(change),
            run: (now) => this.#isNow(now),
            gone: () => notice("This run was deleted."),
            how: (text) => {
                this.#how.textContent = this.run.state === "running" || text !== "live" ? text : "";
            },
        });
        this.#clock = setInterval(() => this.#drawFacts(), 5000);
    }

    close() {
        clearInterval(this.#clock);
        this.#live.close();
        this.#tab?.close?.();
    }

    update(query) {
        const name = TABS.some(([one]) => one === query.get("tab")) ? query.get("tab") : TABS[0][0];
        const whole = (text) => (/^-?\d{1,15}$/.test(text ?? "") ? Number(text) : null);
        const [from, to] = [whole(query.get("from")), whole(query.get("to"))];
        this.zoom = from !== null && to !== null && from <= to ? { from, to } : null;
        if (name !== this.#name) this.#open(name, query);
        else this.#guard(this.#tab.zoomed?.(query));
    }

    // ---- for tabs ----

    get path() {
        return `/runs/${this.run.id}`;
    }

    /** All steps, and those that are shown; null: there are no points. */
    get range() {
        const all = rangeOf(this.series);
        if (!all) return null;
        const shown = this.zoom
            ? { from: Math.max(all.from, this.zoom.from), to: Math.min(all.to, this.zoom.to) }
            : all;
        return { all, shown: shown.from <= shown.to ? shown : all };
    }

    /** The reader wants this range; null: everything. */
    zoomTo(range) {
        setQuery({ from: range?.from, to: range?.to }, { push: true });
        this.update(new URLSearchParams(location.search));
        announce(range ? `Steps ${range.from} to ${range.to}` : "All steps");
    }

    /** A document; null: the run has none of that name. */
    async document(name) {
        if (!this.run.documents.some((one) => one.name === name)) return null;
        return get(`${this.path}/documents/${name}`, null, this.signal);
    }

    // ---- changes ----

    async #guard(work) {
        try {
            await work;
        } catch (error) {
            if (!isAbort(error)) notice(error.message);
        }
    }

    async #changed(change) {
        await this.#guard(
            (async () => {
                const [{ series }, run] = await Promise.all([
                    change.series ? get(`${this.path}/series`, null, this.#signal) : this,
                    change.documents ? get(this.path, null, this.#signal) : this.run,
                ]);
                this.series = series;
                this.run = { ...run, seen_ms: Math.max(Date.now() - 1000, run.seen_ms) };
                this.#drawFacts();
                await this.#tab?.changed?.(change);
            })(),
        );
    }

    #isNow(run) {
        this.run = { ...this.run, ...run };
        this.#drawHead();
    }

    // ---- header ----

    #drawHead() {
        const { run } = this;
        const link = (format, text = format.toUpperCase()) =>
            el(
                "a",
                { class: "button", href: `/api/v1${this.path}/export?format=${format}`, download: true },
                text,
            );
        const had = this.#head.contains(document.activeElement) ? document.activeElement.textContent : null;
        this.#head.replaceChildren(
            el("h1", {}, named(run.name)),
            el("span", {}, stateOf(run)),
            this.#how,
            el(
                "span",
                { class: "actions push" },
                el("span", { class: "soft small" }, "Export"),
                link("csv"),
                link("json"),
                link("html"),
                link("perfetto", "Perfetto"),
                ...(this.#mayChange ? this.#changes() : []),
            ),
        );
        if (had) [...this.#head.querySelectorAll("button")].find((one) => one.textContent === had)?.focus();
        this.#drawFacts();
    }

    #changes() {
        const { archived } = this.run;
        return [
            button("Rename", () => this.#rename()),
            button(archived ? "Restore" : "Archive", () => this.#alter({ archived: !archived })),
            button("Delete", () => this.#delete(), { class: "danger" }),
        ];
    }

    #drawFacts() {
        const { run } = this;
        const { steps, peak, predicted, budget, limit } = summaryOf(this.series);
        const error = errorOf(predicted, peak);
        const fact = (name, text, ...more) =>
            el("div", {}, el("dt", {}, name), el("dd", {}, text, more.length ? el("small", {}, more) : null));
        const size = (value) => (value === null ? "–" : bytes(value));
        this.#facts.replaceChildren(
            fact(
                "Budget",
                size(budget),
                limit !== null ? `of ${bytes(limit)} on the device` : "not recorded",
            ),
            fact(
                "Peak measured",
                size(peak),
                peak !== null && budget ? `${percent(peak / budget)} of the budget` : "over all steps",
            ),
            fact("Peak predicted", size(predicted), "by the plan in force"),
            fact(
                "Error of prediction",
                signedPercent(error),
                !Number.isFinite(error)
                    ? "needs both"
                    : error < 0
                      ? "more was used than predicted"
                      : "predicted was enough",
            ),
            fact("Steps", number(steps), run.state === "running" ? "so far" : ""),
            fact(
                "Duration",
                duration(lastedMs(run)),
                "started ",
                time(run.created_ms, ago(run.created_ms)),
                ", seen ",
                time(run.seen_ms, ago(run.seen_ms)),
            ),
        );
    }

    async #alter(change) {
        try {
            this.#isNow(await patch(this.path, change));
        } catch (error) {
            notice(error.message);
        }
    }

    #rename() {
        const input = el("input", {
            name: "name",
            value: this.run.name,
            maxlength: 128,
            required: true,
            "aria-label": "New name",
        });
        const close = () => {
            dialog.close();
            dialog.remove();
        };
        const dialog = el(
            "dialog",
            { "aria-labelledby": "rename", on: { cancel: close } },
            el(
                "form",
                {
                    on: {
                        submit: (event) => {
                            event.preventDefault();
                            close();
                            this.#alter({ name: input.value });
                        },
                    },
                },
                el("h2", { id: "rename" }, "Rename this run"),
                el("div", { class: "field" }, input),
                el(
                    "div",
                    { class: "actions" },
                    button("Cancel", close),
                    el("button", { type: "submit", class: "primary" }, "Rename"),
                ),
            ),
        );
        document.body.append(dialog);
        dialog.showModal();
        input.select();
    }

    async #delete() {
        const sure = await confirm({
            title: "Delete this run?",
            action: "Delete for good",
            text: `“${this.run.name}” is deleted with its series, events and documents. This cannot be undone.`,
        });
        if (!sure) return;
        try {
            this.#live.close();
            await remove(this.path);
            navigate(`/projects/${this.run.project}`, { replace: true });
        } catch (error) {
            notice(error.message);
        }
    }

    // ---- tabs ----

    #tabList() {
        const choose = (name) => {
            setQuery({ tab: name === TABS[0][0] ? null : name }, { push: true });
            this.update(new URLSearchParams(location.search));
        };
        const tabs = TABS.map(([name, text]) =>
            el(
                "button",
                {
                    type: "button",
                    role: "tab",
                    id: `tab-${name}`,
                    "aria-controls": "panel",
                    on: { click: () => choose(name) },
                },
                text,
            ),
        );
        return el(
            "div",
            {
                class: "tabs",
                role: "tablist",
                "aria-label": "What this run has",
                on: {
                    keydown: (event) => {
                        const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
                        if (!step) return;
                        const next =
                            tabs[(tabs.indexOf(document.activeElement) + step + tabs.length) % tabs.length];
                        next.focus();
                        next.click();
                    },
                },
            },
            tabs,
        );
    }

    #open(name, query) {
        this.#name = name;
        this.#tab?.close?.();
        for (const tab of this.#tabs.children) {
            const chosen = tab.id === `tab-${name}`;
            tab.setAttribute("aria-selected", String(chosen));
            tab.tabIndex = chosen ? 0 : -1;
        }
        this.#panel.setAttribute("aria-labelledby", `tab-${name}`);
        const [, , Tab] = TABS.find(([one]) => one === name);
        this.#panel.replaceChildren();
        this.#tab = new Tab(this, this.#panel);
        this.#guard(this.#tab.open(query));
    }
}
