// The hub's totals, and notices about the whole fleet, in the words of `edgeasync status`.

import { bytes, count, duration, joined, percent, seconds, short, significant } from "./text.js";
import { fill, get, make, write } from "./dom.js";

const REMEDIES = {
  alert: "nothing was changed",
  increase_frequency: "intervals were halved",
  reduce_lr: "the hub's learning rate was halved",
  reduce_local_lr: "the devices' learning rates were halved",
  rollback: "rolled back to an earlier model, at half the hub's learning rate",
};

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
    findNotices(summary),
    (one) => one.join(),
    ([level, words]) => make("li", { "data-level": level }, short(words, 800)),
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

function findNotices(summary) {
  const notices = [];
  if (summary.disk_trouble) {
    const cost =
      summary.durability === "checkpoint"
        ? "training continues, but a crash of the hub loses everything after the last checkpoint"
        : "the hub accepts no updates until it can write again";
    notices.push(["bad", `Cannot write the run's folder: ${summary.disk_trouble}; ${cost}`]);
  }
  for (const alarm of summary.alarms.filter((one) => !one.device)) {
    const remedy = REMEDIES[alarm.remedy] ?? alarm.remedy;
    notices.push(["bad", `Alarm of the fleet, for ${duration(alarm.since_s)}: ${alarm.cause}; ${remedy}`]);
  }
  const { cadence, learning_rate_factor: factor } = summary;
  if (cadence.resting) {
    const still = `the model has not improved for ${duration(cadence.still_s)}`;
    notices.push(["info", `Idle: ${still}, so devices exchange every ${seconds(cadence.rest_period_s)}`]);
  }
  if (factor !== 1)
    notices.push(["info", `The hub's learning rate is reduced to ${significant(factor)} of its setting`]);
  return notices;
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
