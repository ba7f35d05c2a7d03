// SPDX-License-Identifier: Apache-2.0
// Sizes, durations and numbers as text; as MemScale prints them elsewhere.

const BINARY = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** Three significant digits. */
function short(value) {
    const size = Math.abs(value);
    return minus(value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2));
}

/** With a sign that is as wide as a plus. */
const minus = (text) => text.replace(/^-/, "−");

/** A size: "7.45 GiB". */
export function bytes(value) {
    if (!Number.isFinite(value)) return "–";
    let power = 0;
    let size = Math.abs(value);
    while (size >= 999.5 && power < BINARY.length - 1) {
        size /= 1024;
        power += 1;
    }
    return `${value < 0 ? "−" : ""}${power === 0 ? size.toFixed(0) : short(size)} ${BINARY[power]}`;
}

/** A duration given in nanoseconds: "12.3 ms". */
export function nanoseconds(value) {
    if (!Number.isFinite(value)) return "–";
    const size = Math.abs(value);
    if (size >= 60e9) return duration(value / 1e6);
    if (size >= 1e9) return `${short(value / 1e9)} s`;
    if (size >= 1e6) return `${short(value / 1e6)} ms`;
    if (size >= 1e3) return `${short(value / 1e3)} µs`;
    return `${minus(value.toFixed(0))} ns`;
}

/** A long duration given in milliseconds, in its two largest units: "2 h 5 min". */
export function duration(ms) {
    const seconds = Math.max(0, Math.round(ms / 1000));
    if (seconds < 60) return `${seconds} s`;
    const minutes = Math.floor(seconds / 60);
    if (minutes < 60) return `${minutes} min ${seconds % 60} s`;
    const hours = Math.floor(minutes / 60);
    if (hours < 24) return `${hours} h ${minutes % 60} min`;
    return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** A moment as the reader's clock has it: "2026-11-28 15:02:24". */
export function clock(ms) {
    const date = new Date(ms);
    return `${day(ms)} ${[date.getHours(), date.getMinutes(), date.getSeconds()].map(two).join(":")}`;
}

/** How long ago: "3 min ago". */
export function ago(ms, now = Date.now()) {
    const seconds = (now - ms) / 1000;
    if (seconds < 0) return until(ms, now);
    if (seconds < 10) return "just now";
    if (seconds < 60) return `${Math.floor(seconds)} s ago`;
    if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
    if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
    if (seconds < 30 * 86400) return `${Math.floor(seconds / 86400)} d ago`;
    return day(ms);
}

/** How long until: "in 3 d". */
export function until(ms, now = Date.now()) {
    return `in ${duration(ms - now)}`;
}

const two = (value) => String(value).padStart(2, "0");

/** A day: "2026-11-28". */
export function day(ms) {
    const date = new Date(ms);
    return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
}

/** A number: whole ones exactly, others with five significant digits. */
export function number(value) {
    if (value === null || value === undefined) return "–";
    if (!Number.isFinite(value)) return String(value);
    if (Number.isInteger(value) && Math.abs(value) < 1e15) return minus(value.toLocaleString("en-US"));
    const size = Math.abs(value);
    return minus(size >= 1e6 || size < 1e-4 ? value.toExponential(3) : String(Number(value.toPrecision(5))));
}

/** A value of a series with its unit. */
export function quantity(value, unit) {
    if (value === null || value === undefined) return "–";
    if (unit === "bytes") return bytes(value);
    if (unit === "ns") return nanoseconds(value);
    return unit ? `${number(value)} ${unit}` : number(value);
}

/** A tick of an axis: a quantity without zeros at its end. */
export const tick = (value, unit) =>
    quantity(value, unit)
        .replace(/(\.\d*?)0+(?=\s|$)/, "$1")
        .replace(/\.(?=\s|$)/, "");

/** A share with its sign, in percent: "+1.2 %". */
export function signedPercent(ratio) {
    if (!Number.isFinite(ratio)) return "–";
    const value = ratio * 100;
    const digits = Math.abs(value) < 10 ? 1 : 0;
    const rounded = value.toFixed(digits);
    const sign = Number(rounded) === 0 ? "±" : value > 0 ? "+" : "−";
    return `${sign}${rounded.replace("-", "")} %`;
}

/** A share in percent: "85 %". */
export const percent = (ratio) => (Number.isFinite(ratio) ? `${(ratio * 100).toFixed(0)} %` : "–");

/** JSON's stand-ins for what JSON has no number for. */
export const value = (raw) => (typeof raw === "string" ? Number(raw) : raw);

/** One thing, many things. */
export const count = (n, one, many = `${one}s`) => `${number(n)} ${n === 1 ? one : many}`;
