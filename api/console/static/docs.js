// The server's OpenAPI document, readably.

import { html, useState } from "./preact-htm.js";
import { call } from "./api.js";
import { Failure, useAnswer } from "./parts.js";

const DEEPEST = 6;

function named(document, schema) {
  const name = schema?.$ref?.split("/").at(-1);
  return name ? [name, document.components.schemas[name]] : [null, schema];
}

function kind(document, schema) {
  if (!schema) return "any";
  const [name, found] = named(document, schema);
  if (name) return name;
  if (found.const !== undefined) return JSON.stringify(found.const);
  if (found.enum) return found.enum.map((one) => JSON.stringify(one)).join(" | ");
  const several = found.anyOf ?? found.oneOf;
  if (several) return several.map((one) => kind(document, one)).join(" | ");
  if (found.type === "array") return `${kind(document, found.items)}[]`;
  return found.type ?? "any";
}

// The structs that a schema leads to at once, so that they can be opened below it.
function within(document, schema) {
  const [name, found] = named(document, schema);
  if (name) return [[name, found]];
  const inner = found?.anyOf ?? found?.oneOf ?? (found?.items ? [found.items] : []);
  return inner.flatMap((one) => within(document, one));
}

function Struct({ document, name, schema, depth }) {
  const [open, setOpen] = useState(false);
  const required = new Set(schema.required ?? []);
  return html`<details class="struct" onToggle=${(event) => setOpen(event.target.open)}>
    <summary><code>${name}</code></summary>
    ${open &&
    html`${schema.description && html`<p>${schema.description}</p>`}
      <dl class="fields">
        ${Object.entries(schema.properties ?? {}).map(
          ([field, one]) =>
            html`<div>
              <dt><code>${field}</code>${required.has(field) && html` <small>required</small>`}</dt>
              <dd>
                <span>${kind(document, one)}</span> ${one.description && html`<small>${one.description}</small>`}
                ${depth < DEEPEST &&
                within(document, one).map(
                  ([inner, found]) =>
                    html`<${Struct} document=${document} name=${inner} schema=${found} depth=${depth + 1} />`,
                )}
              </dd>
            </div>`,
        )}
      </dl>
      ${depth < DEEPEST &&
      (schema.anyOf ?? schema.oneOf ?? []).flatMap((one) =>
        within(document, one).map(
          ([inner, found]) => html`<${Struct} document=${document} name=${inner} schema=${found} depth=${depth + 1} />`,
        ),
      )}`}
  </details>`;
}

function Body({ document, content }) {
  return Object.entries(content ?? {}).map(
    ([type, { schema }]) =>
      html`<p><code>${type}</code> ${kind(document, schema)}</p>
        ${within(document, schema).map(
          ([name, found]) => html`<${Struct} document=${document} name=${name} schema=${found} depth=${0} />`,
        )}`,
  );
}

function Operation({ document, path, method, one }) {
  const [open, setOpen] = useState(false);
  return html`<details class="operation" onToggle=${(event) => setOpen(event.target.open)}>
    <summary><b class="method ${method}">${method.toUpperCase()}</b> <code>${path}</code> <span>${one.summary}</span></summary>
    ${open &&
    html`<div class="inside">
      ${one.description && html`<p>${one.description}</p>`}
      ${one.parameters &&
      html`<h4>Parameters</h4>
        <ul>
          ${one.parameters.map(
            (each) => html`<li><code>${each.name}</code> (${each.in}) ${kind(document, each.schema)}</li>`,
          )}
        </ul>`}
      ${one.requestBody && html`<h4>Body</h4><${Body} document=${document} content=${one.requestBody.content} />`}
      <h4>Answers</h4>
      ${Object.entries(one.responses).map(([status, answer]) => {
        const found = answer.$ref ? document.components.responses[status] : answer;
        return html`<p><b>${status}</b> ${found.description}</p>
          ${status < 400 && html`<${Body} document=${document} content=${found.content} />`}`;
      })}
    </div>`}
  </details>`;
}

export function Docs() {
  const [document, error] = useAnswer(() => call("GET", "openapi.json"));
  const [wanted, setWanted] = useState("");
  if (!document) return html`<${Failure} error=${error} />`;
  const tags = new Map();
  for (const [path, methods] of Object.entries(document.paths)) {
    for (const [method, one] of Object.entries(methods)) {
      if (!`${path} ${one.summary}`.toLowerCase().includes(wanted.toLowerCase())) continue;
      const tag = one.tags[0];
      if (!tags.has(tag)) tags.set(tag, []);
      tags.get(tag).push([path, method, one]);
    }
  }
  return html`<div class="docs">
    <p>${document.info.description} Version ${document.info.version}. The document itself: <a href="openapi.json">openapi.json</a>.</p>
    <label class="field wide"><span>Find</span><input type="search" value=${wanted} onInput=${(event) => setWanted(event.target.value)} /></label>
    ${[...tags].map(
      ([tag, operations]) =>
        html`<h2>${tag}</h2>
          ${operations.map(
            ([path, method, one]) =>
              html`<${Operation} key=${method + path} document=${document} path=${path} method=${method} one=${one} />`,
          )}`,
    )}
  </div>`;
}
