// A rollout token by token, coloured by a signal, with all numbers of the token under the pointer or of the selected one.
// A rollout may have a hundred thousand tokens: only those near the window are fetched and drawn, the others are empty space.

import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./core.js";
import { ask, useAnswer } from "./api.js";
import { number } from "./format.js";
import { change } from "./router.js";
import { Fault, Words } from "./ui.js";

/** @typedef {import("./types").Tokens} Tokens */
/** @typedef {{begin: number, end: number, sample: number | null}} Chunk a few tokens that are drawn together; `sample`: the sample that begins here */

const ORDER = ["gap", "ratio", "trainer_logprobs", "logprobs", "entropies", "advantages", "stopped", "teacher_gap", "reference_gap", "versions"];
const NAMES = /** @type {Record<string, string>} */ ({ trainer_logprobs: "trainer logprob", logprobs: "sampler logprob", gap: "trainer − sampler", ratio: "importance ratio", stopped: "clip and mask",
  entropies: "entropy", advantages: "advantage", teacher_gap: "teacher gap", reference_gap: "reference gap", versions: "policy version" });
const STOPPED = ["trained", "clipped", "masked", "stopped in a later epoch"];
/** Signals that have a middle; the others go from little to much. */
const TWO_SIDED = ["gap", "advantages", "teacher_gap", "reference_gap", "ratio"];
/** Number of tokens in one answer of the server, and in a chunk. */
const PAGE = 512, CHUNK = 64;
/** Number of chunks drawn per frame. */
const PACE = 1;
/** Margin above and below the window in which tokens are drawn, and the assumed height of a chunk before one was drawn, in px. */
const BEYOND = 300, HEIGHT = 150;

/** @param {{run: string, step: number | null, group: number | null, rollout: number | null, values: Record<string, string>}} props */
export function TokenView({ run, step, group, rollout, values }) {
  const question = { run, step, group, rollout, limit: PAGE };
  const { data, error } = useAnswer("tokens", { ...question, offset: 0 });
  const pages = usePages(question, data);
  const [over, setOver] = useState(/** @type {number | null} */ (null));
  if (error) return html`<${Fault} text=${error} />`;
  if (!data) return html`<p class="empty">Reading the batch …</p>`;
  const names = ORDER.filter((name) => name in data.signals);
  const signal = names.includes(values.signal) ? values.signal : names.includes("gap") ? "gap" : names[0];
  const pinned = values.token === undefined ? null : Number(values.token);
  const at = over ?? pinned, page = at === null ? null : pages.get(Math.floor(at / PAGE));
  return html`<div class="bar">
      <label class="field"><span>Colour by</span><select value=${signal} onChange=${(/** @type {any} */ e) => change({ signal: e.target.value }, true)}>
        ${names.map((name) => html`<option key=${name} value=${name}>${NAMES[name]}</option>`)}</select></label>
      <${Scale} signal=${signal} data=${data} /></div>
    ${data.note && html`<p class="note"><${Words} text=${data.note} /></p>`}
    ${pages.fault && html`<${Fault} text=${pages.fault} />`}
    <div class="reader" aria-live="polite">${page && at !== null ? html`<${Reading} page=${page} i=${at} />` : html`<span class="faint">Hover over a token, or select one, to see its numbers. Faint tokens are not trained.</span>`}</div>
    <${Stretch} data=${data} pages=${pages} signal=${signal} pinned=${pinned} setOver=${setOver} />`;
}

/** The server's answers by page number, as they arrive. @param {Record<string, any>} question @param {Tokens | null} first */
function usePages(question, first) {
  const [later, setLater] = useState(/** @type {Map<number, Tokens>} */ (new Map()));
  const [fault, setFault] = useState("");
  const asked = useRef(new Set([0]));
  const need = (/** @type {number} */ n) => {
    if (asked.current.has(n)) return;
    asked.current.add(n);
    ask("tokens", { ...question, offset: n * PAGE }).then(
      (data) => { setLater((old) => new Map(old).set(n, data)); setFault(""); },
      (problem) => { asked.current.delete(n); setFault(problem.message); });
  };
  return { get: (/** @type {number} */ n) => n === 0 ? first : later.get(n), need, fault };
}

/** The tokens near the window, between two empty spaces as high as the others. @param {{data: Tokens, pages: any, signal: string, pinned: number | null, setOver: (i: number | null) => void}} props */
function Stretch({ data, pages, signal, pinned, setOver }) {
  const chunks = useMemo(() => chunksOf(data), [data]);
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  const heights = useRef(/** @type {number[]} */ ([]));
  const [[from, shownTo], setShown] = useState([0, 6]);
  const to = Math.min(shownTo, chunks.length);
  const seen = useRef(/** @type {number | null} */ (null));
  const look = () => {
    if (!box.current) return;
    const top = box.current.getBoundingClientRect().top, [least, wanted, most] = [BEYOND / 3, BEYOND, 2 * BEYOND].map((room) => near(chunks.length, heights.current, top, room));
    // Keeps what is drawn while it is neither too little nor too much: drawing moves what is below, and would otherwise repeat for ever.
    setShown((old) => old[0] <= least[0] && old[1] >= least[1] && old[0] >= most[0] && old[1] <= most[1] ? old : wanted);
  };
  useLayoutEffect(() => {
    addEventListener("scroll", look, { capture: true, passive: true });
    addEventListener("resize", look);
    return () => { removeEventListener("scroll", look, { capture: true }); removeEventListener("resize", look); };
  }, [chunks]);
  useLayoutEffect(() => {
    for (const one of /** @type {NodeListOf<HTMLElement>} */ (box.current?.querySelectorAll(".chunk") ?? [])) heights.current[Number(one.dataset.n)] = one.offsetHeight;
    const frame = requestAnimationFrame(look);
    return () => cancelAnimationFrame(frame);
  });
  const drawn = usePaced(from, to, (n) => !!pages.get(Math.floor(chunks[n].begin / PAGE)));
  useEffect(() => { for (let n = from; n < to; n++) pages.need(Math.floor(chunks[n].begin / PAGE)); }, [from, to, chunks]);
  useLayoutEffect(() => {  // scrolls to the token chosen by the address or a key, once it is drawn
    if (pinned === null || seen.current === pinned) return;
    const n = chunks.findIndex((chunk) => pinned >= chunk.begin && pinned < chunk.end);
    const one = box.current?.querySelector(`[data-i="${pinned}"]`);
    if (one) { seen.current = pinned; one.scrollIntoView({ block: "nearest" }); }
    else if (box.current && n >= 0 && (n < from || n >= to)) scrollBox(box.current)?.scrollBy(0, box.current.getBoundingClientRect().top + sum(heights.current, 0, n) - innerHeight / 2);
  });
  const at = (/** @type {any} */ event) => event.target.dataset?.i === undefined ? null : Number(event.target.dataset.i);
  const pin = (/** @type {number | null} */ i) => change({ token: i }, true);
  const step = (/** @type {KeyboardEvent} */ event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    setOver(null);
    pin(Math.max(0, Math.min(data.total - 1, (pinned ?? Math.max(0, data.trained.indexOf(true)) - by) + by)));
  };
  const room = (/** @type {number} */ a, /** @type {number} */ b) => ({ height: `${sum(heights.current, a, b)}px` });
  return html`<div ref=${box} class=${`tokens${data.total > CHUNK ? " long" : ""}`} tabindex="0" role="group" aria-label="Tokens; the arrow keys go from one to the next" dir="auto" onKeyDown=${step}
    onMouseOver=${(/** @type {any} */ e) => setOver(at(e))} onMouseLeave=${() => setOver(null)} onClick=${(/** @type {any} */ e) => pin(at(e))}>
    <div style=${room(0, from)}></div>
    ${chunks.slice(from, to).map((chunk, i) => html`<${Piece} key=${chunk.begin} n=${from + i} chunk=${chunk} page=${drawn.has(from + i) ? pages.get(Math.floor(chunk.begin / PAGE)) : undefined} signal=${signal}
      pinned=${pinned !== null && pinned >= chunk.begin && pinned < chunk.end ? pinned : null} height=${heights.current[from + i] ?? HEIGHT} />`)}
    <div style=${room(to, chunks.length)}></div></div>`;
}

/** The chunks to draw: adds a few of the wanted and available ones in each frame, so that the page stays responsive. @param {number} from @param {number} to @param {(n: number) => boolean} there */
function usePaced(from, to, there) {
  const [drawn, setDrawn] = useState(/** @type {Set<number>} */ (new Set()));
  useEffect(() => {
    const wanted = Array.from({ length: to - from }, (_, i) => from + i), kept = wanted.filter((n) => drawn.has(n));
    const next = wanted.filter((n) => !drawn.has(n) && there(n)).slice(0, PACE);
    if (!next.length) return;
    const frame = requestAnimationFrame(() => setDrawn(new Set([...kept, ...next])));
    return () => cancelAnimationFrame(frame);
  });
  return drawn;
}

/** @param {Tokens} data @returns {Chunk[]} */
function chunksOf(data) {
  const cuts = new Set(data.starts);
  for (let at = 0; at < data.total; at += CHUNK) cuts.add(at);
  const begins = [...cuts].sort((a, b) => a - b);
  const many = data.starts.length > 1;
  return begins.map((begin, i) => ({ begin, end: begins[i + 1] ?? data.total, sample: many && data.starts.includes(begin) ? data.starts.indexOf(begin) : null }));
}

/** The range of chunks near the window: the first, and one past the last. @param {number} count @param {number[]} heights @param {number} top of the first one @param {number} room above and below the window @returns {[number, number]} */
function near(count, heights, top, room) {
  const guess = typical(heights);
  let first = 0;
  while (first < count - 1 && top + (heights[first] ?? guess) < -room) top += heights[first++] ?? guess;
  let last = first;
  while (last < count && top < innerHeight + room) top += heights[last++] ?? guess;
  return [first, Math.max(last, Math.min(first + 1, count))];
}

/** The height of all chunks from one to another, px. @param {number[]} heights @param {number} from @param {number} to */
function sum(heights, from, to) {
  const guess = typical(heights);
  let total = 0;
  for (let n = from; n < to; n++) total += heights[n] ?? guess;
  return total;
}

/** The mean height of the drawn chunks, px. @param {number[]} heights */
function typical(heights) {
  const known = heights.filter((one) => one !== undefined);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : HEIGHT;
}

/** The scroll container of an element. @param {HTMLElement | null} one @returns {Element | null} */
function scrollBox(one) {
  for (let box = one?.parentElement; box; box = box.parentElement) if (box.scrollHeight > box.clientHeight && /auto|scroll/.test(getComputedStyle(box).overflowY)) return box;
  return document.scrollingElement;
}

/** The tokens of a chunk; a single listener around all chunks handles the pointer. @param {{n: number, chunk: Chunk, page: Tokens | undefined, signal: string, pinned: number | null, height: number}} props */
function Piece({ n, chunk, page, signal, pinned, height }) {
  const spans = useMemo(() => {
    if (!page) return null;
    const place = placer(signal, page), values = page.values[signal] ?? [], found = [];
    for (let i = chunk.begin; i < chunk.end; i++) {
      const at = i - page.offset;
      found.push(html`<span key=${i} data-i=${i} class=${`t${page.trained[at] ? "" : " off"} ${place(values[at] ?? null)}${i === pinned ? " pinned" : ""}`}>${shown(page.pieces[at])}</span>`);
    }
    return found;
  }, [page, signal, pinned, chunk]);
  const goesOn = page && chunk.end < page.total && !page.pieces[chunk.end - 1 - page.offset]?.endsWith("\n");
  return html`<div class=${goesOn ? "chunk goes-on" : "chunk"} data-n=${n} data-from=${chunk.begin}>${chunk.sample !== null && html`<h3>Sample ${chunk.sample + 1}</h3>`}${spans ?? html`<div style=${{ height: `${height}px` }}></div>`}</div>`;
}

/** Maps a value to a CSS class: a position on the scale from -5 to 5. @param {string} signal @param {Tokens} page */
function placer(signal, page) {
  const { most, values } = page.signals[signal] ?? { most: 1, values: [] };
  return (/** @type {number | null} */ value) => {
    if (value === null) return "";
    if (signal === "stopped") return value ? `s${value}` : "";
    if (signal === "versions") return `v${values.indexOf(value) % 6}`;
    const share = TWO_SIDED.includes(signal) ? (signal === "ratio" ? Math.log(Math.max(value, 1e-5)) : value) / most : Math.abs(value) / most;
    const place = Math.max(-5, Math.min(5, Math.round(share * 5)));
    return place ? `q${place}` : "";
  };
}

/** What the colours mean. @param {{signal: string, data: Tokens}} props */
function Scale({ signal, data }) {
  if (!data.signals[signal]) return null;
  const { most, values } = data.signals[signal];
  if (signal === "stopped") return html`<span class="scale">${[1, 2, 3].map((n) => html`<span class=${`s${n}`}>${STOPPED[n]}</span>`)}</span>`;
  if (signal === "versions") return html`<span class="scale">${values.slice(0, 12).map((version, i) => html`<span class=${`v${i % 6}`}>${version}</span>`)}</span>`;
  const two = TWO_SIDED.includes(signal), end = signal === "ratio" ? Math.exp(most) : most;
  const sides = two ? [-5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5] : [0, 1, 2, 3, 4, 5];
  const minus = signal.endsWith("logprobs") ? "−" : "";
  return html`<span class="scale"><span class="faint">${two ? number(signal === "ratio" ? 1 / end : -end) : 0}</span>${sides.map((n) => html`<i class=${n ? `q${n}` : ""}></i>`)}<span class="faint">${minus}${number(end)}</span></span>`;
}

/** Line ends are shown and kept. @param {string} piece */
function shown(piece) {
  return piece.replaceAll("\n", "⏎\n");
}

/** All numbers of a token. @param {{page: Tokens, i: number}} props */
function Reading({ page, i }) {
  const at = i - page.offset, names = ORDER.filter((name) => name in page.signals);
  if (page.pieces[at] === undefined) return html`<span class="faint">There is no token ${i}.</span>`;
  return html`<b class="piece">${JSON.stringify(page.pieces[at])}</b> <span class="faint">#${i}, id ${page.ids[at]}</span>
    ${page.trained[at] ? names.map((name) => html`<span key=${name} title=${page.signals[name].what}><span class="faint">${NAMES[name]}</span> <b>${name === "stopped" ? STOPPED[page.values[name]?.[at] ?? 0] : exact(name, page.values[name]?.[at])}</b></span>`) : html`<span class="faint">not trained</span>`}`;
}

/** A formatted value: ratios are near 1 and need more digits. @param {string} signal @param {number | null | undefined} value */
function exact(signal, value) {
  return signal === "ratio" && value !== null && value !== undefined ? String(+value.toPrecision(6)) : number(value);
}
