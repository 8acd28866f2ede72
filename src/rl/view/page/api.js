// Queries the server, once or repeatedly. An exported page contains the answers.

import { useEffect, useRef, useState } from "./core.js";
import { recordedAnswer } from "./recorded.js";

/** @typedef {import("./types").Answers} Answers */

/** Requests an answer. Throws an Error with the server's message. Leaves out null values.
 * @template {keyof Answers} N
 * @param {N} name @param {Record<string, any>} values @param {AbortSignal} [signal]
 * @returns {Promise<Answers[N]>} */
export async function ask(name, values, signal) {
  if (window.recorded) return recordedAnswer(window.recorded, name, values);
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(values)) {
    for (const one of Array.isArray(value) ? value : [value]) if (one !== null && one !== undefined && one !== "") query.append(key, one);
  }
  const response = await fetch(`api/${name}?${query}`, { signal }).catch((error) => {
    if (error.name === "AbortError") throw error;
    throw new Error("rl view does not answer: it was stopped, or the connection is broken");
  });
  const content = await response.json().catch((error) => {
    if (error.name === "AbortError" || response.ok) throw error;
    return {};
  });
  if (!response.ok) throw new Error(content.error?.message ?? `the server answered ${response.status}`);
  return content;
}

let stamp = "";

/** Repeats every request when this text changes; it describes the state of the runs shown. @param {string} text */
export function asOf(text) {
  stamp = text;
}

/** The answer to a request, repeated whenever its values change, and every `every` ms while the page is visible. The last answer stays
 * until the next one arrives. If `values` is null, requests nothing.
 * @template {keyof Answers} N
 * @param {N} name @param {Record<string, any> | null} values @param {number} [every]
 * @returns {{data: Answers[N] | null, error: string, loading: boolean}} */
export function useAnswer(name, values, every) {
  const [state, setState] = useState({ data: /** @type {any} */ (null), error: "", loading: values !== null });
  const text = useRef("");
  const key = JSON.stringify(values);
  useEffect(() => {
    if (values === null) return setState({ data: null, error: "", loading: false });
    const abort = new AbortController();
    let timer = 0;
    const once = async () => {
      try {
        const data = document.hidden && text.current ? null : await ask(name, values, abort.signal);
        const now = data && JSON.stringify(data);
        if (data && (now !== text.current || state.loading)) setState({ data, error: "", loading: false });
        text.current = now || text.current;
      } catch (/** @type {any} */ error) {
        if (error.name === "AbortError") return;
        setState((old) => ({ data: every ? old.data : null, error: error.message, loading: false }));
        text.current = "";
      }
      if (every && !abort.signal.aborted) timer = setTimeout(once, every);
    };
    setState((old) => ({ ...old, loading: true }));
    text.current = "";
    once();
    return () => {
      abort.abort();
      clearTimeout(timer);
    };
  }, [name, key, every, name === "runs" ? "" : stamp]);
  return state;
}
