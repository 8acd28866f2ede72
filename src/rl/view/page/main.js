// The frame around all pages: choice of page and runs, keys, light and dark theme.

import { html, render, useEffect, useErrorBoundary, useState } from "./core.js";
import { Compare } from "./compare.js";
import { Curves } from "./curves.js";
import { Health } from "./health.js";
import { Help, useKeys } from "./keys.js";
import { Rollouts } from "./rollouts.js";
import { Runs } from "./runs.js";
import { Tasks } from "./tasks.js";
import { Timeline } from "./timeline.js";
import { asOf, useAnswer } from "./api.js";
import { day } from "./format.js";
import { go, link, usePlace } from "./router.js";
import { Fault, State } from "./ui.js";

/** Name in the address -> title and component; `several`: it can show several runs, `least`: it needs at least this many. The pages without
 * `least` have the keys 1, 2, ... in this order. CONTRIBUTING.md lists what else a new page needs.
 * @type {Record<string, {title: string, page: any, several?: boolean, least?: number}>} */
const PAGES = {
  runs: { title: "Runs", page: Runs },
  curves: { title: "Curves", page: Curves, several: true },
  rollouts: { title: "Rollouts", page: Rollouts },
  tasks: { title: "Tasks", page: Tasks },
  timeline: { title: "Timeline", page: Timeline },
  health: { title: "Health", page: Health },
  compare: { title: "Compare", page: Compare, several: true, least: 2 },
};
/** [name in the address, title] of the pages with keys. @type {[string, string][]} */
const WITH_KEYS = Object.entries(PAGES).filter(([, { least }]) => !least).map(([name, { title }]) => [name, title]);
const THEMES = ["auto", "light", "dark"];

function App() {
  const place = usePlace();
  const runs = useAnswer("runs", {}, 2000);
  const [help, setHelp] = useState(false);
  const known = runs.data?.runs ?? [];
  const keys = place.run.length ? [...new Set(place.run)] : known.slice(0, 1).map((run) => run.key);
  const at = Object.hasOwn(PAGES, place.page) ? place.page : "runs", shown = PAGES[at];
  const tooFew = keys.length < (shown.least ?? 0);
  useKeys(WITH_KEYS.map(([name]) => name), keys, setHelp);
  useEffect(() => {
    document.title = place.page === "runs" ? "rl view" : `${shown.title} · ${keys.join(", ")} · rl view`;
  }, [place.page, keys.join()]);
  useEffect(() => document.querySelector("nav [aria-current]")?.scrollIntoView({ inline: "center", block: "nearest" }), [at, keys.length > 1]);
  const chosen = known.filter((run) => keys.includes(run.key));
  const gone = runs.data ? place.run.filter((key) => !known.some((run) => run.key === key)) : [];
  asOf(chosen.map((run) => run.state === "live" ? "live" : `${run.changed}`).join());
  return html`
    <a class="skip" href="#main" onClick=${(/** @type {Event} */ e) => { e.preventDefault(); document.getElementById("main")?.focus(); }}>Skip to content</a>
    <header class="top">
      <a class="brand" href="#/runs" aria-label="rl view: all runs"><img src=${iconAddress()} alt="" width="22" height="22" /><span>rl view</span></a>
      ${at !== "runs" && html`<${RunPicker} known=${known} keys=${keys} page=${at} several=${shown.several} />`}
      <nav aria-label="Pages">
        ${Object.entries(PAGES).map(([name, { title, least }]) => keys.length >= (least ?? 0) && html`
          <a key=${name} href=${link(name, { run: name === "runs" ? [] : keys })} aria-current=${at === name ? "page" : null}>${title}</a>`)}
      </nav>
      <span class="grow"></span>
      ${window.recorded && html`<span class="faint made">as of ${day(window.recorded.made)}</span>`}
      ${at !== "runs" && chosen.length === 1 && html`<${State} state=${chosen[0].state} why=${chosen[0].why} />`}
      <${Theme} />
      <button class="quiet" onClick=${() => setHelp(true)} aria-label="Keys and help" title="Keys and help (?)">?</button>
    </header>
    <main id="main" tabindex="-1">
      ${runs.error && html`<${Fault} text=${runs.error} />`}
      ${gone.length > 0 && html`<${Fault} text=${`${gone.join(", ")}: no such run here; it may have been deleted.`} />`}
      ${at !== place.page && html`<${Fault} text=${`There is no page “${place.page}”.`} />`}
      ${at === "runs" ? html`<${Guard} key="runs"><${Runs} answer=${runs} late=${!!runs.error} chosen=${place.run} values=${place.values} /></${Guard}>`
        : tooFew ? html`<${Fault} text="Select at least two runs in Runs to compare them." />`
        : keys.length && !gone.length ? html`<${Guard} key=${at}><${shown.page} key=${at} run=${keys[0]} runs=${keys} values=${place.values} live=${!window.recorded && chosen.some((run) => run.state === "live")} /></${Guard}>`
        : !runs.loading && !gone.length && html`<p class="empty">There are no runs yet.</p>`}
    </main>
    ${help && html`<${Help} pages=${WITH_KEYS.map(([, title]) => title)} close=${() => setHelp(false)} />`}`;
}

/** Shows the error of a page that failed, in place of an empty page; another address retries. @param {any} props */
function Guard({ children }) {
  const [error, again] = useErrorBoundary();
  useEffect(() => {
    if (!error) return;
    addEventListener("hashchange", again, { once: true });
    return () => removeEventListener("hashchange", again);
  }, [error]);
  return error ? html`<${Fault} text=${`The page failed: ${error.message ?? error}`} />` : children;
}

/** The address of the icon: a file of the server, or the data in an exported page. */
function iconAddress() {
  return window.recorded?.icon ?? "page/icon.svg";
}

/** Chooses the run that the page is about. @param {any} props */
function RunPicker({ known, keys, page, several }) {
  const label = keys.length > 1 && several ? `${keys.length} runs` : keys[0];
  return html`<label class="picker"><span class="sr">Run</span>
    <select value=${label} onChange=${(/** @type {any} */ e) => go(link(page === "compare" ? "curves" : page, { run: [e.target.value] }))}>
      ${keys.length > 1 && several && html`<option value=${label}>${label}: ${keys.join(", ")}</option>`}
      ${known.map((/** @type {any} */ run) => html`<option key=${run.key} value=${run.key}>${run.key}</option>`)}
    </select></label>`;
}

/** The switch between light, dark and the system's theme. */
function Theme() {
  const [theme, setTheme] = useState(stored() ?? "auto");
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
    dispatchEvent(new Event("theme"));
    try { localStorage.setItem("rl-view-theme", theme); } catch { /* a page in a file may have no storage */ }
  }, [theme]);
  const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  const sign = { auto: "◐", light: "☀", dark: "☾" }[theme];
  return html`<button class="quiet" onClick=${() => setTheme(next)} aria-label=${`Colours: ${theme}. Change to ${next}`} title=${`Colours: ${theme}`}>${sign}</button>`;
}

function stored() {
  try { return localStorage.getItem("rl-view-theme"); } catch { return null; }
}

render(html`<${App} />`, /** @type {Element} */ (document.getElementById("app")));
