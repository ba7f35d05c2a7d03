// SPDX-License-Identifier: Apache-2.0
// The first account, by the one-time link that the server has printed: /setup#token=…

import { get, post } from "../api.js";
import { el, field, form } from "../dom.js";
import { navigate } from "../router.js";

export const NAME_RULE = "Lower-case letters, digits, “.”, “_” and “-”; up to 64.";
export const PASSWORD_RULE = "At least 10 characters; a few words are easy to remember and hard to guess.";

/** A field for the name of a new account. */
export function accountName(label, rule, autocomplete) {
    const input = el("input", {
        name: "name",
        required: true,
        maxlength: 64,
        pattern: "[a-z0-9][a-z0-9._\\-]*",
        autocomplete,
        autocapitalize: "none",
        spellcheck: "false",
    });
    return field(label, input, rule);
}

/** Two fields for a new password, and a check that they agree. */
export function newPassword(label) {
    const attributes = {
        type: "password",
        required: true,
        minlength: 10,
        maxlength: 256,
        autocomplete: "new-password",
    };
    const fields = [
        field(label, el("input", { name: "password", ...attributes }), PASSWORD_RULE),
        field(`${label}, again`, el("input", { name: "repeated", ...attributes })),
    ];
    const read = (data) => {
        if (data.get("password") !== data.get("repeated")) throw new Error("The two passwords differ.");
        return data.get("password");
    };
    return { fields, read };
}

export async function show({ place, session, signal }) {
    const { needed } = await get("/setup", null, signal);
    place.classList.add("narrow");
    if (!needed) {
        place.append(
            el("h1", {}, "Already set up"),
            el("p", {}, "This server has its first account."),
            el("a", { class: "button primary", href: "/login" }, "Log in"),
        );
        return;
    }
    const token = new URLSearchParams(location.hash.slice(1)).get("token") ?? "";
    if (!/^.{64}$/.test(token)) {
        place.append(
            el("h1", {}, "Set up this server"),
            el(
                "p",
                {},
                "The first account is made with a one-time link that the server prints in its terminal when it starts. " +
                    "Open that link here; it works for 15 minutes. A restart of the server prints a new one.",
            ),
        );
        return;
    }
    const password = newPassword("Password");
    place.append(
        el("h1", {}, "Set up this server"),
        el(
            "p",
            { class: "soft" },
            "The first account is an admin: it sees the server's accounts and can make others.",
        ),
        el(
            "div",
            { class: "card" },
            form(
                [
                    accountName("Account name", NAME_RULE, "username"),
                    password.fields,
                ],
                "Make the account",
                async (data) => {
                    const { account } = await post("/setup", {
                        token,
                        name: data.get("name"),
                        password: password.read(data),
                    });
                    session.loggedIn(account);
                    navigate("/", { replace: true });
                },
            ),
        ),
    );
}
