// The hub's state as the page knows it: built from FeedUpdates, read by the panels.

/** History points to keep; older ones are thinned. */
const HISTORY_MAX = 4000;

/** Events to keep, so that the list of problems outlives a busy hour. */
const EVENTS_MAX = 1000;

const NAMES = new Intl.Collator("en", { numeric: true });

/** A device in the page: its row, and what sorting and filtering derive from it. */
export class Device {
  constructor(row) {
    this.row = row;
    this.id = row.id;
    /** Place among all names. */
    this.rank = 0;
    /** Place among the devices that need attention; Infinity: it needs none. */
    this.urgency = Infinity;
    /** Why it needs attention. */
    this.reason = "";
    this.searched = "";
  }

  /** Text that the filter searches, in lower case. */
  get text() {
    if (!this.searched) {
      const { id, state, machine, software, address, last_error: error } = this.row;
      this.searched =
        `${id}\n${state}\n${this.reason.replaceAll("_", " ")}\n${machine}\n${software}\n${address}\n${error}`.toLowerCase();
    }
    return this.searched;
  }
}

export class Fleet {
  constructor() {
    this.number = 0;
    this.lineage = "";
    /** The hub's time of the newest update. */
    this.time = 0;
    this.summary = null;
    this.notices = [];
    this.denied = "";
    /** names of the values of a device */
    this.columns = [];
    this.counts = {};
    this.attention = [];
    this.attentionCount = 0;
    this.devices = new Map();
    /** newest first */
    this.events = [];
    /** oldest first: time, version, updates, loss, evaluation's loss, its accuracy */
    this.history = [];
    this.pending = null;
    /** devices that the last update changed */
    this.changed = new Set();
  }

  /** Apply an update. Throws if it does not follow the last one. */
  apply(update) {
    if (update.previous !== 0 && (update.previous !== this.number || update.lineage !== this.lineage)) {
      throw new Error(`update ${update.number} follows ${update.previous}, but this page has ${this.number}`);
    }
    const isWhole = update.previous === 0;
    if (isWhole) {
      this.columns = update.columns;
      this.devices.clear();
      this.events = [];
      this.history = [];
    }
    const { number, lineage, time, summary, notices, denied, counts, pending } = update;
    Object.assign(this, { number, lineage, time, summary, notices, denied, counts, pending });
    this.applyDevices(update.devices, update.gone);
    this.applyAttention(update.attention, update.attention_count);
    this.events = [...[...update.events].reverse(), ...this.events].slice(0, EVENTS_MAX);
    this.history.push(...update.history);
    if (this.history.length > HISTORY_MAX) {
      const half = HISTORY_MAX / 2;
      this.history = this.history.filter((_, place) => place >= half || place % 2 === 0);
    }
  }

  applyDevices(rows, gone) {
    let isNew = false;
    this.changed = new Set(gone);
    for (const id of gone) this.devices.delete(id);
    for (const values of rows) {
      const row = {};
      for (let place = 0; place < this.columns.length; place += 1) row[this.columns[place]] = values[place];
      const known = this.devices.get(row.id);
      if (known) {
        known.row = row;
        known.searched = "";
      } else {
        this.devices.set(row.id, new Device(row));
        isNew = true;
      }
      this.changed.add(row.id);
    }
    if (!isNew) return;
    const sorted = [...this.devices.values()].sort((one, other) => NAMES.compare(one.id, other.id));
    sorted.forEach((device, rank) => {
      device.rank = rank;
    });
  }

  applyAttention(attention, total) {
    for (const { device } of this.attention) this.mark(device, Infinity, "");
    attention.forEach(({ device, reason }, place) => this.mark(device, place, reason));
    this.attention = attention;
    this.attentionCount = total;
  }

  mark(id, urgency, reason) {
    const device = this.devices.get(id);
    if (!device) return;
    device.urgency = urgency;
    device.reason = reason;
    device.searched = "";
  }

  /** Return seconds since a point in the hub's time, as of the newest update. */
  ago(time) {
    return Math.max(this.time - time, 0);
  }
}
