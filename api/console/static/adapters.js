// Adapters: what there is, who uses it, uploads, removal. Admins see all tenants' adapters.

import { html, useState } from "./preact-htm.js";
import { call, upload } from "./api.js";
import { Failure, Field, bytes, inOrder, useAnswer, when } from "./parts.js";
import { Users, resolved } from "./users.js";

const SHOWN = 50; // cards
const OPENED = 10; // of more adapters each is one line, until it is opened
const CONFIG = "adapter_config.json";
const TENSORS = "adapter_model.safetensors";

function Upload({ done }) {
  const [name, setName] = useState("");
  const [files, setFiles] = useState({});
  const [flags, setFlags] = useState({ replace: false, shared: false });
  const [share, setShare] = useState(null);
  const [error, setError] = useState(null);
  const [over, setOver] = useState(false);
  const take = (list) => {
    const found = { ...files };
    for (const file of list) if (file.name === CONFIG || file.name === TENSORS) found[file.name] = file;
    setFiles(found);
    setOver(false);
  };
  const send = async (event) => {
    event.preventDefault();
    setError(null);
    const chooser = event.currentTarget.querySelector("input[type=file]");
    const form = new FormData();
    form.append("name", name);
    for (const [flag, on] of Object.entries(flags)) if (on) form.append(flag, "true");
    form.append(CONFIG, files[CONFIG]);
    form.append(TENSORS, files[TENSORS]);
    setShare(0);
    try {
      const record = await upload("v1/adapters", form, setShare);
      setFiles({});
      chooser.value = "";
      setName("");
      done(record);
    } catch (failure) {
      setError(failure);
    }
    setShare(null);
  };
  const ready = name && files[CONFIG] && files[TENSORS] && share === null;
  return html`<form class="card" onSubmit=${send}>
    <h2>Upload an adapter</h2>
    <${Field} label="Name"><input required value=${name} onInput=${(event) => setName(event.target.value)} /><//>
    <label
      class=${over ? "drop over" : "drop"}
      onDragOver=${(event) => {
        event.preventDefault();
        setOver(true);
      }}
      onDragLeave=${() => setOver(false)}
      onDrop=${(event) => {
        event.preventDefault();
        take(event.dataTransfer.files);
      }}
    >
      <span>Drop <code>${CONFIG}</code> and <code>${TENSORS}</code> here, or choose them</span>
      <input type="file" multiple aria-label="Files of the adapter" onChange=${(event) => take(event.target.files)} />
    </label>
    ${(files[CONFIG] || files[TENSORS]) &&
    html`<ul class="files">
      ${[CONFIG, TENSORS].map(
        (one) => html`<li class=${files[one] ? "good" : ""}>${one}${files[one] ? `: ${bytes(files[one].size)}` : " is missing"}</li>`,
      )}
    </ul>`}
    ${["replace", "shared"].map(
      (flag) =>
        html`<label class="check"
          ><input
            type="checkbox"
            checked=${flags[flag]}
            onChange=${(event) => setFlags({ ...flags, [flag]: event.target.checked })}
          />
          ${flag === "replace" ? "Replace an adapter of this name" : "Share with all tenants (admins)"}</label
        >`,
    )}
    ${share !== null &&
    html`<label class="progress"
      >${share < 1 ? "Sending" : "The server checks it"} <progress value=${share} max="1"></progress
    ></label>`}
    <${Failure} error=${error} />
    <button class="primary" disabled=${!ready}>Upload</button>
  </form>`;
}

function Fetch({ done }) {
  const [source, setSource] = useState("");
  const [name, setName] = useState("");
  const [replace, setReplace] = useState(false);
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState(null);
  const send = async (event) => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try {
      const record = await call("POST", "v1/adapters", { source, replace, ...(name ? { name } : {}) });
      setSource("");
      setName("");
      done(record);
    } catch (failure) {
      setError(failure);
    }
    setBusy(false);
  };
  return html`<form class="card" onSubmit=${send}>
    <h2>Fetch an adapter</h2>
    <${Field} label="Source" hint="As hf://org/repository@revision, s3://bucket/folder or file:///folder.">
      <input required value=${source} onInput=${(event) => setSource(event.target.value)} />
    <//>
    <${Field} label="Serve as" hint="Otherwise the last part of the address.">
      <input value=${name} onInput=${(event) => setName(event.target.value)} />
    <//>
    <label class="check"
      ><input type="checkbox" checked=${replace} onChange=${(event) => setReplace(event.target.checked)} /> Replace an
      adapter of that name</label
    >
    <${Failure} error=${error} />
    <button class="primary" disabled=${!source || busy}>${busy ? "The server fetches it" : "Fetch"}</button>
  </form>`;
}

// The defaults of the version that a name means, as JSON to change.
function Defaults({ path }) {
  const [text, setText] = useState(null);
  const [error, setError] = useState(null);
  const [told, setTold] = useState("");
  const show = (record) => setText(JSON.stringify(record.defaults, null, 2));
  const open = (event) => {
    if (event.currentTarget.open && text === null) call("GET", path).then(show, setError);
  };
  const save = async (event) => {
    event.preventDefault();
    setTold("");
    try {
      const known = (await call("GET", path)).defaults;
      const removed = Object.fromEntries(Object.keys(known).map((name) => [name, null]));
      show(await call("PATCH", path, { defaults: { ...removed, ...JSON.parse(text) } }));
      setError(null);
      setTold("Saved.");
    } catch (failure) {
      setError(failure);
    }
  };
  return html`<details onToggle=${open}>
    <summary>Defaults</summary>
    <form onSubmit=${save}>
      <${Field} label="What requests get that leave fields out" hint="As JSON. The guide to adapters lists them." wide>
        <textarea class="code" rows="6" spellcheck=${false} value=${text ?? ""} onInput=${(event) => setText(event.target.value)}></textarea>
      <//>
      <${Failure} error=${error} />
      <p role="status" class="good">${told}</p>
      <button disabled=${text === null}>Save defaults</button>
    </form>
  </details>`;
}

function Card({ adapter, users, open, remove }) {
  const whose = adapter.tenant ? `?tenant=${encodeURIComponent(adapter.tenant)}` : "";
  const ranks = [...new Set(Object.values(adapter.ranks))].join(", ");
  const line = [`version ${adapter.version}`, `rank ${ranks}`, bytes(adapter.bytes), adapter.tenant].filter(Boolean);
  return html`<article class="card adapter" aria-label=${adapter.name}>
    <details open=${open}>
    <summary><h2>${adapter.name}</h2>${" "}<small>${line.join(" · ")}</small></summary>
    <dl>
      <div><dt>Version</dt><dd>${adapter.version}</dd></div>
      <div><dt>Ranks</dt><dd>${ranks}</dd></div>
      <div><dt>Modules</dt><dd>${adapter.targets.join(", ")}</dd></div>
      <div><dt>Size</dt><dd>${bytes(adapter.bytes)}</dd></div>
      <div><dt>Created</dt><dd>${when(adapter.created)}</dd></div>
      ${adapter.tenant && html`<div><dt>Tenant</dt><dd>${adapter.tenant}</dd></div>`}
      ${adapter.traits.length > 0 && html`<div><dt>Besides LoRA</dt><dd>${adapter.traits.join(", ")}</dd></div>`}
      ${adapter.source && html`<div><dt>Source</dt><dd>${adapter.source}</dd></div>`}
      <div><dt>Shared</dt><dd>${adapter.shared ? "with all tenants" : "no"}</dd></div>
      <div><dt>SHA-256</dt><dd><code>${adapter.sha256.slice(0, 16)}…</code></dd></div>
    </dl>
    <${Users} name=${adapter.name} rows=${users} />
    <${Defaults} path=${`v1/adapters/${encodeURIComponent(adapter.name)}${whose}`} />
    <button type="button" class="danger" onClick=${remove}>Delete</button>
    </details>
  </article>`;
}

// All tenants' adapters for an admin, with their tenants. Others see their own and the shared ones.
async function listed() {
  try {
    return (await call("GET", "v1/adapters?tenant=*")).data;
  } catch (failure) {
    if (failure.status !== 403) throw failure;
    return (await call("GET", "v1/adapters")).data;
  }
}

// What each tenant used of each adapter in the last 30 days; null if the server keeps no usage.
async function used() {
  const begin = Math.floor(Date.now() / 1000) - 30 * 86400;
  try {
    return (await call("GET", `v1/usage?group_by=tenant,adapter&from=${begin}`)).data;
  } catch (failure) {
    if (failure.status !== 404) throw failure;
    return null;
  }
}

export function Adapters({ models, refresh, shown }) {
  const [list, error, again] = useAnswer(listed);
  const [usage, unknown] = useAnswer(async () => (shown ? used() : null), [shown]);
  const [find, setFind] = useState("");
  const [told, setTold] = useState("");
  const [failure, setFailure] = useState(null);
  const changed = (text) => {
    setTold(text);
    again();
    refresh();
  };
  const remove = async ({ name, tenant }) => {
    if (!confirm(`Delete the adapter ${name}${tenant ? ` of ${tenant}` : ""}?`)) return;
    const whose = tenant ? `?tenant=${encodeURIComponent(tenant)}` : "";
    try {
      await call("DELETE", `v1/adapters/${encodeURIComponent(name)}${whose}`);
      setFailure(null);
      changed(`${name} was deleted.`);
    } catch (one) {
      setFailure(one);
    }
  };
  const all = list ?? [];
  const users = resolved(all, usage);
  const found = all
    .filter((one) => `${one.name} ${one.tenant ?? ""}`.toLowerCase().includes(find.toLowerCase()))
    .sort((a, b) => inOrder(a.tenant ?? "", b.tenant ?? "") || inOrder(a.name, b.name));
  const uploaded = new Set(all.map((one) => one.name));
  const fixed = models.filter((model) => model.parent && !uploaded.has(model.id));
  return html`<div class="pair">
    <div>
      <p role="status" class="good">${told}</p>
      <${Failure} error=${failure} />
      ${error?.status === 404
        ? html`<p>This server takes no uploads.</p>`
        : html`<${Failure} error=${error} />`}
      <${Failure} error=${unknown} />
      ${all.length > 5 &&
      html`<${Field} label=${all[0].tenant ? "Find by name or tenant" : "Find by name"}>
        <input type="search" value=${find} onInput=${(event) => setFind(event.target.value)} />
      <//>`}
      ${found
        .slice(0, SHOWN)
        .map(
          (adapter) =>
            html`<${Card} key=${adapter.id} adapter=${adapter} users=${users(adapter)} open=${found.length <= OPENED} remove=${() => remove(adapter)} />`,
        )}
      ${found.length > SHOWN && html`<p>${found.length - SHOWN} more are not shown.</p>`}
      ${fixed.length > 0 &&
      html`<div class="card">
        <h2>From the server's start</h2>
        <ul>
          ${fixed.map((one) => html`<li>${one.id}${one.rank && html`, rank ${one.rank}`}<${Users} name=${one.id} rows=${users({ name: one.id })} /></li>`)}
        </ul>
      </div>`}
    </div>
    <div>
      <${Upload} done=${(record) => changed(`${record.name} was uploaded and checked (version ${record.version}).`)} />
      <${Fetch} done=${(record) => changed(`${record.name} was fetched and checked (version ${record.version}).`)} />
    </div>
  </div>`;
}
