// Tenants, their limits, keys and usage, for admins; and what a tenant's own key sees.

import { html, useState } from "./preact-htm.js";
import { call, hasKey, setKey } from "./api.js";
import { Copy, Failure, Field, bytes, day, inOrder, useAnswer, when } from "./parts.js";
import { Usage, monthAgo } from "./usage.js";

const LIMITS = [
  "requests_per_minute",
  "tokens_per_minute",
  "tokens_per_day",
  "spend_per_day",
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
                step=${name === "weight" || name === "spend_per_day" ? "any" : 1}
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
    html`<div class="scrolls" tabindex="0" role="region" aria-label=${`Keys of ${tenant}`}><table>
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
    </table></div>`}
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

function Tenant({ tenant, change, close }) {
  const whose = `v1/keys?tenant=${encodeURIComponent(tenant.name)}`;
  const [keys, error, again] = useAnswer(async () => (await call("GET", whose)).data, [tenant.name]);
  const changed = async (work) => {
    const answer = await change(work);
    again();
    return answer;
  };
  const revoke = () =>
    confirm(`Revoke ${tenant.name} and all its keys?`) && changed(() => call("DELETE", path("tenants", tenant.name)));
  const free = () =>
    confirm(`Remove all that ${tenant.name} has, and free its name?`) &&
    change(() => call("DELETE", `${path("tenants", tenant.name)}?free=true`));
  return html`<article class="card" aria-label=${tenant.name}>
    <div class="bar">
      <h2>${tenant.name}</h2>
      <button type="button" class="quiet" onClick=${close}>Close</button>
    </div>
    <p>Since ${when(tenant.created)}${tenant.revoked && ` · revoked ${when(tenant.revoked)}`}</p>
    <${Failure} error=${error} />
    <${Usage} key=${`usage ${tenant.name}`} tenant=${tenant.name} />
    ${tenant.revoked
      ? html`<button type="button" class="danger" onClick=${free}>Free the name</button>`
      : html`<${Limits} key=${tenant.name} tenant=${tenant} change=${changed} />
          ${keys && html`<${Keys} key=${`keys ${tenant.name}`} tenant=${tenant.name} keys=${keys} change=${changed} />`}
          <button type="button" class="danger" onClick=${revoke}>Revoke</button>`}
  </article>`;
}

const NONE = { requests: 0, prompt_tokens: 0, completion_tokens: 0, spend: 0 };
const COLUMNS = [
  ["Name", (row) => row.name],
  ["Requests", (row) => row.requests],
  ["Tokens", (row) => row.tokens],
  ["Spend", (row) => row.spend],
  ["Own limits", (row) => row.limits],
  ["Since", (row) => row.created],
];
const PAGE = 50; // rows

function Table({ rows, chosen, choose }) {
  const [find, setFind] = useState("");
  const [order, setOrder] = useState([0, false]);
  const [page, setPage] = useState(0);
  const [column, down] = order;
  const value = COLUMNS[column][1];
  const found = rows
    .filter((row) => row.name.includes(find.trim().toLowerCase()))
    .sort((a, b) => inOrder(value(a), value(b)) * (down ? -1 : 1));
  const last = Math.max(0, Math.ceil(found.length / PAGE) - 1);
  const at = Math.min(page, last);
  const sort = (index) => setOrder([index, index === column ? !down : index > 0]);
  return html`<section class="card" aria-label="All tenants">
    <div class="bar">
      <${Field} label="Find by name">
        <input
          type="search"
          value=${find}
          onInput=${(event) => {
            setFind(event.target.value);
            setPage(0);
          }}
        />
      <//>
      <span role="status">${found.length === 1 ? "1 tenant" : `${found.length} tenants`}</span>
    </div>
    <div class="scrolls" tabindex="0" role="region" aria-label="Table of tenants">
      <table>
        <thead>
          <tr>
            ${COLUMNS.map(
              ([name], index) =>
                html`<th scope="col" aria-sort=${index === column ? (down ? "descending" : "ascending") : null}>
                  <button type="button" class="quiet" onClick=${() => sort(index)}>
                    ${name}${index === column ? (down ? " ↓" : " ↑") : ""}
                  </button>
                </th>`,
            )}
          </tr>
        </thead>
        <tbody>
          ${found.slice(at * PAGE, (at + 1) * PAGE).map(
            (row) =>
              html`<tr key=${row.name}>
                <td>
                  <button type="button" class="quiet" aria-pressed=${row.name === chosen} onClick=${() => choose(row.name)}>
                    ${row.name}
                  </button>
                  ${row.revoked && " (revoked)"}
                </td>
                <td>${row.requests.toLocaleString()}</td>
                <td>${row.tokens.toLocaleString()}</td>
                <td>${row.spend ? row.spend.toFixed(2) : "–"}</td>
                <td>${row.limits || "default"}</td>
                <td>${day(row.created)}</td>
              </tr>`,
          )}
        </tbody>
      </table>
    </div>
    ${last > 0 &&
    html`<div class="bar">
      <button type="button" disabled=${at === 0} onClick=${() => setPage(at - 1)}>Earlier</button>
      <span role="status">Page ${at + 1} of ${last + 1}</span>
      <button type="button" disabled=${at === last} onClick=${() => setPage(at + 1)}>Later</button>
    </div>`}
    <small>Requests, tokens and spend are those of the last 30 days.</small>
  </section>`;
}

// What a tenant's own key sees: its limits, its day and its usage.
function Account({ account }) {
  const limits = Object.entries(account.limits);
  const today = account.today;
  return html`<article class="card" aria-label=${account.tenant}>
    <h2>${account.tenant}</h2>
    ${today &&
    html`<p>
      ${`Today ${today.tokens.toLocaleString()} tokens${today.spend > 0 ? ` for ${today.spend.toFixed(4)}` : ""}.`}
      ${` The next day begins ${when(today.resets)}.`}
    </p>`}
    <h3>Limits</h3>
    <dl>${limits.map(([name, value]) => html`<div><dt>${name.replaceAll("_", " ")}</dt><dd>${name.endsWith("bytes") ? bytes(value) : value.toLocaleString()}</dd></div>`)}</dl>
    <${Usage} tenant=${account.tenant} />
  </article>`;
}

export function Tenants({ shown }) {
  const ask = async () => {
    if (!shown) return null;
    const account = await call("GET", "v1/account");
    if (account.role !== "admin") return { account };
    const [tenants, usage] = await Promise.all([
      call("GET", "v1/tenants"),
      call("GET", `v1/usage?group_by=tenant&from=${monthAgo()}`).catch(() => ({ data: [] })),
    ]);
    const used = new Map(usage.data.map((row) => [row.tenant, row]));
    const rows = tenants.data.map((tenant) => {
      const use = used.get(tenant.name) ?? NONE;
      const tokens = use.prompt_tokens + use.completion_tokens;
      const { name, created, revoked } = tenant;
      const limits = Object.keys(tenant.limits).length;
      return { name, created, revoked, limits, requests: use.requests, tokens, spend: use.spend ?? 0 };
    });
    return { tenants: tenants.data, rows };
  };
  const [found, error, again] = useAnswer(ask, [shown]);
  const [failure, change] = useChange(again);
  const [name, setName] = useState("");
  const [chosen, choose] = useState(null);
  const create = async (event) => {
    event.preventDefault();
    const made = await change(() => call("POST", "v1/tenants", { name }));
    if (made) {
      setName("");
      choose(made.name);
    }
  };
  if (found?.account) return html`<${Account} account=${found.account} />`;
  const tenants = found?.tenants ?? [];
  const open = tenants.find((tenant) => tenant.name === chosen) ?? (tenants.length === 1 ? tenants[0] : null);
  return html`<${Failure} error=${error} /><${Failure} error=${failure} />
    <form class="card bar" onSubmit=${create}>
      <input aria-label="Name of a new tenant" placeholder="Name" required value=${name} onInput=${(e) => setName(e.target.value)} />
      <button class="primary">Add a tenant</button>
    </form>
    ${open && html`<${Tenant} tenant=${open} change=${change} close=${() => choose(null)} />`}
    ${found && html`<${Table} rows=${found.rows} chosen=${open?.name} choose=${choose} />`}`;
}
