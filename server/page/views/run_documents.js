// SPDX-License-Identifier: Apache-2.0
// The documents of a run, read when they are opened. Flat objects are shown as a table, a report as its
// lines, all else as JSON.

import { isAbort } from "../api.js";
import { el, named, time } from "../dom.js";
import { ago, bytes, number } from "../format.js";

const isPlain = (value) => value === null || ["string", "number", "boolean"].includes(typeof value);
const isFlat = (value) =>
    value !== null &&
    typeof value === "object" &&
    !Array.isArray(value) &&
    Object.values(value).every(isPlain);

/** A value of a flat document: "device_bytes" and its like are sizes. */
export function plainText(key, value) {
    if (typeof value !== "number") return String(value);
    return key.endsWith("_bytes") ? `${bytes(value)} (${number(value)})` : number(value);
}

function drawn(name, content) {
    if (name === "report" && Array.isArray(content?.lines))
        return el("pre", { class: "text", tabindex: 0 }, content.lines.join("\n"));
    if (!isFlat(content)) return el("pre", { class: "text", tabindex: 0 }, JSON.stringify(content, null, 2));
    const rows = Object.entries(content);
    if (rows.length === 0) return el("p", { class: "soft" }, "It is empty.");
    return el(
        "table",
        {},
        el(
            "tbody",
            {},
            rows.map(([key, value]) =>
                el(
                    "tr",
                    {},
                    el("th", { scope: "row", class: "wrap" }, named(key)),
                    el("td", { class: "wrap" }, named(plainText(key, value))),
                ),
            ),
        ),
    );
}

export class DocumentsTab {
    #run;
    #place;
    #open = new Set();

    constructor(run, place) {
        this.#run = run;
        this.#place = place;
    }

    open() {
        const { documents } = this.#run.run;
        this.#place.replaceChildren(
            ...(documents.length
                ? documents.map((one) => this.#card(one))
                : [el("p", { class: "card" }, "This run has no documents.")]),
        );
    }

    changed({ documents }) {
        if (documents) this.open();
    }

    #card({ name, bytes: size, updated_ms: updated }) {
        const body = el("div");
        let read = false;
        const fill = async () => {
            if (read) return;
            read = true;
            try {
                const content = await this.#run.document(name);
                body.replaceChildren(drawn(name, content));
            } catch (error) {
                read = false;
                if (!isAbort(error)) body.replaceChildren(el("p", { class: "problem" }, error.message));
            }
        };
        const card = el(
            "details",
            {
                class: "card",
                on: {
                    toggle: () => {
                        if (card.open) this.#open.add(name);
                        else this.#open.delete(name);
                        if (card.open) fill();
                    },
                },
            },
            el(
                "summary",
                {},
                el("strong", {}, name),
                el("span", { class: "soft small" }, ` ${bytes(size)}, `, time(updated, ago(updated))),
            ),
            el(
                "p",
                {},
                el(
                    "a",
                    { href: `/api/v1${this.#run.path}/documents/${name}`, download: `${name}.json` },
                    "Save as JSON",
                ),
            ),
            body,
        );
        card.open = this.#open.has(name);
        return card;
    }
}
