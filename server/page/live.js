// SPDX-License-Identifier: Apache-2.0
// What happens to a run, while its tab is visible.
//
//   visible ─► EventSource from the version that was drawn ──► batch, run, reset, gone
//                 └ no stream comes through ─► the run is read every five seconds;
//                                              each minute a stream is tried again
//   hidden  ─► nothing; a browser has few connections to one server
//
// Batches come as fast as a run sends them. They are gathered, and handed on at most once a second, or as
// often as the last
// redraw allows.

import { get } from "./api.js";

const POLL_MS = 5000;
const POLLS = 12; // then a stream is tried again
const OPEN_MS = 8000; // some proxies hold a stream back and say nothing
const LEAST_MS = 1000;
const TRIES = 3;

/** What has changed since the last call: to be read again. */
const nothing = () => ({ series: false, events: false, documents: false });

export class Live {
    #run;
    #version;
    #hear;
    #source = null;
    #failures = 0;
    #poll = null;
    #polls = 0;
    #deadline = null;
    #pending = null;
    #timer = null;
    #busy = false;
    #pause = LEAST_MS;
    #closed = false;
    #onVisible = () => (document.hidden ? this.#stop() : this.#begin());

    /**
     * @param {string} run - its id
     * @param {number} version - that is drawn already
     * @param hear - changed({series, events, documents}) → Promise; run(run); gone(); how(text)
     */
    constructor(run, version, hear) {
        this.#run = run;
        this.#version = version;
        this.#hear = hear;
        document.addEventListener("visibilitychange", this.#onVisible);
        this.#onVisible();
    }

    close() {
        this.#closed = true;
        document.removeEventListener("visibilitychange", this.#onVisible);
        this.#stop();
        clearTimeout(this.#timer);
    }

    #begin() {
        if (this.#closed || this.#source || this.#poll) return;
        if (this.#failures >= TRIES) {
            this.#beginPolling();
            return;
        }
        const source = new EventSource(`/api/v1/runs/${this.#run}/live?after=${this.#version}`);
        this.#source = source;
        this.#deadline = setTimeout(() => this.#instead(), OPEN_MS);
        source.addEventListener("open", () => {
            clearTimeout(this.#deadline);
            this.#failures = 0;
            this.#hear.how("live");
        });
        source.addEventListener("error", () => this.#failed(source));
        source.addEventListener("batch", (event) => {
            const change = JSON.parse(event.data);
            this.#heard(event, {
                series: change.more || change.series.length > 0,
                events: change.more || change.events > 0,
                documents: change.more || change.documents.length > 0,
            });
        });
        source.addEventListener("reset", (event) =>
            this.#heard(event, { series: true, events: true, documents: true }),
        );
        source.addEventListener("run", (event) => {
            this.#heard(event, nothing());
            this.#hear.run(JSON.parse(event.data));
        });
        source.addEventListener("gone", () => this.#gone());
    }

    #stop() {
        this.#source?.close();
        this.#source = null;
        clearTimeout(this.#deadline);
        clearInterval(this.#poll);
        this.#poll = null;
        this.#hear.how("paused");
    }

    #gone() {
        this.close();
        this.#hear.gone();
    }

    #failed(source) {
        if (source !== this.#source) return;
        this.#failures += 1;
        if (source.readyState !== EventSource.CLOSED && this.#failures < TRIES) {
            this.#hear.how("connecting again");
            return;
        }
        this.#instead();
    }

    // ---- without a stream ----

    #instead() {
        clearTimeout(this.#deadline);
        this.#source?.close();
        this.#source = null;
        this.#beginPolling();
    }

    #beginPolling() {
        this.#hear.how("asking every 5 s");
        this.#polls = 0;
        this.#poll = setInterval(() => this.#ask(), POLL_MS);
        this.#ask();
    }

    async #ask() {
        try {
            const run = await get(`/runs/${this.#run}`);
            if (this.#closed || !this.#poll) return;
            this.#hear.how("asking every 5 s");
            if (run.version !== this.#version) {
                this.#version = run.version;
                this.#gather({ series: true, events: true, documents: true });
            }
            this.#hear.run(run);
            this.#polls += 1;
            if (this.#polls === POLLS) this.#streamAgain();
        } catch (error) {
            if (error.status === 404) this.#gone();
            else if (error.status !== 401) this.#hear.how("no answer");
        }
    }

    #streamAgain() {
        this.#failures = 0;
        this.#stop();
        this.#begin();
    }

    // ---- gathering ----

    #heard(event, change) {
        if (event.lastEventId) this.#version = Number(event.lastEventId);
        this.#gather(change);
    }

    #gather(change) {
        if (!change.series && !change.events && !change.documents) return;
        this.#pending ??= nothing();
        for (const what of Object.keys(this.#pending)) this.#pending[what] ||= change[what];
        this.#schedule();
    }

    #schedule() {
        if (this.#timer || this.#busy || this.#closed) return;
        this.#timer = setTimeout(() => this.#handOn(), this.#pause);
    }

    async #handOn() {
        this.#timer = null;
        const change = this.#pending;
        this.#pending = null;
        this.#busy = true;
        const begun = performance.now();
        try {
            await this.#hear.changed(change);
        } finally {
            this.#busy = false;
            this.#pause = Math.max(LEAST_MS, 4 * (performance.now() - begun));
            if (this.#pending) this.#schedule();
        }
    }
}
