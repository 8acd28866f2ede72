// A rollout token by token, coloured by one of the signals; all numbers of the token under the pointer, or of the one that was chosen.

import { html, useEffect, useMemo, useRef, useState } from "./core.js";
import { useAnswer } from "./api.js";
import { number } from "./format.js";
import { change } from "./router.js";
import { Fault } from "./ui.js";

/** @typedef {import("./types").SampleTokens} Sample */

const ORDER = ["gap", "ratio", "trainer_logprobs", "logprobs", "entropies", "advantages", "stopped", "teacher_gap", "reference_gap", "versions"];
const NAMES = /** @type {Record<string, string>} */ ({ trainer_logprobs: "trainer logprob", logprobs: "sampler logprob", gap: "trainer − sampler", ratio: "importance ratio", stopped: "clip and mask",
  entropies: "entropy", advantages: "advantage", teacher_gap: "teacher gap", reference_gap: "reference gap", versions: "policy version" });
const STOPPED = ["trained", "clipped", "masked", "stopped in a later epoch"];
/** Signals that have a middle; the others go from little to much. */
const TWO_SIDED = ["gap", "advantages", "teacher_gap", "reference_gap", "ratio"];

/** @param {{run: string, step: number | null, group: number | null, rollout: number | null, values: Record<string, string>}} props */
export function TokenView({ run, step, group, rollout, values }) {
  const { data, error } = useAnswer("tokens", { run, step, group, rollout });
  const [over, setOver] = useState(/** @type {[number, number] | null} */ (null));
  const [pinned, setPinned] = useState(/** @type {[number, number] | null} */ (null));
  if (error) return html`<${Fault} text=${error} />`;
  if (!data) return html`<p class="empty">Reading the batch …</p>`;
  const names = ORDER.filter((name) => name in data.signals);
  const signal = names.includes(values.signal) ? values.signal : names.includes("gap") ? "gap" : names[0];
  const at = over ?? pinned;
  return html`<div class="bar">
      <label class="field"><span>Colour by</span><select value=${signal} onChange=${(/** @type {any} */ e) => change({ signal: e.target.value }, true)}>
        ${names.map((name) => html`<option key=${name} value=${name}>${NAMES[name]}</option>`)}</select></label>
      <${Scale} signal=${signal} samples=${data.samples} /></div>
    ${data.note && html`<p class="note">${data.note}</p>`}
    <div class="reader" aria-live="polite">${at ? html`<${Reading} sample=${data.samples[at[0]]} i=${at[1]} signals=${data.signals} />` : html`<span class="faint">Point at a token, or choose one, for its numbers. Faint tokens are not trained.</span>`}</div>
    ${data.samples.map((sample, n) => html`<${Tokens} key=${n} n=${n} many=${data.samples.length > 1} sample=${sample} signal=${signal} pinned=${pinned?.[0] === n ? pinned[1] : -1} setOver=${setOver} setPinned=${setPinned} />`)}
    ${data.left_out > 0 && html`<p class="note">${data.left_out.toLocaleString("en")} more tokens are left out.</p>`}`;
}

/** Value -> place on the scale from -5 to 5, which is a class of the style sheet. @param {string} signal @param {Sample[]} samples */
function scale(signal, samples) {
  const values = samples.flatMap((sample) => (sample.signals[signal] ?? []).filter((value) => value !== null));
  const log = (/** @type {number} */ value) => signal === "ratio" ? Math.log(Math.max(value, 1e-5)) : value;
  const sizes = /** @type {number[]} */ (values).map((value) => Math.abs(log(value))).sort((a, b) => a - b);
  const most = sizes[Math.floor(sizes.length * 0.98)] || sizes[sizes.length - 1] || 1;
  const [low, high] = values.length ? [Math.min(.../** @type {number[]} */ (values)), Math.max(.../** @type {number[]} */ (values))] : [0, 1];
  const ranks = [...new Set(values)].sort((a, b) => /** @type {number} */ (a) - /** @type {number} */ (b));
  return { most, low, high, ranks, place: (/** @type {number | null} */ value) => {
    if (value === null || value === undefined) return "";
    if (signal === "stopped") return value ? `s${value}` : "";
    if (signal === "versions") return `v${ranks.indexOf(value) % 6}`;
    const share = TWO_SIDED.includes(signal) ? log(value) / most : Math.abs(value) / most;
    const place = Math.max(-5, Math.min(5, Math.round(share * 5)));
    return place ? `q${place}` : "";
  } };
}

/** What the colours mean. @param {{signal: string, samples: Sample[]}} props */
function Scale({ signal, samples }) {
  const { most, ranks } = useMemo(() => scale(signal, samples), [signal, samples]);
  if (signal === "stopped") return html`<span class="scale">${[1, 2, 3].map((n) => html`<span class=${`s${n}`}>${STOPPED[n]}</span>`)}</span>`;
  if (signal === "versions") return html`<span class="scale">${ranks.slice(0, 12).map((version, i) => html`<span class=${`v${i % 6}`}>${version}</span>`)}</span>`;
  const two = TWO_SIDED.includes(signal), end = signal === "ratio" ? Math.exp(most) : most;
  const sides = two ? [-5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5] : [0, 1, 2, 3, 4, 5];
  const minus = signal.endsWith("logprobs") ? "−" : "";
  return html`<span class="scale"><span class="faint">${two ? number(signal === "ratio" ? 1 / end : -end) : 0}</span>${sides.map((n) => html`<i class=${n ? `q${n}` : ""}></i>`)}<span class="faint">${minus}${number(end)}</span></span>`;
}

/** All tokens of a sample. One listener for all of them: there may be thousands. @param {any} props */
function Tokens({ n, many, sample, signal, pinned, setOver, setPinned }) {
  const spans = useMemo(() => {
    const { place } = scale(signal, [sample]);
    const values = sample.signals[signal] ?? [];
    return sample.pieces.map((/** @type {string} */ piece, /** @type {number} */ i) => html`<span key=${i} data-i=${i} class=${`${sample.trained[i] ? "t" : "t off"} ${place(values[i] ?? null)}`}>${shown(piece)}</span>`);
  }, [sample, signal]);
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  useEffect(() => {  // by hand, so that thousands of tokens are not drawn again for one
    const one = box.current?.children[pinned];
    one?.classList.add("pinned");
    return () => one?.classList.remove("pinned");
  }, [pinned, signal]);
  const at = (/** @type {any} */ event) => event.target.dataset?.i === undefined ? null : [n, Number(event.target.dataset.i)];
  const step = (/** @type {KeyboardEvent} */ event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    setPinned([n, Math.max(0, Math.min(sample.ids.length - 1, (pinned < 0 ? sample.trained.indexOf(true) - 1 : pinned) + by))]);
  };
  return html`${many && html`<h3>Sample ${n + 1}</h3>`}<div ref=${box} class="tokens" tabindex="0" role="group" aria-label="Tokens; the arrow keys go from one to the next" dir="auto" onKeyDown=${step}
    onMouseOver=${(/** @type {any} */ e) => setOver(at(e))} onMouseLeave=${() => setOver(null)} onClick=${(/** @type {any} */ e) => setPinned(at(e))}>
    ${spans}</div>`;
}

/** Line ends are shown and kept. @param {string} piece */
function shown(piece) {
  return piece.replaceAll("\n", "⏎\n");
}

/** All numbers of a token. @param {{sample: Sample, i: number, signals: Record<string, string>}} props */
function Reading({ sample, i, signals }) {
  const names = ORDER.filter((name) => name in signals);
  return html`<b class="piece">${JSON.stringify(sample.pieces[i])}</b> <span class="faint">#${i}, id ${sample.ids[i]}</span>
    ${sample.trained[i] ? names.map((name) => html`<span key=${name} title=${signals[name]}><span class="faint">${NAMES[name]}</span> <b>${name === "stopped" ? STOPPED[sample.signals[name]?.[i] ?? 0] : number(sample.signals[name]?.[i])}</b></span>`) : html`<span class="faint">not trained</span>`}`;
}
