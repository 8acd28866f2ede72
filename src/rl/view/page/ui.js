// Small elements shared by several pages.

import { html, useEffect, useRef, useState } from "./core.js";
import { change } from "./router.js";

/** @param {{text: string}} props */
export function Fault({ text }) {
  return html`<p class="fault" role="alert"><${Words} text=${text} /></p>`;
}

/** A sentence of `rl`, with what is between backticks as code. @param {{text: string}} props */
export function Words({ text }) {
  const parts = text.split("`");
  return parts.length % 2 ? html`${parts.map((part, i) => i % 2 ? html`<code>${part}</code>` : part)}` : text;
}

/** A number from the address; null if it is missing, invalid or out of range. @param {string | undefined} text @param {number} [low] @param {number} [high] */
export function numberIn(text, low = -Number.MAX_VALUE, high = Number.MAX_VALUE) {
  return text && Number(text) >= low && Number(text) <= high ? Number(text) : null;
}

/** Errors for values in the address that are not valid numbers. @param {{values: Record<string, string>, names: string[], low?: number, high?: number}} props */
export function WrongNumbers({ values, names, low, high }) {
  const ends = low === undefined ? "" : ` from ${low} to ${high}`;
  return html`${names.filter((name) => values[name] && numberIn(values[name], low, high) === null).map((name) => html`<${Fault} text=${`${name} = ${values[name]}: give a number${ends}`} />`)}`;
}

const SIGNS = { live: "●", ended: "✓", died: "✕", stopped: "■", unreadable: "?" };

/** The state of a run: a sign and a word, so that it does not depend on colour. @param {{state: keyof SIGNS, why?: string}} props */
export function State({ state, why }) {
  return html`<span class=${`state ${state}`} title=${why || null}><span aria-hidden="true">${SIGNS[state]}</span> ${window.recorded && state === "live" ? "was live" : state}</span>`;
}

/** A small curve. @param {{values: (number | null)[], label: string}} props */
export function Sparkline({ values, label }) {
  const known = /** @type {number[]} */ (values.filter((value) => value !== null));
  if (known.length < 2) return known.length ? "" : html`<span class="faint">–</span>`;
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const points = values.map((value, i) => value === null ? "" : `${(i / (values.length - 1)) * 100},${26 - ((value - low) / (high - low || 1)) * 24}`);
  const [x, y] = points[points.length - 1].split(",");
  return html`<svg class="spark" viewBox="-2 0 106 28" role="img" aria-label=${label}>
    <polyline points=${points.join(" ")} /><circle cx=${x} cy=${y} r="2.5" /></svg>`;
}

/** A choice that is stored in the address. @param {{label: string, name: string, value: string, options: [string, string][]}} props */
export function Choice({ label, name, value, options }) {
  return html`<label class="field"><span>${label}</span>
    <select value=${value} onChange=${(/** @type {any} */ e) => change({ [name]: e.target.value, offset: null })}>
      ${options.map(([key, text]) => html`<option key=${key} value=${key}>${text}</option>`)}
    </select></label>`;
}

/** A text or number stored in the address once typing pauses, together with the changes in `also`. @param {any} props */
export function Entry({ label, name, value, type = "text", search = false, placeholder = "", hide = false, quiet = true, also = {} }) {
  const [text, setText] = useState(value ?? "");
  const timer = useRef(0);
  useEffect(() => { if (!timer.current) setText(value ?? ""); }, [value]);
  useEffect(() => () => clearTimeout(timer.current), []);
  const typed = (/** @type {any} */ e) => {
    setText(e.target.value);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => { timer.current = 0; change({ ...also, [name]: e.target.value.trim(), offset: null }, quiet); }, 250);
  };
  return html`<label class="field"><span class=${hide ? "sr" : ""}>${label}</span>
    <input type=${type} value=${type === "number" && numberIn(text) === null ? "" : text} placeholder=${placeholder} onInput=${typed} data-search=${search ? "yes" : null}
      inputmode=${type === "number" ? "decimal" : null} step="any" autocomplete="off" spellcheck=${false} /></label>`;
}

/** Pages of a list. @param {{total: number, offset: number, limit: number}} props */
export function Pager({ total, offset, limit }) {
  if (offset >= total && offset) return html`<div class="pager"><button onClick=${() => change({ offset: null })}>‹ first page</button></div>`;
  if (total <= limit) return null;
  const turn = (/** @type {number} */ to) => change({ offset: to || null });
  return html`<div class="pager" role="navigation" aria-label="Pages of the list">
    <button disabled=${offset === 0} onClick=${() => turn(Math.max(0, offset - limit))}>‹ previous</button>
    <span>${(offset + 1).toLocaleString("en")}–${Math.min(total, offset + limit).toLocaleString("en")} of ${total.toLocaleString("en")}</span>
    <button disabled=${offset + limit >= total} onClick=${() => turn(offset + limit)}>next ›</button></div>`;
}

/** Tabs whose choice is stored in the address, together with the changes in `also`. @param {{name: string, value: string, tabs: [string, string][], label: string, also?: Record<string, null>}} props */
export function Tabs({ name, value, tabs, label, also = {} }) {
  return html`<div class="tabs" role="group" aria-label=${label}>${tabs.map(([key, text]) => html`
    <button key=${key} aria-pressed=${value === key} onClick=${() => change({ ...also, [name]: key === tabs[0][0] ? null : key, offset: null }, true)}>${text}</button>`)}</div>`;
}
