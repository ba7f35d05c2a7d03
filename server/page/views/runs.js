// SPDX-License-Identifier: Apache-2.0
// A project's runs. The URL is the state:
// /projects/3?state=lost&search=gpt&sort=-seen&archived=1&after=…&pick=a,b
//
//   control ─► setQuery ─► load ─► one page from the server ─► rows
// The server filters, sorts and pages; here is never more than one page. While the tab is visible the page
// is read again.

import { get, isAbort } from "../api.js";
import { announce, button, el, named, notice } from "../dom.js";
import { count } from "../format.js";
import { navigate, setQuery } from "../router.js";
import { firstRun } from "./first_run.js";
import { RunsTable } from "./runs_table.js";

const STATES = [
    ["", "any state"],
    ["running", "running"],
    ["lost", "lost"],
    ["finished", "finished"],
    ["failed", "failed"],
];
const LIMITS = ["50", "100", "200"];
const REFRESH_MS = 10_000;
const TYPING_MS = 200;
const MOST_COMPARED = 8;

export function show({ place, params, signal }) {
    return new Runs(place, Number(params[0]), signal);
}

class Runs {
    #id;
    #project; // a promise: its name is read beside the first page
    #heading = el("h1", {}, "Runs");
    #signal;
    #query;
    #reading = null;
    #timer;
    #controls;
    #table;
    #body = el("div");
    #pager = el("nav", { class: "pager", "aria-label": "Pages" });
    #chosen = el("div", { class: "chosen", role: "region", "aria-label": "Chosen runs", hidden: true });
    #onVisible = () => {
        if (!document.hidden) this.#load({ quiet: true });
    };

    constructor(place, id, signal) {
        this.#id = id;
        this.#signal = signal;
        this.#project = this.#readProject();
        this.#project.catch(() => {}); // update() says so
        this.#table = new RunsTable({
            sort: (sort) => this.#change({ sort: sort === "-created" ? null : sort }),
            pick: (id, on) => this.#pick(id, on),
            changed: () => this.#load({ quiet: true }),
        });
        place.append(
            el("nav", { class: "crumbs", "aria-label": "Where you are" }, el("a", { href: "/" }, "Projects")),
            el("div", { class: "bar" }, this.#heading),
            this.#filters(),
            this.#body,
            this.#pager,
            this.#chosen,
        );
        document.addEventListener("visibilitychange", this.#onVisible);
        this.#timer = setInterval(this.#onVisible, REFRESH_MS);
    }

    /** The query of the URL has changed. */
    update(query) {
        this.#query = query;
        const { state, search, archived, limit } = this.#controls;
        state.value = query.get("state") ?? "";
        if (document.activeElement !== search) search.value = query.get("search") ?? "";
        archived.checked = query.get("archived") === "1";
        limit.value = LIMITS.includes(query.get("limit")) ? query.get("limit") : LIMITS[0];
        this.#showChosen();
        return Promise.all([this.#project, this.#load()]);
    }

    close() {
        clearInterval(this.#timer);
        document.removeEventListener("visibilitychange", this.#onVisible);
        this.#table.close();
    }

    async #readProject() {
        const project = await get(`/projects/${this.#id}`, null, this.#signal);
        this.#heading.replaceChildren(named(project.name));
        this.#body.classList.toggle("reads", project.role === "viewer");
        this.#heading.after(
            el("a", { class: "button push", href: `/projects/${this.#id}/settings` }, "Settings"),
        );
        document.title = `${project.name} · MemScale`;
        return project;
    }

    // ---- filters ----

    #filters() {
        let typing;
        const search = el("input", {
            type: "search",
            maxlength: 128,
            placeholder: "part of a name",
            autocomplete: "off",
            spellcheck: "false",
            on: {
                input: () => {
                    clearTimeout(typing);
                    typing = setTimeout(
                        () => this.#change({ search: search.value }, { push: false }),
                        TYPING_MS,
                    );
                },
            },
        });
        const state = el(
            "select",
            { on: { change: () => this.#change({ state: state.value }) } },
            STATES.map(([value, text]) => el("option", { value }, text)),
        );
        const archived = el("input", {
            type: "checkbox",
            on: { change: () => this.#change({ archived: archived.checked ? "1" : null }) },
        });
        const limit = el(
            "select",
            { on: { change: () => this.#change({ limit: limit.value === LIMITS[0] ? null : limit.value }) } },
            LIMITS.map((value) => el("option", { value }, value)),
        );
        this.#controls = { search, state, archived, limit };
        return el(
            "form",
            {
                class: "filters",
                role: "search",
                "aria-label": "Runs",
                on: { submit: (event) => event.preventDefault() },
            },
            el("label", {}, "Search", search),
            el("label", {}, "State", state),
            el("label", {}, "Rows", limit),
            el("label", { class: "line" }, archived, "Archived ones"),
        );
    }

    /** A filter or the order changes: from the first page on. */
    #change(changes, { push = true } = {}) {
        setQuery({ after: null, ...changes }, { push });
        return this.update(new URLSearchParams(location.search));
    }

    // ---- a page of runs ----

    #request() {
        const query = this.#query;
        return {
            state: query.get("state"),
            search: query.get("search"),
            archived: query.get("archived") === "1" ? "true" : null,
            sort: query.get("sort"),
            limit: query.get("limit") ?? LIMITS[0],
            after: query.get("after"),
        };
    }

    async #load({ quiet = false } = {}) {
        this.#reading?.abort();
        const reading = new AbortController();
        this.#reading = reading;
        const signal = AbortSignal.any([reading.signal, this.#signal]);
        try {
            const answer = await get(`/projects/${this.#id}/runs`, this.#request(), signal);
            const first = answer.runs.length ? null : await this.#project;
            this.#draw(answer, first?.name);
            if (!quiet) announce(count(answer.runs.length, "run"));
        } catch (error) {
            if (isAbort(error)) return;
            if (!quiet && !this.#body.hasChildNodes()) throw error;
            notice(error.message);
        }
    }

    #draw({ runs, next }, name) {
        const query = this.#query;
        this.#table.draw(runs, { sort: query.get("sort") ?? "-created", picked: this.#picked() });
        const shown = runs.length
            ? el("div", { class: "card runs" }, this.#table.element)
            : this.#nothing(name);
        if (!runs.length || !this.#body.contains(this.#table.element)) this.#body.replaceChildren(shown);
        const step = (after, text, enabled) =>
            button(
                text,
                () => {
                    setQuery({ after }, { push: true });
                    this.update(new URLSearchParams(location.search)).then(() => scrollTo(0, 0));
                },
                { disabled: !enabled },
            );
        const after = query.get("after");
        this.#pager.replaceChildren(
            ...(after || next
                ? [step(null, "First page", Boolean(after)), step(next, "Next page", Boolean(next))]
                : []),
        );
    }

    #nothing(name) {
        const query = this.#query;
        if (query.get("after")) return el("p", { class: "card" }, "No more runs.");
        if (query.get("search") || query.get("state") || query.get("archived") === "1") {
            return el(
                "div",
                { class: "card" },
                el("p", {}, "No run matches."),
                button("Show all runs", () => this.#change({ search: null, state: null, archived: null })),
            );
        }
        return firstRun(name);
    }

    // ---- chosen for a comparison ----

    #picked = () => (this.#query.get("pick") ?? "").split(",").filter(Boolean);

    #pick(id, on) {
        const rest = this.#picked().filter((one) => one !== id);
        if (on && rest.length >= MOST_COMPARED) {
            notice(`At most ${MOST_COMPARED} runs are compared at once.`);
            return false;
        }
        setQuery({ pick: (on ? [...rest, id] : rest).join(",") });
        this.#query = new URLSearchParams(location.search);
        this.#showChosen();
        return true;
    }

    #showChosen() {
        const picked = this.#picked();
        this.#chosen.hidden = picked.length === 0;
        this.#chosen.replaceChildren(
            el("span", {}, `${count(picked.length, "run")} chosen`),
            button("Compare", () => navigate(`/compare?runs=${picked.join(",")}`), {
                class: "primary",
                disabled: picked.length < 2,
                title: picked.length < 2 ? "Choose two or more" : null,
            }),
            button(
                "Choose none",
                () => {
                    setQuery({ pick: null });
                    this.#query = new URLSearchParams(location.search);
                    this.#showChosen();
                    this.#table.unpick();
                },
                { class: "quiet" },
            ),
        );
    }
}
