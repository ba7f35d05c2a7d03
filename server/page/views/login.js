// SPDX-License-Identifier: Apache-2.0
import { post } from "../api.js";
import { el, field, form } from "../dom.js";
import { navigate } from "../router.js";

/** Where the reader wanted to go; a path of this page only. */
function nextOf(query) {
    const next = query.get("next") ?? "/";
    return /^\/(?![/\\])/.test(next) ? next : "/";
}

export function show({ place, query, session }) {
    if (session.account) {
        queueMicrotask(() => navigate(nextOf(query), { replace: true }));
        return;
    }
    place.classList.add("narrow");
    place.append(
        el("h1", {}, "Log in"),
        el(
            "div",
            { class: "card" },
            form(
                [
                    field(
                        "Account name",
                        el("input", {
                            name: "name",
                            required: true,
                            maxlength: 64,
                            autocomplete: "username",
                            autocapitalize: "none",
                            spellcheck: "false",
                        }),
                    ),
                    field(
                        "Password",
                        el("input", {
                            name: "password",
                            type: "password",
                            required: true,
                            maxlength: 256,
                            autocomplete: "current-password",
                        }),
                    ),
                ],
                "Log in",
                async (data) => {
                    const { account } = await post("/login", {
                        name: data.get("name"),
                        password: data.get("password"),
                    });
                    session.loggedIn(account);
                    navigate(nextOf(query), { replace: true });
                },
            ),
        ),
        el("p", { class: "soft small" }, "No account? An admin of this server, or of one of its teams, can send you a link."),
    );
}
