// SPDX-License-Identifier: Apache-2.0
// Begins: who is logged in, the frame around the views, the first view.

import { get, post } from "./api.js";
import { button, el, named, notice } from "./dom.js";
import { navigate, start } from "./router.js";

let known = null;

const session = {
    account: null,
    setupNeeded: false,
    /** Finds out once who is logged in; after a failure the next call tries again. */
    known() {
        known ??= findOut().catch((error) => {
            known = null;
            throw error;
        });
        return known;
    },
    /** A view has logged in. */
    loggedIn(account) {
        session.account = account;
        session.setupNeeded = false;
    },
};

async function findOut() {
    try {
        session.account = (await get("/me")).account;
    } catch (error) {
        if (error.status !== 401) throw error;
        session.setupNeeded = (await get("/setup")).needed;
    }
}

async function logOut() {
    try {
        await post("/logout");
    } catch (error) {
        if (error.status !== 401) {
            notice(error.message);
            return;
        }
    }
    session.account = null;
    navigate("/login");
}

function frame() {
    const place = document.getElementById("account");
    const account = session.account;
    if (!account) {
        place.replaceChildren();
        return;
    }
    const here = (path) => (location.pathname === path ? "page" : null);
    place.replaceChildren(
        el("a", { href: "/", "aria-current": here("/") }, "Projects"),
        el("a", { href: "/teams", "aria-current": here("/teams") }, "Teams"),
        el("a", { href: "/accounts", "aria-current": here("/accounts") }, named(account.name)),
        button("Log out", logOut, { class: "quiet" }),
    );
}

document.addEventListener("arrived", frame);
start(session);
