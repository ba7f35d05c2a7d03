// SPDX-License-Identifier: Apache-2.0
// An invitation: /join#token=…. Who is logged in joins with their account; anybody else makes one.

import { post } from "../api.js";
import { el, form, named, time } from "../dom.js";
import { until } from "../format.js";
import { ROLES } from "../roles.js";
import { navigate } from "../router.js";
import { NAME_RULE, accountName, newPassword } from "./setup.js";

export async function show({ place, session }) {
    const token = new URLSearchParams(location.hash.slice(1)).get("token") ?? "";
    place.classList.add("narrow");
    let invitation;
    try {
        invitation = await post("/invitations/look", { token });
    } catch (error) {
        if (error.status !== 403) throw error;
        place.append(
            el("h1", {}, "This invitation is over"),
            el("p", {}, "It was used, revoked, or is too old. Ask who sent it for another one."),
        );
        return;
    }
    const what = ROLES.find(([role]) => role === invitation.role)?.[1];
    place.append(
        el("h1", {}, "Join ", named(invitation.team)),
        el(
            "p",
            {},
            named(invitation.by),
            ` invites you as ${invitation.role}, who ${what}. The link works once; it ends `,
            time(invitation.expires_ms, until(invitation.expires_ms)),
            ".",
        ),
        el("div", { class: "card" }, session.account ? joinForm(token, session) : accountForm(token, session)),
    );
    if (!session.account)
        place.append(
            el("p", { class: "soft small" }, "Do you have an account? Log in, and open the link again."),
        );
}

const arrive = async (body, session) => {
    const { account } = await post("/invitations/accept", body);
    session.loggedIn(account);
    navigate("/", { replace: true });
};

function joinForm(token, session) {
    return form(
        [el("p", {}, "You are logged in as ", named(session.account.name), ".")],
        "Join the team",
        () => arrive({ token }, session),
    );
}

function accountForm(token, session) {
    const password = newPassword("Password");
    return form(
        [
            accountName("Account name", NAME_RULE, "username"),
            password.fields,
        ],
        "Make the account and join",
        (data) => arrive({ token, name: data.get("name"), password: password.read(data) }, session),
    );
}
