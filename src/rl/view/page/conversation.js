// A conversation. What models and tools wrote is text and nothing else: it never becomes markup, an address or a script.

import { html, useState } from "./core.js";

/** @typedef {import("./types").Message} Message */

const SHORT = 6000;

/** Text as it is, long text cut until it is wanted whole. @param {{text: string, className?: string}} props */
export function Text({ text, className = "" }) {
  const [whole, setWhole] = useState(false);
  const cut = !whole && text.length > SHORT;
  return html`<div class=${`text ${className}`} dir="auto">${cut ? text.slice(0, SHORT) : text}${cut && html`<button class="more" onClick=${() => setWhole(true)}>… ${(text.length - SHORT).toLocaleString("en")} more characters</button>`}</div>`;
}

/** @param {{messages: Message[]}} props */
export function Conversation({ messages }) {
  const many = messages.length > 60;
  const [all, setAll] = useState(false);
  const shown = many && !all ? [...messages.slice(0, 20), ...messages.slice(-20)] : messages;
  return html`<div class="talk">${shown.map((message, i) => html`
    ${many && !all && i === 20 && html`<button class="more" onClick=${() => setAll(true)}>${(messages.length - 40).toLocaleString("en")} messages in between</button>`}
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
    ${message.left_out > 0 && html`<p class="faint">${message.left_out.toLocaleString("en")} characters of it are left out here; rl show has all.</p>`}
  </article>`;
}
