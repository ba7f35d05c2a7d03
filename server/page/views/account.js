// SPDX-License-Identifier: Apache-2.0
// The account: its API tokens, its password, its sessions; for an admin the server's accounts.

import { get, post, put, remove } from "../api.js";
import { announce, button, confirm, copyable, el, field, form, named, notice, time } from "../dom.js";
import { ago, day, until } from "../format.js";
import { accountsCard, readPeople, sessionsCard } from "./account_people.js";
import { newPassword } from "./setup.js";

const SCOPES = [
    ["ingest", "record runs", true],
    ["read", "read runs", false],
    ["admin", "rename, archive and delete runs, and all of the above", false],
];
const EXPIRIES = [
    ["30", "30 days"],
    ["90", "90 days"],
    ["365", "a year"],
    ["", "never"],
];
const DAY_MS = 86_400_000;

export async function show({ place, session, signal }) {
    const [{ tokens }, { teams }, { projects }, { sessions, accounts }] = await Promise.all([
        get("/tokens", null, signal),
        get("/teams", null, signal),
        get("/projects", null, signal),
        readPeople(session, signal),
    ]);
    place.classList.add("middle");
    place.append(
        el(
            "div",
            { class: "bar" },
            el("h1", {}, named(session.account.name)),
            el(
                "span",
                { class: "soft" },
                session.account.admin ? "admin" : "account",
                ", since ",
                day(session.account.created_ms),
            ),
        ),
        tokenCard(tokens, teams, projects),
        passwordCard(session),
        sessionsCard(sessions),
        accounts ? accountsCard(accounts, session) : "",
    );
}

// ---- tokens ----

/** What a token reaches, in words. */
function reachOf(token, teams, projects) {
    const team = teams.find((one) => one.id === token.team);
    const project = projects.find((one) => one.id === token.project);
    if (token.team !== null) return team ? ["team ", named(team.name)] : "a team that is not yours any more";
    if (token.project !== null)
        return project ? ["project ", named(project.name)] : "a project that is not there any more";
    return "all that you see";
}

function tokenCard(tokens, teams, projects) {
    const made = el("div", { "aria-live": "polite" });
    const body = el("tbody");
    const none = el("p", { class: "soft" }, "No token yet. A program that records runs needs one.");
    const table = el(
        "div",
        { class: "scroll" },
        el(
            "table",
            {},
            el(
                "thead",
                {},
                el(
                    "tr",
                    {},
                    ["Name", "Scopes", "Reaches", "Made", "Expires", "Last used"].map((head) =>
                        el("th", { scope: "col" }, head),
                    ),
                    el("th", { scope: "col" }, el("span", { class: "unseen" }, "Actions")),
                ),
            ),
            body,
        ),
    );
    const fill = () => {
        body.replaceChildren(...tokens.map((token) => tokenRow(token, drop, reachOf(token, teams, projects))));
        table.hidden = tokens.length === 0;
        none.hidden = tokens.length > 0;
    };
    const drop = (token) => {
        tokens.splice(tokens.indexOf(token), 1);
        fill();
    };
    fill();
    const create = tokenForm(teams, projects, (token) => {
        tokens.unshift(token);
        fill();
        made.replaceChildren(
            el(
                "div",
                { class: "card" },
                el("h3", {}, "The token ", named(token.name)),
                el(
                    "p",
                    { class: "small soft" },
                    "It is shown this once. Copy it now; if it is lost, revoke it and make another one.",
                ),
                copyable(token.token, { label: "Copy the token" }),
            ),
        );
        made.querySelector("button").focus();
    });
    return el(
        "section",
        { class: "card", "aria-labelledby": "tokens" },
        el("h2", { id: "tokens" }, "API tokens"),
        made,
        none,
        table,
        el("details", { open: tokens.length === 0 }, el("summary", {}, "New token"), create),
    );
}

function tokenRow(token, drop, reach) {
    const expired = token.expires_ms !== null && token.expires_ms <= Date.now();
    const expires = token.expires_ms === null ? "never" : expired ? "expired" : until(token.expires_ms);
    return el(
        "tr",
        {},
        el("th", { scope: "row", class: "wrap" }, named(token.name)),
        el("td", {}, token.scopes.join(", ")),
        el("td", { class: "wrap" }, reach),
        el("td", { class: "when" }, time(token.created_ms, day(token.created_ms))),
        el(
            "td",
            { class: expired ? "when bad-text" : "when" },
            token.expires_ms === null ? expires : time(token.expires_ms, expires),
        ),
        el(
            "td",
            { class: "when" },
            token.used_ms === null ? "never" : time(token.used_ms, ago(token.used_ms)),
        ),
        el(
            "td",
            { class: "n" },
            button("Revoke", () => revoke(token, drop), {
                class: "quiet",
                "aria-label": `Revoke ${token.name}`,
            }),
        ),
    );
}

async function revoke(token, drop) {
    const sure = await confirm({
        title: "Revoke this token?",
        action: "Revoke",
        text:
            `Programs that use “${token.name}” are refused from then on. ` +
            "Runs that record with it go on, and keep what they cannot send.",
    });
    if (!sure) return;
    try {
        await remove(`/tokens/${token.id}`);
        drop(token);
        announce("Revoked");
    } catch (error) {
        notice(error.message);
    }
}

function tokenForm(teams, projects, done) {
    const node = form(
        [
            field(
                "Name",
                el("input", { name: "name", required: true, maxlength: 128, autocomplete: "off" }),
                "What will use it, such as “cluster” or “laptop”.",
            ),
            el(
                "fieldset",
                {},
                el("legend", {}, "It may"),
                SCOPES.map(([scope, what, on]) =>
                    el(
                        "label",
                        { class: "check" },
                        el("input", { type: "checkbox", name: "scope", value: scope, defaultChecked: on }),
                        el("span", {}, el("code", {}, scope), ` – ${what}`),
                    ),
                ),
            ),
            field(
                "Reaches",
                el(
                    "select",
                    { name: "reach" },
                    el("option", { value: "" }, "all that you see"),
                    teams.map((team) => el("option", { value: `team ${team.id}` }, `team ${team.name}`)),
                    projects.map((project) =>
                        el("option", { value: `project ${project.id}` }, `project ${project.name}`),
                    ),
                ),
                "Nothing beyond it, even if the token gets lost.",
            ),
            field(
                "Expires",
                el(
                    "select",
                    { name: "days" },
                    EXPIRIES.map(([days, text]) =>
                        el("option", { value: days, defaultSelected: days === "90" }, text),
                    ),
                ),
            ),
        ],
        "Make the token",
        async (data) => {
            const scopes = data.getAll("scope");
            if (scopes.length === 0) throw new Error("Choose what the token may do.");
            const days = Number(data.get("days"));
            const [kind, id] = data.get("reach").split(" ");
            done(
                await post("/tokens", {
                    name: data.get("name"),
                    scopes,
                    expires_ms: days ? Date.now() + days * DAY_MS : null,
                    ...(kind ? { [kind]: Number(id) } : {}),
                }),
            );
            node.reset();
            node.closest("details").open = false;
        },
    );
    return node;
}

// ---- password ----

function passwordCard(session) {
    const password = newPassword("New password");
    const node = form(
        [
            el("input", {
                type: "text",
                name: "username",
                value: session.account.name,
                autocomplete: "username",
                hidden: true,
                readOnly: true,
            }),
            field(
                "Present password",
                el("input", {
                    name: "current",
                    type: "password",
                    required: true,
                    maxlength: 256,
                    autocomplete: "current-password",
                }),
            ),
            password.fields,
        ],
        "Change the password",
        async (data) => {
            await put("/me/password", { current: data.get("current"), new: password.read(data) });
            node.reset();
            notice("The password is changed. Your other sessions have ended; tokens stay.", "good");
        },
    );
    return el(
        "section",
        { class: "card", "aria-labelledby": "password" },
        el("h2", { id: "password" }, "Password"),
        el("details", {}, el("summary", {}, "Change it"), node),
    );
}
