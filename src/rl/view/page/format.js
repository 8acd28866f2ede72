// Formats numbers, times and sizes for people.

/** A number with about four digits; a dash if there is none. @param {number | null | undefined} value */
export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace("e+", "e").replace(/\.?0+e/, "e");
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return size >= 1000 ? value.toFixed(1) : String(+value.toPrecision(4));
}

/** A reward or a share: three digits after the point. @param {number | null | undefined} value */
export function reward(value) {
  return value === null || value === undefined ? "–" : value.toFixed(3);
}

/** A number with its sign. @param {number | null | undefined} value */
export function signed(value) {
  return value === null || value === undefined ? "–" : (value > 0 ? "+" : value < 0 ? "−" : "±") + Math.abs(value).toFixed(3);
}

/** A duration: `2 h 05 min`, `3 min 07 s`, `4.2 s`, `12 ms`. @param {number} seconds */
export function duration(seconds) {
  if (seconds === 0) return "0 s";
  if (seconds < 0.1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  const two = (/** @type {number} */ n) => String(n).padStart(2, "0");
  if (days) return `${days} d ${two(hours)} h`;
  return hours ? `${hours} h ${two(minutes)} min` : `${minutes} min ${two(whole % 60)} s`;
}

/** How long ago, roughly. @param {number} time seconds since the epoch */
export function ago(time) {
  const seconds = Date.now() / 1000 - time;
  if (seconds < 5) return "now";
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  return seconds < 129600 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} days ago`;
}

/** The time of day, local. @param {number} time seconds since the epoch @param {boolean} [precise] with tenths */
export function clock(time, precise) {
  const date = new Date(time * 1000);
  return date.toLocaleTimeString("en-GB") + (precise ? `.${Math.floor(date.getMilliseconds() / 100)}` : "");
}

/** Day and time, local. @param {number} time seconds since the epoch */
export function day(time) {
  return new Date(time * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
}

/** `1.5 GiB`. @param {number} count */
export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; count >= 1024 && unit < units.length - 1; unit++) count /= 1024;
  return `${unit && count < 1000 ? count.toPrecision(3) : Math.round(count)} ${units[unit]}`;
}

/** `1 rollout`, `2 rollouts`. @param {number} count @param {string} noun */
export function plural(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}
