// Results of `personae eval`, as data: nothing of a report is shown as HTML.

import { html, useState } from "./preact-htm.js";
import { call, download } from "./api.js";
import { Failure, useAnswer, when } from "./parts.js";

const path = (id) => `v1/eval_reports/${encodeURIComponent(id)}`;
const percent = (share) => `${(100 * share).toFixed(1)}`;

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

function Report({ id }) {
  const [report, error] = useAnswer(() => call("GET", path(id)), [id]);
  if (!report) return error ? html`<${Failure} error=${error} />` : html`<p>Reading…</p>`;
  const suites = [...new Set(report.rows.map((row) => row.suite))];
  return html`<p>
      ${report.target} · ${report.started} · ${Math.round(report.seconds)} s${!report.complete && " · not complete"}
    </p>
    ${suites.map(
      (suite) => html`<h3>${suite}</h3><${Rows} rows=${report.rows.filter((row) => row.suite === suite)} />`,
    )}
    ${report.failed > 0 &&
    html`<details>
      <summary>${report.failed} failed${report.failed > report.failures.length && `, of which the first ${report.failures.length}`}</summary>
      ${report.failures.map((one) => html`<${Case} one=${one} />`)}
    </details>`}`;
}

function Entry({ info }) {
  const [open, setOpen] = useState(false);
  const [error, setError] = useState(null);
  const save = () => download(`${path(info.id)}/page`, `${info.id}.html`).then(() => setError(null), setError);
  return html`<details class="struct" onToggle=${(event) => event.target === event.currentTarget && setOpen(event.target.open)}>
    <summary><b>${info.name}</b> <small>${info.id !== info.name && `${info.id} · `}${info.suites.join(", ")} · ${when(info.modified)}</small></summary>
    ${open && html`<${Report} id=${info.id} />`}
    ${info.page && html`<button type="button" onClick=${save}>Save the report</button>`}
    <${Failure} error=${error} />
  </details>`;
}

export function Reports({ shown }) {
  const [list, error, again] = useAnswer(() => (shown ? call("GET", "v1/eval_reports") : Promise.resolve(null)), [shown]);
  return html`<section class="card" aria-label="Evaluations">
    <h2>Evaluations</h2>
    ${error?.status === 404
      ? html`<p>Start the server with <code>--eval-reports DIR</code> to see results of <code>personae eval</code> here.</p>`
      : html`<${Failure} error=${error} />`}
    ${list && !list.data.length && html`<p>No runs yet.</p>`}
    ${list?.data.map((info) => html`<${Entry} key=${info.id} info=${info} />`)}
    ${list && html`<button type="button" class="quiet" onClick=${again}>Look again</button>`}
  </section>`;
}
