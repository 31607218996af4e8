// Who waits, who runs, and who had which share of the tokens: by tenant and adapter.

import { html } from "./preact-htm.js";

const name = (one) => JSON.stringify([one.tenant, one.adapter]);

// The tokens of each tenant and adapter since an earlier answer of the server's.
export function tokensSince(now, before) {
  const then = new Map((before ?? []).map((one) => [name(one), one.tokens]));
  return new Map(now.map((one) => [name(one), Math.max(one.tokens - (then.get(name(one)) ?? (before ? 0 : one.tokens)), 0)]));
}

export function Queues({ queues, before, seconds }) {
  const tokens = tokensSince(queues, before);
  const all = [...tokens.values()].reduce((sum, one) => sum + one, 0);
  const shown = queues.filter((one) => one.running || one.waiting || tokens.get(name(one)));
  return html`<section class="card" aria-label="Tenants and adapters">
    <h2>Tenants and adapters</h2>
    ${shown.length
      ? html`<div class="scrolls" tabindex="0" role="region" aria-label="Table of tenants and adapters">
          <table>
            <thead>
              <tr>
                ${["Tenant", "Adapter", "Running", "Waiting", "Tokens/s", "Share"].map(
                  (title) => html`<th scope="col">${title}</th>`,
                )}
              </tr>
            </thead>
            <tbody>
              ${shown.map((one) => {
                const part = tokens.get(name(one));
                const share = all ? part / all : 0;
                return html`<tr>
                  <td>${one.tenant}</td>
                  <td>${one.adapter ?? html`<i>base</i>`}</td>
                  <td>${one.running}</td>
                  <td>${one.waiting}</td>
                  <td>${seconds > 0 ? Math.round(part / seconds) : "–"}</td>
                  <td>
                    <meter min="0" max="1" value=${share} aria-label=${`Share of ${one.tenant}, ${one.adapter ?? "base"}`}></meter>
                    <small>${Math.round(100 * share)} %</small>
                  </td>
                </tr>`;
              })}
            </tbody>
          </table>
        </div>`
      : html`<p>Nobody, in the last half minute.</p>`}
  </section>`;
}
