// All metrics as charts, by section; the usual ones first.

import { html, useEffect, useMemo, useState } from "./core.js";
import { useAnswer } from "./api.js";
import { Chart, Sign, markOf, moved } from "./chart.js";
import { duration, number } from "./format.js";
import { change, go, link } from "./router.js";
import { Choice, Entry, Fault, numberIn, WrongNumbers } from "./ui.js";

/** @typedef {import("./types").Metric} Metric */

const USUAL = ["reward/mean", "rollouts/length_mean", "rollouts/truncated", "rollouts/zero_advantage", "entropy/mean", "mismatch_kl/mean",
  "lag/mean", "optim/grad_norm", "loss/mean", "validation/loss", "time/step", "perf/generated_tokens_per_s"];
const AXES = /** @type {[string, string][]} */ ([["step", "step"], ["rollouts", "rollouts"], ["tokens", "tokens"], ["time", "wall time"]]);
const ORDERS = /** @type {[string, string][]} */ ([["", "as listed"], ["fell", "fell most"], ["rose", "rose most"]]);
const MARKS = /** @type {[string, string][]} */ ([["eval", "evaluation"], ["checkpoint", "checkpoint"], ["death", "death"], ["restart", "restart"], ["change", "changed setting"]]);

/** Whether a metric is one of the first to look at. @param {string} name */
const usual = (name) => USUAL.includes(name) || /^eval\/[^/]+\/reward_mean$/.test(name) || (/^reward\/[^/]+\/mean$/.test(name));

/** `inner`: shown inside another page, below its title. @param {{runs: string[], values: Record<string, string>, live: boolean, inner?: boolean}} props */
export function Curves({ runs, values, live, inner }) {
  const metrics = useAnswer("metrics", { run: runs }, live ? 2000 : 0);
  const text = (values.q ?? "").toLowerCase();
  const found = (metrics.data?.metrics ?? []).filter((metric) => !metric.name.endsWith("_stderr")
    && (metric.name + " " + metric.what).toLowerCase().includes(text));
  const groups = useMemo(() => grouped(found, text), [metrics.data, text]);
  const [from, to] = [numberIn(values.from), numberIn(values.to)];
  const zoom = from !== null && to !== null && from < to ? /** @type {[number, number]} */ ([from, to]) : null;
  const opened = values.sections?.split(",").map(slug) ?? [slug(groups[0]?.[0] ?? "")];
  const shared = { runs, live, order: values.order ?? "", axis: values.axis ?? "step", weight: numberIn(values.smooth, 0, 0.99) ?? 0, zoom,
    setZoom: (/** @type {[number, number] | null} */ to) => change({ from: to?.[0].toPrecision(8), to: to?.[1].toPrecision(8) }, true) };
  return html`<div class="bar tools">
      ${inner ? "" : html`<h1 class="sr">Curves</h1>`}
      <${Entry} label="Search metrics" hide=${true} name="q" value=${values.q} search=${true} type="search" placeholder="Search metrics  /" />
      <${Choice} label="Over" name="axis" value=${shared.axis} options=${AXES} />
      <label class="field"><span>Smoothing</span><input type="range" min="0" max="0.99" step="0.01" value=${shared.weight}
        onInput=${(/** @type {any} */ e) => change({ smooth: Number(e.target.value) || null }, true)} /><output>${shared.weight || "off"}</output></label>
      <${Choice} label="Order" name="order" value=${shared.order} options=${ORDERS} />
      ${zoom && html`<button onClick=${() => shared.setZoom(null)}>Whole run</button><span class="faint">${range(zoom, shared.axis)}</span>`}
      <span class="grow"></span>
      ${runs.length > 1 ? html`<${Legend} runs=${runs} />` : html`<span class="marks faint">${MARKS.map(([kind, word]) => html`<span class=${`mark ${kind}`}>${word}</span>`)}</span>`}
    </div>
    <${WrongNumbers} values=${values} names=${["from", "to"]} /><${WrongNumbers} values=${values} names=${["smooth"]} low=${0} high=${0.99} />
    ${metrics.error && html`<${Fault} text=${metrics.error} />`}
    ${metrics.data && !found.length && html`<p class="empty">${text ? `No metric matches “${values.q}”.` : "There are no numbers yet: the first step has not ended."}</p>`}
    ${groups.map(([title, names]) => html`<${Section} key=${title} title=${title} metrics=${names} shared=${shared} open=${!!text || opened.includes(slug(title))}
      toggle=${(/** @type {boolean} */ on) => change({ sections: [...opened.filter((one) => one !== slug(title)), ...(on ? [slug(title)] : [])].join(",") || "none" }, true)} />`)}`;
}

/** The name of a section in the address, as titles may have commas. @param {string} title */
const slug = (title) => title.toLowerCase().replace(/[^a-z]+/g, "-");

/** The colours of the runs. @param {{runs: string[]}} props */
function Legend({ runs }) {
  return html`<span class="legend">${runs.map((run, i) => html`<a key=${run} href=${link("curves", { run: [run] })}><${Sign} i=${i} />${run}</a>`)}</span>`;
}

/** @param {[number, number]} zoom @param {string} axis */
function range(zoom, axis) {
  const text = axis === "time" ? duration : (/** @type {number} */ x) => number(Math.round(x));
  return `${text(zoom[0])} to ${text(zoom[1])}`;
}

/** @param {Metric[]} metrics @param {string} text @returns {[string, Metric[]][]} */
function grouped(metrics, text) {
  const sections = new Map(/** @type {[string, Metric[]][]} */ ([]));
  if (!text) sections.set("Overview", metrics.filter((metric) => usual(metric.name)).sort((a, b) => rank(a.name) - rank(b.name)));
  for (const metric of metrics) sections.set(metric.section, [...(sections.get(metric.section) ?? []), metric]);
  return [...sections].filter(([, names]) => names.length);
}

/** @param {string} name */
function rank(name) {
  if (name === "reward/mean") return 0;
  return name.startsWith("eval/") ? 1 : name.startsWith("reward/") ? 2 : 3 + USUAL.indexOf(name);
}

/** The last value that did not change for 200 ms. @template T @param {T} value @returns {T} */
function useSettled(value) {
  const [settled, setSettled] = useState(value);
  useEffect(() => {
    const timer = setTimeout(() => setSettled(value), 200);
    return () => clearTimeout(timer);
  }, [value]);
  return settled;
}

/** One section; fetches its curves when it is open, and those of a long run again when zoomed. @param {any} props */
function Section({ title, metrics, shared, open: shown, toggle }) {
  const { runs, axis, live, order } = shared;
  const names = metrics.map((/** @type {Metric} */ metric) => metric.name);
  const [long, setLong] = useState(false);
  const near = useSettled(long && shared.zoom ? shared.zoom.join() : "").split(",");
  const answer = useAnswer("curves", shown ? { run: runs, name: names, axis, begin: near[0], end: near[1] } : null, live ? 2000 : 0);
  useEffect(() => { if (answer.data?.series.some((one) => one.each > 1)) setLong(true); }, [answer.data]);
  const marks = useMemo(() => (answer.data?.marks ?? []).filter((mark) => runs.length === 1 || mark.kind === "death"), [answer.data]);
  const lines = useMemo(() => linesOf(answer.data, runs), [answer.data]);
  const span = useMemo(() => spanOf(answer.data), [answer.data]);
  const change_ = (/** @type {Metric} */ metric) => (order === "fell" ? 1 : -1) * moved(lines.get(metric.name)?.[0].values ?? []).share;
  const listed = order ? [...metrics].sort((a, b) => change_(a) - change_(b)) : metrics;
  const none = order && lines.size > 0 && !listed.some((/** @type {Metric} */ metric) => change_(metric) < 0);
  return html`<details class="section" open=${shown} onToggle=${(/** @type {any} */ e) => e.target.open !== shown && toggle(e.target.open)}>
    <summary><h2>${title}</h2> <span class="faint">${metrics.length}</span></summary>
    ${answer.error && html`<${Fault} text=${answer.error} />`}
    ${shown && none && html`<p class="faint">None of these ${order}.</p>`}
    ${shown && html`<div class="charts">${listed.map((/** @type {Metric} */ metric) => lines.has(metric.name) && html`
      <${Chart} key=${metric.name} title=${metric.name} what=${metric.what} lines=${lines.get(metric.name)} marks=${marks} axis=${axis}
        weight=${shared.weight} zoom=${shared.zoom} span=${span} setZoom=${shared.setZoom} open=${opener(metric.name)} />`)}</div>`}</details>`;
}

/** The range from the first point of all curves to the last, so that the charts align. @param {import("./types").Curves | null} data @returns {[number, number] | null} */
function spanOf(data) {
  const ends = (data?.series ?? []).flatMap(({ x }) => [x[0], x[x.length - 1]]).filter((at) => at !== null);
  return ends.length ? [Math.min(...ends), Math.max(...ends)] : null;
}

/** The target of a click on a point: the rollouts of the evaluation or the step. @param {string} name */
const opener = (name) => (/** @type {string} */ run, /** @type {number} */ step) =>
  go(link("rollouts", { run: [run], kind: name.startsWith("eval/") ? "eval" : null, begin: step, end: step }));

/** @param {import("./types").Curves | null} data @param {string[]} runs */
function linesOf(data, runs) {
  const found = new Map(/** @type {[string, any[]][]} */ ([]));
  for (const series of data?.series ?? []) {
    const line = { ...series, label: series.run, ...markOf(runs.indexOf(series.run)) };
    found.set(series.name, [...(found.get(series.name) ?? []), line]);
  }
  return found;
}
