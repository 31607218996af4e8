// Who uses an adapter: from the usage of the last 30 days, by tenant.

import { html } from "./preact-htm.js";
import { hour } from "./parts.js";

const SHOWN = 20; // tenants

const key = (tenant, name) => JSON.stringify([tenant ?? null, name]);

// A function that gives the rows of usage of an adapter; null where usage is not known. Usage names adapters as
// requests do: a name is the tenant's own adapter, else the shared one that came first. A list without tenants
// has what one tenant may use, and so has its usage.
export function resolved(adapters, usage) {
  const own = new Map();
  const shared = new Map();
  for (const one of [...adapters].sort((a, b) => a.created - b.created || (a.tenant < b.tenant ? -1 : 1))) {
    own.set(key(one.tenant, one.name), one);
    if (one.shared && !shared.has(one.name)) shared.set(one.name, one);
  }
  const by = new Map();
  for (const row of usage ?? []) {
    const named = own.get(key(row.tenant, row.adapter)) ?? own.get(key(null, row.adapter)) ?? shared.get(row.adapter);
    const id = named?.id ?? row.adapter;
    if (!by.has(id)) by.set(id, []);
    by.get(id).push(row);
  }
  return (adapter) => usage && (by.get(adapter.id ?? adapter.name) ?? []);
}

const tokens = (row) => row.prompt_tokens + row.completion_tokens;

export function Users({ name, rows }) {
  if (!rows) return null;
  if (!rows.length) return html`<p><small>Nobody used it in the last 30 days.</small></p>`;
  const most = [...rows].sort((a, b) => tokens(b) - tokens(a));
  return html`<details class="users" open=${rows.length <= 5}>
    <summary>Used by ${rows.length === 1 ? "1 tenant" : `${rows.length} tenants`} in the last 30 days</summary>
    <div class="scrolls" tabindex="0" role="region" aria-label=${`Who uses ${name}`}>
      <table>
        <thead>
          <tr>
            ${["Tenant", "Requests", "Prompt tokens", "Written", "Last used"].map((title) => html`<th scope="col">${title}</th>`)}
          </tr>
        </thead>
        <tbody>
          ${most.slice(0, SHOWN).map(
            (row) =>
              html`<tr>
                <td>${row.tenant}</td>
                <td>${row.requests}</td>
                <td>${row.prompt_tokens}</td>
                <td>${row.completion_tokens}</td>
                <td title="In this hour">${row.last_hour == null ? "–" : hour(row.last_hour)}</td>
              </tr>`,
          )}
        </tbody>
      </table>
    </div>
    ${rows.length > SHOWN && html`<p><small>${rows.length - SHOWN} more used fewer tokens.</small></p>`}
  </details>`;
}
