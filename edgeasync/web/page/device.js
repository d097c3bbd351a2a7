// "One device": everything about a device, beside the fleet. Its address is in the fragment of the page's URL.

import { bytes, clock, count, duration, joined, percent, seconds, short, significant } from "./text.js";
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
    this.facts = make("div", {});
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

  show({ device, attention, events, time }) {
    this.say(attention?.words ?? "");
    this.order.hidden = !device;
    this.isReleased = !device?.quarantine;
    write(this.order, this.isReleased ? "Quarantine" : "Release");
    this.order.title = this.isReleased ? "Exclude its updates from the model" : "Let its updates count again";
    // Facts keep their elements while their names stay, so that a selection of text survives an update.
    const name = ([one]) => one;
    fill(
      this.facts,
      device ? Object.entries(describe(device, time)) : [],
      name,
      ([title]) => make("section", {}, make("h3", {}, title), make("dl")),
      (section, [, facts]) =>
        fill(
          section.lastElementChild,
          Object.entries(facts).filter(([, value]) => value),
          name,
          ([term]) => make("div", {}, make("dt", {}, term), make("dd")),
          (fact, [, value]) => write(fact.lastElementChild, short(value, 1000)),
        ),
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

/**
 * Return all that is known about a device, as groups of facts; facts without a value are not shown.
 * @param {any} d its DeviceStatus
 * @param {number} time the hub's time
 */
function describe(d, time) {
  const rejected = Object.entries(d.updates_rejected)
    .map(([reason, times]) => `${count(Number(times))} ${reason}`)
    .sort();
  const few = (number, what) => number > 0 && `${count(number)} ${what}`;
  return {
    State: {
      state: joined(", ", d.state, d.pace_percent < 100 && `${d.pace_percent} % of the time`, d.pace_reason),
      quarantine: d.quarantine && `${d.quarantine.cause}; ends ${d.quarantine.ends}`,
      left: d.why_left,
      "last seen": ago(d.last_seen_s),
      "last step": d.stalled_s > 0 && ago(d.stalled_s),
      joined: d.joined_s !== null && `${clock(time - d.joined_s)}, ${ago(d.joined_s)}`,
      "last error": d.last_error_s !== null && `${ago(d.last_error_s)}: ${d.last_error}`,
      temperature: d.temperature_c !== null && `${Math.round(d.temperature_c)} °C`,
    },
    Learning: {
      loss: d.loss === null ? "not reported" : significant(d.loss, 4),
      updates: joined(
        ", ",
        `${count(d.updates_applied)} applied`,
        few(d.updates_buffered, "buffered"),
        few(d.duplicates, "repeated"),
      ),
      rejected: rejected.join(", "),
      clipping:
        d.weight_kept !== null && d.weight_kept < 0.995 && `${percent(d.weight_kept)} of their length counted`,
      "last update": `${count(d.local_steps)} steps, staleness ${count(d.staleness)}`,
      "next update": d.assigned_steps ? joined(": ", `${count(d.assigned_steps)} steps`, d.why) : "not assigned yet",
    },
    Speed: {
      speed: `${significant(d.examples_per_s)} examples/s`,
      "a step": d.step_s > 0 && seconds(d.step_s),
      period: d.period_s ? `${seconds(d.period_s)} between updates` : "not measured yet",
      talk: `${seconds(d.talk_s)}, ${percent(d.talk_share)}`,
      rests: d.rest_s > 0 && `for ${seconds(d.rest_s)}`,
    },
    Link: {
      address: d.address,
      "round trip": d.round_trip_s ? seconds(d.round_trip_s) : "not measured yet",
      rate: d.bandwidth_bytes_per_s ? `${bytes(d.bandwidth_bytes_per_s)}/s` : "not measured yet",
      codec: d.push_codec,
      traffic: `${bytes(d.bytes_up)} up, ${bytes(d.bytes_down)} down`,
      today: joined(", ", bytes(d.day_bytes), d.day_left_bytes !== null && `${bytes(d.day_left_bytes)} left`),
    },
    Machine: {
      machine: d.machine || "unknown",
      software: d.software,
      clock: d.clock_offset_s !== null && offset(d.clock_offset_s),
    },
  };
}

function ago(value) {
  return `${duration(value)} ago`;
}

function offset(value) {
  if (Math.abs(value) < 1) return "as the hub's";
  return `${duration(Math.abs(value))} ${value > 0 ? "ahead of" : "behind"} the hub's`;
}
