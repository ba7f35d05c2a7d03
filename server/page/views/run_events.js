// SPDX-License-Identifier: Apache-2.0
// What happened, in the order in which it arrived; the server filters by kind: ?tab=events&kind=oom

import { get } from "../api.js";
import { button, el, named, time } from "../dom.js";
import { clock, number } from "../format.js";
import { setQuery } from "../router.js";

const KINDS = ["plan", "replan", "oom", "recovery", "refused", "attempt", "dropped", "error", "note"];
const A_PAGE = 100;
const TROUBLE = new Set(["oom", "error", "refused", "dropped"]);

export class EventsTab {
    #run;
    #place;
    #kind = "";
    #last = 0;
    #shown = 0;
    #busy = Promise.resolve();
    #select;
    #body = el("tbody");
    #table;
    #none = el("p", { class: "card" }, "Nothing has happened that was recorded as an event.");
    #more = button("Show later ones", () => this.#read(), { hidden: true });

    constructor(run, place) {
        this.#run = run;
        this.#place = place;
    }

    open(query) {
        this.#select = el(
            "select",
            { on: { change: () => this.#choose(this.#select.value) } },
            ["", ...KINDS].map((kind) => el("option", { value: kind }, kind || "any kind")),
        );
        this.#table = el(
            "div",
            { class: "card" },
            el(
                "div",
                { class: "scroll", tabindex: 0, role: "group", "aria-label": "Events" },
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
                                ["Step", "n"],
                                ["Kind", ""],
                                ["What", ""],
                                ["When", ""],
                            ].map(([text, kind]) => el("th", { scope: "col", class: kind }, text)),
                        ),
                    ),
                    this.#body,
                ),
            ),
            this.#more,
        );
        this.#place.append(
            el("div", { class: "filters" }, el("label", {}, "Kind", this.#select)),
            this.#table,
            this.#none,
        );
        return this.zoomed(query, true);
    }

    zoomed(query, first = false) {
        const kind = query.get("kind") ?? "";
        if (!first && kind === this.#kind) return null;
        this.#kind = kind;
        this.#select.value = KINDS.includes(kind) ? kind : "";
        this.#last = 0;
        this.#shown = 0;
        this.#body.replaceChildren();
        return this.#read();
    }

    /** New ones are added below, unless there are pages between. */
    changed({ events }) {
        return events && this.#more.hidden ? this.#read() : null;
    }

    #choose(kind) {
        setQuery({ kind }, { push: true });
        this.zoomed(new URLSearchParams(location.search));
    }

    #read() {
        this.#busy = this.#busy
            .catch(() => {})
            .then(async () => {
                const query = { after: this.#last, kind: this.#kind, limit: A_PAGE };
                const { events, next } = await get(`${this.#run.path}/events`, query, this.#run.signal);
                if (query.kind !== this.#kind) return;
                this.#last = events.at(-1)?.id ?? this.#last;
                this.#shown += events.length;
                this.#body.append(...events.map(row));
                this.#table.hidden = this.#shown === 0;
                this.#none.hidden = this.#shown > 0;
                this.#more.hidden = next === null;
            });
        return this.#busy;
    }
}

function row(event) {
    const data = event.data && Object.keys(event.data).length ? JSON.stringify(event.data, null, 2) : null;
    return el(
        "tr",
        {},
        el("td", { class: "n" }, event.step === null ? "–" : number(event.step)),
        el("td", { class: TROUBLE.has(event.kind) ? "bad-text" : "" }, event.kind),
        el(
            "td",
            { class: "wrap" },
            event.text.includes("\n") ? el("pre", { class: "text" }, event.text) : named(event.text),
            data &&
                el(
                    "details",
                    {},
                    el("summary", { class: "small soft" }, "Data"),
                    el("pre", { class: "text" }, data),
                ),
        ),
        el("td", { class: "when" }, time(event.time_ms, clock(event.time_ms))),
    );
}
