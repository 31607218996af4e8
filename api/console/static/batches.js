// Batches: a file of requests, how far they are, and what came of them. Below them are the evaluations.

import { html, useRef, useState } from "./preact-htm.js";
import { call, text, upload } from "./api.js";
import { Failure, Field, useEvery, when } from "./parts.js";
import { Reports } from "./reports.js";

const ENDPOINTS = ["/v1/chat/completions", "/v1/completions", "/v1/responses"];
const SHOWN = 50;
const IDLE_TURNS = 5; // as often is asked while nothing runs: every fifteen seconds
const LIVE = new Set(["validating", "in_progress", "finalizing", "cancelling"]);

function Create({ done }) {
  const [name, setName] = useState("");
  const [file, setFile] = useState(null);
  const [endpoint, setEndpoint] = useState(ENDPOINTS[0]);
  const [share, setShare] = useState(null);
  const [error, setError] = useState(null);
  const send = async (event) => {
    event.preventDefault();
    setError(null);
    setShare(0);
    const form = new FormData();
    form.append("purpose", "batch");
    form.append("file", file);
    try {
      const { id } = await upload("v1/files", form, setShare);
      const metadata = name.trim() ? { name: name.trim() } : undefined;
      await call("POST", "v1/batches", { input_file_id: id, endpoint, completion_window: "24h", metadata });
      done();
    } catch (failure) {
      setError(failure);
    }
    setShare(null);
  };
  return html`<form class="card" onSubmit=${send}>
    <h2>Run a batch</h2>
    <${Field} label="Name of the batch">
      <input maxlength="512" placeholder="optional" value=${name} onInput=${(event) => setName(event.target.value)} />
    <//>
    <${Field} label="File of requests (JSON lines)">
      <input type="file" accept=".jsonl" onChange=${(event) => setFile(event.target.files[0])} />
    <//>
    <${Field} label="Endpoint">
      <select value=${endpoint} onChange=${(event) => setEndpoint(event.target.value)}>
        ${ENDPOINTS.map((one) => html`<option value=${one}>${one}</option>`)}
      </select>
    <//>
    ${share !== null && html`<progress value=${share} max="1"></progress>`}
    <${Failure} error=${error} />
    <button class="primary" disabled=${!file || share !== null}>Run</button>
  </form>`;
}

function said(body) {
  if (body?.error) return body.error.message;
  const message = body?.choices?.[0]?.message;
  if (message) return message.content ?? (message.tool_calls ?? []).map((one) => one.function?.name).join(", ");
  if (body?.choices) return body.choices[0]?.text;
  return (body?.output ?? []).flatMap((item) => item.content ?? []).map((part) => part.text).join("");
}

function Results({ id }) {
  const [rows, setRows] = useState(null);
  const [error, setError] = useState(null);
  const load = async () => {
    try {
      const lines = (await text(`v1/files/${encodeURIComponent(id)}/content`)).trim().split("\n");
      setRows({ total: lines.length, lines: lines.slice(0, SHOWN).map((line) => JSON.parse(line)) });
    } catch (failure) {
      setError(failure);
    }
  };
  if (!rows) return html`<button type="button" onClick=${load}>Show results</button><${Failure} error=${error} />`;
  return html`<table class="results">
      <thead>
        <tr>
          <th scope="col">Request</th>
          <th scope="col">Status</th>
          <th scope="col">Answer</th>
        </tr>
      </thead>
      <tbody>
        ${rows.lines.map(
          (line) =>
            html`<tr>
              <td>${line.custom_id}</td>
              <td>${line.response?.status_code ?? line.error?.code}</td>
              <td class="text">${said(line.response?.body)}</td>
            </tr>`,
        )}
      </tbody>
    </table>
    ${rows.total > SHOWN && html`<p>The first ${SHOWN} of ${rows.total}.</p>`}`;
}

// How long it took, or has taken so far.
function lasted({ created_at: begun, status, ...batch }) {
  const end = batch.completed_at ?? batch.cancelled_at ?? batch.expired_at ?? batch.failed_at;
  const seconds = Math.max((end ?? Math.floor(Date.now() / 1000)) - begun, 0);
  return LIVE.has(status) || end ? ` · ${seconds} s` : "";
}

function Card({ batch, again }) {
  const counts = batch.request_counts;
  const cancel = () => call("POST", `v1/batches/${encodeURIComponent(batch.id)}/cancel`, {}).then(again, again);
  const { name, ...others } = batch.metadata ?? {};
  const usage = batch.usage;
  return html`<article class="card">
    <h2>${name || batch.id}</h2>
    <p>
      <strong>${batch.status}</strong> · ${batch.endpoint} · ${when(batch.created_at)} ·${" "}
      ${`${counts.completed} of ${counts.total} answered, ${counts.failed} failed`}${lasted(batch)}
      ${usage && ` · ${usage.input_tokens} prompt tokens, ${usage.output_tokens} written`}
    </p>
    ${name && html`<p><code>${batch.id}</code></p>`}
    ${Object.keys(others).length > 0 &&
    html`<dl>${Object.entries(others).map(([key, value]) => html`<div><dt>${key}</dt><dd>${value}</dd></div>`)}</dl>`}
    <progress
      aria-label=${`Progress of ${name || batch.id}`}
      value=${counts.completed + counts.failed}
      max=${Math.max(counts.total, 1)}
    ></progress>
    ${batch.errors?.data.map((one) => html`<p class="failure">${one.line != null && `Line ${one.line}: `}${one.message}</p>`)}
    ${LIVE.has(batch.status) && html`<button type="button" onClick=${cancel}>Cancel</button>`}
    ${batch.output_file_id && html`<${Results} id=${batch.output_file_id} />`}
    ${batch.error_file_id && html`<${Results} id=${batch.error_file_id} />`}
  </article>`;
}

export function Batches({ shown }) {
  const [list, setList] = useState(null);
  const [error, setError] = useState(null);
  const ask = () =>
    call("GET", "v1/batches?limit=50").then(
      (found) => {
        setList(found);
        setError(null);
      },
      (failure) => setError(failure),
    );
  const asked = useRef(0);
  useEvery(
    3,
    () => {
      const busy = !list || list.data.some((batch) => LIVE.has(batch.status));
      asked.current = !shown ? -1 : busy ? 0 : (asked.current + 1) % IDLE_TURNS;
      return asked.current === 0 && ask();
    },
    [shown],
  );
  return html`<div class="pair">
      <div>
        <${Failure} error=${error} />
        ${list && !list.data.length && html`<p>No batches yet.</p>`}
        ${list?.data.map((batch) => html`<${Card} key=${batch.id} batch=${batch} again=${ask} />`)}
      </div>
      <${Create} done=${ask} />
    </div>
    <${Reports} shown=${shown} />`;
}
