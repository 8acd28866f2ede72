// One rollout: why it was trained or not, its rewards, its group, the conversation, its tokens.

import { html } from "./core.js";
import { useAnswer } from "./api.js";
import { Conversation, promptEnd, Text } from "./conversation.js";
import { number, reward, signed } from "./format.js";
import { change, here, link } from "./router.js";
import { asked, Fate, identity, level } from "./rows.js";
import { TokenView } from "./tokens.js";
import { Fault, Tabs, Words } from "./ui.js";

/** @typedef {import("./types").RolloutDetail} RolloutDetail */

/** @param {{run: string, kind: string, id: string, values: Record<string, string>}} props */
export function Detail({ run, kind, id, values }) {
  const { data, error } = useAnswer("rollout", asked(run, kind, id));
  if (error) return html`<${Back} /><${Fault} text=${error} />`;
  if (!data) return html`<p class="empty">Reading …</p>`;
  const { row } = data;
  const tab = values.tab ?? "talk";
  const tabs = [["talk", "Conversation"], ...(data.has_tokens ? [["tokens", "Tokens"]] : []), ...(data.group.length > 1 ? [["group", "Side by side"]] : []), ["fields", "Fields"]];
  const place = row.kind === "eval" ? `Version ${row.version}, ${row.env}` : `Step ${row.step ?? "–"}, ${row.env}`;
  return html`<${Back} />
    <header class="rollout">
      <h2>${place} <a href=${link("tasks", { run: [run], kind: kind === "eval" ? "eval" : null, env: row.env, task: row.task, step: row.step })} title="This task over all versions, and what this step changed on it">task ${row.task}</a></h2>
      <p class="faint">${[row.group !== null ? `group ${row.group}, rollout ${row.rollout}` : `sample ${row.rollout}`, row.agent !== "agent" && row.agent, `${number(row.tokens)} tokens`, row.turns > 1 && `${row.turns} turns`,
        row.version !== null && row.kind !== "eval" && `sampled by version ${data.fields.versions?.join(", ") ?? row.version}`, row.turns !== 1 && data.fields.stop?.replaceAll("_", " ")].filter(Boolean).join(" · ")}</p>
      ${data.explanation && html`<p class=${`verdict ${row.why === "trained" ? "good" : "dull"}`}><${Words} text=${data.explanation} /></p>`}
      ${data.error && html`<${Text} className="fault" text=${data.error} />`}
      <${Rewards} data=${data} />
      <${Group} data=${data} run=${run} kind=${kind} id=${id} />
    </header>
    <${Tabs} label="View" name="tab" value=${tab} tabs=${tabs} />
    ${tab === "tokens" && data.has_tokens ? html`<${TokenView} run=${run} step=${row.step} group=${row.group} rollout=${row.rollout} values=${values} />`
      : tab === "group" ? html`<${SideBySide} run=${run} kind=${kind} group=${data.group} />`
      : tab === "fields" ? html`<table class="fields"><tbody>${Object.entries(data.fields).map(([name, value]) => html`<tr key=${name}><th scope="row">${name}</th><td><code>${typeof value === "string" ? value : JSON.stringify(value)}</code></td></tr>`)}</tbody></table>`
      : html`<${Conversation} messages=${data.messages} prompt=${data.prompt} />`}`;
}

/** Goes back to the list on screens too narrow for both. */
function Back() {
  return html`<button class="back" onClick=${() => change({ at: null, token: null })}>‹ Rollouts</button>`;
}

/** The reward, and the value of each function. @param {{data: RolloutDetail}} props */
function Rewards({ data }) {
  const { row, metrics } = data;
  const size = Math.max(1, ...Object.values(metrics).map((value) => Math.abs(value ?? 0)));
  return html`<div class="rewards"><span class="score big" data-level=${level(row)}>${row.failed ? "failed" : reward(row.reward)}</span>
    <div class="faint small">reward${row.advantage !== null ? html`<br />advantage <b>${signed(row.advantage)}</b>` : ""}</div>
    <dl>${Object.entries(metrics).map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${number(value)}</dd><i style=${{ width: `${(Math.abs(value ?? 0) / size) * 100}%` }}></i></div>`)}</dl></div>`;
}

/** Links to the rollouts of the group. @param {{data: RolloutDetail, run: string, kind: string, id: string}} props */
function Group({ data, run, kind, id }) {
  const { group } = data;
  if (group.length < 2) return null;
  const now = here();
  const compared = group.filter((row) => row.agent === data.row.agent && (row.why === "not_trainable") === (data.row.why === "not_trainable"));
  const rewards = compared.map((row) => row.reward).filter((value) => value !== null);
  const mean = rewards.reduce((a, b) => a + b, 0) / (rewards.length || 1);
  const whose = group.some((row) => row.agent !== data.row.agent) ? ` of ${data.row.agent}` : "";
  return html`<nav class="group" aria-label="The rollouts of its group"><span class="faint">${kind === "eval" ? "its task’s samples" : `group ${group[0].group}`}, mean${whose} ${reward(mean)}</span>
    ${group.map((row) => html`<a key=${identity(row)} class="score" data-level=${level(row)} aria-current=${identity(row) === id ? "true" : null} aria-label=${`rollout ${row.rollout}, ${row.agent}: reward ${reward(row.reward)}`}
      href=${link("rollouts", { run: [run], ...now.values, token: null, at: identity(row) })} title=${`#${row.rollout} ${row.outcome}, ${row.why}`}>${row.failed ? "✕" : number(row.reward)}</a>`)}</nav>`;
}

/** All answers of the group side by side. @param {{run: string, kind: string, group: import("./types").RolloutRow[]}} props */
function SideBySide({ run, kind, group }) {
  return html`<div class="columns">${group.slice(0, 32).map((row) => html`<${Column} key=${identity(row)} run=${run} kind=${kind} row=${row} />`)}</div>
    ${group.length > 32 && html`<p class="faint">The first 32 of ${group.length}.</p>`}`;
}

/** @param {{run: string, kind: string, row: import("./types").RolloutRow}} props */
function Column({ run, kind, row }) {
  const { data, error } = useAnswer("rollout", asked(run, kind, identity(row)));
  const now = here();
  return html`<article><header><a href=${link("rollouts", { run: [run], ...now.values, tab: null, token: null, at: identity(row) })}>#${row.rollout}</a> <span class="score" data-level=${level(row)}>${row.failed ? "failed" : reward(row.reward)}</span> <${Fate} row=${row} /></header>
    ${error && html`<${Fault} text=${error} />`}
    ${data && html`<${Conversation} messages=${data.messages.slice(promptEnd(data) < data.messages.length ? promptEnd(data) : 0)} />`}</article>`;
}
