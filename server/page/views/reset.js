// SPDX-License-Identifier: Apache-2.0
// A new password, by the one-time link that an admin has made: /reset#token=…

import { post } from "../api.js";
import { el, form } from "../dom.js";
import { navigate } from "../router.js";
import { newPassword } from "./setup.js";

export function show({ place, session }) {
    const token = new URLSearchParams(location.hash.slice(1)).get("token") ?? "";
    const password = newPassword("New password");
    place.classList.add("narrow");
    place.append(
        el("h1", {}, "Choose a new password"),
        el("p", { class: "soft" }, "The link works once. All sessions of the account end; its tokens stay."),
        el(
            "div",
            { class: "card" },
            form(password.fields, "Set the password", async (data) => {
                const { account } = await post("/reset", { token, password: password.read(data) });
                session.loggedIn(account);
                navigate("/", { replace: true });
            }),
        ),
    );
}
