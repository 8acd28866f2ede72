// Tasks over time: which ones changed, one task's rewards by version, and what differs between two of its answers.

import { html, useMemo } from "./core.js";
import { useAnswer } from "./api.js";
import { Conversation } from "./conversation.js";
import { diff } from "./diff.js";
import { Dots } from "./dots.js";
import { useMoving } from "./keys.js";
import { plural, reward, signed } from "./format.js";
import { change, link } from "./router.js";
import { asked, Fate, identity, level } from "./rows.js";
import { Choice, Entry, Fault, numberIn, Pager, Tabs, WrongNumbers } from "./ui.js";

/** @typedef {import("./types").RolloutRow} RolloutRow */

const LIMIT = 40;
const KINDS = /** @type {[string, string][]} */ ([["train", "training"], ["eval", "evaluations"]]);
const SORTS = /** @type {[string, string][]} */ ([["", "largest change"], ["change", "gained"], ["last", "reward now"], ["rollouts", "most played"], ["task", "number"]]);

/** @param {{run: string, values: Record<string, string>, live: boolean}} props */
export function Tasks({ run, values, live }) {
  const kind = values.kind ?? "train", offset = values.offset ?? 0;
  const { data, error } = useAnswer("tasks", { run, kind, number: values.number, sort: values.sort, descending: values.up ? false : null, offset, limit: LIMIT }, live ? 10000 : 0);
  const several = new Set((data?.rows ?? []).map((row) => row.env)).size > 1;
  const chosen = values.task !== undefined && values.env;
  const nameIn = (/** @type {Record<string, string>} */ now) => now.task !== undefined && now.env ? nameOf({ env: now.env, task: now.task }) : "";
  useMoving(data, (data?.rows ?? []).map(nameOf), LIMIT, nameIn, openTask);
  return html`<div class=${`two${chosen ? " chosen" : ""}`}>
    <section class="list" aria-label="Tasks">
      <div class="bar"><h1>Tasks</h1><span class="faint">${data ? plural(data.total, "task") : ""}</span><span class="grow"></span>
        <${Entry} label="Task number" hide=${true} name="number" value=${values.number} type="number" search=${true} placeholder="Number  /" /></div>
      <div class="bar"><${Tabs} label="Kind" name="kind" value=${kind} tabs=${KINDS} also=${openTask("")} /><span class="grow"></span><${Choice} label="Sort" name="sort" value=${values.sort ?? ""} options=${SORTS} />
        ${values.sort && html`<button class="quiet" aria-label="Reverse the order" onClick=${() => change({ up: values.up ? null : 1 })}>${values.up ? "↑" : "↓"}</button>`}</div>
      ${error && html`<${Fault} text=${error} />`}
      ${(data?.damaged ?? []).map((text) => html`<${Fault} text=${text} />`)}
      ${data && !data.total && html`<p class="empty">${values.number ? `Task ${values.number} has no rollouts.` : "No rollout has been scored yet."}</p>`}
      ${data && data.total > 0 && html`<table class="tasks"><thead><tr><th>Task</th><th class="right">Rollouts</th><th class="right" title="Mean reward of the first third of the versions that played it">First</th><th class="right" title="Mean reward of the last third of the versions that played it">Last</th><th class="right">Change</th></tr></thead><tbody>
        ${data.rows.map((row) => html`<tr key=${nameOf(row)} aria-current=${chosen && values.env === row.env && Number(values.task) === row.task ? "true" : null}>
          <td><a href=${link("tasks", { run: [run], ...without(values), env: row.env, task: row.task })}>task ${row.task}</a><div class="faint small snippet">${[several && row.env, row.prompt].filter(Boolean).join(" · ")}</div></td>
          <td class="right">${row.rollouts}</td><td class="right">${reward(row.first)}</td><td class="right">${reward(row.last)}</td>
          <td class=${`right ${(row.change ?? 0) > 0 ? "good" : (row.change ?? 0) < 0 ? "bad" : "faint"}`}>${signed(row.change)}</td></tr>`)}</tbody></table>`}
      ${data && html`<${Pager} total=${data.total} offset=${Number(offset) || 0} limit=${LIMIT} />`}
    </section>
    <section class="detail" aria-label="Task">${chosen ? html`<${One} key=${`${values.env}/${values.task}/${kind}`} run=${run} kind=${kind} values=${values} live=${live} />`
      : html`<p class="empty">Choose a task, or press <kbd>j</kbd>, to see the model's answers, version by version.</p>`}</section></div>`;
}

/** @param {{env: string, task: number | string}} row */
const nameOf = ({ env, task }) => `${env}/${task}`;

/** The address values that name a task, without those of another task. @param {string} name */
function openTask(name) {
  const cut = name.lastIndexOf("/");
  return { env: name.slice(0, Math.max(0, cut)) || null, task: name.slice(cut + 1) || null, a: null, b: null, step: null };
}

/** The address without what belongs to another task. @param {Record<string, string>} values */
function without(values) {
  const { a, b, step, ...rest } = values;
  return rest;
}

/** @param {{run: string, kind: string, values: Record<string, string>, live: boolean}} props */
function One({ run, kind, values, live }) {
  const { data, error } = useAnswer("task", { run, kind, env: values.env, task: values.task }, live ? 5000 : 0);
  if (error) return html`<button class="back" onClick=${() => change({ task: null, env: null })}>‹ Tasks</button><${Fault} text=${error} />`;
  if (!data) return html`<p class="empty">Reading …</p>`;
  const all = data.versions.flatMap((version) => version.rows);
  const step = numberIn(values.step), around_ = step === null ? null : around(data.versions, step);
  const oneSided = around_ !== null && around_[0] === around_[1], sides = oneSided ? null : around_;
  const count = data.versions.reduce((sum, version) => sum + version.count, 0);
  const [first, last] = pair(data.versions.filter((version) => version.rows.length), sides);
  const [left, right] = [all.find((row) => identity(row) === values.a) ?? first, all.find((row) => identity(row) === values.b) ?? last];
  const gone = sides ? absent(sides) : [], other = values.a || values.b || (!oneSided && (gone.length === 0 || left?.version !== right?.version));
  return html`<button class="back" onClick=${() => change({ task: null, env: null })}>‹ Tasks</button>
    <h2>${data.env} task ${data.task}</h2>
    <p class="faint">${plural(count, "rollout")} of ${plural(data.versions.length, "version")}; <a href=${link("rollouts", { run: [run], kind: kind === "eval" ? "eval" : null, env: data.env, task: data.task })}>${all.length < count ? `${all.length.toLocaleString("en")} of them are in this file` : "all of them"}</a>${data.without_version > 0 && `; ${plural(data.without_version, "rollout")} failed before the first token`}</p>
    ${data.prompt.length > 0 && html`<details class="prompt" open><summary>The task</summary><${Conversation} messages=${data.prompt} /></details>`}
    <div class="bar"><${Entry} label="What did this step change:" name="step" type="number" value=${values.step} also=${{ a: null, b: null }} />
      ${sides && html`<span aria-live="polite">mean reward ${said(sides[0])} → ${said(sides[1])}</span>`}</div>
    <${WrongNumbers} values=${values} names=${["step"]} />
    ${sides && sides[1].version - sides[0].version > 1 && html`<p class="note">Steps ${sides[0].version + 1} to ${sides[1].version} lie in between: this task does not show what step ${values.step} alone changed.</p>`}
    ${gone.length > 0 && html`<p class="note">No answer of version ${gone.join(" or ")} is in this file${other ? "; the answers below are of other versions" : ", and too few of other versions to compare"}.</p>`}
    ${data.note && html`<p class="note">${data.note}</p>`}
    ${oneSided && html`<p class="note">All rollouts of this task are on one side of step ${values.step}: nothing shows what it changed.</p>`}
    <${Dots} versions=${data.versions} a=${left && identity(left)} b=${right && identity(right)} />
    ${left && right ? html`<p class="faint small">Each dot is a rollout: click it (or press Enter) to make it the later one, with Shift to make it the earlier one. The line is the mean.${all.length < count ? " A ring is the mean of a version whose rollouts are not all in this file." : ""}</p>
    <div class="pair choose"><${Pick} label="Earlier" name="a" all=${all} value=${identity(left)} /><${Pick} label="Later" name="b" all=${all} value=${identity(right)} /></div>
    ${other && html`<${Difference} run=${run} kind=${kind} a=${left} b=${right} />`}` : html`<p class="empty">No answer to this task is in this file: the means are of the whole run.</p>`}`;
}

/** @typedef {import("./types").TaskVersion} TaskVersion */

/** The newest version before a step, and the first version that includes it: step N makes version N. @param {TaskVersion[]} versions @param {number} step @returns {[TaskVersion, TaskVersion]} */
function around(versions, step) {
  const before = versions.filter((one) => one.version < step), after = versions.filter((one) => one.version >= step);
  return [before[before.length - 1] ?? after[0], after[0] ?? before[before.length - 1]];
}

/** The rollouts to compare: those nearest to their version's mean before and after a step, if they are in this file; else the best of the
 * first and of the last version with rollouts. Undefined if no version has any. @param {TaskVersion[]} versions @param {[TaskVersion, TaskVersion] | null} sides */
function pair(versions, sides) {
  const [from, to] = [versions[0], versions[versions.length - 1]];
  if (!from) return [];
  if (sides?.every(({ rows }) => rows.length)) return sides.map(typical);
  const first = best(from.rows);
  return [first, best(to.rows.filter((row) => row !== first)) ?? first];
}

/** The versions of which no answer is in this file. @param {TaskVersion[]} sides */
const absent = (sides) => [...new Set(sides.filter(({ rows }) => !rows.length).map(({ version }) => version))];

/** The rollout whose reward is nearest to the mean. @param {TaskVersion} version */
function typical({ rows, mean }) {
  const far = (/** @type {RolloutRow} */ row) => row.reward === null || mean === null ? Infinity : Math.abs(row.reward - mean);
  return [...rows].sort((x, y) => far(x) - far(y))[0];
}

/** @param {TaskVersion} version */
const said = ({ version, mean, count }) => html`<b>${reward(mean)}</b> <span class="faint">(version ${version}, ${plural(count, "rollout")})</span>`;

/** The rollout with the highest reward. @param {RolloutRow[]} rows */
function best(rows) {
  return [...rows].sort((x, y) => (y.reward ?? -Infinity) - (x.reward ?? -Infinity))[0];
}

/** @param {{label: string, name: string, all: RolloutRow[], value: string}} props */
function Pick({ label, name, all, value }) {
  const text = (/** @type {RolloutRow} */ row) => `version ${row.version ?? "–"}, ${row.group === null ? "sample" : `group ${row.group}`} #${row.rollout}: ${row.failed ? "failed" : reward(row.reward)}`;
  return html`<${Choice} label=${label} name=${name} value=${value} options=${all.slice(-800).map((row) => [identity(row), text(row)])} />`;
}

/** @param {{run: string, kind: string, a: RolloutRow, b: RolloutRow}} props */
function Difference({ run, kind, a, b }) {
  const one = useAnswer("rollout", asked(run, kind, identity(a))), two = useAnswer("rollout", asked(run, kind, identity(b)));
  const parts = useMemo(() => one.data && two.data ? diff(answer(one.data), answer(two.data)) : null, [one.data, two.data]);
  if (one.error || two.error) return html`<${Fault} text=${one.error || two.error} />`;
  if (!parts) return html`<p class="empty">Reading …</p>`;
  const side = (/** @type {RolloutRow} */ row, /** @type {string} */ name, /** @type {string} */ kind_) => html`<article class="side">
    <header><span class="score" data-level=${level(row)}>${row.failed ? "failed" : reward(row.reward)}</span> <a href=${link("rollouts", { run: [run], kind: kind === "eval" ? "eval" : null, env: row.env, task: row.task, at: identity(row) })}>${name}: version ${row.version ?? "–"}</a> <${Fate} row=${row} /></header>
    <div class="text" dir="auto">${parts.filter((part) => part.kind === "same" || part.kind === kind_).map((part, i) => part.kind === "same" ? html`<span key=${i}>${part.text}</span>` : part.kind === "gone" ? html`<del key=${i}>${part.text}</del>` : html`<ins key=${i}>${part.text}</ins>`)}</div></article>`;
  return html`<div class="sides">${side(a, "Earlier", "gone")}${side(b, "Later", "new")}</div>
    ${identity(a) === identity(b) && html`<p class="faint">Both are the same rollout.</p>`}`;
}

/** All that the model wrote, turn by turn. @param {import("./types").RolloutDetail} data */
function answer(data) {
  const own = data.messages.slice(data.prompt).filter((message) => message.role === "assistant");
  return own.map((message) => [message.thinking, message.text, ...message.calls.map((call) => `${call.name}(${call.arguments})`)].filter(Boolean).join("\n")).join("\n———\n");
}

