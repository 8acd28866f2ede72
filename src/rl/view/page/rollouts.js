// Rollouts: filters, a list, and one of them beside it.

import { html } from "./core.js";
import { ask, useAnswer } from "./api.js";
import { number, plural, reward } from "./format.js";
import { useMoving } from "./keys.js";
import { change, go, here, link } from "./router.js";
import { Detail } from "./rollout.js";
import { Fate, identity, level } from "./rows.js";
import { Choice, Entry, Fault, Pager, Tabs } from "./ui.js";

/** @typedef {import("./types").RolloutRow} RolloutRow */

const LIMIT = 50, PART = 500, MOST_LOOKED = 5000;
const KINDS = /** @type {[string, string][]} */ ([["train", "training"], ["pending", "pending"], ["eval", "evaluations"]]);
const FILTERS = ["begin", "end", "env", "task", "group", "outcome", "why", "lowest", "highest", "shortest", "longest", "tool_errors", "q"];
const NAMES = /** @type {Record<string, string>} */ ({ begin: "from", end: "to", env: "environment", lowest: "reward ≥", highest: "reward ≤", shortest: "tokens ≥", longest: "tokens ≤", tool_errors: "tool errors", q: "text" });

/** @param {{run: string, values: Record<string, string>, live: boolean}} props */
export function Rollouts({ run, values, live }) {
  const kind = values.kind ?? "train";
  const wanted = Object.fromEntries(FILTERS.filter((name) => values[name]).map((name) => [name, values[name]]));
  const offset = values.offset ?? 0;
  const question = { run, kind, ...wanted, sort: values.sort, descending: values.up ? false : null, offset, limit: LIMIT };
  const { data, error, loading } = useAnswer("rollouts", question, live && !wanted.q && !wanted.tool_errors ? 2000 : 0);
  const rows = data?.rows ?? [];
  const chosen = values.at ?? "";
  useMoving(data, rows.map(identity), LIMIT, (now) => now.at ?? "", (id) => ({ at: id || null, token: null }),
    (id) => placeOf(question, id));
  return html`<div class=${`three${chosen ? " chosen" : ""}`}>
    <aside class="filters" aria-label="Filters">
      <details open=${innerWidth > 800}><summary>Filters${Object.keys(wanted).length ? ` (${Object.keys(wanted).length})` : ""}</summary>
        <${Tabs} label="Kind" name="kind" value=${kind} tabs=${KINDS} also=${{ at: null, token: null }} />
        <${Entry} label="Text" name="q" value=${values.q} search=${true} type="search" placeholder="in conversations  /" />
        <div class="pair"><${Entry} label=${kind === "eval" ? "Version from" : "Step from"} name="begin" value=${values.begin} type="number" /><${Entry} label="to" name="end" value=${values.end} type="number" /></div>
        <${Facet} label="Environment" name="env" value=${values.env} counts=${data?.facets.env} />
        ${kind !== "eval" && html`<${Facet} label="Trained, or why not" name="why" value=${values.why} counts=${data?.facets.why} />`}
        <${Facet} label="Outcome" name="outcome" value=${values.outcome} counts=${data?.facets.outcome} />
        <${Bars} histogram=${data?.histogram} values=${values} />
        <div class="pair"><${Entry} label="Tokens from" name="shortest" value=${values.shortest} type="number" /><${Entry} label="to" name="longest" value=${values.longest} type="number" /></div>
        <div class="pair"><${Entry} label="Task" name="task" value=${values.task} type="number" />${kind !== "eval" && html`<${Entry} label="Group" name="group" value=${values.group} type="number" />`}</div>
        <label class="check"><input type="checkbox" checked=${!!values.tool_errors} onChange=${(/** @type {any} */ e) => change({ tool_errors: e.target.checked ? "true" : null, offset: null })} /> a tool result mentions an error</label>
      </details></aside>
    <section class="list" aria-label="Rollouts">
      <div class="bar"><h1 class="sr">Rollouts</h1><span aria-live="polite">${loading ? (data ? "Searching …" : "Reading …") : data ? summary(data) : ""}</span><span class="grow"></span>
        <${Choice} label="Sort" name="sort" value=${values.sort ?? ""} options=${[["", "newest"], ...(data?.sorts ?? []).map((name) => [name, name])]} />
        ${values.sort && html`<button class="quiet" aria-label="Reverse the order" title="Reverse the order" onClick=${() => change({ up: values.up ? null : 1 })}>${values.up ? "↑" : "↓"}</button>`}</div>
      <${Chips} wanted=${wanted} />
      ${error && html`<${Fault} text=${error} />`}
      ${(data?.damaged ?? []).map((text) => html`<${Fault} text=${text} />`)}
      ${data && !data.total && html`<p class="empty">${Object.keys(wanted).length ? "No rollout matches the filters." : kind === "pending" ? "No rollout is pending." : "There are no rollouts yet."}</p>`}
      <ul class=${loading && data ? "rows late" : "rows"}>${rows.map((row) => html`<${Row} key=${identity(row)} row=${row} chosen=${identity(row) === chosen} />`)}</ul>
      ${data && html`<${Pager} total=${data.total} offset=${Number(offset) || 0} limit=${LIMIT} />`}
    </section>
    <section class="detail" aria-label="Rollout">${chosen
      ? html`<${Detail} key=${chosen} run=${run} kind=${kind} id=${chosen} values=${values} />`
      : html`<p class="empty">Choose a rollout, or press <kbd>j</kbd>.</p>`}</section>
  </div>`;
}

/** The index of a rollout in the whole list, or -1 if it is not among the first MOST_LOOKED. @param {Record<string, any>} question @param {string} id */
async function placeOf(question, id) {
  for (let offset = 0, total = 1; offset < Math.min(total, MOST_LOOKED); offset += PART) {
    const some = await ask("rollouts", { ...question, offset, limit: PART }).catch(() => null), at = some?.rows.findIndex((row) => identity(row) === id) ?? -1;
    if (at >= 0) return offset + at;
    total = some?.total ?? 0;
  }
  return -1;
}

/** @param {import("./types").RolloutPage} data */
function summary(data) {
  if (data.searched === null) return plural(data.total, "rollout");
  return data.complete ? `${data.total.toLocaleString("en")} of ${plural(data.searched, "rollout")}` : `${data.total.toLocaleString("en")} so far, in the first ${plural(data.searched, "rollout")}: narrow the filters to see more`;
}

/** @param {{row: RolloutRow, chosen: boolean}} props */
function Row({ row, chosen }) {
  const now = here();
  const address = link("rollouts", { run: now.run, ...now.values, token: null, at: identity(row) });
  const place = row.kind === "eval" ? `version ${row.version}` : row.step === null ? "pending" : `step ${row.step}`;
  return html`<li><a href=${address} aria-current=${chosen ? "true" : null} onClick=${(/** @type {MouseEvent} */ e) => { if (!e.ctrlKey && !e.metaKey && !e.shiftKey) { e.preventDefault(); go(address, !!now.values.at); } }}>
    <span class="score" data-level=${level(row)}>${row.failed ? "failed" : reward(row.reward)}</span>
    <span class="about"><span>task ${row.task} · ${place}${row.agent !== "agent" ? ` · ${row.agent}` : ""}</span>
      <span class="faint">${row.group !== null ? `group ${row.group} #${row.rollout}` : `sample ${row.rollout}`} · ${number(row.tokens)} tokens${row.turns > 1 ? ` · ${row.turns} turns` : ""} · ${row.env}</span></span>
    <span class="fate"><${Fate} row=${row} /></span></a></li>`;
}

/** The values of a field with their counts. @param {{label: string, name: string, value: string | undefined, counts: Record<string, number> | undefined}} props */
function Facet({ label, name, value, counts }) {
  const found = Object.entries(counts ?? {}).filter(([word]) => word);
  if (value && !found.some(([word]) => word === value)) found.unshift([value, 0]);
  if (found.length < 2 && !value) return null;
  const most = Math.max(1, ...found.map(([, count]) => count));
  return html`<fieldset class="facet"><legend>${label}</legend>${found.slice(0, 14).map(([word, count]) => html`
    <button key=${word} aria-pressed=${value === word} onClick=${() => change({ [name]: value === word ? null : word, offset: null })}>
      <span class="word" title=${word === "error" ? "Rollouts that failed, and the others of their groups" : null}>${word.replaceAll("_", " ")}</span><span class="count">${count.toLocaleString("en")}</span><i style=${{ width: `${(count / most) * 100}%` }}></i></button>`)}</fieldset>`;
}

/** A histogram of the rewards; a click on a bar filters by it. @param {{histogram: import("./types").Histogram | null | undefined, values: Record<string, string>}} props */
function Bars({ histogram, values }) {
  const most = Math.max(1, ...(histogram?.counts ?? []));
  const [low, high] = [values.lowest ? Number(values.lowest) : -Infinity, values.highest ? Number(values.highest) : Infinity];
  const choose = (/** @type {number} */ i) => {
    if (!histogram) return;
    const [from, to] = histogram.ranges[i].map(String);  // unrounded, so that the filter includes them
    const same = values.lowest === from && values.highest === to;
    change({ lowest: same ? null : from, highest: same ? null : to, offset: null });
  };
  return html`<fieldset class="facet"><legend>Reward</legend>
    ${histogram && html`<div class="bars" role="group" aria-label="Rollouts by reward">${histogram.counts.map((count, i) => html`
      <button key=${i} disabled=${!count} class=${histogram.ranges[i][1] >= low && histogram.ranges[i][0] <= high ? "in" : ""} aria-label=${`reward ${number(histogram.edges[i])} to ${number(histogram.edges[i + 1])}: ${plural(count, "rollout")}`}
        title=${`${number(histogram.edges[i])} to ${number(histogram.edges[i + 1])}: ${count}`} onClick=${() => choose(i)}><i style=${{ height: `${count ? Math.max(6, Math.sqrt(count / most) * 100) : 0}%` }}></i></button>`)}</div>
      <div class="ends faint"><span>${number(histogram.edges[0])}</span><span>${number(histogram.edges[histogram.edges.length - 1])}</span></div>`}
    <div class="pair"><${Entry} label="from" name="lowest" value=${values.lowest} type="number" /><${Entry} label="to" name="highest" value=${values.highest} type="number" /></div></fieldset>`;
}

/** The active filters, each with a button to remove it. @param {{wanted: Record<string, string>}} props */
function Chips({ wanted }) {
  const names = Object.keys(wanted);
  if (!names.length) return null;
  return html`<div class="chips">${names.map((name) => html`<button key=${name} aria-label=${`Remove the filter ${NAMES[name] ?? name} ${wanted[name]}`} onClick=${() => change({ [name]: null, offset: null })}>
    ${NAMES[name] ?? name}${name === "tool_errors" ? "" : html` <b>${name === "lowest" || name === "highest" ? number(Number(wanted[name])) : wanted[name]}</b>`} ×</button>`)}
    <button class="quiet" onClick=${() => change({ ...Object.fromEntries(names.map((name) => [name, null])), offset: null })}>all</button></div>`;
}
