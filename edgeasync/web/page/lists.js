// Lists beside the table: who needs attention, who wants in, what happened.

import { clock, count, duration, joined, short } from "./text.js";
import { deviceLink, fill, get, make, mark, press, write } from "./dom.js";

/** Events that are a reason to look; docs/operate/events.md explains all events. */
const PROBLEMS = new Set([
  "alarm",
  "excluded",
  "left",
  "lost",
  "not_writing",
  "paused",
  "plateau",
  "quarantined",
  "revoked",
  "warning",
]);

/** Events in the list; older ones stay in `edgeasync events`. */
const EVENTS_SHOWN = 200;

export function showAttention(fleet) {
  const { attention, attentionCount } = fleet;
  write(get("attention-count"), attentionCount ? count(attentionCount) : "");
  get("no-attention").hidden = attentionCount > 0;
  get("attention-list").hidden = attentionCount === 0;
  const rest = attentionCount - attention.length;
  const more = { device: "", reason: "", words: `and ${count(rest)} more` };
  fill(
    get("attention-list"),
    rest > 0 ? [...attention, more] : attention,
    ({ device }) => device,
    ({ device }) => make("li", {}, deviceLink(device, short(device, 80)), make("p", { class: "words" })),
    (item, { reason, words }) => {
      mark(item, "data-reason", reason);
      write(item.lastElementChild, short(words));
    },
  );
}

export class Events {
  constructor(fleet) {
    this.fleet = fleet;
    this.onlyProblems = false;
    press([get("all-events"), get("problems")], (place) => {
      this.onlyProblems = place === 1;
      this.update();
    });
  }

  update() {
    const events = this.fleet.events.filter(({ event }) => !this.onlyProblems || PROBLEMS.has(event));
    get("no-events").hidden = events.length > 0;
    get("event-list").hidden = events.length === 0;
    fill(
      get("event-list"),
      events.slice(0, EVENTS_SHOWN),
      (one) => `${this.fleet.lineage} ${one.number}`,
      eventItem,
    );
  }
}

export function eventItem(one) {
  const name = make("span", { class: "event" }, short(one.event, 40).replaceAll("_", " "));
  if (PROBLEMS.has(one.event)) name.dataset.problem = "";
  const line = make("p", { class: "line" }, make("time", {}, clock(one.time)), name);
  if (one.device) line.append(deviceLink(one.device, short(one.device, 80)));
  return make("li", {}, line, ...(one.detail ? [make("p", { class: "words" }, short(one.detail, 600))] : []));
}

/** "Who wants in?": keys that an operator may accept or refuse. */
export class Pending {
  /**
   * @param {import("./fleet.js").Fleet} fleet
   * @param {(path: string, body: object, done: string) => Promise<boolean>} act
   */
  constructor(fleet, act) {
    this.fleet = fleet;
    this.act = act;
  }

  update() {
    const { pending, denied } = this.fleet;
    const waiting = (pending ?? []).filter(({ refused }) => !refused);
    const refused = (pending ?? []).length - waiting.length;
    get("pending").hidden = pending === null && !denied;
    write(get("pending-count"), waiting.length ? count(waiting.length) : "");
    get("no-pending").hidden = waiting.length > 0 || pending === null;
    get("pending-list").hidden = waiting.length === 0;
    write(
      get("denied"),
      joined(
        " · ",
        refused > 0 && `${count(refused)} refused keys`,
        denied && `refused connections: ${short(denied)}`,
      ),
    );
    fill(
      get("pending-list"),
      waiting,
      ({ fingerprint }) => fingerprint,
      (one) => this.item(one),
      (item, { address, seen }) =>
        write(item.querySelector(".words"), `${short(address, 80)}, ${duration(this.fleet.ago(seen))} ago`),
    );
  }

  item(one) {
    const fingerprint = short(one.fingerprint, 80);
    const name = make("input", {
      type: "text",
      placeholder: "name",
      required: true,
      maxlength: 64,
      autocomplete: "off",
      spellcheck: "false",
      pattern: "[A-Za-z0-9][A-Za-z0-9._\\-]*",
      title: "Letters, digits, dots, dashes and underscores",
      "aria-label": `Name of the device with key ${fingerprint}`,
    });
    const accept = make("button", { type: "submit", class: "primary" }, "Accept");
    const refuse = make("button", { type: "button" }, "Refuse");
    const form = make("form", { class: "accept" }, name, accept, refuse);
    const send = async (verb, body, done) => {
      accept.disabled = refuse.disabled = true;
      await this.act(`api/pending/${encodeURIComponent(one.fingerprint)}/${verb}`, body, done);
      accept.disabled = refuse.disabled = false;
    };
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      void send("accept", { name: name.value }, `${name.value} may join`);
    });
    refuse.addEventListener("click", () => void send("refuse", {}, `${fingerprint}: refused`));
    return make(
      "li",
      {},
      make("p", { class: "line" }, make("code", {}, fingerprint), make("span", { class: "words" })),
      form,
    );
  }
}
