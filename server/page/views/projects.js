// SPDX-License-Identifier: Apache-2.0
import { get, post } from "../api.js";
import { el, field, form, named, time } from "../dom.js";
import { count, day } from "../format.js";
import { atLeast } from "../roles.js";
import { navigate } from "../router.js";
import { firstRun } from "./first_run.js";

export async function show({ place, signal }) {
    const [{ projects }, { teams }] = await Promise.all([
        get("/projects", null, signal),
        get("/teams", null, signal),
    ]);
    const open = teams.filter((team) => atLeast(team.role, "member"));
    const choice = el(
        "select",
        { name: "team" },
        open.map((team) => el("option", { value: team.id }, team.name)),
    );
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
                open.length > 1 && field("Team", choice),
            ],
            "Make the project",
            async (data) => {
                const project = await post("/projects", {
                    name: data.get("name"),
                    team: Number(data.get("team")) || null,
                });
                navigate(`/projects/${project.id}`);
            },
        ),
    );
    place.append(
        el("div", { class: "bar" }, el("h1", {}, "Projects")),
        projects.length ? list(projects, teams) : open.length ? firstRun(null) : noTeam(teams),
        open.length > 0 ? create : "",
    );
}

/** Who may not send runs anywhere. */
const noTeam = (teams) =>
    el(
        "p",
        { class: "card" },
        teams.length
            ? "There is no project that you see yet."
            : "You are in no team. An admin or owner of one can send you an invitation, which is a link.",
    );

function list(projects, teams) {
    const teamOf = (project) => teams.find((team) => team.id === project.team)?.name ?? "";
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
                    teams.length > 1 && el("th", { scope: "col" }, "Team"),
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
                            project.visibility === "private" &&
                                el("span", { class: "soft small" }, " private, of ", named(project.owner)),
                        ),
                        teams.length > 1 && el("td", { class: "wrap" }, named(teamOf(project))),
                        el("td", { class: "n" }, count(project.runs, "run")),
                        el("td", { class: "n" }, time(project.created_ms, day(project.created_ms))),
                    ),
                ),
            ),
        ),
    );
}
