// The table of devices: only the rows in view exist as elements, so that 10,000 devices scroll as well as three.

import { count, duration, percent, seconds, short, significant } from "./text.js";
import { deviceHref, make, mark, write } from "./dom.js";

/** Height of a row; page.css has the same. */
const ROW_PX = 30;
/** Rows above and below the view, so that scrolling shows no gaps. */
const SPARE = 6;
/** For this long after the pointer moved over the rows, updates leave their order: nobody aims at a moving row. */
const AIM_MS = 2000;

export const STATES = ["training", "joining", "paused", "lost", "left", "quarantined"];

const known = (value, show) => (value ? show(value) : "");

/** A column: its heading, a title, a device's value, the value as text, and whether the first click sorts upwards. */
const COLUMNS = [
  ["device", "Devices that need attention first, then by name", "id", (id) => short(id, 80), true],
  ["state", "State, pace, and why it needs attention", "state"],
  ["seen", "Time since its last message", "last_seen", (time, fleet) => duration(Math.round(fleet.ago(time)))],
  ["updates", "Updates that are part of the model", "updates_applied", (value) => count(value), true],
  ["rejected", "Updates that never count", "updates_rejected", (value) => known(value, count)],
  ["stale", "Staleness of its last update, in versions", "staleness", String],
  ["ex/s", "Examples that it trains on per second", "examples_per_s", (value) => known(value, significant), true],
  ["loss", "Mean loss of its last local steps", "loss", (value) => (value === null ? "" : significant(value))],
  ["period", "Time between two exchanges", "period_s", (value) => known(value, seconds)],
  ["talk", "Share of the period spent on communication", "talk_share", (value) => percent(value)],
  ["machine", "Board or computer", "machine", (name) => short(name, 80), true],
].map(([name, title, field, text, upwards = false]) => ({ name, title, field, text, upwards }));

/** What to sort by, where it is not the value. */
const KEYS = {
  id: (device) => device.rank,
  state: (device) => STATES.indexOf(device.row.state),
  last_seen: (device) => -device.row.last_seen,
};

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
    this.headings = COLUMNS.map((column) => this.heading(column));
    const head = make("div", { role: "row", class: "head", "aria-rowindex": 1 }, ...this.headings);
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
    this.body.addEventListener("pointermove", () => (this.moved = performance.now()), { passive: true });
    this.body.addEventListener("click", (event) => this.onClick(event));
    new ResizeObserver(() => this.draw()).observe(this.grid);
  }

  heading(column) {
    const button = make("button", { type: "button", title: column.title }, column.name);
    button.addEventListener("click", () => this.sortBy(column));
    return makeCell("columnheader", column, button);
  }

  /** Sort by a column; again: the other way; a third time: by urgency. */
  sortBy(column) {
    const again = this.column === column;
    const turned = again && this.upwards !== column.upwards;
    this.column = turned ? null : column;
    this.upwards = again ? !column.upwards : column.upwards;
    COLUMNS.forEach((one, place) => {
      const sorted = this.upwards ? "ascending" : "descending";
      mark(this.headings[place], "aria-sort", one === this.column ? sorted : "none");
    });
    this.selectFromTop();
  }

  /** Show only devices that match every word. */
  filter(text) {
    this.words = text.toLowerCase().split(/\s+/).filter(Boolean);
    this.selectFromTop();
  }

  /** Show only devices in a state, or all if it is empty. */
  filterState(state) {
    this.state = state;
    this.selectFromTop();
  }

  selectFromTop() {
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
    const { words, state, column } = this;
    const field = column?.field;
    const key = column ? (KEYS[field] ?? ((device) => device.row[field] ?? -Infinity)) : (device) => device.urgency;
    const sign = column && !this.upwards ? -1 : 1;
    this.shown = [...this.fleet.devices.values()]
      .filter((device) => !state || (state === "attention" ? device.reason : device.row.state === state))
      .filter((device) => words.every((word) => device.text.includes(word)))
      .sort((one, other) => {
        const a = key(one),
          b = key(other);
        return a < b ? -sign : a > b ? sign : one.rank - other.rank;
      });
    this.onChange(this.shown.length);
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
    for (let place = first; place < first + size; place += 1)
      this.drawRow(this.pool[place % size], place, shown[place]);
    const active = this.pool.find(({ device }) => device && device === this.active);
    if (active) grid.setAttribute("aria-activedescendant", active.row.id);
    else grid.removeAttribute("aria-activedescendant");
  }

  makeRow(number) {
    const cells = COLUMNS.map((column) => makeCell("gridcell", column));
    const link = make("a", { tabindex: -1, class: "name" });
    const words = make("span", { class: "state" });
    const tag = make("span", { class: "tag" });
    cells[0].append(link);
    cells[1].append(words, tag);
    const row = make("div", { role: "row", id: `row-${number}` }, ...cells);
    this.body.append(row);
    return { row, cells, link, words, tag, device: "" };
  }

  drawRow(element, place, device) {
    const { row, cells, link, words, tag } = element;
    row.hidden = !device;
    if (!device) {
      element.device = "";
      return;
    }
    if (element.device !== device.id) {
      element.device = device.id;
      link.href = deviceHref(device.id);
    }
    row.style.transform = `translateY(${place * ROW_PX}px)`;
    mark(row, "aria-rowindex", place + 2);
    mark(row, "aria-selected", device.id === this.active);
    const { state, pace_percent: pace } = device.row;
    const reason = device.reason === state ? "" : device.reason;
    write(words, !device.reason && state === "training" && pace < 100 ? `${state} ${pace} %` : state);
    mark(words, "data-state", state);
    write(tag, reason.replaceAll("_", " "));
    mark(tag, "data-reason", reason);
    tag.hidden = !reason;
    COLUMNS.forEach(({ field, text }, at) => {
      if (text) write(at ? cells[at] : link, text(device.row[field], this.fleet));
    });
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

function makeCell(role, { name }, ...children) {
  return make("div", { role, class: `cell ${name.replace("/", "")}` }, ...children);
}
