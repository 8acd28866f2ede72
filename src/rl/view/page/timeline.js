// What each process did when. Drag to zoom; a click on a span shows what it is.

import { html, useEffect, useRef, useState } from "./core.js";
import { useAnswer } from "./api.js";
import { clock, day, duration } from "./format.js";
import { change, link } from "./router.js";
import { Fault, numberIn, Words, WrongNumbers } from "./ui.js";

/** @typedef {import("./types").LaneSpan} Span */
/** @typedef {import("./types").LaneTimeline} Answer */

const ROW = 26, LEFT = 0, WIDTH = 1000;
const WAITS = /wait|idle/;
const MOMENTS = /** @type {Record<string, string>} */ ({ death: "✕", restart: "↻", ready: "▲", start: "▶", silent: "…", stall: "…", quarantine: "!", warning: "!", repair: "✚", give_up: "✕", stop: "■", step: "S", batch: "B", eval: "E" });
const KINDS = /** @type {Record<string, string>} */ ({ forward_backward: "k0", optimizer: "k1", publish_weights: "k2", checkpoint: "k4", batch: "k5", eval: "k3", training: "k0", publishing: "k2", checkpointing: "k4", copying_state: "k4", filling_batch: "k2", evaluating: "k3", loading_version: "k4", play: "k3", score: "k1",
  starting: "k4", fetch_batch: "wait", serving: "idle", sampling: "k5", load: "k4", stage: "k4", "no process worked": "k6" });
const QUIET = ["step", "batch", "eval"];

/** @param {{run: string, values: Record<string, string>, live: boolean}} props */
export function Timeline({ run, values, live }) {
  const { data, error } = useAnswer("timeline", { run, begin: values.begin, end: values.end }, live && !values.begin ? 2000 : 0);
  if (error) return html`<${Fault} text=${error} />`;
  if (!data) return html`<p class="empty">Reading …</p>`;
  const look = (/** @type {number} */ begin, /** @type {number} */ end) => change({ begin: begin.toFixed(3), end: end.toFixed(3) }, true);
  const length = data.end - data.begin;
  const at = numberIn(values.at);
  const point = (/** @type {number} */ time) => change({ at: time.toFixed(2) }, true);
  const moved = (/** @type {number} */ share) => look(data.begin + share * length, data.end + share * length);
  return html`<div class="bar tools"><h1>Timeline</h1><span class="faint">${day(data.begin)} · ${clock(data.begin)} to ${clock(data.end)}, ${duration(length)}</span><span class="grow"></span><${Clock} data=${data} at=${at} />
      <button aria-label="Earlier" disabled=${data.begin <= data.first} onClick=${() => moved(-0.5)}>‹</button>
      <button aria-label="Zoom in" onClick=${() => look(data.begin + length / 4, data.end - length / 4)}>+</button>
      <button aria-label="Zoom out" onClick=${() => look(Math.max(data.first, data.begin - length / 2), Math.min(data.last, data.end + length / 2))}>−</button>
      <button aria-label="Later" disabled=${data.end >= data.last} onClick=${() => moved(0.5)}>›</button>
      <button onClick=${() => look(data.first, data.last)}>All</button>
      <button onClick=${() => change({ begin: null, end: null, at: null }, true)}>${live ? "Follow" : "The end"}</button></div>
    <${WrongNumbers} values=${values} names=${["at"]} />
    ${data.note && html`<p class="note"><${Words} text=${data.note} /></p>`}
    ${length > 0 ? html`<${Lanes} data=${data} look=${look} at=${at} point=${point} />` : html`<p class="empty">Nothing was recorded yet.</p>`}
    <p class="faint">Drag to zoom in. Click, or enter a time above, to see what each process was doing at that moment.</p>
    ${at !== null && length > 0 && html`<${Then} data=${data} at=${at} />`}
    <div class="sides"><section class="card"><h2>Where the time went</h2><${Shares} data=${data} /></section>
      <section class="card"><h2>What happened</h2><${Moments} data=${data} run=${run} every=${!!values.every} /></section></div>`;
}

/** A time of day to look at. @param {{data: Answer, at: number | null}} props */
function Clock({ data, at }) {
  const [text, setText] = useState(""), [fault, setFault] = useState("");
  useEffect(() => { setText(at === null ? "" : clock(at)); setFault(""); }, [at]);
  const find = (/** @type {Event} */ e) => {
    e.preventDefault();
    const time = timeOf(text, data.first, data.last);
    setFault(!timeOfDay(text) ? "give a time of day, such as 10:41 or 10:41:30" : time === null ? `outside the run, which lasted from ${day(data.first)} to ${day(data.last)}` : "");
    if (document.activeElement instanceof HTMLElement) document.activeElement.blur();
    if (time === null) return;
    const near = time >= data.begin && time <= data.end && data.end - data.begin <= 600;
    change({ at: time.toFixed(2), ...(near ? {} : { begin: Math.max(data.first, time - 60).toFixed(2), end: Math.min(data.last, time + 60).toFixed(2) }) }, true);
  };
  return html`<form class="field" onSubmit=${find}><label class="field"><span>Look at</span>
    <input type="text" size="8" data-search="yes" placeholder="10:41  /" value=${text} onInput=${(/** @type {any} */ e) => setText(e.target.value)} autocomplete="off" /></label>
    ${fault && html`<span class="bad" role="alert">${fault}</span>`}</form>`;
}

/** Hours, minutes and optional seconds; null if the text is not a time of day. @param {string} text */
function timeOfDay(text) {
  const found = /^\s*(\d{1,2}):(\d{2})(?::(\d{2}))?\s*$/.exec(text)?.slice(1).filter(Boolean).map(Number);
  return found && found[0] < 24 && found[1] < 60 && (found[2] ?? 0) < 60 ? found : null;
}

/** The last moment of a run with this time of day, in seconds since the epoch. @param {string} text @param {number} first @param {number} last */
function timeOf(text, first, last) {
  const found = timeOfDay(text);
  if (!found) return null;
  const date = new Date(last * 1000);
  date.setHours(found[0], found[1], found[2] ?? 0, 0);
  const length = found.length > 2 ? 1 : 60;  // a minute may be only partly inside the run
  for (; date.getTime() / 1000 + length > first; date.setDate(date.getDate() - 1)) {
    if (date.getTime() / 1000 <= last) return Math.max(first, date.getTime() / 1000);
  }
  return null;
}

/** What everyone was doing at one moment, and who waited for whom. @param {{data: Answer, at: number}} props */
function Then({ data, at }) {
  const rows = data.lanes.flatMap((lane) => lane.spans.filter((span) => span.begin <= at && span.end >= at && span.name !== "level 0").slice(0, 1).map((span) => ({ lane, span })));
  const quiet = data.quiet.find((one) => one.begin <= at && one.end >= at);
  return html`<section class="card then" aria-live="polite"><h2>At ${clock(at, true)}</h2>
    ${at < data.begin || at > data.end ? html`<p class="faint">That is outside the interval shown.</p>` : html`
      ${quiet && html`<p class="note">No process worked from ${clock(quiet.begin)} to ${clock(quiet.end)}, ${duration(quiet.end - quiet.begin)}.</p>`}
      <p>${chain(rows)}</p>
      <table><tbody>${rows.map(({ lane, span }) => html`<tr key=${lane.process + lane.name}><th scope="row">${lane.process} <span class="faint">${lane.name}</span></th><td><i class=${`swatch ${kind(span.name)}`}></i>${span.text || span.name}</td>
        <td>${span.waits_for && html`waits for <b>${span.waits_for}</b>`}</td><td class="faint right nowrap">${clock(span.begin, true)} to ${clock(span.end, true)}</td><td class="right nowrap">${duration(span.end - span.begin)}</td></tr>`)}</tbody></table>
      ${!rows.length && html`<p class="faint">Nothing was recorded at that moment.</p>`}`}</section>`;
}

/** The spans of a process's own activity: parts of its step, requests and weights; else its phase; else its threads; else that a server
 * is up. @param {string} process @param {{lane: {process: string, name: string}, span: Span}[]} rows */
function doing(process, rows) {
  const own = rows.filter(({ lane, span }) => lane.process === process && !span.name.startsWith("level "));
  const busy = own.filter(({ span }) => span.name !== "serving"), of = (/** @type {RegExp} */ lanes) => busy.filter(({ lane }) => lanes.test(lane.name));
  const found = [of(/^(step|requests|weights|)$/), of(/^phase$/), busy.slice(0, 1), own].find((some) => some.length) ?? [];
  return found.map(({ span }) => span);
}

/** The chain of waits, from the trainer, which everything works for, to the process that waited for none. @param {{lane: {process: string, name: string}, span: Span}[]} rows */
function chain(rows) {
  const words = [], seen = new Set();
  let name = "trainer";
  while (name && !seen.has(name)) {
    seen.add(name);
    const there = rows.map(({ lane }) => lane.process).sort();
    const spans = doing(there.find((process) => process === name || process.startsWith(`${name}-`)) ?? name, rows);
    words.push(html`<b>${name}</b> ${spans.map((span) => (span.text || span.name).replaceAll("_", " ")).join(" and ") || "has no recorded activity"}`);
    name = spans.find((span) => span.waits_for)?.waits_for ?? "";
  }
  if (name) return html`<b>${[...seen].join(" and ")}</b> each waited for the other at this moment: work was being handed over.`;
  return words.map((word, i) => html`${i ? "; it waited for " : ""}${word}`);
}

/** A colour for each kind of span: waits are grey. @param {string} name */
function kind(name) {
  if (name.startsWith("level ")) return `g${name.slice(6)}`;
  if (WAITS.test(name)) return "wait";
  if (name in KINDS) return KINDS[name];
  let sum = 0;
  for (const letter of name) sum = (sum * 31 + letter.charCodeAt(0)) % 997;
  return `k${sum % 6}`;
}

/** @param {{data: import("./types").LaneTimeline, look: (begin: number, end: number) => void, at: number | null, point: (time: number) => void}} props */
function Lanes({ data, look, at, point }) {
  const box = useRef(/** @type {SVGSVGElement | null} */ (null));
  const [drag, setDrag] = useState(/** @type {[number, number] | null} */ (null));
  const lanes = data.lanes.filter((lane) => lane.spans.length);
  const height = (lanes.length + 1) * ROW + 20, length = data.end - data.begin;
  const x = (/** @type {number} */ time) => LEFT + ((time - data.begin) / length) * WIDTH;
  const time = (/** @type {PointerEvent} */ e) => {
    const place = /** @type {SVGSVGElement} */ (box.current).getBoundingClientRect();
    return data.begin + Math.max(0, Math.min(1, (e.clientX - place.left) / place.width)) * length;
  };
  const up = (/** @type {PointerEvent} */ e) => {
    if (drag && Math.abs(x(time(e)) - x(drag[0])) > 6) look(Math.min(drag[0], time(e)), Math.max(drag[0], time(e)));
    else if (drag) point(time(e));
    setDrag(null);
  };
  const loud = data.moments.filter((moment) => !QUIET.includes(moment.kind));
  return html`<div class="lanes"><div class="names"><b class="wide"></b>${lanes.map((lane, i) => html`<b key=${i} title=${lane.process}>${lane.process === lanes[i - 1]?.process ? "" : lane.process}</b><span>${lane.name}</span>`)}</div>
    <svg ref=${box} viewBox=${`0 0 ${WIDTH} ${height}`} preserveAspectRatio="none" style=${{ height: `${height}px` }} role="img" aria-label=${spoken(data)}
      onPointerDown=${(/** @type {any} */ e) => setDrag([time(e), time(e)])} onPointerMove=${(/** @type {any} */ e) => drag && setDrag([drag[0], time(e)])} onPointerUp=${up} onPointerLeave=${() => setDrag(null)}>
      ${ticks(data.begin, data.end).map((tick) => html`<line key=${tick} class="grid" x1=${x(tick)} x2=${x(tick)} y1=${ROW} y2=${height} vector-effect="non-scaling-stroke" />`)}
      ${lanes.map((lane, row) => lane.spans.map((span) => html`<rect key=${`${lane.process}${lane.name}${span.begin}${span.name}`} class=${kind(span.name)} x=${Math.max(0, x(span.begin))} y=${(row + 1) * ROW + 3}
        width=${Math.max(0.8, x(Math.min(span.end, data.end)) - Math.max(0, x(span.begin)))} height=${ROW - 6}><title>${lane.process} ${lane.name}: ${span.text || span.name}, ${duration(span.end - span.begin)}</title></rect>`))}
      ${loud.map((moment) => html`<line key=${moment.time + moment.kind} class=${`moment ${moment.kind}`} x1=${x(moment.time)} x2=${x(moment.time)} y1=${ROW - 6} y2=${height} vector-effect="non-scaling-stroke"><title>${clock(moment.time)} ${moment.process}: ${moment.text}</title></line>`)}
      ${data.quiet.map((one) => html`<rect key=${`quiet ${one.begin}`} class="quiet" x=${x(one.begin)} width=${x(one.end) - x(one.begin)} y=${ROW} height=${height}><title>no process worked, ${duration(one.end - one.begin)}</title></rect>`)}
      ${at !== null && at >= data.begin && at <= data.end && html`<line class="at" x1=${x(at)} x2=${x(at)} y1=${ROW - 6} y2=${height} vector-effect="non-scaling-stroke" />`}
      ${drag && html`<rect class="drag" x=${Math.min(x(drag[0]), x(drag[1]))} width=${Math.abs(x(drag[1]) - x(drag[0]))} y="0" height=${height} />`}
    </svg>
    <div class="clock">${ticks(data.begin, data.end).map((tick) => html`<span key=${tick} style=${{ left: `${(x(tick) / WIDTH) * 100}%` }}>${clock(tick)}</span>`)}
      ${loud.map((moment) => html`<b key=${moment.time + moment.kind} class=${moment.kind} style=${{ left: `${(x(moment.time) / WIDTH) * 100}%` }} aria-hidden="true">${MOMENTS[moment.kind] ?? "•"}</b>`)}</div></div>`;
}

/** Round times within an interval. @param {number} begin @param {number} end */
function ticks(begin, end) {
  const steps = [0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400];
  const step = steps.find((one) => (end - begin) / one <= (innerWidth < 600 ? 3 : 8)) ?? 604800;
  const found = [];
  for (let at = Math.ceil(begin / step) * step; at < end - (end - begin) * 0.03; at += step) if (at > begin + (end - begin) * 0.03) found.push(at);
  return found;
}

/** @param {import("./types").LaneTimeline} data */
function spoken(data) {
  return `Lanes of ${[...new Set(data.lanes.map((lane) => lane.process))].join(", ")} from ${clock(data.begin)} to ${clock(data.end)}; the table below has their shares of the time`;
}

/** @param {{data: import("./types").LaneTimeline}} props */
function Shares({ data }) {
  const length = data.end - data.begin;
  const rows = [...new Set(data.lanes.map((lane) => lane.process))].flatMap((process) => {
    const own = (/** @type {RegExp} */ which) => data.lanes.filter((lane) => lane.process === process && which.test(lane.name)).flatMap((lane) => lane.spans);
    const sums = new Map(), parts = own(/^(step|requests|)$/);
    for (const span of [...parts, ...own(/^phase$/).flatMap((phase) => beside(phase, parts))]) {
      const seconds = Math.min(span.end, data.end) - Math.max(span.begin, data.begin);
      if (seconds > 0) sums.set(span.name, (sums.get(span.name) ?? 0) + seconds);
    }
    return [...sums].sort((a, b) => b[1] - a[1]).slice(0, 6).map(([name, seconds], i) => ({ lane: i ? "" : process, name, seconds }));
  });
  const quiet = data.quiet.reduce((total, one) => total + one.end - one.begin, 0);
  if (quiet) rows.push({ lane: "nobody", name: "no process worked", seconds: quiet });
  return html`<table><tbody>${rows.map((row, i) => html`<tr key=${i}><th scope="row">${row.lane}</th><td><i class=${`swatch ${kind(row.name)}`}></i>${row.name.replaceAll("_", " ")}</td>
    <td class="right nowrap">${duration(row.seconds)}</td><td class="right">${((row.seconds / length) * 100).toFixed(0)}%</td></tr>`)}</tbody></table>`;
}

/** The parts of a span that others do not cover; those are in chronological order and do not overlap. @param {Span} span @param {Span[]} others @returns {Span[]} */
function beside(span, others) {
  const found = [];
  let begin = span.begin;
  for (const other of others) {
    if (other.end <= begin) continue;
    if (other.begin >= span.end) break;
    if (other.begin > begin) found.push({ ...span, begin, end: other.begin });
    begin = other.end;
  }
  return begin < span.end ? [...found, { ...span, begin }] : found;
}

/** @param {{data: Answer, run: string, every: boolean}} props */
function Moments({ data, run, every }) {
  const shown = data.moments.filter((moment) => every || !QUIET.includes(moment.kind));
  const where = (/** @type {import("./types").Moment} */ moment) => moment.kind === "batch" ? link("rollouts", { run: [run], begin: moment.step, end: moment.step }) : moment.kind === "eval" ? link("rollouts", { run: [run], kind: "eval", begin: moment.step, end: moment.step }) : "";
  return html`<label class="check"><input type="checkbox" checked=${every} onChange=${(/** @type {any} */ e) => change({ every: e.target.checked || null }, true)} /> steps, batches and evaluations, too</label>
    <ol class="moments">${shown.slice(-200).reverse().map((moment, i) => html`<li key=${i}><time>${clock(moment.time)}</time> <b>${moment.process}</b> ${where(moment) ? html`<a href=${where(moment)}>${moment.text}</a>` : moment.text}</li>`)}</ol>
    ${!shown.length && html`<p class="faint">Nothing happened in this interval.</p>`}`;
}
