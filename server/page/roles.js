// SPDX-License-Identifier: Apache-2.0
// Roles of a team, and a table as all settings have it.

import { el } from "./dom.js";

/** By what they may do, the least first. */
export const ROLES = [
    ["viewer", "reads"],
    ["member", "makes projects, sends runs"],
    ["admin", "sees private projects, has members and the log"],
    ["owner", "has the team"],
];

const rank = (role) => ROLES.findIndex(([name]) => name === role);

/** Whether a role is at least another. */
export const atLeast = (role, least) => rank(role) >= rank(least);

/** A choice of roles up to one. */
export function roleChoice(most, chosen, attributes = {}) {
    return el(
        "select",
        attributes,
        ROLES.filter(([name]) => atLeast(most, name)).map(([name, what]) =>
            el("option", { value: name, defaultSelected: name === chosen }, `${name} – ${what}`),
        ),
    );
}

/** A table in a card that scrolls; "" as a head: actions. */
export function settingsTable(heads, body, attributes = {}) {
    return el(
        "div",
        { class: "scroll", ...attributes },
        el(
            "table",
            {},
            el(
                "thead",
                {},
                el(
                    "tr",
                    {},
                    heads.map((head) =>
                        el("th", { scope: "col" }, head || el("span", { class: "unseen" }, "Actions")),
                    ),
                ),
            ),
            body,
        ),
    );
}

/** A part of the settings, with its heading. */
export const card = (id, heading, ...parts) =>
    el("section", { class: "card", "aria-labelledby": id }, el("h2", { id }, heading), parts);

/** Where a page of settings is. */
export const crumbs = (...links) =>
    el(
        "nav",
        { class: "crumbs", "aria-label": "Where you are" },
        links.map(([href, text], at) => [at > 0 && " › ", el("a", { href }, el("bdi", {}, text))]),
    );
