// SPDX-License-Identifier: Apache-2.0
import { get, post } from "../api.js";
import { el, field, form, named, time } from "../dom.js";
import { count, day } from "../format.js";
import { navigate } from "../router.js";
import { firstRun } from "./first_run.js";

export async function show({ place, signal }) {
    const { projects } = await get("/projects", null, signal);
    place.classList.add("middle");
    const create = el(
        "details",
        { class: "card" },
        el("summary", {}, "New project"),
        form(
            [
                field(
                    "Name",
                    el("input", { name: "name", required: true, maxlength: 128, autocomplete: "off" }),
                    "The first run of a project makes it, too.",
                ),
            ],
            "Make the project",
            async (data) => {
                const project = await post("/projects", { name: data.get("name") });
                navigate(`/projects/${project.id}`);
            },
        ),
    );
    place.append(
        el("div", { class: "bar" }, el("h1", {}, "Projects")),
        projects.length ? list(projects) : firstRun(null),
        create,
    );
}

function list(projects) {
    return el(
        "div",
        { class: "card" },
        el(
            "table",
            { class: "projects" },
            el(
                "thead",
                {},
                el(
                    "tr",
                    {},
                    el("th", { scope: "col" }, "Name"),
                    el("th", { scope: "col", class: "n" }, "Runs"),
                    el("th", { scope: "col", class: "n" }, "Made"),
                ),
            ),
            el(
                "tbody",
                {},
                projects.map((project) =>
                    el(
                        "tr",
                        {},
                        el(
                            "th",
                            { scope: "row", class: "wrap" },
                            el("a", { href: `/projects/${project.id}` }, named(project.name)),
                        ),
                        el("td", { class: "n" }, count(project.runs, "run")),
                        el("td", { class: "n" }, time(project.created_ms, day(project.created_ms))),
                    ),
                ),
            ),
        ),
    );
}
