// Numbers, times and text from devices, formatted as `edgeasync status` does.

/** Characters that a terminal or browser would act on instead of showing: controls, bidi marks, line ends. */
const UNSAFE = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}]/gu;

const LINES = { "\n": "\\n", "\r": "\\r", "\t": "\\t" };

/** Escape invisible and control characters; text from peers may contain any. */
export function visible(text) {
  return text.replace(UNSAFE, (one) => {
    if (one in LINES) return LINES[one];
    const code = one.codePointAt(0);
    const digits = code.toString(16);
    if (code < 0x100) return `\\x${digits.padStart(2, "0")}`;
    return code < 0x10000 ? `\\u${digits.padStart(4, "0")}` : `\\U${digits.padStart(8, "0")}`;
  });
}

/** Return at most `length` characters of text, escaped. */
export function short(text, length = 300) {
  // Slice before escaping: escaping 10,000 characters only to drop them would cost time in every row.
  const cut = text.length > length ? `${text.slice(0, length).replace(/[\ud800-\udbff]$/, "")}…` : text;
  return visible(cut);
}

/** Format a number with significant digits, without trailing zeros. */
export function significant(value, digits = 3) {
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size >= 10 ** digits && size < 999_999.5) return count(Math.round(value));
  if (size >= 1e6 || (value && size < 1e-3)) return value.toExponential(digits - 1).replace(/\.?0*e\+?/, "e");
  return String(Number(value.toPrecision(digits)));
}

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** Format a whole number with thousands separators. */
export function count(value) {
  return WHOLE.format(value);
}

/** Format a fraction as a percentage. */
export function percent(fraction, decimals = 0) {
  return `${(100 * fraction).toFixed(decimals)} %`;
}

/** Format a measured time in seconds or milliseconds. */
export function seconds(value) {
  if (value >= 100) return `${count(value)} s`;
  return value >= 1 ? `${value.toFixed(2)} s` : `${significant(1e3 * value)} ms`;
}

/** Format a duration with its largest unit. */
export function duration(value) {
  if (value < 10) return `${significant(Math.max(value, 0), 2)} s`;
  if (value < 120) return `${Math.round(value)} s`;
  for (const [unit, size, limit] of [
    ["min", 60, 7200],
    ["h", 3600, 172_800],
    ["days", 86_400, Infinity],
  ]) {
    if (value < limit) return `${value < 10 * size ? significant(value / size, 2) : count(value / size)} ${unit}`;
  }
  return "";
}

/** Format a number of bytes with a unit and three significant digits. */
export function bytes(value) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (value < 999.5) return `${significant(value)} ${unit}`;
    value /= 1000;
  }
  return `${significant(value)} TB`;
}

const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const DAY = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });

/** Format a point in time; with its day, unless it is today's. */
export function clock(time) {
  const date = new Date(time * 1000);
  const today = date.toDateString() === new Date().toDateString();
  return today ? CLOCK.format(date) : `${DAY.format(date)} ${CLOCK.format(date)}`;
}

/** Join the non-empty parts of a sentence. */
export function joined(separator, ...parts) {
  return parts.filter(Boolean).join(separator);
}
