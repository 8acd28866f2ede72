// Compares runs: what they have learned, which settings differ, their evaluations.

import { html, useMemo } from "./core.js";
import { useAnswer } from "./api.js";
import { Sign } from "./chart.js";
import { Curves } from "./curves.js";
import { reward } from "./format.js";
import { Fault, Words } from "./ui.js";

/** Maximum number of runs with a column each. */
const FEW = 4;

/** @param {{runs: string[], values: Record<string, string>, live: boolean}} props */
export function Compare({ runs, values, live }) {
  const { data, error } = useAnswer("compare", { run: runs }, live ? 2000 : 0);
  const evals = useMemo(() => newestCommon(data?.evals ?? []), [data]);
  return html`<div class="bar"><h1>Compare</h1><span class="faint">${runs.join(" · ")}</span></div>
    ${error && html`<${Fault} text=${error} />`}
    ${(data?.faults ?? []).map((text) => html`<${Fault} text=${text} />`)}
    ${(data?.notes ?? []).map((text) => html`<p class="note"><${Words} text=${text} /></p>`)}
    <div class=${`sides compared${runs.length > FEW ? " many" : ""}`}>
      <section class="card"><h2>Settings that differ</h2>
        ${data && (data.settings.length ? html`<${Table} runs=${runs} corner="Setting" rows=${data.settings.map((row) => ({ name: html`<code>${row.key}</code>`, cells: row.values.map((value) => html`<code>${value ?? "–"}</code>`) }))} />`
          : html`<p class="faint">None except name and place.</p>`)}</section>
      <section class="card"><h2>Reward after equal numbers of rollouts</h2>
        ${data && (data.learned.length ? html`<${Table} runs=${runs} corner="Rollouts" rows=${data.learned.map((row) => ({ name: Math.round(row.rollouts).toLocaleString("en"), cells: row.rewards.map(reward), best: row.rewards.map((mean) => best(mean, row.rewards)) }))} />
          <p class="faint">Mean training reward over the preceding tenth, or at least the last step. Green is ahead at that point${data.notes.length ? "" : ": it learned faster per rollout"}.</p>` : html`<p class="faint">Not all runs have rewards.</p>`)}</section>
      <section class="card"><h2>Evaluations</h2>
        ${data && (evals.length ? html`<${Table} runs=${runs} corner="Evaluation" rows=${evals.map((row) => ({ name: html`${row.name} <span class="faint">version ${row.version}</span>`, best: row.means.map((_, i) => clear(row, i)),
          cells: row.means.map((mean, i) => html`${reward(mean)}${!!row.errors[i] && html`<span class="faint"> ± ${reward(row.errors[i])}</span>`}`) }))} />
          <p class="faint">± is one standard error over examples, as in <code>rl compare</code>; it is missing where all rewards are equal, which does not prove that the next one would be. Green is ahead by more than twice the error of the difference.</p>` : html`<p class="faint">No run has an evaluation.</p>`)}</section>
    </div>
    <${Curves} runs=${runs} values=${values} live=${live} inner=${true} />`;
}

/** Values of runs: a column per run, or a row per run if columns would make the table wider.
 * @param {{runs: string[], corner: string, rows: {name: any, cells: any[], best?: boolean[]}[]}} props */
function Table({ runs, corner, rows }) {
  const signs = runs.map((run, i) => html`<${Sign} i=${i} />${run}`), turned = runs.length > FEW && rows.length < runs.length;
  const cell = (/** @type {number} */ row, /** @type {number} */ run) => html`<td class=${rows[row].best?.[run] ? "right best" : "right"}>${rows[row].cells[run]}</td>`;
  const [heads, sides] = turned ? [rows.map(({ name }) => name), signs] : [signs, rows.map(({ name }) => name)];
  return html`<div class="tablebox" tabindex="0" role="group" aria-label=${corner}><table><thead><tr><th scope="col">${turned ? "Run" : corner}</th>${heads.map((head) => html`<th scope="col" class="right">${head}</th>`)}</tr></thead>
    <tbody>${sides.map((side, i) => html`<tr><th scope="row">${side}</th>${heads.map((_, j) => turned ? cell(j, i) : cell(i, j))}</tr>`)}</tbody></table></div>`;
}

/** Whether a value is the highest of several. @param {number | null} value @param {(number | null)[]} all */
function best(value, all) {
  const known = all.filter((one) => one !== null);
  return value !== null && value === Math.max(.../** @type {number[]} */ (known)) && new Set(known).size > 1;
}

/** Whether a run's mean is the highest by more than twice the error of the difference. @param {import("./types").EvalPoint} row @param {number} i */
function clear(row, i) {
  const others = row.means.flatMap((mean, j) => j !== i && mean !== null ? [{ mean, error: row.errors[j] ?? 0 }] : []);
  const mean = row.means[i], error = row.errors[i] ?? 0;
  return mean !== null && others.length > 0 && others.every((one) => mean - one.mean > 2 * Math.hypot(error, one.error));
}

/** The evaluations of versions that several runs have, and each run's newest; at most sixteen, the newest first. @param {import("./types").EvalPoint[]} points */
function newestCommon(points) {
  const newest = /** @type {Record<string, import("./types").EvalPoint>} */ ({});
  for (const point of points) point.means.forEach((mean, i) => { if (mean !== null) newest[`${point.name} ${i}`] = point; });
  const kept = points.filter((point) => point.means.filter((mean) => mean !== null).length > 1 || Object.values(newest).includes(point));
  return kept.sort((a, b) => b.version - a.version || a.name.localeCompare(b.name)).slice(0, 16);
}
