// Several runs side by side: what they have learned, which settings differ, their evaluations.

import { html, useMemo } from "./core.js";
import { useAnswer } from "./api.js";
import { Sign } from "./chart.js";
import { Curves } from "./curves.js";
import { reward } from "./format.js";
import { Fault } from "./ui.js";

/** @param {{runs: string[], values: Record<string, string>, live: boolean}} props */
export function Compare({ runs, values, live }) {
  const { data, error } = useAnswer("compare", { run: runs }, live ? 2000 : 0);
  const head = runs.map((run, i) => html`<th key=${run} scope="col" class="right"><${Sign} i=${i} />${run}</th>`);
  const evals = useMemo(() => newestCommon(data?.evals ?? []), [data]);
  return html`<div class="bar"><h1>Compare</h1><span class="faint">${runs.join(" · ")}</span></div>
    ${error && html`<${Fault} text=${error} />`}
    ${(data?.faults ?? []).map((text) => html`<${Fault} text=${text} />`)}
    <div class="sides compared">
      <section class="card"><h2>Settings that differ</h2>
        ${data && (data.settings.length ? html`<div class="tablebox"><table><thead><tr><th scope="col">Setting</th>${head}</tr></thead><tbody>
          ${data.settings.map((row) => html`<tr key=${row.key}><th scope="row"><code>${row.key}</code></th>
            ${row.values.map((value) => html`<td class="right"><code>${value === null ? "–" : typeof value === "string" ? value : JSON.stringify(value)}</code></td>`)}</tr>`)}
          </tbody></table></div>` : html`<p class="faint">None but name and place.</p>`)}</section>
      <section class="card"><h2>Reward after as many rollouts</h2>
        ${data && (data.learned.length ? html`<div class="tablebox"><table><thead><tr><th scope="col">Rollouts</th>${head}</tr></thead><tbody>
          ${data.learned.map((row) => html`<tr key=${row.samples}><th scope="row">${Math.round(row.samples).toLocaleString("en")}</th>${row.rewards.map((mean) => html`<td class=${best(mean, row.rewards) ? "right best" : "right"}>${reward(mean)}</td>`)}</tr>`)}
          </tbody></table></div><p class="faint">Mean reward in training over the tenth before, of the newest step at least; who is ahead at the same place learned faster per sample.</p>` : html`<p class="faint">Not all of them have rewards.</p>`)}</section>
      <section class="card"><h2>Evaluations</h2>
        ${data && (evals.length ? html`<div class="tablebox"><table><thead><tr><th scope="col">Evaluation</th><th scope="col" class="right">Version</th>${head}</tr></thead><tbody>
          ${evals.map((row) => html`<tr key=${row.name + row.version}><th scope="row">${row.name}</th><td class="right">${row.version}</td>
            ${row.means.map((mean, i) => html`<td class=${clear(row, i) ? "right best" : "right"}>
              ${reward(mean)}${!!row.errors[i] && html`<span class="faint"> ± ${reward(row.errors[i])}</span>`}</td>`)}</tr>`)}
          </tbody></table></div><p class="faint">± is one standard error over examples, as in <code>rl compare</code>; none where all rewards are equal, which proves nothing of the next one. Green is ahead by more than twice the error of the difference.</p>` : html`<p class="faint">Neither has one.</p>`)}</section>
    </div>
    <${Curves} runs=${runs} values=${values} live=${live} inner=${true} />`;
}

/** Whether a value is the highest of several. @param {number | null} value @param {(number | null)[]} all */
function best(value, all) {
  const known = all.filter((one) => one !== null);
  return value !== null && value === Math.max(.../** @type {number[]} */ (known)) && new Set(known).size > 1;
}

/** Whether a run's mean is the highest, by more than chance would have it. @param {import("./types").EvalPoint} row @param {number} i */
function clear(row, i) {
  const others = row.means.flatMap((mean, j) => j !== i && mean !== null ? [{ mean, error: row.errors[j] ?? 0 }] : []);
  const mean = row.means[i], error = row.errors[i] ?? 0;
  return mean !== null && others.length > 0 && others.every((one) => mean - one.mean > 2 * Math.hypot(error, one.error));
}

/** The evaluations of versions that several runs have, and each run's newest; sixteen at most, the newest first. @param {import("./types").EvalPoint[]} points */
function newestCommon(points) {
  const newest = /** @type {Record<string, import("./types").EvalPoint>} */ ({});
  for (const point of points) point.means.forEach((mean, i) => { if (mean !== null) newest[`${point.name} ${i}`] = point; });
  const kept = points.filter((point) => point.means.filter((mean) => mean !== null).length > 1 || Object.values(newest).includes(point));
  return kept.sort((a, b) => b.version - a.version || a.name.localeCompare(b.name)).slice(0, 16);
}
