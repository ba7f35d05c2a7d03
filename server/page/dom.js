// SPDX-License-Identifier: Apache-2.0
// Elements, made from text alone: no string of a server's or a user's is ever read as HTML.

import { clock } from "./format.js";

// `defaultChecked` and `defaultSelected` are what a form goes back to.
const PROPERTIES = new Set([
    "value",
    "checked",
    "defaultChecked",
    "defaultSelected",
    "disabled",
    "hidden",
    "open",
    "readOnly",
]);
const SVG = "http://www.w3.org/2000/svg";

function set(node, name, value) {
    if (value === null || value === undefined) return;
    if (name === "on") {
        for (const [kind, listener] of Object.entries(value)) node.addEventListener(kind, listener);
    } else if (PROPERTIES.has(name)) {
        node[name] = value;
    } else if (name === "href" && !/^[/#]/.test(value)) {
        throw new Error("a link leads within the page");
    } else if (value === true) {
        node.setAttribute(name, "");
    } else if (value !== false) {
        node.setAttribute(name, String(value));
    }
}

/**
 * An element. `attributes` are attributes and properties by name, `on` listeners by event; children are
 * nodes, texts,
 * lists of them, or nothing (null, undefined, false).
 */
export function el(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    node.append(
        ...children
            .flat(Infinity)
            .filter((child) => child !== null && child !== undefined && child !== false),
    );
    for (const [name, value] of Object.entries(attributes)) set(node, name, value); // after a select's options
    return node;
}

/** An SVG element; as `el`. */
export function svg(tag, attributes = {}, ...children) {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) set(node, name, value);
    node.append(...children);
    return node;
}

/** A name that somebody else has chosen: its writing direction ends with it. */
export const named = (text, attributes = {}) => el("bdi", attributes, text);

/** A button that does something here. */
export const button = (text, click, attributes = {}) =>
    el("button", { type: "button", on: { click }, ...attributes }, text);

/** A point in time as the reader's clock has it; the exact one in its title. */
export function time(ms, text) {
    const date = new Date(ms);
    return el("time", { datetime: date.toISOString(), title: clock(ms) }, text);
}

/** Says something to a screen reader. */
export function announce(text) {
    const place = document.getElementById("announce");
    place.textContent = "";
    setTimeout(() => {
        place.textContent = text;
    }, 50); // a change is what is read out
}

/** A line above the view, until the next one or until it is closed. */
export function notice(text, kind = "bad") {
    const place = document.getElementById("notices");
    place.replaceChildren(
        el(
            "div",
            { class: `notice ${kind}`, role: kind === "bad" ? "alert" : "status" },
            el("p", {}, text),
            button("Close", () => clearNotices(), { class: "quiet" }),
        ),
    );
}

export const clearNotices = () => document.getElementById("notices").replaceChildren();

/**
 * Asks before something that cannot be undone.
 * @returns {Promise<boolean>}
 */
export function confirm({ title, text, action, danger = true }) {
    return new Promise((resolve) => {
        const close = (answer) => () => {
            dialog.close();
            dialog.remove();
            resolve(answer);
        };
        const dialog = el(
            "dialog",
            { "aria-labelledby": "confirm-title", on: { cancel: close(false) } },
            el("h2", { id: "confirm-title" }, title),
            el("p", {}, text),
            el(
                "div",
                { class: "actions" },
                button("Cancel", close(false), { autofocus: true }),
                button(action, close(true), { class: danger ? "danger" : "primary" }),
            ),
        );
        document.body.append(dialog);
        dialog.showModal();
    });
}

/** A text with a button that copies it. */
export function copyable(text, { label = "Copy", block = true } = {}) {
    const copy = button(
        label,
        async () => {
            try {
                await navigator.clipboard.writeText(text);
                copy.textContent = "Copied";
                announce("Copied");
            } catch {
                getSelection().selectAllChildren(code);
                copy.textContent = "Press Ctrl+C";
            }
            setTimeout(() => {
                copy.textContent = label;
            }, 2000);
        },
        { class: "copy" },
    );
    const code = el("code", { tabindex: block ? 0 : null }, text);
    return el(
        block ? "div" : "span",
        { class: "copyable" },
        block ? el("pre", { tabindex: -1 }, code) : code,
        copy,
    );
}

/** A field of a form with its label, and a hint below. */
export function field(label, input, hint = null) {
    const id = input.id || `field-${label.toLowerCase().replace(/[^a-z]+/g, "-")}`;
    input.id = id;
    if (hint) input.setAttribute("aria-describedby", `${id}-hint`);
    return el(
        "div",
        { class: "field" },
        el("label", { for: id }, label),
        input,
        hint && el("p", { class: "hint", id: `${id}-hint` }, hint),
    );
}

/**
 * A form that sends once at a time and shows what went wrong.
 * @param {(data: FormData) => Promise<void>} send - throws what is shown
 */
export function form(fields, action, send, attributes = {}) {
    const problem = el("p", { class: "problem", role: "alert" });
    const go = el("button", { type: "submit", class: "primary" }, action);
    const node = el(
        "form",
        {
            ...attributes,
            on: {
                submit: async (event) => {
                    event.preventDefault();
                    problem.textContent = "";
                    go.disabled = true;
                    try {
                        await send(new FormData(node));
                    } catch (error) {
                        problem.textContent = error.message;
                    } finally {
                        go.disabled = false;
                    }
                },
            },
        },
        fields,
        problem,
        el("div", { class: "actions" }, go),
    );
    return node;
}
