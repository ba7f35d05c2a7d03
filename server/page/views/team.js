// SPDX-License-Identifier: Apache-2.0
// One team: members, invitations, its name and its end. What a role does not allow is not shown; the server
// decides.

import { get, patch, post, remove } from "../api.js";
import { announce, button, confirm, copyable, el, field, form, named, notice, time } from "../dom.js";
import { count, day, until } from "../format.js";
import { atLeast, card, crumbs, roleChoice, settingsTable } from "../roles.js";
import { navigate } from "../router.js";

const DAYS = [
    ["1", "a day"],
    ["7", "7 days"],
    ["30", "30 days"],
];

export async function show({ place, params, session, signal }) {
    const path = `/teams/${params[0]}`;
    const [team, { members }] = await Promise.all([
        get(path, null, signal),
        get(`${path}/members`, null, signal),
    ]);
    const admin = atLeast(team.role, "admin");
    const invitations = admin ? (await get(`${path}/invitations`, null, signal)).invitations : null;
    const heading = el("h1", {}, named(team.name));
    place.classList.add("middle");
    place.append(
        crumbs(["/teams", "Teams"]),
        el(
            "div",
            { class: "bar" },
            heading,
            el("span", { class: "soft" }, `your role: ${team.role}`),
            admin && el("a", { class: "button push", href: `/teams/${team.id}/audit` }, "Audit log"),
        ),
        membersCard(path, team, members, session),
    );
    if (invitations) place.append(invitationsCard(path, team, invitations));
    if (team.role === "owner") place.append(teamCard(path, team, heading));
}

// ---- members ----

function membersCard(path, team, members, session) {
    const body = el("tbody");
    const fill = () => body.replaceChildren(...members.map(row));
    const alter = async (change, said) => {
        try {
            await change();
            members.splice(0, members.length, ...(await get(`${path}/members`)).members);
            announce(said);
        } catch (error) {
            notice(error.message);
        }
        fill();
    };
    const leave = async (member, self) => {
        const sure = await confirm({
            title: self ? "Leave this team?" : "Remove this member?",
            action: self ? "Leave" : "Remove",
            text:
                `“${member.name}” sees nothing of the team from then on, and programs with their tokens send ` +
                "nothing more to it. Their projects and runs stay.",
        });
        if (!sure) return;
        const gone = () => remove(`${path}/members/${encodeURIComponent(member.name)}`);
        if (!self) {
            await alter(gone, "Removed");
            return;
        }
        try {
            await gone();
            navigate("/teams");
        } catch (error) {
            notice(error.message);
        }
    };
    const row = (member) => {
        const self = member.name === session.account.name;
        const mine = atLeast(team.role, "admin") && atLeast(team.role, member.role);
        const choice =
            mine &&
            roleChoice(team.role, member.role, {
                "aria-label": `Role of ${member.name}`,
                on: {
                    change: () =>
                        alter(
                            () =>
                                patch(`${path}/members/${encodeURIComponent(member.name)}`, {
                                    role: choice.value,
                                }),
                            `${member.name} is ${choice.value} now`,
                        ),
                },
            });
        return el(
            "tr",
            {},
            el(
                "th",
                { scope: "row", class: "wrap" },
                named(member.name),
                self && " (you)",
                member.disabled && el("span", { class: "soft" }, " disabled"),
            ),
            el("td", {}, choice || member.role),
            el("td", { class: "when" }, time(member.joined_ms, day(member.joined_ms))),
            el(
                "td",
                { class: "n" },
                (self || mine) &&
                    button(self ? "Leave" : "Remove", () => leave(member, self), {
                        class: "quiet",
                        "aria-label": self ? "Leave the team" : `Remove ${member.name}`,
                    }),
            ),
        );
    };
    fill();
    return card("members", count(members.length, "member"), settingsTable(["Name", "Role", "Joined", ""], body));
}

// ---- invitations ----

function invitationsCard(path, team, invitations) {
    const made = el("div", { "aria-live": "polite" });
    const body = el("tbody");
    const none = el("p", { class: "soft" }, "No invitation is open.");
    const table = settingsTable(["Role", "By", "Made", "Expires", ""], body);
    const fill = () => {
        body.replaceChildren(...invitations.map(row));
        table.hidden = invitations.length === 0;
        none.hidden = invitations.length > 0;
    };
    const revoke = async (invitation) => {
        try {
            await remove(`${path}/invitations/${invitation.id}`);
            invitations.splice(invitations.indexOf(invitation), 1);
            made.replaceChildren();
            fill();
            announce("Revoked");
        } catch (error) {
            notice(error.message);
        }
    };
    const row = (invitation) => {
        const expired = invitation.expires_ms <= Date.now();
        return el(
            "tr",
            {},
            el("th", { scope: "row" }, invitation.role),
            el("td", { class: "wrap" }, named(invitation.by)),
            el("td", { class: "when" }, time(invitation.created_ms, day(invitation.created_ms))),
            el(
                "td",
                { class: expired ? "when bad-text" : "when" },
                time(invitation.expires_ms, expired ? "expired" : until(invitation.expires_ms)),
            ),
            el(
                "td",
                { class: "n" },
                button("Revoke", () => revoke(invitation), {
                    class: "quiet",
                    "aria-label": `Revoke the invitation as ${invitation.role} by ${invitation.by}`,
                }),
            ),
        );
    };
    const create = form(
        [
            field("Role", roleChoice(team.role, "member", { name: "role" })),
            field(
                "Works for",
                el(
                    "select",
                    { name: "days" },
                    DAYS.map(([days, text]) =>
                        el("option", { value: days, defaultSelected: days === "7" }, text),
                    ),
                ),
            ),
        ],
        "Make the link",
        async (data) => {
            const invitation = await post(`${path}/invitations`, {
                role: data.get("role"),
                days: Number(data.get("days")),
            });
            invitations.unshift(invitation);
            fill();
            made.replaceChildren(
                el(
                    "div",
                    { class: "card" },
                    el("h3", {}, `An invitation as ${invitation.role}`),
                    el(
                        "p",
                        { class: "small soft" },
                        "The link works once, for one person. It is shown this once: send it to them.",
                    ),
                    copyable(`${location.origin}/join#token=${invitation.token}`, { label: "Copy the link" }),
                ),
            );
            made.querySelector("button").focus();
        },
    );
    fill();
    return card(
        "invitations",
        "Invitations",
        made,
        none,
        table,
        el("details", {}, el("summary", {}, "New invitation"), create),
    );
}

// ---- the team itself ----

function teamCard(path, team, heading) {
    const rename = form(
        [
            field(
                "Name of the team",
                el("input", {
                    name: "name",
                    required: true,
                    maxlength: 128,
                    autocomplete: "off",
                    value: team.name,
                }),
            ),
        ],
        "Rename",
        async (data) => {
            const renamed = await patch(path, { name: data.get("name") });
            heading.replaceChildren(named(renamed.name));
            announce("Renamed");
        },
    );
    const drop = button(
        "Delete the team",
        async () => {
            const sure = await confirm({
                title: "Delete this team?",
                action: "Delete for good",
                text: `“${team.name}” can be deleted once it has no projects. Its members keep their accounts.`,
            });
            if (!sure) return;
            try {
                await remove(path);
                navigate("/teams");
            } catch (error) {
                notice(error.message);
            }
        },
        { class: "danger" },
    );
    return card("team", "The team", rename, el("div", { class: "actions apart" }, drop));
}
