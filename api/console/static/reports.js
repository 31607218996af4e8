// Evaluations: start one, watch it, read results and compare them. Nothing of a report is shown as HTML.

import { html, useState } from "./preact-htm.js";
import { call, download } from "./api.js";
import { Failure, Field, useAnswer, useEvery, when } from "./parts.js";

const WATCH_SECONDS = 2;

const path = (id) => `v1/eval_reports/${encodeURIComponent(id)}`;
const percent = (share) => `${(100 * share).toFixed(1)}`;
const signed = (share) => `${share > 0 ? "+" : ""}${percent(share)}`;
const words = (text) => text.split(/[\s,]+/).filter(Boolean);

function Start({ done }) {
  const [asked, setAsked] = useState({ suites: "", models: "", count: "", name: "" });
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState(null);
  const set = (field) => (event) => setAsked({ ...asked, [field]: event.target.value });
  const send = async (event) => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    const body = { suites: words(asked.suites), models: words(asked.models), name: asked.name.trim() };
    try {
      await call("POST", "v1/eval_reports", asked.count ? { ...body, count: Number(asked.count) } : body);
      done();
    } catch (failure) {
      setError(failure);
    }
    setBusy(false);
  };
  return html`<form onSubmit=${send} aria-label="Start an evaluation">
    <${Field} label="Suites" hint="those of personae eval list; else the models decide">
      <input placeholder="demo schemas" value=${asked.suites} onInput=${set("suites")} />
    <//>
    <${Field} label="Models" hint="base, or names; else all">
      <input placeholder="all" value=${asked.models} onInput=${set("models")} />
    <//>
    <${Field} label="Cases of a task">
      <input type="number" min="1" placeholder="the suite's own" value=${asked.count} onInput=${set("count")} />
    <//>
    <${Field} label="Name of the run">
      <input maxlength="200" placeholder="optional" value=${asked.name} onInput=${set("name")} />
    <//>
    <${Failure} error=${error} />
    <button class="primary" disabled=${busy}>${busy ? "Starting…" : "Start"}</button>
  </form>`;
}

function Compared({ id, other }) {
  const [found, error] = useAnswer(() => call("GET", `${path(id)}/against/${encodeURIComponent(other)}`), [id, other]);
  if (!found) return error ? html`<${Failure} error=${error} />` : html`<p>Reading…</p>`;
  const titles = ["Suite", "Task", "Model", "Mode", "Before %", "Now %", "Change", "95 % interval", "Gained", "Lost", "p"];
  return html`<div class="scrolls" tabindex="0" role="region" aria-label=${`Compared with ${other}`}>
    <table>
      <thead>
        <tr>
          ${titles.map((title) => html`<th scope="col">${title}</th>`)}
        </tr>
      </thead>
      <tbody>
        ${found.rows.map(
          (row) =>
            html`<tr>
              <td>${row.suite}</td>
              <td>${row.task}</td>
              <td>${row.model}</td>
              <td>${row.mode}</td>
              <td>${percent(row.before)}</td>
              <td>${percent(row.after)}</td>
              <td>${signed(row.change)}</td>
              <td>${row.interval.map(signed).join(" – ")}</td>
              <td>${row.gained} of ${row.of}</td>
              <td>${row.lost}</td>
              <td>${row.p.toFixed(3)}</td>
            </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

function Compare({ id, others }) {
  const [other, setOther] = useState("");
  if (!others.length) return null;
  return html`<${Field} label="Compare with">
      <select value=${other} onChange=${(event) => setOther(event.target.value)}>
        <option value="">–</option>
        ${others.map((one) => html`<option value=${one.id}>${one.name}</option>`)}
      </select>
    <//>
    ${other && html`<${Compared} id=${id} other=${other} />`}`;
}

function Save({ id }) {
  const [error, setError] = useState(null);
  const save = () => download(`${path(id)}/page`, `${id}.html`).then(() => setError(null), setError);
  return html`<button type="button" onClick=${save}>Save the report</button><${Failure} error=${error} />`;
}

function Running({ report, again, shown }) {
  const [error, setError] = useState(null);
  useEvery(WATCH_SECONDS, () => shown && again());
  const stop = () => call("POST", `${path(report.id)}/cancel`).then(again, setError);
  const most = report.plays ?? undefined;
  return html`<p role="status">
      <progress value=${most && report.played} max=${most}></progress> ${report.played}${most && ` of ${most}`} cases
    </p>
    <button type="button" onClick=${stop}>Stop</button>
    <${Failure} error=${error} />`;
}

function Rows({ rows }) {
  const scores = [...new Set(rows.flatMap((row) => Object.keys(row.scores)))];
  const titles = ["Task", "Model", "Mode", "Passed", "%", "95 % interval", ...scores, "Errors", "s"];
  return html`<div class="scrolls" tabindex="0" role="region" aria-label=${`Results of ${rows[0].suite}`}>
    <table>
      <thead>
        <tr>
          ${titles.map((title) => html`<th scope="col">${title}</th>`)}
        </tr>
      </thead>
      <tbody>
        ${rows.map(
          (row) =>
            html`<tr>
              <td>${row.task}</td>
              <td>${row.model}</td>
              <td>${row.mode}</td>
              <td>${row.passed} of ${row.judged}</td>
              <td>${row.judged ? percent(row.passed / row.judged) : "–"}</td>
              <td>${row.interval ? row.interval.map(percent).join(" – ") : "–"}</td>
              ${scores.map((name) => html`<td>${name in row.scores ? percent(row.scores[name]) : ""}</td>`)}
              <td>${row.errors || ""}</td>
              <td>${row.seconds === null ? "" : row.seconds.toFixed(2)}</td>
            </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

function Case({ one }) {
  const parts = ["error", "note", "prompt", "expected", "answer"].filter((name) => one[name]);
  return html`<details class="struct">
    <summary><code>${one.case}</code> ${one.suite}, ${one.model}, ${one.mode}</summary>
    ${parts.map((name) => html`<h4>${name}</h4><pre tabindex="0">${one[name]}</pre>`)}
  </details>`;
}

function Report({ id, others, shown }) {
  const [report, error, again] = useAnswer(() => call("GET", path(id)), [id]);
  if (!report) return error ? html`<${Failure} error=${error} />` : html`<p>Reading…</p>`;
  const suites = [...new Set(report.rows.map((row) => row.suite))];
  return html`<p>
      ${report.target} · ${report.started} · ${Math.round(report.seconds)} s${!report.complete && !report.running && " · not complete"}
    </p>
    ${report.running && html`<${Running} report=${report} again=${again} shown=${shown} />`}
    ${!report.complete && !report.running && report.output && html`<p><code>${report.output}</code></p>`}
    ${suites.map(
      (suite) => html`<h3>${suite}</h3><${Rows} rows=${report.rows.filter((row) => row.suite === suite)} />`,
    )}
    ${report.failed > 0 &&
    html`<details>
      <summary>${report.failed} failed${report.failed > report.failures.length && `, of which the first ${report.failures.length}`}</summary>
      ${report.failures.map((one) => html`<${Case} one=${one} />`)}
    </details>`}
    ${report.page && html`<${Save} id=${id} />`}
    ${!report.running && html`<${Compare} id=${id} others=${others} />`}`;
}

function Entry({ info, others, shown }) {
  const [open, setOpen] = useState(info.running);
  return html`<details class="struct" open=${open} onToggle=${(event) => event.target === event.currentTarget && setOpen(event.target.open)}>
    <summary><b>${info.name}</b> <small>${info.id !== info.name && `${info.id} · `}${info.suites.join(", ")} · ${when(info.modified)}</small></summary>
    ${open && html`<${Report} id=${info.id} others=${others} shown=${shown} />`}
  </details>`;
}

export function Reports({ shown }) {
  const [list, error, again] = useAnswer(() => (shown ? call("GET", "v1/eval_reports") : Promise.resolve(null)), [shown]);
  return html`<section class="card" aria-label="Evaluations">
    <h2>Evaluations</h2>
    ${error?.status === 404
      ? html`<p>Start the server with <code>--eval-reports DIR</code> to run evaluations here and see results of <code>personae eval</code>.</p>`
      : html`<${Failure} error=${error} />`}
    ${list && html`<${Start} done=${again} />`}
    ${list && !list.data.length && html`<p>No runs yet.</p>`}
    ${list?.data.map((info) => html`<${Entry} key=${info.id} info=${info} others=${list.data.filter((one) => one !== info)} shown=${shown} />`)}
    ${list && html`<button type="button" class="quiet" onClick=${again}>Look again</button>`}
  </section>`;
}
