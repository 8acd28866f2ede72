// What each process did when. Drag to zoom; a click on a span shows what it is.

import { html, useRef, useState } from "./core.js";
import { useAnswer } from "./api.js";
import { clock, day, duration } from "./format.js";
import { change, link } from "./router.js";
import { Fault } from "./ui.js";

/** @typedef {import("./types").Span} Span */

const ROW = 26, LEFT = 0, WIDTH = 1000;
const WAITS = /wait|idle|starting/;
const MOMENTS = /** @type {Record<string, string>} */ ({ death: "✕", restart: "↻", ready: "▲", start: "▶", silent: "…", stall: "…", quarantine: "!", repair: "✚", give_up: "✕", step: "S", batch: "B", eval: "E" });
const KINDS = /** @type {Record<string, string>} */ ({ forward_backward: "k0", optimizer: "k1", publish_weights: "k2", checkpoint: "k4", batch: "k5", eval: "k3", training: "k0", publishing: "k2", checkpointing: "k4", copying_state: "k4", filling_batch: "k2", evaluating: "k3", loading_version: "k4", play: "k3", score: "k1",
  fetch_batch: "wait", serving: "idle", sampling: "k5", load: "k4", stage: "k4" });
const QUIET = ["step", "batch", "eval"];

/** @param {{run: string, values: Record<string, string>, live: boolean}} props */
export function Timeline({ run, values, live }) {
  const { data, error } = useAnswer("timeline", { run, begin: values.begin, end: values.end }, live && !values.begin ? 2000 : 0);
  const [chosen, setChosen] = useState(/** @type {{lane: string, span: Span} | null} */ (null));
  if (error) return html`<${Fault} text=${error} />`;
  if (!data) return html`<p class="empty">Reading …</p>`;
  const look = (/** @type {number} */ begin, /** @type {number} */ end) => change({ begin: begin.toFixed(3), end: end.toFixed(3) }, true);
  const length = data.end - data.begin;
  const moved = (/** @type {number} */ share) => look(data.begin + share * length, data.end + share * length);
  return html`<div class="bar tools"><h1>Timeline</h1><span class="faint">${day(data.begin)} · ${clock(data.begin)} to ${clock(data.end)}, ${duration(length)}</span><span class="grow"></span>
      <button aria-label="Earlier" disabled=${data.begin <= data.first} onClick=${() => moved(-0.5)}>‹</button>
      <button aria-label="Zoom in" onClick=${() => look(data.begin + length / 4, data.end - length / 4)}>+</button>
      <button aria-label="Zoom out" onClick=${() => look(Math.max(data.first, data.begin - length / 2), Math.min(data.last, data.end + length / 2))}>−</button>
      <button aria-label="Later" disabled=${data.end >= data.last} onClick=${() => moved(0.5)}>›</button>
      <button onClick=${() => look(data.first, data.last)}>All</button>
      <button onClick=${() => change({ begin: null, end: null }, true)}>${live ? "Follow" : "The end"}</button></div>
    ${data.note && html`<p class="note">${data.note}</p>`}
    ${length > 0 ? html`<${Lanes} data=${data} look=${look} chosen=${chosen} setChosen=${setChosen} />` : html`<p class="empty">Nothing was recorded yet.</p>`}
    <p class="reader line" aria-live="polite">${chosen ? html`<b>${chosen.lane}</b> ${chosen.span.text || chosen.span.name} <span class="faint">${clock(chosen.span.begin, true)} to ${clock(chosen.span.end, true)}, </span><b>${duration(chosen.span.end - chosen.span.begin)}</b>`
      : html`<span class="faint">Drag over a stretch of time to look closer; choose a span for what it is.</span>`}</p>
    <div class="sides"><section class="card"><h2>Where the time went</h2><${Shares} data=${data} /></section>
      <section class="card"><h2>What happened</h2><${Moments} data=${data} run=${run} /></section></div>`;
}

/** A colour for each kind of span: waits are grey. @param {string} name */
function kind(name) {
  if (WAITS.test(name)) return "wait";
  if (name in KINDS) return KINDS[name];
  let sum = 0;
  for (const letter of name) sum = (sum * 31 + letter.charCodeAt(0)) % 997;
  return `k${sum % 6}`;
}

/** @param {{data: import("./types").Timeline, look: (begin: number, end: number) => void, chosen: {span: Span} | null, setChosen: (chosen: any) => void}} props */
function Lanes({ data, look, chosen, setChosen }) {
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
    setDrag(null);
  };
  const loud = data.moments.filter((moment) => !QUIET.includes(moment.kind));
  return html`<div class="lanes"><div class="names"><b class="wide"></b>${lanes.map((lane, i) => html`<b key=${i} title=${lane.process}>${lane.process === lanes[i - 1]?.process ? "" : lane.process}</b><span>${lane.name}</span>`)}</div>
    <svg ref=${box} viewBox=${`0 0 ${WIDTH} ${height}`} preserveAspectRatio="none" style=${{ height: `${height}px` }} role="img" aria-label=${spoken(data)}
      onPointerDown=${(/** @type {any} */ e) => setDrag([time(e), time(e)])} onPointerMove=${(/** @type {any} */ e) => drag && setDrag([drag[0], time(e)])} onPointerUp=${up} onPointerLeave=${() => setDrag(null)}>
      ${ticks(data.begin, data.end).map((at) => html`<line key=${at} class="grid" x1=${x(at)} x2=${x(at)} y1=${ROW} y2=${height} vector-effect="non-scaling-stroke" />`)}
      ${lanes.map((lane, row) => lane.spans.map((span) => html`<rect key=${`${lane.process}${lane.name}${span.begin}${span.name}`} class=${`${kind(span.name)}${chosen?.span.begin === span.begin && chosen.span.name === span.name ? " chosen" : ""}`} x=${Math.max(0, x(span.begin))} y=${(row + 1) * ROW + 3}
        width=${Math.max(0.8, x(Math.min(span.end, data.end)) - Math.max(0, x(span.begin)))} height=${ROW - 6} onClick=${() => setChosen({ lane: `${lane.process} ${lane.name}`, span })}><title>${lane.process} ${lane.name}: ${span.text || span.name}, ${duration(span.end - span.begin)}</title></rect>`))}
      ${loud.map((moment) => html`<line key=${moment.time + moment.kind} class=${`moment ${moment.kind}`} x1=${x(moment.time)} x2=${x(moment.time)} y1=${ROW - 6} y2=${height} vector-effect="non-scaling-stroke"><title>${clock(moment.time)} ${moment.process}: ${moment.text}</title></line>`)}
      ${drag && html`<rect class="drag" x=${Math.min(x(drag[0]), x(drag[1]))} width=${Math.abs(x(drag[1]) - x(drag[0]))} y="0" height=${height} />`}
    </svg>
    <div class="clock">${ticks(data.begin, data.end).map((at) => html`<span key=${at} style=${{ left: `${(x(at) / WIDTH) * 100}%` }}>${clock(at)}</span>`)}
      ${loud.map((moment) => html`<b key=${moment.time + moment.kind} class=${moment.kind} style=${{ left: `${(x(moment.time) / WIDTH) * 100}%` }} aria-hidden="true">${MOMENTS[moment.kind] ?? "•"}</b>`)}</div></div>`;
}

/** Round times within a stretch. @param {number} begin @param {number} end */
function ticks(begin, end) {
  const steps = [0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400];
  const step = steps.find((one) => (end - begin) / one <= (innerWidth < 600 ? 3 : 8)) ?? 604800;
  const found = [];
  for (let at = Math.ceil(begin / step) * step; at < end - (end - begin) * 0.03; at += step) if (at > begin + (end - begin) * 0.03) found.push(at);
  return found;
}

/** @param {import("./types").Timeline} data */
function spoken(data) {
  return `Lanes of ${[...new Set(data.lanes.map((lane) => lane.process))].join(", ")} from ${clock(data.begin)} to ${clock(data.end)}; the table below has their shares of the time`;
}

/** @param {{data: import("./types").Timeline}} props */
function Shares({ data }) {
  const length = data.end - data.begin;
  const parts = data.lanes.filter((lane) => /^(step|phase|requests|)$/.test(lane.name) && (lane.name !== "phase" || !data.lanes.some((one) => one.process === lane.process && /step|requests/.test(one.name))));
  const rows = parts.flatMap((lane) => {
    const sums = new Map();
    for (const span of lane.spans) sums.set(span.name, (sums.get(span.name) ?? 0) + Math.min(span.end, data.end) - Math.max(span.begin, data.begin));
    return [...sums].sort((a, b) => b[1] - a[1]).slice(0, 6).map(([name, seconds], i) => ({ lane: i ? "" : lane.process, name, seconds }));
  });
  return html`<table><tbody>${rows.map((row, i) => html`<tr key=${i}><th scope="row">${row.lane}</th><td><i class=${`swatch ${kind(row.name)}`}></i>${row.name.replaceAll("_", " ")}</td>
    <td class="right nowrap">${duration(row.seconds)}</td><td class="right">${((row.seconds / length) * 100).toFixed(0)}%</td></tr>`)}</tbody></table>`;
}

/** @param {{data: import("./types").Timeline, run: string}} props */
function Moments({ data, run }) {
  const [quiet, setQuiet] = useState(false);
  const shown = data.moments.filter((moment) => quiet || !QUIET.includes(moment.kind));
  const where = (/** @type {import("./types").Moment} */ moment) => moment.kind === "batch" ? link("rollouts", { run: [run], begin: moment.step, end: moment.step }) : moment.kind === "eval" ? link("rollouts", { run: [run], kind: "eval", begin: moment.step, end: moment.step }) : "";
  return html`<label class="check"><input type="checkbox" checked=${quiet} onChange=${(/** @type {any} */ e) => setQuiet(e.target.checked)} /> steps, batches and evaluations, too</label>
    <ol class="moments">${shown.slice(-200).reverse().map((moment, i) => html`<li key=${i}><time>${clock(moment.time)}</time> <b>${moment.process}</b> ${where(moment) ? html`<a href=${where(moment)}>${moment.text}</a>` : moment.text}</li>`)}</ol>
    ${!shown.length && html`<p class="faint">Nothing in this stretch of time.</p>`}`;
}
