// SPDX-License-Identifier: Apache-2.0
// For an admin of the server: its accounts; and, for everybody, their sessions.

import { get, patch, post, remove } from "../api.js";
import { announce, button, confirm, copyable, el, form, named, notice, time } from "../dom.js";
import { ago, day, until } from "../format.js";
import { card, settingsTable } from "../roles.js";
import { NAME_RULE, accountName, newPassword } from "./setup.js";

// ---- sessions ----

/** The browsers in which the account is logged in. */
export function sessionsCard(sessions) {
    const body = el("tbody");
    const end = async (session) => {
        try {
            await remove(`/me/sessions/${session.id}`);
            sessions.splice(sessions.indexOf(session), 1);
            announce("Ended");
        } catch (error) {
            notice(error.message);
        }
        fill();
    };
    const fill = () =>
        body.replaceChildren(
            ...sessions.map((session) =>
                el(
                    "tr",
                    {},
                    el("th", { scope: "row", class: "when" }, time(session.created_ms, day(session.created_ms))),
                    el("td", { class: "when" }, time(session.used_ms, ago(session.used_ms))),
                    el(
                        "td",
                        { class: "n" },
                        session.current
                            ? "this one"
                            : button("End", () => end(session), {
                                  class: "quiet",
                                  "aria-label": `End the session of ${day(session.created_ms)}`,
                              }),
                    ),
                ),
            ),
        );
    fill();
    return card("sessions", "Sessions", settingsTable(["Begun", "Last used", ""], body));
}

// ---- accounts ----

/** All accounts of the server: make, disable, promote, and links for new passwords. */
export function accountsCard(accounts, session) {
    const body = el("tbody");
    const made = el("div", { "aria-live": "polite" });
    const alter = async (account, change, said) => {
        try {
            Object.assign(account, await patch(`/accounts/${encodeURIComponent(account.name)}`, change));
            announce(said);
        } catch (error) {
            notice(error.message);
        }
        fill();
    };
    const disable = async (account) => {
        const sure = await confirm({
            title: "Disable this account?",
            action: "Disable",
            text: `“${account.name}” is logged out and cannot log in; its tokens are refused. What it made stays.`,
        });
        if (sure) await alter(account, { disabled: true }, "Disabled");
    };
    const reset = async (account) => {
        try {
            const link = await post(`/accounts/${encodeURIComponent(account.name)}/reset`);
            made.replaceChildren(
                el(
                    "div",
                    { class: "card" },
                    el("h3", {}, "A new password for ", named(account.name)),
                    el(
                        "p",
                        { class: "small soft" },
                        "The link works once, and ends ",
                        time(link.expires_ms, until(link.expires_ms)),
                        ". It is shown this once: hand it to them.",
                    ),
                    copyable(`${location.origin}/reset#token=${link.token}`, { label: "Copy the link" }),
                ),
            );
            made.querySelector("button").focus();
        } catch (error) {
            notice(error.message);
        }
    };
    const act = (text, account, click) =>
        button(text, click, { class: "quiet", "aria-label": `${text}: ${account.name}` });
    const row = (account) => {
        const off = account.disabled_ms !== null;
        const self = account.name === session.account.name;
        return el(
            "tr",
            {},
            el("th", { scope: "row", class: "wrap" }, named(account.name)),
            el("td", {}, account.admin ? "admin" : "account", off && el("span", { class: "soft" }, ", disabled")),
            el("td", { class: "when" }, time(account.created_ms, day(account.created_ms))),
            el(
                "td",
                { class: "n" },
                act("New password", account, () => reset(account)),
                !self &&
                    act(account.admin ? "No admin" : "Make admin", account, () =>
                        alter(account, { admin: !account.admin }, "Changed"),
                    ),
                !self &&
                    act(off ? "Enable" : "Disable", account, () =>
                        off ? alter(account, { disabled: false }, "Enabled") : disable(account),
                    ),
            ),
        );
    };
    const fill = () => body.replaceChildren(...accounts.map(row));
    fill();
    return card(
        "accounts",
        "Accounts of this server",
        made,
        settingsTable(["Name", "Kind", "Made", ""], body),
        el("p", {}, el("a", { href: "/audit" }, "Audit log of accounts, logins and tokens")),
        el(
            "details",
            {},
            el("summary", {}, "New account"),
            accountForm((account) => {
                accounts.push(account);
                accounts.sort((a, b) => (a.name < b.name ? -1 : 1));
                fill();
            }),
        ),
    );
}

function accountForm(done) {
    const password = newPassword("First password");
    const node = form(
        [
            accountName(
                "Name of the account",
                `${NAME_RULE} It is in no team until it is invited; an invitation makes an account, too.`,
                "off",
            ),
            password.fields,
            el(
                "label",
                { class: "check" },
                el("input", { type: "checkbox", name: "admin" }),
                "an admin, who has accounts and makes teams",
            ),
        ],
        "Make the account",
        async (data) => {
            const account = await post("/accounts", {
                name: data.get("name"),
                password: password.read(data),
                admin: data.get("admin") !== null,
            });
            done(account);
            node.reset();
            announce("The account is made");
        },
    );
    return node;
}

/** What both cards show. */
export async function readPeople(session, signal) {
    const [{ sessions }, accounts] = await Promise.all([
        get("/me/sessions", null, signal),
        session.account.admin ? get("/accounts", null, signal) : null,
    ]);
    return { sessions, accounts: accounts?.accounts ?? null };
}
