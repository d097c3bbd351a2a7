// The hub's totals, and notices about the whole fleet, in the words of `edgeasync status`.

import { bytes, count, duration, joined, percent, seconds, short, significant } from "./text.js";
import { fill, get, make, write } from "./dom.js";

const BOUNDS = {
  change: "local steps at most double or halve per assignment",
  device: "limited by the devices' local_steps_max",
  epochs_max: "limited by epochs_max",
  local_steps_max: "limited by local_steps_max",
  local_steps_min: "limited by local_steps_min",
};

export function showSummary(fleet) {
  const { summary } = fleet;
  write(get("place"), short(`${summary.address} · lineage ${summary.lineage}`, 200));
  fill(
    get("notices"),
    fleet.notices,
    ({ words }) => words,
    ({ level, words }) => make("li", { "data-level": level }, short(words, 800)),
  );
  fill(
    get("figures"),
    findFigures(fleet),
    ([name]) => name,
    ([name]) => make("div", {}, make("dt", {}, name), make("dd"), make("dd", { class: "muted" })),
    ({ children: [, shown, below] }, [, value, more]) => {
      write(shown, value);
      write(below, more);
      below.title = more;
    },
  );
  for (const [id, version] of [
    ["newest", summary.version],
    ["best", summary.best?.version],
  ]) {
    const link = get(id);
    link.hidden = version === undefined;
    link.title = version === undefined ? "" : `Download version ${version} as safetensors`;
  }
}

function findFigures({ summary, counts }) {
  const { cadence, traffic, evaluation, best } = summary;
  const total = Object.values(counts).reduce((sum, one) => sum + one, 0);
  const here = (counts.training ?? 0) + (counts.paused ?? 0) + (counts.joining ?? 0);
  const figures = [
    ["devices", count(here), here === total ? "connected" : `connected, ${count(total)} known`],
    ["version", count(summary.version), `hub up for ${duration(summary.uptime_s)}`],
    [
      "updates",
      count(summary.updates_applied),
      joined(
        ", ",
        `${count(summary.updates_rejected)} rejected`,
        summary.rollbacks > 0 && `${count(summary.rollbacks)} rollbacks`,
      ),
    ],
    ["devices' loss", summary.fleet.loss === null ? "–" : significant(summary.fleet.loss), "median"],
  ];
  if (evaluation) {
    const isLoss = evaluation.accuracy === null;
    const shown = (one) =>
      isLoss ? (one.loss === null ? "–" : significant(one.loss)) : percent(one.accuracy ?? 0, 1);
    figures.push([
      isLoss ? "evaluation" : "accuracy",
      shown(evaluation),
      !best || best.version === evaluation.version
        ? `of version ${count(evaluation.version)}`
        : `best ${shown(best)} at ${count(best.version)}`,
    ]);
  }
  const bound = BOUNDS[cadence.bound] ?? cadence.bound;
  const gain = cadence.gain < 1 && joined(": ", `shortened to ${percent(cadence.gain)}`, cadence.cause);
  figures.push([
    "period",
    cadence.period_s ? seconds(cadence.period_s) : "–",
    joined(", ", cadence.warming_up && "warming up", bound, gain) || "between exchanges",
  ]);
  const left =
    traffic.day_left_bytes === null
      ? `${bytes(traffic.day_bytes)} today`
      : `${bytes(traffic.day_left_bytes)} left today`;
  figures.push(["traffic", bytes(traffic.bytes_up + traffic.bytes_down), left]);
  return figures;
}
