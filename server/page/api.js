// SPDX-License-Identifier: Apache-2.0
// The server's API, and its refusals in words. The browser sends the session's cookie, Origin and
// Sec-Fetch-Site by itself:
// that is all that a change needs.

/** A refusal, or no answer. `status` is 0 where none came; `field` is what the server finds wrong. */
export class ApiError extends Error {
    constructor(message, { status = 0, code = "", field = "" } = {}) {
        super(message);
        this.name = "ApiError";
        this.status = status;
        this.code = code;
        this.field = field;
    }
}

const AWAY = "The server does not answer. It may be restarting, or the connection is gone.";

function inSeconds(response) {
    const seconds = Number(response.headers.get("Retry-After"));
    if (!(seconds > 0)) return "Try later.";
    return seconds < 120 ? `Try again in ${seconds} s.` : `Try again in ${Math.ceil(seconds / 60)} min.`;
}

/** What a person reads when the server refuses. */
function inWords(response, error) {
    switch (response.status) {
        case 429:
            return `Too many tries. ${inSeconds(response)}`;
        case 503:
            return `The server is busy. ${inSeconds(response)}`;
        case 507:
            return "The server's disk is full: nothing was changed.";
        case 413:
            return "That is more than the server takes at once.";
        case 403:
            return error.message || "You may not do this.";
        default:
            break;
    }
    const message = error.message || `The server answered with ${response.status}.`;
    const sentence = message.charAt(0).toUpperCase() + message.slice(1);
    const shown = error.value ? ` (${error.value})` : "";
    return `${sentence}${shown}${/[.!?]$/.test(sentence) && !shown ? "" : "."}`;
}

async function refusal(response) {
    let error = {};
    try {
        error = (await response.json()).error ?? {};
    } catch {
        // a proxy's answer: its status has to do
    }
    return new ApiError(inWords(response, error), {
        status: response.status,
        code: error.code,
        field: error.field,
    });
}

function withQuery(path, query) {
    const parts = new URLSearchParams();
    for (const [name, value] of Object.entries(query ?? {})) {
        for (const one of [value].flat())
            if (one !== null && one !== undefined && one !== "") parts.append(name, one);
    }
    const text = parts.toString();
    return text ? `${path}?${text}` : path;
}

/**
 * One request. A body is sent as JSON, an answer read as JSON; 204 is null.
 * @throws {ApiError}; what `signal` has aborted throws its AbortError
 */
export async function request(method, path, { query, body, signal } = {}) {
    const options = { method, signal, credentials: "same-origin", headers: { Accept: "application/json" } };
    if (body !== undefined) {
        options.body = JSON.stringify(body);
        options.headers["Content-Type"] = "application/json";
    }
    let response;
    try {
        response = await fetch(withQuery(`/api/v1${path}`, query), options);
    } catch (error) {
        if (signal?.aborted) throw error;
        throw new ApiError(AWAY);
    }
    if (!response.ok) {
        const error = await refusal(response);
        if (response.status === 401 && !path.startsWith("/login") && !path.startsWith("/me/password")) {
            dispatchEvent(new CustomEvent("signed-out"));
        }
        throw error;
    }
    try {
        return response.status === 204 ? null : await response.json();
    } catch (error) {
        if (signal?.aborted) throw error;
        throw new ApiError(AWAY);
    }
}

export const get = (path, query, signal) => request("GET", path, { query, signal });
export const post = (path, body) => request("POST", path, { body });
export const put = (path, body) => request("PUT", path, { body });
export const patch = (path, body) => request("PATCH", path, { body });
export const remove = (path) => request("DELETE", path);

const MOST_SERIES = 32; // of one request

/**
 * Any number of series of a run in buckets; as `points` of the API, which takes a few at a time.
 * Give `from` and `to` where there are more than 32 names, so that all have the same buckets.
 */
export async function points(run, names, { buckets, from, to } = {}, signal) {
    const path = `/runs/${encodeURIComponent(run)}/points`;
    const parts = [];
    for (let first = 0; first < names.length; first += MOST_SERIES) {
        const series = names.slice(first, first + MOST_SERIES);
        parts.push(get(path, { series, buckets, from, to }, signal));
    }
    const answers = await Promise.all(parts);
    return { ...answers[0], series: answers.flatMap((answer) => answer.series) };
}

/** True for what is no trouble: the view was left before an answer came. */
export const isAbort = (error) => error?.name === "AbortError";
