// Tenants, their keys and what they use; for admins.

import { html, useState } from "./preact-htm.js";
import { call, hasKey, setKey } from "./api.js";
import { Copy, Failure, Field, useAnswer, when } from "./parts.js";

const LIMITS = [
  "requests_per_minute",
  "tokens_per_minute",
  "concurrent",
  "adapters",
  "bytes",
  "files",
  "file_bytes",
  "batches",
  "schemas_per_minute",
  "body_bytes",
  "response_bytes",
  "weight",
];
const DAY = 86400;

const path = (kind, name) => `v1/${kind}/${encodeURIComponent(name)}`;

// Runs what a button asks for, shows why it failed, and asks for the lists again.
function useChange(again) {
  const [error, setError] = useState(null);
  const change = async (work) => {
    try {
      const answer = await work();
      setError(null);
      again();
      return answer;
    } catch (failure) {
      setError(failure);
      return null;
    }
  };
  return [error, change];
}

function Limits({ tenant, change }) {
  const [values, setValues] = useState(tenant.limits);
  const save = (event) => {
    event.preventDefault();
    const limits = Object.fromEntries(LIMITS.map((name) => [name, values[name] === "" ? null : (values[name] ?? null)]));
    change(() => call("PATCH", path("tenants", tenant.name), { limits }));
  };
  return html`<details>
    <summary>Limits${Object.keys(tenant.limits).length ? ` (${Object.keys(tenant.limits).length} set)` : ""}</summary>
    <form onSubmit=${save}>
      <div class="grid">
        ${LIMITS.map(
          (name) =>
            html`<${Field} label=${name.replaceAll("_", " ")}>
              <input
                type="number"
                step=${name === "weight" ? "any" : 1}
                min="0"
                placeholder="default"
                value=${values[name] ?? ""}
                onInput=${(event) =>
                  setValues({ ...values, [name]: event.target.value === "" ? "" : Number(event.target.value) })}
              />
            <//>`,
        )}
      </div>
      <button>Save limits</button>
    </form>
  </details>`;
}

function Secret({ secret, close }) {
  return html`<div class="secret" role="status">
    <p>This is the whole key. It cannot be shown again.</p>
    <pre>${secret}</pre>
    <${Copy} text=${() => secret}>Copy<//>
    <button type="button" class="quiet" onClick=${close}>Close</button>
  </div>`;
}

function Keys({ tenant, keys, change }) {
  const [label, setLabel] = useState("");
  const [days, setDays] = useState("");
  const [role, setRole] = useState("tenant");
  const [secret, setSecret] = useState(null);
  const made = async (work) => {
    const key = await change(async () => {
      const answer = await work();
      if (!hasKey() && answer.role === "admin") setKey(answer.secret); // from now on the server asks for one
      return answer;
    });
    if (key) setSecret(key.secret);
  };
  const create = (event) => {
    event.preventDefault();
    const expires = days === "" ? null : Math.floor(Date.now() / 1000) + Number(days) * DAY;
    made(() => call("POST", "v1/keys", { tenant, role, label, expires }));
  };
  return html`<details open=${keys.length < 3}>
    <summary>Keys (${keys.length})</summary>
    ${keys.length > 0 &&
    html`<table>
      <thead>
        <tr>
          ${["Key", "Label", "Role", "Used", "Expires", ""].map((name) => html`<th scope="col">${name}</th>`)}
        </tr>
      </thead>
      <tbody>
        ${keys.map(
          (key) =>
            html`<tr>
              <td><code>${key.id}</code></td>
              <td>${key.label}</td>
              <td>${key.role}</td>
              <td>${when(key.used)}</td>
              <td>${key.revoked ? "revoked" : when(key.expires)}</td>
              <td>
                ${!key.revoked &&
                html`<button type="button" onClick=${() => made(() => call("POST", `${path("keys", key.id)}/rotate`, {}))}>
                    Rotate
                  </button>
                  <button
                    type="button"
                    class="danger"
                    onClick=${() => confirm(`Revoke the key ${key.id}?`) && change(() => call("DELETE", path("keys", key.id)))}
                  >
                    Revoke
                  </button>`}
              </td>
            </tr>`,
        )}
      </tbody>
    </table>`}
    ${secret && html`<${Secret} secret=${secret} close=${() => setSecret(null)} />`}
    <form class="bar" onSubmit=${create}>
      <input aria-label=${`Label of a new key of ${tenant}`} placeholder="Label" value=${label} onInput=${(e) => setLabel(e.target.value)} />
      <input
        aria-label=${`Days until a new key of ${tenant} expires`}
        type="number"
        min="1"
        placeholder="Days, or for ever"
        value=${days}
        onInput=${(e) => setDays(e.target.value)}
      />
      <select aria-label=${`Role of a new key of ${tenant}`} value=${role} onChange=${(e) => setRole(e.target.value)}>
        <option value="tenant">tenant</option>
        <option value="admin">admin</option>
      </select>
      <button>Make a key</button>
    </form>
  </details>`;
}

function Tenant({ tenant, keys, usage, change }) {
  const revoke = () =>
    confirm(`Revoke ${tenant.name} and all its keys?`) && change(() => call("DELETE", path("tenants", tenant.name)));
  const free = () =>
    confirm(`Remove all that ${tenant.name} has, and free its name?`) &&
    change(() => call("DELETE", `${path("tenants", tenant.name)}?free=true`));
  return html`<article class="card">
    <h2>${tenant.name}</h2>
    <p>
      Since ${when(tenant.created)}${tenant.revoked && ` · revoked ${when(tenant.revoked)}`}
      ${usage &&
      ` · in the last 30 days ${usage.requests} requests, ${usage.prompt_tokens} prompt tokens (${usage.cached_tokens} cached), ${usage.completion_tokens} written`}
    </p>
    ${tenant.revoked
      ? html`<button type="button" class="danger" onClick=${free}>Free the name</button>`
      : html`<${Limits} tenant=${tenant} change=${change} />
          <${Keys} tenant=${tenant.name} keys=${keys} change=${change} />
          <button type="button" class="danger" onClick=${revoke}>Revoke</button>`}
  </article>`;
}

export function Tenants({ shown }) {
  const month = () => Math.floor(Date.now() / 1000) - 30 * DAY;
  const ask = async () => {
    if (!shown) return null;
    const [tenants, keys, usage] = await Promise.all([
      call("GET", "v1/tenants"),
      call("GET", "v1/keys"),
      call("GET", `v1/usage?group_by=tenant&from=${month()}`).catch(() => ({ data: [] })),
    ]);
    return { tenants: tenants.data, keys: keys.data, usage: new Map(usage.data.map((row) => [row.tenant, row])) };
  };
  const [found, error, again] = useAnswer(ask, [shown]);
  const [failure, change] = useChange(again);
  const [name, setName] = useState("");
  const create = async (event) => {
    event.preventDefault();
    if (await change(() => call("POST", "v1/tenants", { name }))) setName("");
  };
  return html`<${Failure} error=${error} /><${Failure} error=${failure} />
    <form class="card bar" onSubmit=${create}>
      <input aria-label="Name of a new tenant" placeholder="Name" required value=${name} onInput=${(e) => setName(e.target.value)} />
      <button class="primary">Add a tenant</button>
    </form>
    <div class="pair">
      ${found?.tenants.map(
        (tenant) =>
          html`<${Tenant}
            key=${tenant.name}
            tenant=${tenant}
            keys=${found.keys.filter((key) => key.tenant === tenant.name)}
            usage=${found.usage.get(tenant.name)}
            change=${change}
          />`,
      )}
    </div>`;
}
