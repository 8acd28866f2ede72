// One chart of uPlot: lines of several runs, smoothed, with marks; zoom, cursor and clicks are shared by all charts of a page.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./core.js";
import { duration, number } from "./format.js";

const COLOURS = ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7"];
const INCREMENTS = /** @type {Record<string, number[]>} */ ({ step: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000],
  time: [0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800] });
const HEIGHT = 170, AWAY = { left: -10, top: -10 };

/** What distinguishes a run: a colour, and a dash pattern that changes after every eight runs. @param {number} i index among the runs */
export function markOf(i) {
  const round = Math.floor(i / COLOURS.length);
  return { colour: COLOURS[i % COLOURS.length], dash: round ? [9, 4, ...Array(round - 1).fill([2, 4]).flat()] : [] };
}

/** A piece of a run's line, shown before its name. @param {{i: number}} props */
export function Sign({ i }) {
  const { colour, dash } = markOf(i);
  return html`<svg class="sign" viewBox="0 0 26 10" aria-hidden="true"><line x1="1" x2="25" y1="5" y2="5" stroke-dasharray=${dash.join(" ") || null} style=${{ stroke: `var(${colour})` }} /></svg>`;
}

/** The value of a colour variable of the style sheet. @param {string} name */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** An exponential mean whose weights sum to 1 from the first point on. @param {(number | null)[]} values @param {number} weight 0 to 0.99 */
export function smooth(values, weight) {
  if (!weight) return values;
  let [sum, total] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    sum = sum * weight + value;
    total = total * weight + 1;
    return sum / total;
  });
}

/** @typedef {{label: string, colour: string, dash: number[], x: (number | null)[], values: (number | null)[], errors: (number | null)[], steps: number[], firsts: number[], lows: number[], highs: number[], run: string, each: number}} Line */

/** Lines of different x on one axis, as uPlot wants them. @param {Line[]} lines @param {number} weight */
function joined(lines, weight) {
  const tables = lines.flatMap((line) => {
    const kept = line.x.map((x, i) => [x, i]).filter(([x]) => x !== null);
    const x = kept.map(([at]) => at);
    const at = (/** @type {(number | null)[]} */ values) => kept.map(([, i]) => values[/** @type {number} */ (i)] ?? null);
    const smoothed = smooth(at(line.values), weight);
    const beside = (/** @type {number} */ sign) => line.errors.length ? at(line.values.map((v, i) => v === null ? null : v + sign * (line.errors[i] ?? 0))) : null;
    const low = line.lows.length ? at(line.lows) : beside(-1), high = line.highs.length ? at(line.highs) : beside(1);
    return [[x, smoothed], [x, weight ? at(line.values) : x.map(() => null)], [x, high ?? x.map(() => null)], [x, low ?? x.map(() => null)]];
  });
  return uPlot.join(tables);
}

/** @param {{title: string, what: string, lines: Line[], marks: import("./types").CurveMark[], axis: string, weight: number,
 *   zoom: [number, number] | null, span: [number, number] | null, setZoom: (zoom: [number, number] | null) => void, open: (run: string, step: number) => void, height?: number}} props */
export function Chart(props) {
  const { title, what, lines, axis, weight, zoom, height = HEIGHT } = props;
  const box = useRef(/** @type {HTMLDivElement | null} */ (null));
  const plot = useRef(/** @type {any} */ (null));
  const now = useRef(props);
  now.current = props;
  const [at, setAt] = useState(/** @type {number | null} */ (null));
  const [said, setSaid] = useState("");
  const [theme, setTheme] = useState(0);
  useEffect(() => {
    const changed = () => setTheme((n) => n + 1);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    addEventListener("theme", changed);
    dark.addEventListener("change", changed);
    return () => { removeEventListener("theme", changed); dark.removeEventListener("change", changed); };
  }, []);
  const between = zoom ?? (props.span && props.span[0] < props.span[1] ? props.span : null);
  const shape = lines.map((line) => line.label + line.colour).join("|");
  useLayoutEffect(() => {
    const data = joined(lines, weight);
    if (plot.current && plot.current.shape === `${shape}/${axis}/${theme}`) {
      plot.current.setData(data, !between);
      if (between) plot.current.setScale("x", { min: between[0], max: between[1] });
      return;
    }
    plot.current?.destroy();
    plot.current = new uPlot(options(now, box.current?.clientWidth || 300, height, setAt), data, box.current);
    plot.current.shape = `${shape}/${axis}/${theme}`;
    if (between) plot.current.setScale("x", { min: between[0], max: between[1] });
  }, [lines, weight, axis, shape, theme, between?.[0], between?.[1], props.marks]);
  useEffect(() => {
    const watch = new ResizeObserver(() => plot.current && box.current && plot.current.setSize({ width: box.current.clientWidth, height }));
    if (box.current) watch.observe(box.current);
    return () => { watch.disconnect(); plot.current?.destroy(); plot.current = null; };
  }, []);
  const pressed = (/** @type {KeyboardEvent} */ e) => {
    const line = lines[0], u = plot.current;
    if (!line || !u || e.ctrlKey || e.metaKey || e.altKey) return;
    const shown = line.x.flatMap((x, i) => x !== null && x >= u.scales.x.min && x <= u.scales.x.max ? [i] : []);
    if (e.key === "Home" || e.key === "Escape") {
      setSaid("the whole run");
      u.setCursor(AWAY);
      props.setZoom(null);
    } else if (e.key === "Enter" && at !== null) {
      props.open(line.run, line.steps[nearest(line, at)]);
    } else if ((e.key === "ArrowLeft" || e.key === "ArrowRight") && shown.length) {
      const before = at === null ? shown.length : shown.indexOf(nearest(line, at));
      const to = shown[Math.max(0, Math.min(shown.length - 1, before + (e.key === "ArrowRight" ? 1 : -1)))], x = line.x[to] ?? 0;
      u.setCursor({ left: u.valToPos(x, "x"), top: 10 });
      setAt(x);  // exact, as the cursor is rounded to a pixel
      setSaid(sentence(lines, x, axis));
    } else return;
    e.preventDefault();
  };
  return html`<figure class="chart">
    <figcaption><span class="title" title=${what}>${title}</span><span class="reading">${reading(lines, at, axis, weight)}</span></figcaption>
    <div ref=${box} class="plot" tabindex="0" role="application" aria-roledescription="chart" aria-label=${spoken(title, lines)} onKeyDown=${pressed} onBlur=${() => { setSaid(""); plot.current?.setCursor(AWAY); }}></div>
    <span class="sr" aria-live="polite">${said}</span></figure>`;
}

/** The change of a curve from its first fifth to its last, and its share of the curve's whole range. @param {(number | null)[]} values */
export function moved(values) {
  const known = /** @type {number[]} */ (values.filter((value) => value !== null)), part = Math.max(1, Math.floor(known.length / 5));
  if (known.length < 2) return { by: 0, share: 0 };
  const mean = (/** @type {number[]} */ some) => some.reduce((a, b) => a + b, 0) / some.length;
  const by = mean(known.slice(-part)) - mean(known.slice(0, part));
  return { by, share: by / (Math.max(...known) - Math.min(...known) || 1) };
}

/** A difference with its sign. @param {number} by */
const change = (by) => `${by > 0 ? "+" : by < 0 ? "−" : "±"}${number(Math.abs(by))}`;

/** The index of a line's point nearest to a position; -1 if it has none. @param {Line} line @param {number} at */
function nearest(line, at) {
  let best = -1;
  line.x.forEach((x, i) => { if (x !== null && (best < 0 || Math.abs(x - at) < Math.abs(/** @type {number} */ (line.x[best]) - at))) best = i; });
  return best;
}

/** The value of each line at a position, for a screen reader. @param {Line[]} lines @param {number} at @param {string} axis */
function sentence(lines, at, axis) {
  const found = lines.map((line) => ({ line, i: nearest(line, at) })).filter(({ i }) => i >= 0);
  return found.map(({ line, i }) => `${place(line, i, axis)} ${lines.length > 1 ? line.label : ""} ${number(line.values[i])}`).join("; ");
}

/** The values at a position, or the newest, smoothed like the lines; for a single run also the measured value.
 * @param {Line[]} lines @param {number | null} at @param {string} axis @param {number} weight */
function reading(lines, at, axis, weight) {
  const found = lines.map((line) => ({ line, i: at === null ? line.values.length - 1 : nearest(line, at) })).filter(({ i }) => i >= 0);
  const values = new Map(found.map(({ line }) => [line, smooth(line.values, weight)]));
  return html`${at !== null && found[0] && html`<span class="faint">${place(found[0].line, found[0].i, axis)} </span>`}
    ${at === null && found.length === 1 && html`<span class="faint" title="From the mean of the first fifth to that of the last">${change(moved(found[0].line.values).by)} </span>${found[0].line.each > 1 && html`<span class="faint" title=${window.recorded ? "The band shows minimum and maximum" : "The band shows minimum and maximum; zoom in for single steps"}>mean of ${found[0].line.each} </span>`}`}
    ${weight > 0 && html`<span class="faint">smoothed </span>`}
    ${found.slice(0, 4).map(({ line, i }) => html`<b style=${{ color: `var(${line.colour})` }}>${number(values.get(line)?.[i])}${weight > 0 && found.length === 1 && html`<span class="faint">, measured ${number(line.values[i])}</span>`}${line.errors[i] && (!weight || found.length === 1) ? html`<span class="faint" title="One standard error over examples"> ± ${number(line.errors[i])}</span>` : ""}</b> `)}
    ${found.length > 4 && html`<span class="faint">4 of ${found.length} runs</span>`}`;
}

/** @param {Line} line @param {number} i @param {string} axis */
function place(line, i, axis) {
  const step = line.each > 1 && line.firsts[i] < line.steps[i] ? `mean of steps ${line.firsts[i]} to ${line.steps[i]}, ${number(line.lows[i])} to ${number(line.highs[i])};` : `step ${line.steps[i]}`;
  return axis === "time" ? `${step}, ${duration(line.x[i] ?? 0)}` : step;
}

/** A chart in words, for a screen reader. @param {string} title @param {Line[]} lines */
function spoken(title, lines) {
  const texts = lines.map((line) => `${line.label}: ${number(line.values[0])} at first, ${number(line.values[line.values.length - 1])} at last`);
  return `${title}. ${texts.join("; ") || "no values"}`;
}

/** @param {{current: any}} now @param {number} width @param {number} height @param {(at: number | null) => void} setAt */
function options(now, width, height, setAt) {
  const { lines, axis } = now.current;
  const ink = colour("--faint"), grid = { stroke: colour("--grid"), width: 1 }, font = "11px system-ui, sans-serif";
  const texts = { step: number, rollouts: short, tokens: short, time: duration };
  const format = (/** @type {any} */ _u, /** @type {number[]} */ marks) => marks.map((mark) => texts[/** @type {"step"} */ (axis)](mark));
  return {
    width, height, legend: { show: false }, padding: [8, axis === "time" ? 26 : 8, 0, 0], focus: { alpha: 1 },
    cursor: { sync: { key: "rl" }, drag: { x: true, y: false, setScale: false }, points: { size: 6 } },
    scales: { x: { time: false }, y: { range: (/** @type {any} */ _u, /** @type {number} */ low, /** @type {number} */ high) => padded(low, high) } },
    axes: [
      { stroke: ink, grid, ticks: grid, font, size: 26, space: 60, values: format, incrs: INCREMENTS[axis] },
      { stroke: ink, grid, ticks: grid, font, size: axisWidth, space: 30, values: (/** @type {any} */ _u, /** @type {number[]} */ marks) => marks.map(number) },
    ],
    series: [{}, ...lines.flatMap((/** @type {Line} */ line) => {
      const stroke = colour(line.colour), few = line.values.length < 40;
      return [
        { stroke, width: 1.8, dash: line.dash, points: { show: few, size: 4 }, spanGaps: true },
        { stroke: `${stroke}55`, width: 1, points: { show: false }, spanGaps: true },
        { stroke: "transparent", points: { show: false }, spanGaps: true },
        { stroke: "transparent", points: { show: false }, spanGaps: true },
      ];
    })],
    bands: lines.map((/** @type {Line} */ line, /** @type {number} */ i) => ({ series: [4 * i + 3, 4 * i + 4], fill: `${colour(line.colour)}26` })),
    hooks: { drawClear: [(/** @type {any} */ u) => drawMarks(u, now.current.marks)], setSelect: [(/** @type {any} */ u) => select(u, now.current.setZoom)],
      setCursor: [(/** @type {any} */ u) => setAt(u.cursor.left >= 0 ? u.posToVal(u.cursor.left, "x") : null)], init: [(/** @type {any} */ u) => listen(u, now)] },
  };
}

/** Room for the longest number of the axis, px. @param {any} u @param {string[] | null} texts */
function axisWidth(u, texts) {
  return Math.max(40, ...(texts ?? []).map((text) => 16 + text.length * 6.2));
}

/** @param {number} low @param {number} high @returns {[number, number]} */
function padded(low, high) {
  if (low === null || !Number.isFinite(low)) return [0, 1];
  const room = (high - low) * 0.08 || Math.abs(low) * 0.1 || 0.5;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

/** @param {number} value */
function short(value) {
  const [size, unit] = value >= 1e9 ? [1e9, "G"] : value >= 1e6 ? [1e6, "M"] : value >= 1e3 ? [1e3, "k"] : [1, ""];
  return `${+(value / size).toPrecision(3)}${unit}`;
}

/** @param {any} u @param {(zoom: [number, number]) => void} setZoom */
function select(u, setZoom) {
  if (u.select.width > 4 && !u.panned) setZoom([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
  u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
}

/** Panning with Shift, a double click for everything, a click for the step's rollouts. @param {any} u @param {{current: any}} now */
function listen(u, now) {
  let from = /** @type {{x: number, min: number, max: number} | null} */ (null), down = 0;
  u.over.addEventListener("mousedown", (/** @type {MouseEvent} */ e) => {
    down = e.clientX;
    u.panned = e.shiftKey;
    if (e.shiftKey) from = { x: e.clientX, min: u.scales.x.min, max: u.scales.x.max };
  });
  u.over.addEventListener("mousemove", (/** @type {MouseEvent} */ e) => {
    if (!from) return;
    const by = (from.x - e.clientX) * (from.max - from.min) / u.over.clientWidth;
    now.current.setZoom([from.min + by, from.max + by]);
  });
  addEventListener("mouseup", () => { from = null; }, { passive: true });
  u.over.addEventListener("dblclick", () => now.current.setZoom(null));
  u.over.addEventListener("click", (/** @type {MouseEvent} */ e) => {
    const line = now.current.lines[0];
    if (Math.abs(e.clientX - down) > 4 || !line || e.detail > 1) return;
    const x = u.posToVal(u.cursor.left, "x");
    setTimeout(() => { if (u.over.isConnected) now.current.open(line.run, line.steps[nearest(line, x)]); }, 250);
  });
}

const MARKS = { eval: "--c0", checkpoint: "--faint", restart: "--warn", death: "--bad", change: "--c4" };

/** Marks as lines behind the curves: evaluations and checkpoints as short ticks, deaths and changes over the whole height. @param {any} u @param {import("./types").CurveMark[]} marks */
function drawMarks(u, marks) {
  const { ctx, bbox } = u;
  ctx.save();
  for (const mark of marks) {
    if (mark.x === null || mark.x < u.scales.x.min || mark.x > u.scales.x.max) continue;
    const x = Math.round(u.valToPos(mark.x, "x", true)), tall = mark.kind === "death" || mark.kind === "restart" || mark.kind === "change";
    ctx.strokeStyle = colour(MARKS[mark.kind]);
    ctx.lineWidth = devicePixelRatio * (tall ? 1.5 : 1);
    ctx.setLineDash(tall ? [4, 3] : []);
    ctx.beginPath();
    ctx.moveTo(x, tall ? bbox.top : bbox.top + bbox.height - (mark.kind === "eval" ? 10 : 5) * devicePixelRatio);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

