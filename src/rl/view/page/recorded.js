// An exported page: answers in place of the server, from the data in the file. It has fewer rollouts than the run, and says so.

import { promptEnd } from "./conversation.js";
import { identity } from "./rows.js";

/** @param {any} recorded @param {string} name @param {Record<string, any>} values @returns {any} */
export function recordedAnswer(recorded, name, values) {
  const make = ANSWERS[name] ?? ((/** @type {any} */ all) => all[name]);
  const found = make(recorded, values);
  if (!found) throw new Error("this file does not include that: open the run with rl view");
  return found;
}

/** @type {Record<string, (recorded: any, values: any) => any>} */
const ANSWERS = {
  curves: (all, { name, axis }) => ({ ...all.curves[axis], series: all.curves[axis].series.filter((/** @type {any} */ one) => name.includes(one.name)) }),
  rollouts: (all, values) => listed(all, values),
  rollout: (all, values) => all.rollouts[values.kind === "eval" ? `${values.version}/${values.env}/${values.task}/${values.rollout}/${values.agent}` : `${values.group}/${values.rollout}`],
  tokens: (all, { group, rollout, offset, limit }) => stretch(all.tokens[`${group}/${rollout}`], offset, limit),
  tasks: (all, values) => tasks(all, values),
  task: (all, values) => oneTask(all, values),
  log: (all, { process }) => all.logs[process],
  timeline: (all, { begin, end }) => between(all.timeline, Math.max(Number(begin) || 0, all.timeline.first), Math.min(Number(end) || Infinity, all.timeline.last)),
};

/** The part of a timeline in an interval. @param {import("./types").LaneTimeline} all @param {number} begin @param {number} end */
function between(all, begin, end) {
  const inside = (/** @type {import("./types").LaneSpan[]} */ spans) => spans.filter((span) => span.end >= begin && span.begin <= end);
  const lanes = all.lanes.map((lane) => ({ ...lane, spans: inside(lane.spans) }));
  return { ...all, begin, end, lanes, quiet: inside(all.quiet), moments: all.moments.filter((moment) => moment.time >= begin && moment.time <= end) };
}

/** A part of a rollout's tokens, which the file has as one answer. @param {import("./types").Tokens | undefined} all @param {number} offset @param {number} limit */
function stretch(all, offset, limit) {
  if (!all) return null;
  const part = (/** @type {any[]} */ list) => list.slice(offset, offset + limit);
  const values = Object.fromEntries(Object.entries(all.values).map(([name, list]) => [name, part(list)]));
  return { ...all, offset, pieces: part(all.pieces), ids: part(all.ids), trained: part(all.trained), values };
}

/** The rollouts of a kind, the newest first, as the server has them. @param {any} all @param {string} kind */
function rowsOf(all, kind) {
  const rows = Object.values(all.rollouts).map((/** @type {any} */ one) => one.row).filter((row) => row.kind === kind);
  return kind === "eval" ? rows.sort((a, b) => b.version - a.version) : rows;
}

/** Sorts rows by a value like the server: stable, with rows without a value last.
 * @param {any[]} rows @param {any} values @param {string[]} sorts the valid names @param {(row: any, sort: string) => number | null | undefined} value */
function sorted(rows, { sort, descending }, sorts, value) {
  if (!sort) return rows;
  if (!sorts.includes(sort)) throw new Error(`sort = ${sort}: give one of ${sorts.join(", ")}`);
  const sign = descending === false ? 1 : -1, keyed = rows.map((row) => ({ row, x: value(row, sort) ?? null }));
  return keyed.sort((a, b) => a.x === null || b.x === null ? Number(a.x === null) - Number(b.x === null) : sign * (a.x - b.x)).map(({ row }) => row);
}

/** A page of rows. @param {any[]} rows @param {any} values */
function paged(rows, values) {
  const offset = Number(values.offset);
  if (!Number.isInteger(offset) || offset < 0) throw new Error(`offset = ${values.offset}: give a whole number from 0`);
  return { total: rows.length, offset, rows: rows.slice(offset, offset + values.limit) };
}

/** The value that a rollout is sorted by: a field or a metric, whose name has the prefix `metrics/` if it is also a field's. @param {any} all @param {any} row @param {string} sort */
function sortValue(all, row, sort) {
  if (sort === "retries") return detailOf(all, row).fields.retries ?? 0;
  const field = FIELDS[sort];
  return field ? row[field] : detailOf(all, row).metrics[sort.replace(/^metrics\//, "")];
}

const FIELDS = /** @type {Record<string, string>} */ ({ step: "step", version: "version", reward: "reward", advantage: "advantage", num_tokens: "tokens", num_turns: "turns", task: "task" });

/** @param {any} row @param {any} values @param {string} [left] a filter that is left out */
function fits(row, values, left) {
  const place = row.kind === "eval" ? row.version : row.step;
  const within = (/** @type {any} */ value, /** @type {any} */ low, /** @type {any} */ high) => (!low || value >= Number(low)) && (!high || value <= Number(high));
  const is = (/** @type {string} */ name) => name === left || !values[name] || String(row[name]) === String(values[name]) || (name === "why" && values.why === "error" && row.failed);
  return within(place, values.begin, values.end) && (left === "reward" || within(row.reward ?? NaN, values.lowest, values.highest)) && within(row.tokens, values.shortest, values.longest)
    && ["env", "task", "group", "outcome", "why"].every(is);
}

/** @param {any} all @param {any} row @returns {any} */
const detailOf = (all, row) => all.rollouts[identity(row)];

/** @param {any} detail */
function texts(detail) {
  return detail.messages.map((/** @type {any} */ message) => [message.text, message.thinking, ...message.calls.map((/** @type {any} */ call) => call.name + call.arguments)].join("\n")).join("\n") + detail.error;
}

/** @param {any} all @param {any} values */
function listed(all, values) {
  const rows = rowsOf(all, values.kind);
  let found = rows.filter((row) => fits(row, values));
  const text = (values.q ?? "").toLowerCase(), looked = found.length;
  if (text || values.tool_errors) {
    found = found.filter((row) => {
      const detail = detailOf(all, row);
      return (!text || texts(detail).toLowerCase().includes(text)) && (!values.tool_errors || detail.messages.some((/** @type {any} */ m) => m.role === "tool" && /error/i.test(m.text.slice(0, 200))));
    });
  }
  found = sorted(found, values, all.sorts.rollouts, (row, sort) => sortValue(all, row, sort));
  const facets = Object.fromEntries(["env", "why", "outcome"].map((name) => [name, facet(rows.filter((row) => fits(row, values, name)), name)]));
  return { ...paged(found, values), facets, histogram: histogram(rows.filter((row) => fits(row, values, "reward"))),
    sorts: all.sorts.rollouts, searched: text || values.tool_errors ? looked : null, complete: true, damaged: all.left_out ? [all.left_out] : [] };
}

/** The number of rows that a filter on each value of a field finds, the most frequent first. @param {any[]} rows @param {string} name @returns {Record<string, number>} */
function facet(rows, name) {
  const found = /** @type {Record<string, number>} */ ({}), errors = rows.filter((row) => row.why === "error" || row.failed).length;
  for (const row of rows) found[row[name]] = (found[row[name]] ?? 0) + 1;
  if (name === "why" && errors) found.error = errors;
  return Object.fromEntries(Object.entries(found).sort((a, b) => b[1] - a[1]));
}

/** @param {any[]} rows */
function histogram(rows) {
  const values = rows.map((row) => row.reward).filter((value) => value !== null);
  const low = Math.min(...values), high = Math.max(...values), bins = 24;
  if (!(high > low)) return null;
  const found = Array.from({ length: bins }, () => /** @type {number[]} */ ([]));
  for (const value of values) found[Math.min(bins - 1, Math.floor(((value - low) / (high - low)) * bins))].push(value);
  return { edges: found.concat([[]]).map((_, i) => low + ((high - low) * i) / bins), counts: found.map((some) => some.length),
    ranges: found.map((some) => some.length ? [Math.min(...some), Math.max(...some)] : []) };
}

/** @param {any} all @param {any} values */
function tasks(all, values) {
  const rows = all.tasks[values.kind].filter((/** @type {any} */ row) => !values.number || row.task === Number(values.number));
  const found = sorted(rows, values, all.sorts.tasks, (row, sort) => row[sort]);
  return { ...paged(found, values), damaged: all.tasks_left_out ? [all.tasks_left_out] : [] };
}

/** A task: the file has the mean and the count of each of its versions, and some of their rollouts. @param {any} all @param {any} values */
function oneTask(all, { kind, env, task }) {
  const known = all.task[kind][`${env}/${task}`];
  if (!known) throw new Error(all.tasks_left_out || `task ${task} of ${env}: has no rollouts in the run`);
  const rows = rowsOf(all, kind).filter((row) => row.env === env && String(row.task) === String(task));
  const versions = known.versions.map((/** @type {any} */ one) => ({ ...one, rows: rows.filter((row) => row.version === one.version) }));
  const newest = rows.length ? detailOf(all, rows[rows.length - 1]) : { messages: [], prompt: 0 };
  return { ...known, versions, prompt: newest.messages.slice(0, promptEnd(newest)) };
}
