/* The pages of locks and of beat: times that tick, and a page that refreshes itself and keeps what is selected. */
"use strict";
{
    const ONE = "#heldlock_form, #beatrun_form"; // the page of one lock, or of one entry of beat
    const CONTROLS = ".distlock-refresh"; // the elements that this script adds to a page
    const EVERY = 5000; // ms between two looks at the store, at least
    const REST = 4; // the pause, in lengths of the last look: many locks, or a backend that hangs, keep the site busy
    const ABOUT_BACKEND = "distlock-backend"; // class of messages that each look replaces
    const PAUSED = "distlock-paused"; // the key by which this tab remembers that it was paused

    const TEXTS = document.currentScript.dataset; // in the language of the page

    // Fills "%(name)s" as Django does.
    function filled(text, values) {
        return text.replace(/%\((\w+)\)s/g, (_, name) => values[name]);
    }

    // When the answer came, on a clock that nobody sets; times are counted from it. Null if nothing is known any more.
    let seenAt = performance.getEntriesByType("navigation")[0]?.responseStart || performance.now();

    function inWords(seconds) {
        const whole = Math.floor(seconds);
        const two = (number) => String(number).padStart(2, "0");
        if (whole < 60) {
            return filled(TEXTS.seconds, { seconds: whole });
        }
        if (whole < 3600) {
            return filled(TEXTS.minutes, { minutes: Math.floor(whole / 60), seconds: two(whole % 60) });
        }
        if (whole < 86400) {
            const minutes = two(Math.floor((whole % 3600) / 60));
            return filled(TEXTS.hours, { hours: Math.floor(whole / 3600), minutes });
        }
        const hours = two(Math.floor((whole % 86400) / 3600));
        return filled(TEXTS.days, { days: Math.floor(whole / 86400), hours });
    }

    function tick() {
        for (const element of document.querySelectorAll(".distlock-seconds")) {
            const { seconds, step } = element.dataset;
            const passed = (performance.now() - seenAt) / 1000;
            const text = seenAt === null ? "-" : inWords(Math.max(0, Number(seconds) + Number(step) * passed));
            if (element.textContent !== text) {
                element.textContent = text;
            }
        }
    }

    // Django's script keeps a list of the first page's checkboxes. Give it a list that follows changes of the page.
    if (window.Actions) {
        const original = window.Actions;
        window.Actions = function (checkboxes, options) {
            const current = document.getElementsByClassName("action-select");
            current.forEach = Array.prototype.forEach;
            return original(current, options);
        };
    }

    // It also remembers the last clicked checkbox, for a range by Shift. If that is gone, a range would begin on top.
    let lastClicked = null;
    document.addEventListener("change", (event) => {
        if (event.target.classList.contains("action-select")) {
            if (lastClicked && !lastClicked.isConnected) {
                document.dispatchEvent(new KeyboardEvent("keyup")); // Shift is not pressed any more
            }
            lastClicked = event.target;
        }
    }, true);

    // A click is lost if its element is replaced between the press and the release of the button.
    let clicked = Promise.resolve();
    document.addEventListener("pointerdown", () => {
        clicked = new Promise((resolve) => {
            for (const end of ["pointerup", "pointercancel"]) {
                document.addEventListener(end, () => setTimeout(resolve), { once: true, capture: true });
            }
        });
    }, true);

    function checkboxOf(row) {
        return row.querySelector("input.action-select");
    }

    function replaceRows(table, fresh) {
        const known = new Map();
        for (const row of table.tBodies[0].rows) {
            const checkbox = checkboxOf(row);
            if (checkbox) {
                known.set(checkbox.value, checkbox);
            }
        }
        const focused = document.activeElement;
        for (const row of fresh.tBodies[0].rows) {
            const checkbox = checkboxOf(row);
            const before = checkbox && known.get(checkbox.value);
            if (before) {
                row.classList.toggle("selected", before.checked);
                checkbox.replaceWith(before);
            }
        }
        table.tBodies[0].replaceChildren(...fresh.tBodies[0].rows);
        if (focused?.isConnected && focused !== document.activeElement) {
            focused.focus({ preventScroll: true });
        }
    }

    // If the page has as many elements as before, they stay, and so do the focus and the marked text.
    function replaceValues(form, fresh) {
        const elements = [...form.querySelectorAll(`:not(${CONTROLS}, ${CONTROLS} *)`)];
        const changed = [...fresh.querySelectorAll("*")];
        const isAlike = (one, index) => (
            one.tagName === changed[index].tagName && one.children.length === changed[index].children.length
        );
        if (elements.length !== changed.length || !elements.every(isAlike)) {
            form.replaceChildren(form.querySelector(CONTROLS), ...fresh.childNodes);
            return;
        }
        elements.forEach((element, index) => {
            Object.assign(element.dataset, changed[index].dataset);
            if (!element.children.length && element.textContent !== changed[index].textContent) {
                element.textContent = changed[index].textContent;
            }
        });
    }

    function replaceMessages(page) {
        for (const old of document.querySelectorAll(`.messagelist .${ABOUT_BACKEND}`)) {
            old.remove();
        }
        const fresh = page.querySelector(".messagelist");
        const list = document.querySelector(".messagelist");
        if (fresh && list) {
            list.append(...fresh.children);
        } else if (fresh) {
            document.getElementById("content")?.before(fresh);
        }
    }

    function replaceCounts(page) {
        const paginator = document.querySelector(".paginator");
        const freshPaginator = page.querySelector(".paginator");
        if (paginator && freshPaginator) {
            paginator.replaceWith(freshPaginator);
        }
        const counter = document.querySelector(".action-counter");
        const freshCounter = page.querySelector(".action-counter");
        if (counter && freshCounter) {
            counter.dataset.actionsIcnt = freshCounter.dataset.actionsIcnt;
        }
        // Lets Django's script count the selected rows again.
        window.dispatchEvent(new PageTransitionEvent("pageshow"));
    }

    async function refresh() {
        const response = await fetch(location.href, { credentials: "same-origin", cache: "no-store" });
        const at = performance.now();
        if (!response.ok) {
            throw new Error(response.statusText || String(response.status));
        }
        const page = new DOMParser().parseFromString(await response.text(), "text/html");
        await clicked;
        const one = document.querySelector(ONE);
        const table = document.getElementById("result_list");
        const freshOne = page.querySelector(ONE);
        const freshTable = page.getElementById("result_list");
        if (one && page.getElementById("changelist-form")) {
            // The lock is gone, or its backend does not answer. The messages of the list say which.
            for (const note of page.querySelectorAll(`.messagelist .${ABOUT_BACKEND}:not(.error)`)) {
                note.remove(); // a message about the list itself
            }
            for (const message of page.querySelectorAll(".messagelist > *")) {
                message.classList.add(ABOUT_BACKEND);
            }
            replaceMessages(page);
            one.classList.add("distlock-stale");
            seenAt = null;
            tick();
            return;
        }
        const isOther = response.redirected && response.url !== location.href;
        if (isOther || Boolean(one) !== Boolean(freshOne) || Boolean(table) !== Boolean(freshTable)) {
            location.reload(); // from or to an empty list, or to the login: a completely different page
            return;
        }
        seenAt = at;
        replaceMessages(page);
        if (one) {
            one.classList.remove("distlock-stale");
            replaceValues(one, freshOne);
        } else if (table) {
            replaceRows(table, freshTable);
            replaceCounts(page);
        }
        tick();
    }

    function addControls() {
        const list = document.getElementById("result_list");
        const form = document.querySelector(`#changelist-form, ${ONE}`) || list?.closest("form");
        if (!form) {
            return;
        }
        const controls = document.createElement("div");
        const button = document.createElement("button");
        const note = document.createElement("span");
        controls.className = "distlock-refresh";
        button.type = "button";
        note.setAttribute("role", "status");
        controls.append(button, note);
        form.prepend(controls);

        let paused = sessionStorage.getItem(PAUSED) === "1";
        let asking = false;
        let every = EVERY;
        let next = setTimeout(look, every);

        function show() {
            const seconds = Math.round(every / 1000);
            button.textContent = paused ? TEXTS.resume : TEXTS.pause;
            note.textContent = paused ? TEXTS.paused : filled(TEXTS.refreshed, { seconds });
        }

        async function look() {
            if (paused || asking || document.hidden) {
                return; // until the button or the tab is clicked
            }
            const began = performance.now();
            asking = true;
            clearTimeout(next);
            try {
                await refresh();
                every = Math.max(EVERY, REST * (performance.now() - began));
                show();
            } catch (error) {
                note.textContent = filled(TEXTS.failed, { error: error.message });
            } finally {
                asking = false;
                next = setTimeout(look, every);
            }
        }

        button.addEventListener("click", () => {
            paused = !paused;
            sessionStorage.setItem(PAUSED, paused ? "1" : "0");
            show();
            look();
        });
        document.addEventListener("visibilitychange", look);
        show();
    }

    function start() {
        tick();
        setInterval(tick, 250);
        addControls();
    }

    if (document.readyState === "loading") {
        document.addEventListener("DOMContentLoaded", start);
    } else {
        start();
    }
}
