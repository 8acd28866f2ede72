// The list of runs: live ones first, then most recently changed first.

import { html } from "./core.js";
import { ago, bytes, duration, plural, reward } from "./format.js";
import { go, link } from "./router.js";
import { Entry, Sparkline, State, Words } from "./ui.js";

/** @typedef {import("./types").RunRow} RunRow */

/** `late`: the list is outdated because the server does not answer. @param {{answer: {data: import("./types").Runs | null}, late: boolean, chosen: string[], values: Record<string, string>}} props */
export function Runs({ answer, late, chosen, values }) {
  const text = values.q ?? "";
  const runs = answer.data?.runs;
  if (!runs) return html`<p class="empty">Looking for runs …</p>`;
  if (!runs.length) {
    return html`<div class="empty"><p>There are no runs in ${answer.data?.folders}.</p>
      <p>Start one: <code>uv run rl @ configs/quickstart.toml</code>. It will appear here automatically.</p></div>`;
  }
  const toggle = (/** @type {string} */ key) => go(link("runs", { ...values, run: chosen.includes(key) ? chosen.filter((one) => one !== key) : [...chosen, key] }), true);
  const fits = (/** @type {RunRow} */ run) => [run.key, run.model, ...run.environments, run.state].join(" ").toLowerCase().includes(text.toLowerCase());
  const compared = runs.filter((run) => chosen.includes(run.key)).map((run) => run.key);
  return html`
    <div class="bar">
      <h1>Runs</h1><span class="faint">${plural(runs.length, "run")} in ${answer.data?.folders}</span><span class="grow"></span>
      <${Entry} label="Search runs" hide=${true} name="q" value=${values.q} search=${true} type="search" placeholder="Search runs  /" />
      <button class="primary" disabled=${compared.length < 2} onClick=${() => go(link("compare", { run: compared }))}>
        Compare${compared.length > 1 ? ` ${compared.length}` : ""}</button>
    </div>
    <div class=${late ? "tablebox late" : "tablebox"}><table class="runs">
      <thead><tr><th><span class="sr">Compare</span></th><th>Run</th><th>State</th><th class="right">Step</th><th>Reward</th><th>Held out</th>
        <th class="right">Lag</th><th class="right">Tokens/s</th><th class="right">Took</th><th class="right">Disk</th></tr></thead>
      <tbody>${runs.filter(fits).map((run) => html`<${Row} key=${run.key} run=${run} chosen=${chosen.includes(run.key)} toggle=${() => toggle(run.key)} />`)}</tbody>
    </table></div>
    ${!runs.some(fits) && html`<p class="empty">No run matches “${text}”.</p>`}`;
}

/** @param {{run: RunRow, chosen: boolean, toggle: () => void}} props */
function Row({ run, chosen, toggle }) {
  const share = run.max_steps ? Math.min(1, run.step / run.max_steps) : 0;
  return html`<tr>
    <td class="check"><input type="checkbox" aria-label=${`Compare ${run.key}`} checked=${chosen} onChange=${toggle} /></td>
    <td class="name"><a href=${link("curves", { run: [run.key] })}>${run.key}</a>
      <div class="faint">${[run.model, run.environments.join(", ")].filter(Boolean).join(" · ")}</div></td>
    <td class="how"><${State} state=${run.state} why=${run.why} /><a class="faint why" href=${link("health", { run: [run.key] })}><${Words} text=${said(run)} /></a></td>
    <td class="right" data-label="Step"><span>${run.step}${run.max_steps > 0 && html`<span class="faint">/${run.max_steps}</span>`}</span>
      <progress max="1" value=${share} aria-label=${`${Math.round(share * 100)}% of the steps`}></progress></td>
    <td class="curve" data-label=${run.measure === "reward/mean" ? "Reward" : "Loss"}><${Sparkline} values=${run.rewards} label=${`${run.measure} over the run, now ${reward(run.reward)}`} />
      <b title="The mean of the newest steps, at most five">${reward(run.reward)}</b>${run.measure !== "reward/mean" && html`<span class="faint"> loss</span>`}</td>
    <td class="evals" data-label="Held out">${run.evals.length ? run.evals.map((one) => html`<${Change} key=${one.name} one=${one} alone=${run.evals.length === 1} />`) : html`<span class="faint">–</span>`}</td>
    <td class="right" data-label="Lag">${run.lag === null ? "–" : +run.lag.toFixed(2)}</td>
    <td class="right" data-label="Tokens/s">${run.tokens_per_s === null ? "–" : Math.round(run.tokens_per_s).toLocaleString("en")}</td>
    <td class="right" data-label="Took">${duration(run.seconds)}</td>
    <td class="right" data-label="Disk">${bytes(run.bytes)}</td></tr>`;
}

/** What a run is doing, or when and how it ended. @param {RunRow} run */
function said(run) {
  if (run.state === "live" || !run.last_sign) return run.why;
  return run.state === "ended" ? ago(run.last_sign) : `${ago(run.last_sign)}: ${run.why}`;
}

/** @param {{one: import("./types").EvalChange, alone: boolean}} props */
function Change({ one, alone }) {
  const rose = one.clear ? one.last - one.first : 0;
  return html`<div title=${`${one.name}: version ${one.first_version} to ${one.last_version}`}>${!alone && html`<span class="faint">${one.name} </span>`}
    ${one.first_version !== one.last_version && html`${reward(one.first)} <span class="faint">→</span> `}<b class=${rose > 0 ? "good" : rose < 0 ? "bad" : ""}>${reward(one.last)}</b></div>`;
}

