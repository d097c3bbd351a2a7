// The page of a hub: connects the feed to the panels.

import { clock, count, joined, short } from "./text.js";
import { Chart } from "./chart.js";
import { Connection, Refusal } from "./connection.js";
import { DeviceView } from "./device.js";
import { Events, Pending, showAttention } from "./lists.js";
import { Fleet } from "./fleet.js";
import { STATES, Table } from "./table.js";
import { askToken } from "./token.js";
import { fill, get, make, mark, write } from "./dom.js";
import { showSummary } from "./summary.js";

/** How long a message about an action stays. */
const TOAST_MS = 6000;

const NO_ANSWER = "No answer from the hub; try again once the page is live";

const STATE_WORDS = {
  connecting: "connecting",
  live: "live",
  disconnected: "disconnected, trying again",
  paused: "paused while hidden",
  refused: "waiting for a token",
};

const fleet = new Fleet();
/** an open token form; several requests may need it at once */
let asking = null;
let toastTimer = 0;

const connection = new Connection({
  onUpdate(update) {
    fleet.apply(update);
    show();
  },
  onState: showState,
  askToken(words) {
    asking ??= askToken(words, Boolean(fleet.summary)).then((token) => {
      asking = null;
      if (token) connection.token = token;
      return Boolean(token);
    });
    return asking;
  },
});

const chart = new Chart(fleet);
const events = new Events(fleet);
const pending = new Pending(fleet, act);
const device = new DeviceView(fleet, connection, act);
const filter = get("filter");
const table = new Table(get("table"), fleet, (shown) => {
  const empty = get("no-rows");
  empty.hidden = shown > 0 || !fleet.summary;
  write(get("shown"), shown === fleet.devices.size ? "" : `${count(shown)} of ${count(fleet.devices.size)}`);
  write(empty, fleet.devices.size ? "No device matches." : "No device has joined yet.");
});

/** Show the newest update in every panel. */
function show() {
  showSummary(fleet);
  showStates();
  showAttention(fleet);
  table.update();
  chart.update();
  events.update();
  pending.update();
  device.update();
  const waiting = fleet.attentionCount;
  document.title = waiting ? `(${count(waiting)}) edgeasync` : "edgeasync";
}

function showState(state, words = "") {
  const pill = get("connection");
  pill.dataset.state = state;
  const since = state !== "live" && fleet.time > 0 && `shown as of ${clock(fleet.time)}`;
  write(pill, joined(" · ", STATE_WORDS[state], since, short(words)));
  pill.title = pill.textContent;
  document.body.classList.toggle("is-old", state !== "live" && Boolean(fleet.time));
}

/** Show how many devices are in each state; each count filters the table. */
function showStates() {
  const numbers = { ...fleet.counts, "": fleet.devices.size, attention: fleet.attentionCount };
  fill(
    get("states"),
    ["", ...STATES, "attention"].filter((state) => !state || numbers[state] || table.state === state),
    (state) => state,
    (state) => {
      const chip = make(
        "button",
        { type: "button", "data-state": state },
        make("b"),
        ` ${state === "attention" ? "need attention" : state || "all"}`,
      );
      chip.addEventListener("click", () => {
        table.filterState(table.state === state ? "" : state);
        showStates();
      });
      return chip;
    },
    (chip, state) => {
      write(chip.firstElementChild, count(numbers[state] ?? 0));
      mark(chip, "aria-pressed", state === table.state);
    },
  );
}

/** Send an operator's order; show whether it worked. */
async function act(path, body, done) {
  try {
    const answer = await connection.requestWithToken(path, { method: "POST", body });
    if (answer) toast(done, "good");
    return answer !== null;
  } catch (error) {
    toast(error instanceof Refusal ? error.message : NO_ANSWER, "bad");
    return false;
  }
}

function toast(words, level) {
  const place = get("toast");
  clearTimeout(toastTimer);
  place.hidden = false;
  place.dataset.level = level;
  write(place, short(words, 400));
  toastTimer = setTimeout(() => {
    place.hidden = true;
  }, TOAST_MS);
}

/** Download a model with the token. Without one, the browser follows the link itself. */
async function download(event) {
  if (!connection.token && connection.isLive) return;
  event.preventDefault();
  const link = event.currentTarget;
  link.setAttribute("aria-busy", "true");
  try {
    const answer = await connection.requestWithToken(link.href);
    if (!answer) return;
    const named = /filename="?([\w.-]+)/.exec(answer.headers.get("Content-Disposition") ?? "");
    const address = URL.createObjectURL(await answer.blob());
    make("a", { href: address, download: named?.[1] ?? `${link.id}.safetensors` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 60_000);
  } catch (error) {
    toast(error instanceof Refusal ? error.message : NO_ANSWER, "bad");
  } finally {
    link.removeAttribute("aria-busy");
  }
}

filter.addEventListener("input", () => table.filter(filter.value));
filter.addEventListener("keydown", (event) => {
  if (event.key === "ArrowDown" || event.key === "Enter") {
    event.preventDefault();
    table.focus();
  } else if (event.key === "Escape" && filter.value) {
    event.stopPropagation();
    filter.value = "";
    table.filter("");
  }
});
document.addEventListener("keydown", (event) => {
  const isTyping = event.target instanceof HTMLInputElement;
  if (event.key === "/" && !isTyping && !event.ctrlKey && !event.metaKey) {
    event.preventDefault();
    filter.focus();
    filter.select();
  } else if (event.key === "Escape" && !get("token").open) {
    device.leave();
  }
});
for (const id of ["newest", "best"]) get(id).addEventListener("click", download);
device.route();
void connection.follow();
