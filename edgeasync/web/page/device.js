// "One device": everything about a device, beside the fleet. Its address is in the fragment of the page's URL.

import { short } from "./text.js";
import { fill, get, make, write } from "./dom.js";
import { Refusal } from "./connection.js";
import { eventItem } from "./lists.js";

const FRAGMENT = "#device=";

export class DeviceView {
  /**
   * @param {import("./fleet.js").Fleet} fleet
   * @param {import("./connection.js").Connection} connection
   * @param {(path: string, body: object, done: string) => Promise<boolean>} act
   */
  constructor(fleet, connection, act) {
    this.fleet = fleet;
    this.connection = connection;
    this.act = act;
    this.id = "";
    this.isAsking = false;
    /** where the focus was before */
    this.before = null;
    this.view = get("device");
    this.body = get("device-body");
    this.notice = make("p", { class: "notice", role: "status", hidden: true });
    this.order = make("button", { type: "button" });
    this.order.addEventListener("click", () => this.send());
    this.facts = make("dl");
    this.eventsTitle = make("h3", {}, "Latest events");
    this.events = make("ol", {});
    this.body.append(this.notice, this.order, this.facts, this.eventsTitle, this.events);
    get("device-close").addEventListener("click", () => this.leave());
    addEventListener("hashchange", () => this.route());
  }

  /** Show the device that the URL names, or none. */
  route() {
    let id = "";
    try {
      if (location.hash.startsWith(FRAGMENT)) id = decodeURIComponent(location.hash.slice(FRAGMENT.length));
    } catch {
      // A broken escape names no device.
    }
    if (id === this.id) return;
    if (id && !this.id) this.before = document.activeElement;
    this.id = id;
    this.view.hidden = !id;
    document.body.classList.toggle("has-device", Boolean(id));
    if (!id) {
      if (this.before instanceof HTMLElement && this.before.isConnected) this.before.focus();
      return;
    }
    write(get("device-title"), short(id, 100));
    this.notice.hidden = true;
    for (const part of [this.facts, this.events]) part.replaceChildren();
    this.order.hidden = this.eventsTitle.hidden = true;
    this.body.scrollTop = 0;
    get("device-title").focus();
    void this.load();
  }

  leave() {
    if (this.id) history.pushState(null, "", location.pathname + location.search);
    this.route();
  }

  /** After an update of the feed: ask again if the device changed. */
  update() {
    const isListed = this.fleet.devices.has(this.id);
    if (this.id && (!isListed || this.fleet.changed.has(this.id))) void this.load();
  }

  async load() {
    if (this.isAsking) return;
    this.isAsking = true;
    const { id } = this;
    try {
      const answer = await this.connection.request(`api/devices/${encodeURIComponent(id)}`);
      const details = await answer.json();
      if (id === this.id) this.show(details);
    } catch (error) {
      // Without an answer, the page already says that it is disconnected.
      if (id === this.id && error instanceof Refusal) this.say(error.message);
    } finally {
      this.isAsking = false;
      if (this.id && id !== this.id) void this.load();
    }
  }

  say(words) {
    this.notice.hidden = !words;
    write(this.notice, short(words, 1000));
  }

  show({ device, facts, attention, events }) {
    this.say(attention?.words ?? "");
    this.order.hidden = !device;
    this.isReleased = !device?.quarantine;
    write(this.order, this.isReleased ? "Quarantine" : "Release");
    this.order.title = this.isReleased ? "Exclude its updates from the model" : "Let its updates count again";
    // Facts keep their elements while their names stay, so that a selection of text survives an update.
    fill(
      this.facts,
      facts,
      ([name]) => name,
      ([name]) => make("div", {}, make("dt", {}, name), make("dd")),
      (fact, [, value]) => write(fact.lastElementChild, short(value, 1000)),
    );
    this.eventsTitle.hidden = !events.length;
    fill(this.events, [...events].reverse(), (one) => `${this.fleet.lineage} ${one.number}`, eventItem);
  }

  /** Quarantine or release the device. */
  async send() {
    const [verb, done] = this.isReleased ? ["quarantine", "quarantined"] : ["release", "released"];
    this.order.disabled = true;
    if (await this.act(`api/devices/${encodeURIComponent(this.id)}/${verb}`, {}, `${this.id}: ${done}`)) {
      await this.load();
    }
    this.order.disabled = false;
    if (document.activeElement === document.body) this.order.focus(); // disabling it took its focus
  }
}
