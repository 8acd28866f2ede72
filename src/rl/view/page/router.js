// The address holds the whole state of the page after the #: `#/rollouts?run=x&why=no_signal`. A link shows what its sender saw.

import { useEffect, useState } from "./core.js";

/** @typedef {{page: string, run: string[], values: Record<string, string>}} Place */
/** @typedef {Record<string, string | number | boolean | null | undefined | string[]>} Values */

/** @returns {Place} the state in the address */
export function here() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?", 2);
  const found = new URLSearchParams(query ?? "");
  const values = Object.fromEntries([...found].filter(([name]) => name !== "run"));
  return { page: path || "runs", run: found.getAll("run"), values };
}

/** The address of a page. Empty values are left out. @param {string} page @param {Values} values */
export function link(page, values) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "" && one !== false) query.append(name, String(one));
    }
  }
  return `#/${page}${query.size ? `?${query}` : ""}`;
}

/** Goes to an address; `quietly` without a new entry in the history, as for a slider. @param {string} address @param {boolean} [quietly] */
export function go(address, quietly) {
  if (address === location.hash) return;
  if (quietly) {
    history.replaceState(null, "", address);
    dispatchEvent(new Event("hashchange"));
  } else {
    location.hash = address;
  }
}

/** Changes some values of the address and keeps the others. @param {Values} values @param {boolean} [quietly] */
export function change(values, quietly) {
  const now = here();
  go(link(now.page, { run: now.run, ...now.values, ...values }), quietly);
}

/** @returns {Place} the state in the address, kept up to date */
export function usePlace() {
  const [place, setPlace] = useState(here);
  useEffect(() => {
    const moved = () => setPlace(here());
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  return place;
}
