// The table of devices: only the rows in view exist as elements, so that 10,000 devices scroll as well as three.

import { count, percent, seconds, short, significant } from "./text.js";
import { deviceHref, make, write } from "./dom.js";

/** Height of a row; page.css has the same. */
const ROW_PX = 30;
/** Rows above and below the view, so that scrolling shows no gaps. */
const SPARE = 6;
/** For this long after the pointer moved over the rows, updates leave their order: nobody aims at a moving row. */
const AIM_MS = 2000;

export const STATES = ["training", "joining", "paused", "lost", "left", "quarantined"];

/**
 * - `name`: heading, as in the terminal's table.
 * - `text`: what a cell shows. `key`: what to sort by. `upwards`: whether the first click sorts upwards.
 * @typedef {object} Column
 * @property {string} name
 * @property {string} title
 * @property {(row: any, fleet: import("./fleet.js").Fleet) => string} text
 * @property {(device: import("./fleet.js").Device) => number | string} key
 * @property {boolean} [upwards]
 */

const number = (value) => (value === null ? -Infinity : value);

const COLUMNS = [
  {
    name: "device",
    title: "Devices that need attention first, then by name",
    text: (row) => short(row.id, 80),
    key: (device) => device.rank,
    upwards: true,
  },
  {
    name: "state",
    title: "State, pace, and why it needs attention",
    text: (row) => row.state,
    key: (device) => STATES.indexOf(device.row.state),
  },
  {
    name: "seen",
    title: "Time since its last message",
    text: (row, fleet) => age(fleet.ago(row.last_seen)),
    key: (device) => -device.row.last_seen,
  },
  {
    name: "updates",
    title: "Updates that are part of the model",
    text: (row) => count(row.updates_applied),
    key: (device) => device.row.updates_applied,
    upwards: true,
  },
  {
    name: "rejected",
    title: "Updates that never count",
    text: (row) => (row.updates_rejected ? count(row.updates_rejected) : ""),
    key: (device) => device.row.updates_rejected,
  },
  {
    name: "stale",
    title: "Staleness of its last update, in versions",
    text: (row) => String(row.staleness),
    key: (device) => device.row.staleness,
  },
  {
    name: "ex/s",
    title: "Examples that it trains on per second",
    text: (row) => (row.examples_per_s ? significant(row.examples_per_s) : ""),
    key: (device) => device.row.examples_per_s,
    upwards: true,
  },
  {
    name: "loss",
    title: "Mean loss of its last local steps",
    text: (row) => (row.loss === null ? "" : significant(row.loss)),
    key: (device) => number(device.row.loss),
  },
  {
    name: "period",
    title: "Time between two exchanges",
    text: (row) => (row.period_s ? seconds(row.period_s) : ""),
    key: (device) => device.row.period_s,
  },
  {
    name: "talk",
    title: "Share of the period spent on communication",
    text: (row) => percent(row.talk_share),
    key: (device) => device.row.talk_share,
  },
  {
    name: "machine",
    title: "Board or computer",
    text: (row) => short(row.machine, 80),
    key: (device) => device.row.machine,
    upwards: true,
  },
];

function age(value) {
  if (value < 120) return `${Math.round(value)} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  return value < 172_800 ? `${Math.round(value / 3600)} h` : `${Math.round(value / 86_400)} d`;
}

function order(key, upwards) {
  const sign = upwards ? 1 : -1;
  return (one, other) => {
    const a = key(one),
      b = key(other);
    return a < b ? -sign : a > b ? sign : one.rank - other.rank;
  };
}

const byUrgency = (one, other) =>
  one.urgency === other.urgency ? one.rank - other.rank : one.urgency - other.urgency;

export class Table {
  /**
   * @param {HTMLElement} place
   * @param {import("./fleet.js").Fleet} fleet
   * @param {(shown: number) => void} onChange called with the number of devices that pass the filter
   */
  constructor(place, fleet, onChange) {
    this.fleet = fleet;
    this.onChange = onChange;
    this.words = [];
    this.state = "";
    /** null: devices that need attention first */
    this.column = null;
    this.upwards = true;
    this.shown = [];
    this.active = "";
    this.moved = -Infinity;
    /** rows by place modulo their number, so that a row keeps its element while it stays in view */
    this.pool = [];
    this.buttons = COLUMNS.map((column) => this.heading(column));
    const head = make(
      "div",
      { role: "row", class: "head", "aria-rowindex": 1 },
      ...this.buttons.map(({ cell }) => cell),
    );
    this.body = make("div", { role: "rowgroup", class: "rows" });
    this.grid = make(
      "div",
      { role: "grid", class: "grid", tabindex: 0, "aria-labelledby": "here-title" },
      make("div", { role: "rowgroup", class: "heads" }, head),
      this.body,
    );
    place.append(this.grid);
    this.grid.addEventListener("scroll", () => this.draw(), { passive: true });
    this.grid.addEventListener("keydown", (event) => this.onKey(event));
    this.body.addEventListener(
      "pointermove",
      () => {
        this.moved = performance.now();
      },
      { passive: true },
    );
    this.body.addEventListener("click", (event) => this.onClick(event));
    new ResizeObserver(() => this.draw()).observe(this.grid);
  }

  heading(column) {
    const button = make("button", { type: "button", title: column.title, tabindex: 0 }, column.name);
    const cell = make("div", { role: "columnheader", "aria-sort": "none", class: cellClass(column) }, button);
    button.addEventListener("click", () => this.sortBy(column));
    return { column, cell };
  }

  /** Sort by a column; again: the other way; a third time: by urgency. */
  sortBy(column) {
    const first = Boolean(column.upwards);
    if (this.column !== column) {
      this.column = column;
      this.upwards = first;
    } else if (this.upwards === first) {
      this.upwards = !first;
    } else {
      this.column = null;
    }
    for (const { column: one, cell } of this.buttons) {
      const sorted = this.upwards ? "ascending" : "descending";
      cell.setAttribute("aria-sort", one === this.column ? sorted : "none");
    }
    this.grid.scrollTop = 0;
    this.select();
  }

  /** Show only devices that match every word. */
  filter(text) {
    this.words = text.toLowerCase().split(/\s+/).filter(Boolean);
    this.grid.scrollTop = 0;
    this.select();
  }

  /** Show only devices in a state, or all if it is empty. */
  filterState(state) {
    this.state = state;
    this.grid.scrollTop = 0;
    this.select();
  }

  /** Show the newest update. */
  update() {
    const known = this.fleet.devices;
    const isAimed = performance.now() - this.moved < AIM_MS && this.shown.every(({ id }) => known.has(id));
    if (!isAimed) this.select();
    else this.draw();
  }

  /** Choose and sort the devices to show. */
  select() {
    const { words, state } = this;
    const found = [];
    for (const device of this.fleet.devices.values()) {
      if (state === "attention" ? device.urgency === Infinity : state && device.row.state !== state) continue;
      if (words.length && !words.every((word) => device.text.includes(word))) continue;
      found.push(device);
    }
    this.shown = found.sort(this.column ? order(this.column.key, this.upwards) : byUrgency);
    this.onChange(found.length);
    this.draw();
  }

  /** Show the rows in view. */
  draw() {
    const { grid, shown } = this;
    this.body.style.height = `${shown.length * ROW_PX}px`;
    grid.setAttribute("aria-rowcount", String(shown.length + 1));
    const first = Math.max(0, Math.floor(grid.scrollTop / ROW_PX) - SPARE);
    const room = Math.ceil(grid.clientHeight / ROW_PX) + 2 * SPARE;
    while (this.pool.length < room) this.pool.push(this.makeRow(this.pool.length));
    const size = this.pool.length;
    for (const element of this.pool) {
      const place = first + ((((element.number - first) % size) + size) % size);
      this.drawRow(element, place, shown[place]);
    }
    const active = this.pool.find((element) => element.device === this.active && this.active);
    if (active) grid.setAttribute("aria-activedescendant", active.row.id);
    else grid.removeAttribute("aria-activedescendant");
  }

  makeRow(number) {
    const cells = COLUMNS.map((column) => make("div", { role: "gridcell", class: cellClass(column) }));
    const link = make("a", { tabindex: -1, class: "name" });
    cells[0].append(link);
    const words = make("span", { class: "state" });
    const tag = make("span", { class: "tag", hidden: true });
    cells[1].append(words, tag);
    const row = make("div", { role: "row", id: `row-${number}`, hidden: true }, ...cells);
    this.body.append(row);
    return { number, row, cells, link, words, tag, device: "", place: -1, href: "" };
  }

  drawRow(element, place, device) {
    const { row, cells, link, words, tag } = element;
    if (row.hidden !== !device) row.hidden = !device;
    if (!device) {
      element.device = "";
      return;
    }
    if (element.place !== place) {
      element.place = place;
      row.style.transform = `translateY(${place * ROW_PX}px)`;
      row.setAttribute("aria-rowindex", String(place + 2));
    }
    if (element.device !== device.id) {
      element.device = device.id;
      link.href = deviceHref(device.id);
    }
    const { row: values, reason } = device;
    const isActive = device.id === this.active;
    if (element.isActive !== isActive) {
      element.isActive = isActive;
      row.setAttribute("aria-selected", String(isActive));
    }
    write(link, COLUMNS[0].text(values, this.fleet));
    const pace =
      !reason && values.state === "training" && values.pace_percent < 100 ? ` ${values.pace_percent} %` : "";
    write(words, values.state + pace);
    if (words.dataset.state !== values.state) words.dataset.state = values.state;
    const shownReason = reason === values.state ? "" : reason;
    write(tag, shownReason.replaceAll("_", " "));
    if (tag.dataset.reason !== shownReason) tag.dataset.reason = shownReason;
    if (tag.hidden !== !shownReason) tag.hidden = !shownReason;
    for (let place = 2; place < COLUMNS.length; place += 1)
      write(cells[place], COLUMNS[place].text(values, this.fleet));
  }

  onKey(event) {
    if (event.target !== this.grid || event.ctrlKey || event.metaKey || event.altKey) return;
    const last = this.shown.length - 1;
    const now = this.shown.findIndex(({ id }) => id === this.active);
    const page = Math.max(1, Math.floor(this.grid.clientHeight / ROW_PX) - 2);
    const goals = {
      ArrowDown: now + 1,
      ArrowUp: now - 1,
      PageDown: now + page,
      PageUp: now - page,
      Home: 0,
      End: last,
    };
    if (event.key in goals && last >= 0) {
      event.preventDefault();
      this.activate(Math.min(Math.max(goals[event.key], 0), last));
    } else if (event.key === "Enter" && now >= 0) {
      location.hash = deviceHref(this.active);
    }
  }

  /** Make a row the active one, and scroll it into view. */
  activate(place) {
    this.active = this.shown[place].id;
    const top = place * ROW_PX,
      view = this.grid.clientHeight - ROW_PX; // the heading covers one row
    if (top < this.grid.scrollTop) this.grid.scrollTop = top;
    else if (top + ROW_PX > this.grid.scrollTop + view) this.grid.scrollTop = top + ROW_PX - view;
    this.draw();
  }

  onClick(event) {
    const target = event.target;
    const row = target.closest("[role=row]");
    const element = this.pool.find((one) => one.row === row);
    if (!element?.device) return;
    this.active = element.device;
    this.draw();
    if (!target.closest("a")) location.hash = deviceHref(element.device);
  }

  focus() {
    this.grid.focus();
    if (!this.shown.some(({ id }) => id === this.active) && this.shown.length) this.activate(0);
  }
}

function cellClass(column) {
  return `cell ${column.name.replace("/", "")}`;
}
