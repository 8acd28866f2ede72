// Keys: / search, j and k through lists, ? help, digits the pages.

import { html, useEffect, useRef } from "./core.js";
import { change, go, here, link } from "./router.js";

/** The pages' titles -> [key, what it does]. @type {(pages: string[]) => string[][]} */
const keysOf = (pages) => [
  ["/", "search"],
  ["j  k", "next and previous rollout or task"],
  [`1 – ${pages.length}`, pages.join(", ")],
  ["Esc", "close what is open"],
  ["?", "this help"],
];
const CHARTS = [
  ["drag", "zoom in, all charts at once"],
  ["Shift + drag", "pan"],
  ["double click", "the whole run again"],
  ["click", "the rollouts of that step"],
  ["Tab, then ← →", "from point to point, or from rollout to rollout of a task"],
  ["Enter", "the rollouts of that step; the later one of a task’s two answers, with Shift the earlier one"],
  ["Home, Esc", "the whole run again"],
];

/** Handles keys; the first digit opens the first of `pages`. Pages receive `j`, `k` and Escape as `move` and `leave` events. @param {string[]} pages @param {string[]} runs @param {(open: boolean) => void} setHelp */
export function useKeys(pages, runs, setHelp) {
  useEffect(() => {
    const pressed = (/** @type {KeyboardEvent} */ event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const target = /** @type {HTMLElement} */ (event.target);
      if (event.key === "Escape") {
        setHelp(false);
        if (target.matches("input, select, textarea")) target.blur();
        else dispatchEvent(new Event("leave"));
        return;
      }
      if (document.querySelector("dialog[open]")) return;
      if (target.matches("input:not([type=checkbox]):not([type=range]), select, textarea")) return;
      const search = /** @type {HTMLElement | null} */ (document.querySelector("[data-search]"));
      if (event.key === "/" && search) {
        event.preventDefault();
        const box = /** @type {HTMLDetailsElement | null} */ (search.closest("details"));
        if (box) box.open = true;
        search.focus();
      } else if (event.key === "j" || event.key === "k") {
        dispatchEvent(new CustomEvent("move", { detail: event.key === "j" ? 1 : -1 }));
      } else if (event.key === "?") {
        setHelp(true);
      } else if (pages[Number(event.key) - 1]) {
        go(link(pages[Number(event.key) - 1], { run: runs }));
      }
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, [pages.join(), runs.join()]);
}

/** j and k step through a list, page after page, and Escape closes the open row. The address, not the page, says which row is open, as it
 * changes with a click before the page is drawn.
 * @param {{offset: number, total: number} | null} list the answer shown @param {string[]} ids names of its rows @param {number} limit rows on a page
 * @param {(values: Record<string, string>) => string} chosen the row named in the address, or "" @param {(id: string) => Record<string, any>} choose the address values that name a row
 * @param {(id: string) => Promise<number>} [find] the index in the whole list of a row that has left this page, or -1: a live list moves on */
export function useMoving(list, ids, limit, chosen, choose, find) {
  const now = useRef({ list, ids, chosen, choose, find }), turned = useRef(/** @type {number | null} */ (null));
  now.current = { list, ids, chosen, choose, find };
  useEffect(() => {
    if (turned.current !== null && ids[turned.current]) open(choose(ids[turned.current]));
    turned.current = null;
  }, [list?.offset]);
  const begun = useRef({ list: "", state: "" }), page = useRef(here().page);
  useEffect(() => {  // at first the first row is open, if there is room beside the list, and the row of a link is in sight
    const { page: shown, run, values } = here(), of = [...run, values.kind].join(), id = chosen(values), known = !id || ids.includes(id);
    const state = begun.current.list === of ? begun.current.state : "";
    if (!list || state === "done" || (state && !known) || shown !== page.current) return;  // the rows may come while one leaves
    begun.current = { list: of, state: known || !find ? "done" : "sought" };
    if (!known) find?.(id).then((at) => at >= 0 && change({ offset: at - at % limit || null }, true));
    else open(!id && innerWidth > 800 && ids[0] ? choose(ids[0]) : {});
  }, [list]);
  useEffect(() => {
    const moved = async (/** @type {any} */ event) => {
      const { list, ids, chosen, choose, find } = now.current, place = here(), way = event.detail, id = chosen(place.values);
      if (!list || list.offset !== Number(place.values.offset ?? 0)) return;  // the rows of that page are still loading
      const there = id && find && !ids.includes(id) ? await find(id) : -1;
      if (there >= 0) {
        const next = Math.max(0, Math.min(list.total - 1, there + way)), page = next - next % limit;
        if (page === list.offset) return open(choose(now.current.ids[next - page]));
        turned.current = next - page;
        return change({ offset: page || null }, true);
      }
      const at = ids.indexOf(id), to = Math.max(0, list.offset + limit * way);
      if (at >= 0 && !ids[at + way] && to !== list.offset && to < list.total) {
        turned.current = list.offset + at + way - to;  // the page before may reach into this one
        return change({ offset: to || null }, true);
      }
      const next = ids[at < 0 ? 0 : Math.max(0, Math.min(ids.length - 1, at + way))];
      if (next !== undefined) open(choose(next));
    };
    const left = () => now.current.chosen(here().values) && change(now.current.choose(""));
    addEventListener("move", moved);
    addEventListener("leave", left);
    return () => { removeEventListener("move", moved); removeEventListener("leave", left); };
  }, []);
}

/** Opens a row and scrolls it into view. @param {Record<string, any>} values */
function open(values) {
  change(values, true);
  requestAnimationFrame(() => document.querySelector(".list [aria-current=true]")?.scrollIntoView({ block: "nearest" }));
}

/** `pages`: the titles of the pages that have keys. @param {{pages: string[], close: () => void}} props */
export function Help({ pages, close }) {
  const box = useRef(/** @type {HTMLDialogElement | null} */ (null));
  useEffect(() => box.current?.showModal(), []);
  const table = (/** @type {string[][]} */ rows) => html`<dl class="keys">${rows.map(([key, what]) => html`<dt><kbd>${key}</kbd></dt><dd>${what}</dd>`)}</dl>`;
  return html`<dialog ref=${box} onClose=${close} aria-label="Help">
    <h2>Keys</h2>${table(keysOf(pages))}
    <h2>Charts</h2>${table(CHARTS)}
    <p class="faint">The address holds the current view: copy it to share what you see.</p>
    <form method="dialog"><button autofocus>Close</button></form>
  </dialog>`;
}
