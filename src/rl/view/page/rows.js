// Shared by the list of rollouts and the single rollout: its name in the address, and its fate in a word.

import { html } from "./core.js";
import { signed } from "./format.js";

/** @typedef {import("./types").RolloutRow} RolloutRow */

/** The name of a rollout in an address. @param {RolloutRow} row */
export function identity(row) {
  return row.kind === "eval" ? `${row.version}/${row.env}/${row.task}/${row.rollout}/${row.agent}` : `${row.group}/${row.rollout}`;
}

/** The parameters by which the server finds a rollout. @param {string} run @param {string} kind @param {string} id */
export function asked(run, kind, id) {
  const parts = id.split("/");
  if (kind !== "eval") return { run, kind, group: parts[0], rollout: parts[1] };
  const [agent, rollout, task] = [parts.pop(), parts.pop(), parts.pop()];
  return { run, kind, version: parts.shift(), env: parts.join("/"), task, rollout, agent };
}

/** What became of a rollout. @param {{row: RolloutRow}} props */
export function Fate({ row }) {
  return html`${row.why && html`<span class=${`tag ${row.why !== "trained" ? "dull" : (row.advantage ?? 0) > 0 ? "good" : (row.advantage ?? 0) < 0 ? "bad" : "dull"}`}>${row.why === "trained" && row.advantage !== null ? `${signed(row.advantage)}` : row.why.replaceAll("_", " ")}</span>`}
    ${row.outcome !== "finished" && html`<span class="tag warn">${row.outcome}</span>`}`;
}

/** How good a reward is, for a colour: 0 to 4. @param {RolloutRow} row */
export function level(row) {
  if (row.failed || row.reward === null) return "none";
  return Math.round(Math.max(0, Math.min(1, row.reward)) * 4);
}
