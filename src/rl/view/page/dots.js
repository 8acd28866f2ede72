// One task's rewards by version: a dot for each rollout, a line for the mean. One dot takes the focus, and the arrow keys go on from it.

import { html, useRef, useState } from "./core.js";
import { number, plural, reward } from "./format.js";
import { change } from "./router.js";
import { identity } from "./rows.js";

/** @typedef {import("./types").TaskVersion} TaskVersion */
/** @typedef {{row: import("./types").RolloutRow, value: number, x: number}} Dot */

const LEFT = 46, RIGHT = 16, TOP = 16, BOTTOM = 128, RADIUS = 4.5, APART = 5, MARGIN = 36;

/** @param {{versions: TaskVersion[], a?: string, b?: string}} props */
export function Dots({ versions, a, b }) {
  const box = useRef(/** @type {SVGSVGElement | null} */ (null));
  const [held, setHeld] = useState("");
  const width = innerWidth < 800 ? 420 : 800;
  const x = placed(versions, width), dots = versions.flatMap((version, i) => row(version, x[i], roomAt(x, i, width)));
  const values = [...dots.map(({ value }) => value), .../** @type {number[]} */ (versions.map(({ mean }) => mean).filter((mean) => mean !== null))];
  if (!values.length) return null;
  const [low, high] = [Math.min(0, ...values), Math.max(1, ...values)];
  const y = (/** @type {number} */ value) => BOTTOM - ((value - low) / (high - low || 1)) * (BOTTOM - TOP);
  const means = versions.flatMap(({ mean, ...of }, i) => mean === null ? [] : [{ ...of, mean, x: x[i] }]);
  const [first, last] = [versions[0], versions[versions.length - 1]];
  const stop = dots.findIndex(({ row }) => identity(row) === held) < 0 ? b ?? "" : held;
  const pressed = (/** @type {KeyboardEvent} */ e, /** @type {number} */ i) => {
    const to = { ArrowRight: i + 1, ArrowDown: i + 1, ArrowLeft: i - 1, ArrowUp: i - 1, Home: 0, End: dots.length - 1 }[e.key];
    if (e.key === "Enter" || e.key === " ") choose(dots[i], e.shiftKey);
    else if (to === undefined) return;
    else /** @type {SVGElement | undefined} */ (box.current?.querySelectorAll("circle.one")[to])?.focus();
    e.preventDefault();
  };
  return html`<svg ref=${box} class="dots" viewBox=${`0 0 ${width} 150`} role="group" aria-label=${`Mean reward ${reward(first.mean)} at version ${first.version}, ${reward(last.mean)} at version ${last.version}; arrow keys go from rollout to rollout`}>
    ${[low, high].map((value) => html`<line class="grid" x1="40" x2=${width - 10} y1=${y(value)} y2=${y(value)} /><text x="34" y=${y(value) + 4} text-anchor="end">${number(value)}</text>`)}
    <text x=${x[0]} y="147" text-anchor="middle">version ${first.version}</text>${versions.length > 1 && html`<text x=${x[x.length - 1]} y="147" text-anchor="middle">${last.version}</text>`}
    ${means.length > 1 && html`<polyline class="mean" points=${means.map((one) => `${one.x},${y(one.mean)}`).join(" ")} />`}
    ${means.filter(({ count, rows }) => rows.length < count).map((one) => html`<circle key=${`mean ${one.version}`} class="ring" cx=${one.x} cy=${y(one.mean)} r="6.5"><title>version ${one.version}: mean ${reward(one.mean)} of ${plural(one.count, "rollout")}, ${one.rows.length} of them in this file</title></circle>`)}
    ${dots.map((dot, i) => html`<circle key=${identity(dot.row)} class=${`one ${identity(dot.row) === a ? "a" : identity(dot.row) === b ? "b" : ""}`} cx=${dot.x} cy=${y(dot.value)} r=${RADIUS} role="button" tabindex=${identity(dot.row) === stop ? 0 : -1}
      aria-label=${spoken(dot, a, b)} onFocus=${() => setHeld(identity(dot.row))} onClick=${(/** @type {MouseEvent} */ e) => choose(dot, e.shiftKey)} onKeyDown=${(/** @type {KeyboardEvent} */ e) => pressed(e, i)}><title>version ${dot.row.version}, #${dot.row.rollout}: ${reward(dot.value)}</title></circle>`)}</svg>`;
}

/** The x of each version; a single version is in the middle. @param {TaskVersion[]} versions @param {number} width */
function placed(versions, width) {
  const [from, to] = [versions[0].version, versions[versions.length - 1].version];
  if (from === to) return [(LEFT + width - RIGHT) / 2];
  return versions.map(({ version }) => LEFT + MARGIN + ((version - from) / (to - from)) * (width - LEFT - RIGHT - 2 * MARGIN));
}

/** How far a version's dots may reach: to the middle between it and its neighbours, and to the edge. @param {number[]} x @param {number} i @param {number} width */
function roomAt(x, i, width) {
  const gaps = [i > 0 ? (x[i] - x[i - 1]) / 2 : Infinity, i < x.length - 1 ? (x[i + 1] - x[i]) / 2 : Infinity, x[i] - LEFT, width - RIGHT - x[i]];
  return Math.max(0, Math.min(...gaps) - RADIUS - 1);
}

/** The dots of a version: equal rewards side by side, closer where there is little room. @param {TaskVersion} version @param {number} x @param {number} room @returns {Dot[]} */
function row({ rows }, x, room) {
  const equal = /** @type {Map<string, import("./types").RolloutRow[]>} */ (new Map());
  for (const one of rows) if (one.reward !== null) equal.set(one.reward.toFixed(2), [...(equal.get(one.reward.toFixed(2)) ?? []), one]);
  return [...equal.values()].flatMap((some) => {
    const apart = Math.min(APART, (2 * room) / Math.max(1, some.length - 1));
    return some.map((one, i) => ({ row: one, value: /** @type {number} */ (one.reward), x: x + (i - (some.length - 1) / 2) * apart }));
  });
}

/** @param {Dot} dot @param {string} [a] @param {string} [b] */
function spoken({ row, value }, a, b) {
  const side = identity(row) === a ? ", the earlier one" : identity(row) === b ? ", the later one" : "";
  return `version ${row.version}, rollout ${row.rollout}: reward ${reward(value)}${side}`;
}

/** @param {Dot} dot @param {boolean} earlier */
function choose({ row }, earlier) {
  change({ [earlier ? "a" : "b"]: identity(row) }, true);
}
