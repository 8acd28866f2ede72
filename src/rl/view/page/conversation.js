// A conversation. Whatever models and tools wrote is only text: it never becomes markup, an address or a script.

import { html, useState } from "./core.js";

/** @typedef {import("./types").Message} Message */

const SHORT = 6000, PART = 4000;

/** Plain text; long text is cut until the user expands it. @param {{text: string, className?: string}} props */
export function Text({ text, className = "" }) {
  const [whole, setWhole] = useState(false);
  if (text.length <= SHORT) return html`<div class=${`text ${className}`} dir="auto">${text}</div>`;
  if (whole) return html`<div class=${`text ${className}`} dir="auto">${partsOf(text).map((part, i) => html`<div class="part" key=${i}>${part}</div>`)}</div>`;
  return html`<div class=${`text ${className}`} dir="auto">${text.slice(0, SHORT)}<button class="more" onClick=${() => setWhole(true)}>… ${(text.length - SHORT).toLocaleString("en")} more characters</button></div>`;
}

/** Splits a long text, so that the browser lays out only visible parts; cuts after a line, or else after a word. @param {string} text */
function partsOf(text) {
  const parts = [];
  for (let at = 0; at < text.length; at += parts[parts.length - 1].length) {
    const end = at + PART, line = text.lastIndexOf("\n", end - 1), blank = text.lastIndexOf(" ", end - 1);
    parts.push(text.slice(at, end >= text.length ? end : line > at ? line + 1 : blank > at ? blank + 1 : end));
  }
  return parts;
}

/** The end of a rollout's prompt: before the first answer if its line does not have it. @param {{messages: Message[], prompt: number}} rollout */
export function promptEnd({ messages, prompt }) {
  const first = messages.findIndex((message) => message.role === "assistant");
  return prompt || (first < 0 ? messages.length : first);
}

/** A conversation; marks the end of the prompt if that has worked examples. @param {{messages: Message[], prompt?: number}} props */
export function Conversation({ messages, prompt = 0 }) {
  const examples = messages.slice(0, prompt).some((message) => message.role === "assistant");
  const many = messages.length > 60;
  const [all, setAll] = useState(false);
  const shown = many && !all ? [...messages.slice(0, 20), ...messages.slice(-20)] : messages;
  return html`<div class="talk">${shown.map((message, i) => html`
    ${many && !all && i === 20 && html`<button class="more" onClick=${() => setAll(true)}>${(messages.length - 40).toLocaleString("en")} messages in between</button>`}
    ${examples && prompt === (many && !all && i >= 20 ? i + messages.length - 40 : i) && html`<p class="faint small">The prompt ends here.</p>`}
    <${One} key=${i} message=${message} />`)}</div>`;
}

/** @param {{message: Message}} props */
function One({ message }) {
  const known = ["system", "user", "assistant", "tool"].includes(message.role) ? message.role : "other";
  return html`<article class=${`message ${known}`}>
    <header>${message.role || "no role"}${message.name && html` <span class="faint">${message.name}</span>`}</header>
    ${message.thinking && html`<details class="thinking"><summary>thinking <span class="faint">${message.thinking.length.toLocaleString("en")} characters</span></summary><${Text} text=${message.thinking} /></details>`}
    ${message.text && html`<${Text} text=${message.text} />`}
    ${message.calls.map((call, i) => html`<div class="call" key=${i}><span class="faint">calls</span> <b>${call.name}</b><${Text} text=${call.arguments} /></div>`)}
    ${!message.text && !message.thinking && !message.calls.length && html`<p class="faint">(empty)</p>`}
    ${message.left_out > 0 && html`<p class="faint">${message.left_out.toLocaleString("en")} characters are left out here; rl show prints all.</p>`}
  </article>`;
}
