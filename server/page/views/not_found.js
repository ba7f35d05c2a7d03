// SPDX-License-Identifier: Apache-2.0
import { el } from "../dom.js";

export function show({ place }) {
    place.classList.add("narrow");
    place.append(
        el("h1", {}, "No such page"),
        el("p", {}, "Nothing is shown at this address."),
        el("a", { class: "button primary", href: "/" }, "All projects"),
    );
}
