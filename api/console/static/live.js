// What the server does now, from /v1/stats every two seconds.

import { html, useRef, useState } from "./preact-htm.js";
import { call } from "./api.js";
import { Chart } from "./chart.js";
import { Engines } from "./engines.js";
import { percentile, samples, sum } from "./metrics.js";
import { Failure, Field, bytes, useEvery } from "./parts.js";
import { Queues } from "./queues.js";
import { Timeline } from "./steps.js";

const SECONDS = 2;
const KEPT = 150; // five minutes
const HOUR = 60; // points of the last hour, one a minute
const BACK = 15; // scrapes that percentiles look back: half a minute

const FIRST = "vllm:time_to_first_token_seconds";
const GAP = "vllm:inter_token_latency_seconds";

function point(at, now, before, back, seconds) {
  const rate = (name, labels) => (before ? (sum(now, name, labels) - sum(before, name, labels)) / seconds : null);
  const share = (part, whole) => {
    const all = sum(now, whole) - sum(back ?? new Map(), whole);
    return all > 0 ? (sum(now, part) - sum(back ?? new Map(), part)) / all : null;
  };
  return {
    at,
    tokens: rate("vllm:generation_tokens_total"),
    prompt: rate("vllm:prompt_tokens_total"),
    requests: rate("vllm:request_success_total"),
    running: sum(now, "vllm:num_requests_running"),
    waiting: sum(now, "vllm:num_requests_waiting"),
    kv: sum(now, "vllm:kv_cache_usage_perc") / Math.max(1, now.get("vllm:kv_cache_usage_perc")?.length ?? 1),
    hits: share("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
    first50: percentile(now, back, FIRST, 0.5),
    first95: percentile(now, back, FIRST, 0.95),
    gap50: percentile(now, back, GAP, 0.5),
    gap95: percentile(now, back, GAP, 0.95),
  };
}

const rate = (value) => (value == null ? "–" : `${value >= 100 ? Math.round(value) : value.toFixed(1)}/s`);
const clock = (at) => new Date(1000 * at).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
const whole = (value) => (value == null ? "–" : String(Math.round(value)));
const percent = (value) => (value == null ? "–" : `${(100 * value).toFixed(1)} %`);
const time = (value) => (value == null ? "–" : value < 1 ? `${(1000 * value).toFixed(0)} ms` : `${value.toFixed(2)} s`);

function hits(metrics) {
  const asked = sum(metrics, "vllm:prefix_cache_queries_total");
  return asked ? sum(metrics, "vllm:prefix_cache_hits_total") / asked : null;
}

function Facts({ metrics }) {
  const facts = [
    ["Ready", sum(metrics, "personae:ready") ? "yes" : "no"],
    ["Backlog", time(sum(metrics, "personae:backlog_seconds"))],
    ["Preemptions", whole(sum(metrics, "vllm:num_preemptions_total"))],
    ["Engine restarts", whole(sum(metrics, "personae:engine_restarts_total"))],
    ["Steps", whole(sum(metrics, "personae:steps_total"))],
    ["Forced tokens", whole(sum(metrics, "personae:jumped_tokens_total"))],
    ["Prefix hits", percent(hits(metrics))],
    ["Adapters on the device", whole(sum(metrics, "personae:adapters_held", { place: "device" }))],
    ["Adapters on the host", whole(sum(metrics, "personae:adapters_held", { place: "host" }))],
    ["Host memory of adapters", bytes(sum(metrics, "personae:adapter_host_bytes"))],
    ["Adapters waiting for room", whole(sum(metrics, "personae:adapters_in_line"))],
    ["Loads from disk", whole(sum(metrics, "personae:adapter_loads_total", { source: "disk" }))],
    ["Loads from the host", whole(sum(metrics, "personae:adapter_loads_total", { source: "host" }))],
    ["Adapter evictions", whole(sum(metrics, "personae:adapter_evictions_total"))],
  ];
  return html`<section class="card" aria-label="State">
    <h2>State</h2>
    <dl>${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
  </section>`;
}

export function Live({ shown }) {
  const scrapes = useRef([]);
  const points = useRef([]);
  const [error, setError] = useState(null);
  const [, drawn] = useState(0);
  const [minutes, setMinutes] = useState([]);
  const [range, setRange] = useState("hour");
  useEvery(
    60,
    async () => {
      if (!shown) return;
      const kept = (await call("GET", "v1/stats/history").catch(() => ({ data: [] }))).data;
      const all = kept.map((one) => ({ at: one.at, metrics: samples(one) }));
      const pairs = all.slice(1).map((one, index) => [one, all[index]]);
      setMinutes(pairs.map(([one, last]) => point(one.at, one.metrics, last.metrics, last.metrics, one.at - last.at)).slice(-HOUR));
    },
    [shown],
  );
  const again = useEvery(
    SECONDS,
    async () => {
      if (!shown) return;
      try {
        const answer = await call("GET", "v1/stats");
        const metrics = samples(answer);
        const { at } = answer;
        const last = scrapes.current.at(-1);
        if (last?.at === at) return; // asked twice within the second for which the server keeps its answer
        const back = scrapes.current.at(-BACK) ?? scrapes.current[0];
        points.current = [...points.current, point(at, metrics, last?.metrics, back?.metrics, at - (last?.at ?? at))].slice(-KEPT);
        scrapes.current = [...scrapes.current, { at, metrics, answer }].slice(-BACK - 1);
        setError(null);
        drawn(at);
      } catch (failure) {
        setError(failure);
      }
    },
    [shown],
  );
  const { metrics: latest, answer, at } = scrapes.current.at(-1) ?? {};
  const first = scrapes.current[0];
  const charted = range === "hour" && minutes.length ? [...minutes, ...points.current.slice(-1)] : points.current;
  const times = charted.map((one) => one.at);
  const line = (name, field) => ({ name, values: charted.map((one) => one[field]) });
  const chart = (title, say, series, whole) => html`<${Chart} ...${{ title, times, say, at: clock, series, whole }} />`;
  return html`<${Failure} error=${error} />
    ${latest &&
    html`<${Field} label="Charts show">
        <select value=${range} onChange=${(event) => setRange(event.target.value)}>
          <option value="hour">the last hour, by the minute</option>
          <option value="now">the last five minutes</option>
        </select>
      <//>
      <div class="charts">
        ${chart("Tokens", rate, [line("written", "tokens"), line("prompts", "prompt")])}
        ${chart("Sequences", whole, [line("running", "running"), line("waiting", "waiting")], true)}
        ${chart("Ended", rate, [line("sequences", "requests")])}
        ${chart("First token", time, [line("median", "first50"), line("95 %", "first95")])}
        ${chart("Between tokens", time, [line("median", "gap50"), line("95 %", "gap95")])}
        ${chart("KV memory and prefix hits", percent, [line("KV in use", "kv"), line("hits", "hits")])}
      </div>
      <div class="pair">
        ${answer.engines.map(
          (engine) => html`<${Timeline} key=${engine.id} engine=${engine} several=${answer.engines.length > 1} />`,
        )}
      </div>
      <div class="pair">
        <div>
          <${Engines} engines=${answer.engines} most=${answer.max_replicas} again=${again} />
          <${Queues} queues=${answer.queues} before=${first.at < at ? first.answer.queues : null} seconds=${at - first.at} />
        </div>
        <${Facts} metrics=${latest} />
      </div>`}`;
}
