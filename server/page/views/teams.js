// SPDX-License-Identifier: Apache-2.0
// The teams of an account; an admin of the server makes others.

import { get, post } from "../api.js";
import { el, field, form, named, time } from "../dom.js";
import { count, day } from "../format.js";
import { settingsTable } from "../roles.js";
import { navigate } from "../router.js";

export async function show({ place, session, signal }) {
    const { teams } = await get("/teams", null, signal);
    place.classList.add("middle");
    place.append(
        el("div", { class: "bar" }, el("h1", {}, "Teams")),
        el(
            "div",
            { class: "card" },
            teams.length
                ? settingsTable(["Name", "Your role", "Members", "Projects", "Made"], rows(teams))
                : el(
                      "p",
                      { class: "soft" },
                      "You are in no team. An admin or owner of one can send you an invitation, which is a link.",
                  ),
        ),
    );
    if (session.account.admin) place.append(newTeam());
}

const rows = (teams) =>
    el(
        "tbody",
        {},
        teams.map((team) =>
            el(
                "tr",
                {},
                el(
                    "th",
                    { scope: "row", class: "wrap" },
                    el("a", { href: `/teams/${team.id}` }, named(team.name)),
                ),
                el("td", {}, team.role),
                el("td", {}, count(team.members, "member")),
                el("td", {}, count(team.projects, "project")),
                el("td", { class: "when" }, time(team.created_ms, day(team.created_ms))),
            ),
        ),
    );

function newTeam() {
    return el(
        "details",
        { class: "card" },
        el("summary", {}, "New team"),
        form(
            [
                field(
                    "Name",
                    el("input", { name: "name", required: true, maxlength: 128, autocomplete: "off" }),
                    "You will be its owner, and can hand it on.",
                ),
            ],
            "Make the team",
            async (data) => {
                const team = await post("/teams", { name: data.get("name") });
                navigate(`/teams/${team.id}`);
            },
        ),
    );
}
