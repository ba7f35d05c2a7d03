// SPDX-License-Identifier: Apache-2.0
// What to do where there is nothing yet: the commands that record a first run on this server.

import { copyable, el } from "../dom.js";

/** @param {?string} project - the project that is open */
export function firstRun(project) {
    const shell = `memscale login ${location.origin}`;
    const code = `memscale.wrap(model, record="${location.origin}/${encodeURIComponent(project ?? "my-project")}")`;
    return el(
        "section",
        { class: "card empty", "aria-labelledby": "first" },
        el("h2", { id: "first" }, project ? "No run yet in this project" : "Record a first run"),
        el(
            "ol",
            {},
            el(
                "li",
                {},
                el("a", { href: "/accounts" }, "Make an API token"),
                " with the scope ",
                el("code", {}, "ingest"),
                ".",
            ),
            el(
                "li",
                {},
                el("p", {}, "On the machine that trains, say where runs go, and paste the token:"),
                copyable(shell),
            ),
            el(
                "li",
                {},
                el("p", {}, "In the program, add to the line that wraps the model:"),
                copyable(code),
            ),
        ),
    );
}
