// Problems of a run, each with links to its evidence, and the logs of the processes.

import { html, useEffect, useRef } from "./core.js";
import { useAnswer } from "./api.js";
import { ago, bytes, number } from "./format.js";
import { change, link } from "./router.js";
import { Entry, Fault, State, Words } from "./ui.js";

/** @param {{run: string, values: Record<string, string>, live: boolean}} props */
export function Health({ run, values, live }) {
  const { data, error } = useAnswer("health", { run }, live ? 2000 : 15000);
  if (error) return html`<${Fault} text=${error} />`;
  if (!data) return html`<p class="empty">Examining …</p>`;
  const process = values.process ?? data.processes.find((one) => one.name === "trainer" && one.attempts.length)?.name ?? data.processes.find((one) => one.attempts.length)?.name;
  const isVerdict = (/** @type {import("./types").Finding} */ one) => one.text === data.bottleneck;
  const findings = data.findings.filter((one) => !isVerdict(one));
  return html`<div class="bar"><h1>Health</h1><${State} state=${data.state} /></div>
    <p class=${`verdict ${data.findings.some((one) => one.serious) ? "bad" : "good"}`}><${Words} text=${data.bottleneck} />${data.findings.filter(isVerdict).map((finding) => html`<${Evidence} run=${run} finding=${finding} />`)}</p>
    ${findings.length > 0 && html`<section><h2>Findings</h2><ul class="findings">${findings.map((finding, i) => html`<${Finding} key=${i} run=${run} finding=${finding} />`)}</ul></section>`}
    ${data.machines.length > 0 && html`<section class="card"><h2>Machines</h2><div class="tablebox"><table class="machines"><thead><tr><th>Machine</th><th>State</th><th>Does</th><th>Host</th><th>Processes</th><th class="right">Since</th><th class="right">Last sign</th></tr></thead>
      <tbody>${data.machines.map((one) => html`<${Machine} key=${one.index} run=${run} machine=${one} logs=${data.processes.filter((process) => process.attempts.length).map((process) => process.name)} />`)}</tbody></table></div></section>`}
    <div class="sides"><section class="card"><h2>The run</h2><ul class="lines">${data.lines.map((line, i) => html`<li key=${i}><${Words} text=${line} /></li>`)}</ul></section>
      <section class="card"><h2>Processes</h2><table><tbody>${data.processes.map((one) => html`<tr key=${one.name} aria-current=${one.name === process ? "true" : null}><th scope="row">${one.attempts.length ? html`<a href=${link("health", { run: [run], process: one.name })}>${one.name}</a>` : one.name}</th>
        <td>${one.doing || html`<span class="faint">${data.state === "live" ? "no status" : "has ended"}</span>`}</td><td class="faint right">${one.heartbeat ? ago(one.heartbeat) : ""}</td><td class="faint right">${one.attempts.length > 1 ? `attempt ${Math.max(...one.attempts)}` : ""}</td></tr>`)}</tbody></table></section></div>
    ${data.mismatch.length > 0 && html`<${Mismatch} rows=${data.mismatch} />`}
    ${process && html`<${Log} key=${process} run=${run} process=${process} attempts=${data.processes.find((one) => one.name === process)?.attempts ?? []} attempt=${values.attempt} text=${values.find ?? ""} live=${live} />`}`;
}

const STATES = { live: "there", leaving: "is leaving", lost: "lost", absent: "not there" };

/** @param {{run: string, machine: import("./types").MachineRow, logs: string[]}} props */
function Machine({ run, machine, logs }) {
  return html`<tr><th scope="row">${machine.index}</th><td class=${`nowrap ${machine.state === "lost" ? "bad" : machine.state === "live" ? "good" : "faint"}`}>${STATES[machine.state]}</td>
    <td>${machine.does}${machine.facts && html`<div class="faint small">${machine.facts}</div>`}</td><td>${machine.host}</td>
    <td>${machine.processes.map((name, i) => html`${i > 0 && ", "}${logs.includes(name) ? html`<a key=${name} href=${link("health", { run: [run], process: name })}>${name}</a>` : name}`)}</td>
    <td class="faint right nowrap">${machine.since ? ago(machine.since) : ""}</td><td class="faint right nowrap">${machine.last_sign ? ago(machine.last_sign) : ""}</td></tr>`;
}

/** Mismatch KL by place, with bars for the eye. @param {{rows: import("./types").MismatchRow[]}} props */
function Mismatch({ rows }) {
  const most = Math.max(...rows.map((row) => row.kl));
  const places = (/** @type {import("./types").MismatchRow} */ { first, last }) => [...new Set([first, last])].map((end) => end.toLocaleString("en")).join("-");
  return html`<section class="card"><h2>Mismatch KL by place</h2><div class="mismatch">
    ${[...new Set(rows.map((row) => row.kind))].map((kind) => html`<table key=${kind}><thead><tr><th>${kind[0].toUpperCase() + kind.slice(1)}</th><th>Mean KL</th><th class="right">± error</th><th class="right">Tokens</th><th class="right">Samples</th></tr></thead>
      <tbody>${rows.filter((row) => row.kind === kind).map((row) => html`<tr key=${row.first}><th scope="row" class="nowrap">${places(row)}</th><td>${number(row.kl)}<i style=${{ width: `${(row.kl / most) * 100}%` }}></i></td><td class="faint right nowrap">${row.samples > 1 ? number(row.error) : ""}</td>
        <td class="faint right">${row.tokens.toLocaleString("en")}</td><td class="faint right">${row.samples.toLocaleString("en")}</td></tr>`)}</tbody></table>`)}</div></section>`;
}

/** @param {{run: string, finding: import("./types").Finding}} props */
function Finding({ run, finding }) {
  return html`<li class=${finding.serious ? "serious" : ""}><span class="word">${finding.serious ? "problem" : finding.metrics.length ? "may hold the reward down" : "note"}</span> <${Words} text=${finding.text} />
    <${Evidence} run=${run} finding=${finding} /></li>`;
}

/** Links to where a problem shows. @param {{run: string, finding: import("./types").Finding}} props */
function Evidence({ run, finding }) {
  return html`<span class="evidence">${finding.metrics.map((name) => html`<a key=${name} href=${link("curves", { run: [run], q: name })}>curve of ${name}</a>`)}
      ${finding.why && html`<a href=${link("rollouts", { run: [run], why: finding.why })}>rollouts: ${finding.why}</a>`}
      ${finding.files.map((file) => {
        const log = /^logs\/(.+)-(\d+)\.log$/.exec(file);
        return log ? html`<a key=${file} href=${link("health", { run: [run], process: log[1], attempt: log[2] })}>${file}</a>` : html`<code key=${file}>${file}</code>`;
      })}</span>`;
}

/** @param {{run: string, process: string, attempts: number[], attempt: string | undefined, text: string, live: boolean}} props */
function Log({ run, process, attempts, attempt, text, live }) {
  const { data, error } = useAnswer("log", { run, process, attempt, lines: 400 }, live ? 2000 : 0);
  const box = useRef(/** @type {HTMLPreElement | null} */ (null));
  const atEnd = useRef(true);
  useEffect(() => { if (box.current && atEnd.current) box.current.scrollTop = box.current.scrollHeight; }, [data]);
  const scrolled = (/** @type {any} */ e) => { atEnd.current = e.target.scrollHeight - e.target.scrollTop - e.target.clientHeight < 30; };
  const lines = (data?.lines ?? []).filter((line) => line.toLowerCase().includes(text.toLowerCase()));
  return html`<section class="log"><div class="bar"><h2>Log of ${process}</h2>
      ${attempts.length > 1 && html`<label class="field"><span>Attempt</span><select value=${attempt ?? String(Math.max(...attempts))} onChange=${(/** @type {any} */ e) => change({ attempt: e.target.value })}>${attempts.map((n) => html`<option key=${n} value=${n}>${n}</option>`)}</select></label>`}
      <span class="faint">${data ? `${bytes(data.bytes)}, last lines` : ""}</span><span class="grow"></span>
      <${Entry} label="Search the log" hide=${true} name="find" value=${text} search=${true} type="search" placeholder="Search these lines  /" /></div>
    ${error && html`<${Fault} text=${error} />`}
    <pre ref=${box} tabindex="0" aria-label=${`Log of ${process}`} onScroll=${scrolled}>${lines.map((line, i) => html`<span key=${i} class=${/\b(error|exception|traceback|fatal)\b/i.test(line) ? "bad" : /\bwarn/i.test(line) ? "warn" : ""}>${`${line}\n`}</span>`)}</pre></section>`;
}
