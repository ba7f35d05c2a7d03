// SPDX-License-Identifier: Apache-2.0
// A project: its name, who sees it, how long its runs are kept, its end.

import { get, patch, post, put, remove } from "../api.js";
import { announce, button, confirm, el, field, form, named, notice, time } from "../dom.js";
import { ago, count } from "../format.js";
import { card, crumbs, settingsTable } from "../roles.js";
import { navigate } from "../router.js";

export async function show({ place, params, signal }) {
    const path = `/projects/${params[0]}`;
    const project = await get(path, null, signal);
    const [{ chosen }, { members }] = await Promise.all([
        get(`${path}/chosen`, null, signal),
        get(`/teams/${project.team}/members`, null, signal),
    ]);
    const title = el("span", {}, named(project.name));
    place.classList.add("middle");
    place.append(
        crumbs(["/", "Projects"], [path, project.name]),
        el(
            "div",
            { class: "bar" },
            el("h1", {}, "Settings of ", title),
            el("span", { class: "soft" }, "made by ", named(project.owner)),
        ),
    );
    if (!project.may_change) {
        place.append(
            el(
                "p",
                { class: "card" },
                "Who made the project, and admins of its team, may change it. It is seen by ",
                project.visibility === "team" ? "the team." : "who was chosen.",
            ),
        );
        return;
    }
    place.append(
        nameCard(path, project, title),
        sightCard(path, project, members, chosen),
        retentionCard(path, project),
        endCard(path, project),
    );
}

function nameCard(path, project, title) {
    return card(
        "name",
        "Name",
        form(
            [
                field(
                    "Name of the project",
                    el("input", {
                        name: "name",
                        required: true,
                        maxlength: 128,
                        autocomplete: "off",
                        value: project.name,
                    }),
                    "Programs that send to the old name make a new project of it.",
                ),
            ],
            "Rename",
            async (data) => {
                project.name = (await patch(path, { name: data.get("name") })).name;
                title.replaceChildren(named(project.name));
                announce("Renamed");
            },
        ),
    );
}

// ---- who sees it ----

function sightCard(path, project, members, chosen) {
    const people = el("fieldset", {}, el("legend", {}, "Chosen to see it, in the role that they have"));
    const others = members.filter((member) => member.name !== project.owner);
    const toggle = (member) => async (event) => {
        const box = event.target;
        const one = `${path}/chosen/${encodeURIComponent(member.name)}`;
        try {
            await (box.checked ? put(one) : remove(one));
            announce(box.checked ? `${member.name} sees it` : `${member.name} does not see it`);
        } catch (error) {
            box.checked = !box.checked;
            notice(error.message);
        }
    };
    people.append(
        ...others.map((member) =>
            el(
                "label",
                { class: "check" },
                el("input", {
                    type: "checkbox",
                    checked: chosen.includes(member.name),
                    on: { change: toggle(member) },
                }),
                el("span", {}, named(member.name), el("span", { class: "soft" }, ` ${member.role}`)),
            ),
        ),
        others.length === 0 ? el("p", { class: "soft" }, "The team has nobody else.") : "",
    );
    const choice = el(
        "select",
        {
            on: {
                change: async () => {
                    try {
                        project.visibility = (await patch(path, { visibility: choice.value })).visibility;
                        announce("Changed");
                    } catch (error) {
                        notice(error.message);
                    }
                    choice.value = project.visibility;
                    people.hidden = project.visibility === "team";
                },
            },
        },
        [
            ["team", "all of the team"],
            ["private", "who made it, those chosen, and admins"],
        ].map(([value, text]) => el("option", { value }, text)),
    );
    choice.value = project.visibility;
    people.hidden = project.visibility === "team";
    return card("sight", "Who sees it", field("Seen by", choice), people);
}

// ---- how long runs are kept ----

const days = (label, name, value) =>
    field(
        label,
        el("input", { name, type: "number", min: 1, max: 36500, value: value ?? "", inputmode: "numeric" }),
        "Days since the run's last sign of life; empty: never.",
    );

const number = (data, name) => (data.get(name) === "" ? null : Number(data.get(name)));

function retentionCard(path, project) {
    const would = el("div", { "aria-live": "polite" });
    const rule = form(
        [
            days("Archive after", "archive_days", project.archive_days),
            days("Delete after", "delete_days", project.delete_days),
        ],
        "Keep to this",
        async (data) => {
            const asked = await preview(path, data);
            if (asked.archives + asked.deletes > 0) {
                const sure = await confirm({
                    title: "Begin at once?",
                    action: "Begin",
                    text:
                        `${count(asked.archives, "run")} will be archived and ${count(asked.deletes, "run")} ` +
                        "deleted for good now, others as they come of age. Pinned runs stay.",
                });
                if (!sure) return;
            }
            await patch(path, {
                archive_days: number(data, "archive_days"),
                delete_days: number(data, "delete_days"),
            });
            would.replaceChildren();
            announce("Kept to from now on");
            notice("The rule is set. It is kept to in the background.", "good");
        },
    );
    const look = button("Show what would go", async () => {
        try {
            would.replaceChildren(...shown(await preview(path, new FormData(rule))));
        } catch (error) {
            notice(error.message);
        }
    });
    rule.querySelector(".actions").append(look);
    return card("retention", "How long runs are kept", rule, would);
}

const preview = (path, data) =>
    get(`${path}/retention`, {
        archive_days: number(data, "archive_days") ?? 0,
        delete_days: number(data, "delete_days") ?? 0,
    });

function shown(would) {
    const runs = [
        ...would.deleted_first.map((run) => [run, "deleted"]),
        ...would.archived_first.map((run) => [run, "archived"]),
    ];
    return [
        el(
            "p",
            {},
            `Now: ${count(would.archives, "run")} archived, ${count(would.deletes, "run")} deleted, ` +
                `${count(would.pinned, "pinned run")} left alone.`,
        ),
        runs.length > 0 &&
            settingsTable(
                ["Run", "Last heard of", "Would be"],
                el(
                    "tbody",
                    {},
                    runs.map(([run, what]) =>
                        el(
                            "tr",
                            {},
                            el(
                                "th",
                                { scope: "row", class: "wrap" },
                                el("a", { href: `/runs/${run.id}` }, named(run.name)),
                            ),
                            el("td", { class: "when" }, time(run.seen_ms, ago(run.seen_ms))),
                            el("td", { class: what === "deleted" ? "bad-text" : null }, what),
                        ),
                    ),
                ),
            ),
    ].filter(Boolean);
}

// ---- its end ----

function endCard(path, project) {
    const act = (title, text, action, done) => async () => {
        if (!(await confirm({ title, text, action }))) return;
        try {
            await done();
        } catch (error) {
            notice(error.message);
        }
    };
    return card(
        "end",
        "Delete",
        el(
            "div",
            { class: "actions" },
            button(
                "Delete archived runs",
                act(
                    "Delete what is archived?",
                    `All archived runs of “${project.name}” that are not pinned are deleted for good.`,
                    "Delete for good",
                    async () => {
                        await post(`${path}/purge`);
                        notice("They are deleted in the background.", "good");
                    },
                ),
                { class: "danger" },
            ),
            button(
                "Delete the project",
                act(
                    "Delete this project?",
                    `“${project.name}” is deleted for good with all its runs, archived and pinned ones, too.`,
                    "Delete for good",
                    async () => {
                        await remove(path);
                        navigate("/");
                    },
                ),
                { class: "danger" },
            ),
        ),
    );
}
