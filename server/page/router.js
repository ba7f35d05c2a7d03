// SPDX-License-Identifier: Apache-2.0
// Which view a path shows, and the way from one to the next. A view's state is the query of its URL.
//
//   link or navigate() ─► history ─► show ─► module.show(context) ─► a view ─► view.update(query)
//
// A change of the query alone goes to the open view's update(). A view reads the query there and nowhere
// else.

import { announce, clearNotices, el } from "./dom.js";
import { isAbort } from "./api.js";

/** A view, and beside it what its modules import, so that the browser asks for all at once. */
function together(view, ...others) {
    for (const path of others) import(path).catch(() => {}); // the view's own import of it says what is wrong
    return import(view);
}

const CHARTS = [
    "./charts/lines.js",
    "./charts/axis.js",
    "./charts/buckets.js",
    "./vendor/uplot/uPlot.esm.js",
];
const TABS = ["overview", "series", "plan", "events", "documents"].map((tab) => `./views/run_${tab}.js`);

const ROUTES = [
    [/^\/$/, () => import("./views/projects.js")],
    [/^\/setup$/, () => import("./views/setup.js")],
    [/^\/login$/, () => import("./views/login.js")],
    [/^\/accounts$/, () => import("./views/account.js")],
    [/^\/join$/, () => import("./views/join.js")],
    [/^\/reset$/, () => import("./views/reset.js")],
    [/^\/teams$/, () => import("./views/teams.js")],
    [/^\/teams\/(\d{1,15})$/, () => import("./views/team.js")],
    [/^\/teams\/(\d{1,15})\/audit$/, () => import("./views/audit.js")],
    [/^\/audit$/, () => import("./views/audit.js")],
    [/^\/projects\/(\d{1,15})\/settings$/, () => import("./views/project_settings.js")],
    [/^\/compare$/, () => together("./views/compare.js", "./views/compare_plan.js", ...CHARTS)],
    [
        /^\/projects\/(\d{1,15})$/,
        () => together("./views/runs.js", "./views/runs_table.js", "./views/first_run.js"),
    ],
    [
        /^\/runs\/([A-Za-z0-9_-]{8,64})$/,
        () => together("./views/run.js", "./live.js", "./charts/stack.js", ...TABS, ...CHARTS),
    ],
];
const OPEN_TO_ALL = new Set(["/setup", "/login", "/join", "/reset"]);

let session;
let current = null;

/** @param {object} state - who is logged in, as main.js has it */
export function start(state) {
    session = state;
    addEventListener("popstate", () => show({ focus: false }));
    addEventListener("signed-out", () => {
        if (!session.account) return; // nobody was logged in: show() knows where to go
        session.account = null;
        if (!OPEN_TO_ALL.has(location.pathname)) navigate(loginPath(), { replace: true });
    });
    document.addEventListener("click", (event) => {
        const link = event.target.closest?.("a[href]");
        if (!link || event.defaultPrevented || event.button !== 0) return;
        if (event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
        const path = link.getAttribute("href");
        if (!path.startsWith("/") || path.startsWith("/api/") || link.hasAttribute("download") || link.target)
            return;
        event.preventDefault();
        navigate(path);
    });
    return show({ focus: false });
}

const loginPath = () => {
    const here = location.pathname + location.search;
    return here === "/" ? "/login" : `/login?next=${encodeURIComponent(here)}`;
};

/** Opens a path of this page. */
export function navigate(path, { replace = false } = {}) {
    history[replace ? "replaceState" : "pushState"](null, "", path);
    return show({ focus: true });
}

/** Changes some entries of the query; null removes one. `push` makes an entry in the browser's history. */
export function setQuery(changes, { push = false } = {}) {
    const query = new URLSearchParams(location.search);
    for (const [name, value] of Object.entries(changes)) {
        if (value === null || value === undefined || value === "") query.delete(name);
        else query.set(name, value);
    }
    const text = query.toString().replaceAll("%2C", ",");
    const path = location.pathname + (text ? `?${text}` : "");
    if (path !== location.pathname + location.search)
        history[push ? "pushState" : "replaceState"](null, "", path);
}

function routeOf(path) {
    for (const [pattern, load] of ROUTES) {
        const match = pattern.exec(path);
        if (match) return { load, params: match.slice(1) };
    }
    return { load: () => import("./views/not_found.js"), params: [] };
}

async function show({ focus }) {
    const path = location.pathname;
    const query = new URLSearchParams(location.search);
    if (current?.path === path && current.view?.update) {
        current.view.update(query);
        return;
    }
    current?.leave.abort();
    current?.view?.close?.();
    const leave = new AbortController();
    const mine = { path, leave, view: null };
    current = mine;
    clearNotices();
    const { load, params } = routeOf(path);
    const main = document.getElementById("main");
    try {
        const [module] = await Promise.all([load(), session.known()]);
        if (current !== mine) return;
        if (!session.account && !OPEN_TO_ALL.has(path)) {
            navigate(session.setupNeeded ? "/setup" : loginPath(), { replace: true });
            return;
        }
        const place = el("div", { class: "view" });
        const view = (await module.show({ place, params, query, session, signal: leave.signal })) ?? {};
        if (current !== mine) {
            view.close?.();
            return;
        }
        mine.view = view;
        main.replaceChildren(place);
        arrive(main, focus);
        await view.update?.(query);
    } catch (error) {
        if (isAbort(error) || current !== mine) return;
        mine.view?.close?.();
        main.replaceChildren(problem(error));
        arrive(main, focus);
    }
}

function problem(error) {
    const gone = error.status === 404;
    return el(
        "div",
        { class: "view narrow" },
        el("h1", {}, gone ? "Not here" : "This did not work"),
        el("p", {}, gone ? "There is no such thing, or you do not see it." : error.message),
        el(
            "div",
            { class: "actions" },
            el(
                "button",
                {
                    type: "button",
                    class: "primary",
                    on: {
                        click: () => {
                            current = null;
                            show({ focus: true });
                        },
                    },
                },
                "Try again",
            ),
            el("a", { class: "button", href: "/" }, "All projects"),
        ),
    );
}

/** Title, and where a keyboard or a screen reader goes on. */
function arrive(main, focus) {
    const heading = main.querySelector("h1");
    const title = heading?.textContent ?? "";
    document.title = title ? `${title} · MemScale` : "MemScale";
    document.dispatchEvent(new CustomEvent("arrived"));
    if (!focus) return;
    scrollTo(0, 0);
    if (heading && !main.contains(document.activeElement)) {
        heading.tabIndex = -1;
        heading.focus({ preventScroll: true });
    }
    announce(title);
}
