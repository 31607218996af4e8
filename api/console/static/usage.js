// What a tenant used in the last 30 days, by day, key and adapter.

import { html, useState } from "./preact-htm.js";
import { call, download } from "./api.js";
import { Chart } from "./chart.js";
import { Failure, Field, useAnswer } from "./parts.js";

const DAY = 86400;
const DAYS = 30;

// The beginning of the first of the last 30 days, in UTC.
export function monthAgo() {
  return (Math.floor(Date.now() / 1000 / DAY) - DAYS + 1) * DAY;
}

const number = (value) => (value == null ? "–" : Math.round(value).toLocaleString());
const date = (at) => new Date(1000 * at).toLocaleDateString([], { timeZone: "UTC", month: "short", day: "numeric" });
const money = (value) => (value == null ? "–" : value.toFixed(2));

// The sums of each day of a field, of rows by hour.
function days(rows, begin, field) {
  const sums = Array(DAYS).fill(0);
  for (const row of rows) sums[Math.floor((row.hour - begin) / DAY)] += row[field] ?? 0;
  return sums;
}

function Rows({ rows, by, name }) {
  const [first, ...others] = [...rows].sort((a, b) => b.completion_tokens + b.prompt_tokens - a.completion_tokens - a.prompt_tokens);
  if (!first) return null;
  return html`<div class="scrolls" tabindex="0" role="region" aria-label=${`Usage by ${name}`}>
    <table>
    <thead>
      <tr>
        ${[name, "Requests", "Prompt tokens", "Written", "Spend"].map((one) => html`<th scope="col">${one}</th>`)}
      </tr>
    </thead>
    <tbody>
      ${[first, ...others].slice(0, 20).map(
        (row) =>
          html`<tr>
            <td>${row[by] || (by === "adapter" ? "the base" : "no key")}</td>
            <td>${number(row.requests)}</td>
            <td>${number(row.prompt_tokens)}</td>
            <td>${number(row.completion_tokens)}</td>
            <td>${row.spend ? money(row.spend) : "–"}</td>
          </tr>`,
      )}
    </tbody>
    </table>
  </div>`;
}

// What the charts can be of: all, or an adapter or key alone. The value is the rest of the query.
function Parts({ adapters, keys, part, choose }) {
  const group = (label, by, rows, none) =>
    html`<optgroup label=${label}>
      ${rows.map((row) => html`<option value=${`&${by}=${encodeURIComponent(row[by])}`}>${row[by] || none}</option>`)}
    </optgroup>`;
  return html`<${Field} label="Charts show">
    <select value=${part} onChange=${(event) => choose(event.target.value)}>
      <option value="">all requests</option>
      ${group("Adapters", "adapter", adapters, "the base")}${group("Keys", "key", keys, "no key")}
    </select>
  <//>`;
}

export function Usage({ tenant }) {
  const begin = monthAgo();
  const from = `v1/usage?tenant=${encodeURIComponent(tenant)}&from=${begin}`;
  const [part, choose] = useState("");
  const sums = (by, more = "") => call("GET", `${from}&group_by=${by}${more}`).then((found) => found.data);
  const [totals, error] = useAnswer(() => Promise.all([sums("adapter"), sums("key")]), [tenant]);
  const [hours] = useAnswer(() => sums("hour", part), [tenant, part]);
  const csv = () => download(`${from}&group_by=hour,key,adapter${part}&format=csv`, `usage-${tenant}.csv`);
  if (error) return error.status === 404 ? null : html`<${Failure} error=${error} />`;
  if (!totals || !hours) return null;
  const [adapters, keys] = totals;
  if (!adapters.length) return html`<p>Nothing was used in the last 30 days.</p>`;
  const times = Array.from({ length: DAYS }, (_, day) => begin + DAY * day);
  const line = (name, field) => ({ name, values: days(hours, begin, field) });
  const chart = (title, say, series, whole) => html`<${Chart} ...${{ title, times, say, at: date, series, whole }} />`;
  const spent = adapters.some((row) => row.spend);
  return html`<h3>The last 30 days</h3>
    <${Parts} adapters=${adapters} keys=${keys} part=${part} choose=${choose} />
    <div class="charts">
      ${chart("Tokens a day", number, [line("written", "completion_tokens"), line("prompts", "prompt_tokens")], true)}
      ${chart("Requests a day", number, [line("requests", "requests")], true)}
      ${spent && chart("Spend a day", money, [line("spend", "spend")])}
    </div>
    <details>
      <summary>By adapter and key</summary>
      <${Rows} rows=${adapters} by="adapter" name="Adapter" />
      <${Rows} rows=${keys} by="key" name="Key" />
      <button type="button" onClick=${csv}>Download as CSV</button>
    </details>`;
}
