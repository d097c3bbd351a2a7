// "Is it learning?": the devices' loss and the evaluations, over time or versions.

import { clock, count, duration, percent, significant } from "./text.js";
import { get, press, write } from "./dom.js";

/** Values of a point of the history; the first two are also the places of the buttons that choose between them. */
const TIME = 0,
  LOSS = 3,
  EVALUATION_LOSS = 4,
  ACCURACY = 5;

const HEIGHT_PX = 200;

/** From this ratio of the largest to the smallest loss on, a logarithmic scale shows more. */
const LOG_RATIO = 20;

export class Chart {
  constructor(fleet) {
    this.fleet = fleet;
    this.place = get("chart");
    this.plot = null;
    this.x = TIME;
    /** null: as the values suggest */
    this.chosenLog = null;
    this.isLog = false;
    this.hasAccuracy = false;
    press([get("by-time"), get("by-version")], (x) => {
      this.x = x;
      this.rebuild();
    });
    this.log = get("log-scale");
    this.log.addEventListener("click", () => {
      this.chosenLog = !this.isLog;
      this.rebuild();
    });
    document.documentElement.addEventListener("theme", () => this.rebuild());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.rebuild());
    new ResizeObserver(() => this.plot?.setSize({ width: this.place.clientWidth, height: HEIGHT_PX })).observe(
      this.place,
    );
  }

  /** Show the newest history. */
  update() {
    const { history } = this.fleet;
    const isEmpty = !history.some((point) => point[LOSS] !== null || point[EVALUATION_LOSS] !== null);
    this.place.hidden = isEmpty;
    get("no-chart").hidden = !isEmpty;
    write(get("learning-words"), this.words());
    if (isEmpty) return;
    const isLog = this.chosenLog ?? this.suitsLog();
    const hasAccuracy = history.some((point) => point[ACCURACY] !== null);
    if (!this.plot || isLog !== this.isLog || hasAccuracy !== this.hasAccuracy) this.build(isLog, hasAccuracy);
    else this.plot.setData(this.data());
    this.showLast();
  }

  rebuild() {
    this.plot?.destroy();
    this.plot = null;
    this.update();
  }

  /** Whether losses differ so much that a linear scale would hide the small ones. */
  suitsLog() {
    const losses = this.losses();
    const least = Math.min(...losses);
    return least > 0 && Math.max(...losses) / least >= LOG_RATIO;
  }

  losses() {
    return this.fleet.history
      .flatMap((point) => [point[LOSS], point[EVALUATION_LOSS]])
      .filter((one) => one !== null);
  }

  data() {
    const points = this.fleet.history;
    // A logarithm of zero or less does not exist: such points are gaps.
    const drawn = (loss) => (loss === null || (this.isLog && loss <= 0) ? null : loss);
    return [
      points.map((point) => point[this.x]),
      points.map((point) => drawn(point[LOSS])),
      points.map((point) => drawn(point[EVALUATION_LOSS])),
      ...(this.hasAccuracy ? [points.map((point) => point[ACCURACY])] : []),
    ];
  }

  build(isLog, hasAccuracy) {
    this.plot?.destroy();
    this.isLog = isLog;
    this.hasAccuracy = hasAccuracy;
    this.log.setAttribute("aria-pressed", String(isLog));
    const muted = colour("--muted"),
      line = colour("--line");
    const font = "11px system-ui, sans-serif";
    const axis = {
      stroke: muted,
      font,
      grid: { stroke: line, width: 1 },
      ticks: { stroke: line, width: 1, size: 4 },
    };
    const loss = (plot, _, index, at) => worded(plot, index, at, significant);
    const share = (plot, _, index, at) => worded(plot, index, at, (one) => percent(one, 1));
    const x = (_, value) => (value === null ? "–" : this.x === TIME ? clock(value) : count(value));
    const series = (label, name, more) => ({
      label,
      stroke: colour(name),
      width: 1.5,
      spanGaps: true,
      points: { show: false },
      value: loss,
      ...more,
    });
    this.plot = new window.uPlot(
      {
        width: this.place.clientWidth,
        height: HEIGHT_PX,
        padding: [8, hasAccuracy ? 0 : 12, 0, 0],
        cursor: { y: false, points: { size: 6 } },
        scales: {
          x: { time: this.x === TIME },
          y: isLog ? { distr: 3, range: (_, least, most) => [least / 1.3, most * 1.3] } : {},
          // At least a tenth, because uPlot fails on a scale without extent, and every version may be perfect.
          share: { range: (_, least) => [Math.min(0.9, Math.max(0, Math.floor(10 * least) / 10)), 1] },
        },
        axes: [
          { ...axis, grid: { show: false }, size: 28, ...(this.x === TIME ? { space: clockSpace, values: clockLabels } : {}) },
          {
            ...axis,
            size: 52,
            ...(isLog ? { filter: fewDecades, grid: { ...axis.grid, filter: fewDecades } } : {}),
            values: (_, all) => all.map((one) => (one === null ? "" : significant(one))),
          },
          {
            ...axis,
            show: hasAccuracy,
            scale: "share",
            side: 1,
            size: 54,
            grid: { show: false },
            values: (_, all) => all.map((one) => percent(one)),
          },
        ],
        series: [
          { label: this.x === TIME ? "time" : "version", value: x },
          series("devices' loss", "--accent", {}),
          series("evaluation's loss", "--warn", {
            dash: [5, 3],
            points: { show: this.fleet.history.length < 200, size: 4 },
          }),
          ...(hasAccuracy ? [series("accuracy", "--good", { scale: "share", value: share })] : []),
        ],
        hooks: { setCursor: [() => this.showLast()] },
      },
      this.data(),
      this.place,
    );
    this.showLast();
  }

  /** While the pointer is elsewhere, let the legend show the newest values. */
  showLast() {
    if (this.plot && this.plot.cursor.idx == null) this.plot.setLegend({ idx: this.plot.data[0].length - 1 });
  }

  /** Return a sentence that answers the panel's question with figures. */
  words() {
    const known = this.fleet.history.filter((point) => point[LOSS] !== null);
    if (!known.length) return "";
    const last = known[known.length - 1];
    const since = last[TIME] - known[0][TIME];
    const before = known.find((point) => point[TIME] >= last[TIME] - Math.min(600, since / 2)) ?? last;
    const now = `loss ${significant(last[LOSS])}`;
    if (before === last || !before[LOSS]) return now;
    const change = last[LOSS] / before[LOSS] - 1;
    const ago = duration(last[TIME] - before[TIME]);
    if (Math.abs(change) < 0.01) return `${now}, unchanged in ${ago}`;
    return `${now}, ${percent(Math.abs(change))} ${change < 0 ? "lower" : "higher"} than ${ago} ago`;
  }
}

/** Return a value of the legend; where a series has none, the one before. */
function worded(plot, index, at, format) {
  for (let place = at ?? -1; place >= 0; place -= 1) {
    const value = plot.data[index][place];
    if (value !== null) return format(value);
  }
  return "–";
}

/** Return the least distance of two times in pixels: those with seconds need more. */
function clockSpace(_plot, _axis, least, most, size) {
  return (50 * (most - least)) / size > 30 ? 50 : 70;
}

/** Label times on one line, as precisely as their distance needs. */
function clockLabels(_, times) {
  const step = times.length > 1 ? times[1] - times[0] : 60;
  return times.map((time) => {
    const [day, at] = [clock(time).slice(0, -9), clock(time).slice(-8)];
    if (step >= 86_400) return day || at.slice(0, 5);
    return step >= 60 ? at.slice(0, 5) : at;
  });
}

/** Of the lines of a logarithmic scale, keep the powers of ten; with few of them, 2 and 5 times these. */
export function fewDecades(_, values) {
  const leading = values[values.length - 1] / values[0] < 50 ? "125" : "1";
  return values.map((value) => {
    const digits = value
      .toPrecision(6)
      .replace(/[.]|e.*/g, "")
      .replace(/^0+|0+$/g, ""); // 0.0500000: 5
    return digits.length === 1 && leading.includes(digits) ? value : null;
  });
}

/** Return the value of a custom property as a colour that a canvas understands. */
function colour(name) {
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
