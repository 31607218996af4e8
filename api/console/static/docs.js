// The server's OpenAPI document, readably, and requests to try.

import { html, useState } from "./preact-htm.js";
import { attempt, call } from "./api.js";
import { Failure, Field, useAnswer } from "./parts.js";

const DEEPEST = 6;
const SHOWN = 20_000; // characters of an answer
const JSON_TYPE = "application/json";

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

// A value that a schema takes: of an object its required fields.
function example(document, schema, depth = 0) {
  const [, found] = named(document, schema);
  if (!found || depth > DEEPEST) return null;
  if (found.default !== undefined) return found.default;
  if (found.const !== undefined) return found.const;
  if (found.enum) return found.enum[0];
  const several = found.anyOf ?? found.oneOf;
  if (several) return example(document, several[0], depth);
  if (found.type === "array") return [example(document, found.items, depth + 1)];
  if (found.properties) {
    const required = (found.required ?? []).map((name) => [name, example(document, found.properties[name], depth + 1)]);
    return Object.fromEntries(required);
  }
  return { string: "", integer: 1, number: 1, boolean: false, object: {} }[found.type] ?? null;
}

// The first body to try. A model is one of those that are served.
function firstBody(document, schema, models) {
  const fields = named(document, schema)[1]?.properties ?? {};
  const body = { ...example(document, schema) };
  if (fields.model) body.model = models[0] ?? "";
  if (fields.messages) body.messages = [{ role: "user", content: "Hello!" }];
  return JSON.stringify(body, null, 2);
}

function Try({ document, path, method, one }) {
  const schema = one.requestBody?.content?.[JSON_TYPE]?.schema;
  const [models] = useAnswer(() => call("GET", "v1/models").then(({ data }) => data.map(({ id }) => id)));
  const [values, setValues] = useState({});
  const [body, setBody] = useState(null);
  const [answer, setAnswer] = useState(null);
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  if (one.requestBody && !schema) return null; // a form with files
  const text = schema ? (body ?? firstBody(document, schema, models ?? [])) : undefined;
  const asked = (one.parameters ?? []).filter((each) => each.in !== "header");
  const missing = asked.some((each) => each.in === "path" && !values[each.name]);
  const send = async (event) => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    const query = new URLSearchParams(asked.filter((each) => each.in === "query" && values[each.name]).map((each) => [each.name, values[each.name]]));
    const filled = path.replace(/\{(\w+)\}/g, (_, name) => encodeURIComponent(values[name]));
    try {
      setAnswer(await attempt(method.toUpperCase(), `${filled.slice(1)}${query.size ? `?${query}` : ""}`, text));
    } catch (failure) {
      setError(failure);
    }
    setBusy(false);
  };
  return html`<h4>Try it</h4>
    <form onSubmit=${send} aria-label=${`Try ${method} ${path}`}>
      ${asked.map(
        (each) =>
          html`<${Field} label=${each.name}>
            <input value=${values[each.name] ?? ""} onInput=${(event) => setValues({ ...values, [each.name]: event.target.value })} />
          <//>`,
      )}
      ${schema &&
      html`<${Field} label="Body to send" wide>
        <textarea rows="8" spellcheck=${false} value=${text} onInput=${(event) => setBody(event.target.value)}></textarea>
      <//>`}
      <button disabled=${busy || missing}>${busy ? "Sending…" : "Send"}</button>
    </form>
    <${Failure} error=${error} />
    ${answer &&
    html`<p role="status"><b>${answer.status}</b></p>
      <pre tabindex="0">${answer.text.slice(0, SHOWN)}${answer.text.length > SHOWN && "…"}</pre>`}`;
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
      <${Try} document=${document} path=${path} method=${method} one=${one} />
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
