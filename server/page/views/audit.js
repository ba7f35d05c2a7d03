// SPDX-License-Identifier: Apache-2.0
// An audit log: /teams/3/audit for a team's admins, /audit for the server's. Older lines come on demand.

import { get } from "../api.js";
import { announce, button, el, named, notice, time } from "../dom.js";
import { clock, count } from "../format.js";
import { crumbs, settingsTable } from "../roles.js";

export async function show({ place, params, signal }) {
    const id = params[0];
    const path = id ? `/teams/${id}/audit` : "/audit";
    const [team, page] = await Promise.all([
        id ? get(`/teams/${id}`, null, signal) : null,
        get(path, null, signal),
    ]);
    const body = el("tbody");
    const more = button("Older lines", () => load());
    let next;
    const add = (entries, following) => {
        body.append(...entries.map(row));
        next = following;
        more.hidden = next === null;
    };
    async function load() {
        more.disabled = true;
        try {
            const older = await get(path, { before: next }, signal);
            const first = body.rows.length;
            add(older.entries, older.next);
            announce(count(older.entries.length, "line"));
            body.rows[first]?.querySelector("th").focus();
        } catch (error) {
            notice(error.message);
        } finally {
            more.disabled = false;
        }
    }
    add(page.entries, page.next);
    place.classList.add("middle");
    place.append(
        team ? crumbs(["/teams", "Teams"], [`/teams/${id}`, team.name]) : crumbs(["/accounts", "Account"]),
        el(
            "div",
            { class: "bar" },
            el("h1", {}, "Audit log"),
            el("span", { class: "soft" }, team ? named(team.name) : "accounts, logins and tokens"),
        ),
        el(
            "div",
            { class: "card" },
            settingsTable(["When", "Who", "What", "Which", "More"], body),
            page.entries.length === 0 && el("p", { class: "soft" }, "Nothing yet."),
            el("div", { class: "actions" }, more),
        ),
    );
}

const row = (entry) =>
    el(
        "tr",
        {},
        el("th", { scope: "row", class: "when", tabindex: -1 }, time(entry.time_ms, clock(entry.time_ms))),
        el("td", { class: "wrap" }, entry.by === null ? "the server" : named(entry.by)),
        el("td", {}, el("code", {}, entry.action)),
        el("td", { class: "wrap" }, named(entry.thing)),
        el("td", { class: "wrap soft" }, named(entry.detail)),
    );
