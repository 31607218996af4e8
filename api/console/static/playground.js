// Two columns that answer the same conversation: base and adapter, or two adapters.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./preact-htm.js";
import { call, stream, url } from "./api.js";
import { watchPauses } from "./pauses.js";
import { Answer, Turn } from "./answer.js";
import { Conversations, keep, kept, lastShown, show } from "./conversations.js";
import { EXAMPLES, TOOLS } from "./examples.js";
import { Copy, Failure, Field } from "./parts.js";
import { KINDS, MOST_TOKENS, asCurl, asJavaScript, asPython, binding, chatBody } from "./request.js";
import { Verdict } from "./verdict.js";

const START = {
  system: "",
  temperature: "",
  topP: "",
  topK: "",
  maxTokens: "",
  seed: "",
  thinking: "default",
  logprobs: false,
  kind: "none",
  source: "",
  strict: true,
  tools: "",
  toolChoice: "auto",
};

function Sampling({ options, set, defaults }) {
  const input = (name, label, more, usual = "default") =>
    html`<${Field} label=${label}>
      <input type="number" step="any" value=${options[name]} placeholder=${usual} ...${more} onInput=${set(name)} />
    <//>`;
  return html`<details class="card" open>
    <summary>Sampling</summary>
    <div class="grid">
      ${input("temperature", "Temperature", { min: 0, max: 2, step: 0.1 }, defaults.temperature)}
      ${input("topP", "Top p", { min: 0, max: 1, step: 0.05 }, defaults.top_p)} ${input("topK", "Top k", { min: 0, step: 1 }, defaults.top_k || "off")}
      ${input("maxTokens", "Most tokens", { min: 1, step: 1 }, defaults.max_tokens ?? MOST_TOKENS)} ${input("seed", "Seed", { step: 1 })}
      <${Field} label="Reasoning">
        <select value=${options.thinking} onChange=${set("thinking")}>
          <option value="default">the model's way</option>
          <option value="on">on</option>
          <option value="off">off</option>
        </select>
      <//>
      <label class="check">
        <input type="checkbox" checked=${options.logprobs} onChange=${set("logprobs", "checked")} /> Token probabilities
      </label>
    </div>
  </details>`;
}

function Example({ of, text, insert }) {
  return html`<button type="button" class="quiet" aria-label=${`Insert an example of ${of}`} onClick=${() => insert(text)}>
    Insert an example
  </button>`;
}

function Binding({ options, set, put, model }) {
  const [verdict, setVerdict] = useState(null);
  const [error, setError] = useState(null);
  const needed = options.kind !== "none" || options.tools.trim();
  useEffect(() => {
    setVerdict(null);
    setError(null);
    if (!needed) return undefined;
    const abort = new AbortController();
    const timer = setTimeout(async () => {
      try {
        const body = { model, messages: [{ role: "user", content: "hi" }], ...binding(options) };
        setVerdict(await call("POST", "v1/chat/completions/check", body, abort.signal));
      } catch (failure) {
        if (!abort.signal.aborted) setError(failure);
      }
    }, 500);
    return () => {
      clearTimeout(timer);
      abort.abort();
    };
  }, [options.kind, options.source, options.strict, options.tools, options.toolChoice, model]);
  return html`<details class="card" open>
    <summary>Shape of the answer</summary>
    <${Field} label="Bound by">
      <select value=${options.kind} onChange=${set("kind")}>
        ${Object.entries(KINDS).map(([id, name]) => html`<option value=${id}>${name}</option>`)}
      </select>
    <//>
    ${options.kind !== "none" &&
    html`<${Field} label=${KINDS[options.kind]} wide>
      <textarea class="code" rows="8" spellcheck=${false} value=${options.source} onInput=${set("source")}></textarea>
    <//>
    <${Example} of=${KINDS[options.kind]} text=${EXAMPLES[options.kind]} insert=${(source) => put({ source })} />`}
    ${options.kind === "schema" &&
    html`<label class="check">
      <input type="checkbox" checked=${options.strict} onChange=${set("strict", "checked")} /> Strict: enforce all or
      refuse
    </label>`}
    <details open=${Boolean(options.tools)}>
      <summary>Tools</summary>
      <${Field} label="Tools, as JSON" wide>
        <textarea class="code" rows="6" spellcheck=${false} value=${options.tools} onInput=${set("tools")}></textarea>
      <//>
      <${Example} of="tools" text=${TOOLS} insert=${(tools) => put({ tools })} />
      <${Field} label="Choice">
        <select value=${options.toolChoice} onChange=${set("toolChoice")}>
          <option value="auto">auto</option>
          <option value="required">required</option>
          <option value="none">none</option>
        </select>
      <//>
    </details>
    <${Failure} error=${error} />
    ${verdict && html`<${Verdict} verdict=${verdict} />`}
  </details>`;
}

function Column({ index, column, models, change, close, options, edit, again, defaults }) {
  const talk = useRef(null);
  const follows = useRef(true); // until one scrolls up to read
  const top = useRef(0);
  useEffect(() => {
    if (follows.current && talk.current) talk.current.scrollTop = talk.current.scrollHeight;
  });
  const scrolled = ({ target }) => {
    if (target.scrollHeight - target.scrollTop - target.clientHeight < 40) follows.current = true;
    else if (target.scrollTop < top.current) follows.current = false;
    top.current = target.scrollTop;
  };
  const last = column.messages.length - 1;
  const copies = () => {
    const body = chatBody(column.model, options, column.messages, defaults);
    return body.messages.length ? body : { ...body, messages: [{ role: "user", content: "Hello!" }] };
  };
  const address = url("").href;
  return html`<article class="column card" aria-label=${`Column ${index + 1}`}>
    <div class="bar">
      <select
        aria-label=${`Model of column ${index + 1}`}
        value=${column.model}
        onChange=${(event) => change({ model: event.target.value })}
      >
        ${models.map((model) => html`<option value=${model.id}>${model.id}${model.parent ? " (adapter)" : ""}</option>`)}
      </select>
      ${close && html`<button type="button" class="quiet" onClick=${close}>Close</button>`}
    </div>
    <div class="talk" aria-live="polite" tabindex="0" role="region" aria-label=${`Conversation ${index + 1}`} ref=${talk} onScroll=${scrolled}>
      ${column.messages.map(
        (message, place) =>
          html`<${Turn}
            message=${message}
            edit=${edit && (() => edit(place))}
            again=${again && place === last && again}
            answer=${(result) =>
              change({
                messages: [...column.messages.slice(0, place), { ...message, content: result }, ...column.messages.slice(place + 1)],
              })}
          />`,
      )}
      ${column.running && html`<${Answer} answer=${column.running} />`}
      ${column.paused && html`<p class="paused" role="status">The engine restarts. The answer goes on by itself.</p>`}
      <${Failure} error=${column.error} />
    </div>
    <div class="bar">
      <${Copy} text=${() => asCurl(address, copies())}>Copy as curl<//>
      <${Copy} text=${() => asPython(address, copies())}>Python<//>
      <${Copy} text=${() => asJavaScript(address, copies())}>JavaScript<//>
    </div>
  </article>`;
}

export function Playground({ models }) {
  const [options, setOptions] = useState(START);
  const [columns, setColumns] = useState([{ model: models[0].id, messages: [] }]);
  const [prompt, setPrompt] = useState("");
  const [list, setList] = useState(kept);
  const [id, setId] = useState(() => crypto.randomUUID?.() ?? String(Math.random()));
  const running = useRef(new Map());
  const [known, setKnown] = useState({});
  const of = (model) => known[model] ?? {};
  const shown = columns.map((column) => column.model).join(" ");
  useEffect(() => {
    for (const { model } of columns) {
      const found = ({ sampling_defaults, defaults }) =>
        setKnown((now) => ({ ...now, [model]: { ...sampling_defaults, ...defaults } }));
      call("GET", `v1/models/${model.split("/").map(encodeURIComponent).join("/")}`).then(found, () => {}); // the list has the rest
    }
  }, [shown]);
  const [busy, setBusy] = useState(false);
  const set =
    (name, property = "value") =>
    (event) =>
      setOptions((now) => ({ ...now, [name]: event.target[property] }));
  const put = (what) => setOptions((now) => ({ ...now, ...what }));
  const change = (index, what) =>
    setColumns((now) => now.map((one, at) => (at === index ? { ...one, ...what } : one)));

  const run = async (index, column, messages) => {
    const abort = new AbortController();
    running.current.set(index, abort);
    const bound = options.kind !== "none" && options.source.trim() !== "";
    const answer = { content: "", reasoning: "", calls: [], tokens: [], finish: null, bound, began: performance.now() };
    let drawn = 0;
    const draw = () => {
      if (drawn) return;
      drawn = requestAnimationFrame(() => {
        drawn = 0;
        if (running.current.has(index)) change(index, { running: { ...answer } });
      });
    };
    change(index, { messages, running: answer, error: null });
    const pauses = watchPauses((paused) => {
      answer.restarted ||= paused;
      change(index, { paused });
    });
    try {
      const body = { ...chatBody(column.model, options, messages, of(column.model)), stream: true, stream_options: { include_usage: true } };
      for await (const chunk of stream("v1/chat/completions", body, abort.signal)) {
        pauses.heard();
        take(answer, chunk);
        draw();
      }
    } catch (error) {
      if (!abort.signal.aborted) change(index, { error });
    }
    pauses.end();
    running.current.delete(index);
    change(index, { running: null, paused: false, messages: [...messages, ...asMessages(answer)] });
    setBusy(running.current.size > 0);
  };

  const send = (event) => {
    event.preventDefault();
    const said = prompt.trim() ? [{ role: "user", content: prompt }] : [];
    if (!said.length && !columns.some((column) => column.messages.at(-1)?.role === "tool")) return;
    setPrompt("");
    setBusy(true);
    columns.forEach((column, index) => run(index, column, [...column.messages, ...said]));
  };
  // With a question at once, and with its answer before the page says that it is complete: who reloads finds both again.
  useLayoutEffect(() => {
    if (!columns[0].messages.length) return;
    const title = columns[0].messages.find((message) => message.role === "user")?.content.slice(0, 60) ?? "";
    const talks = columns.map(({ model, messages }) => ({ model, messages }));
    setList(keep({ id, title, when: new Date().toISOString(), system: options.system, columns: talks }));
  }, [busy]);
  const begin = (columns, system) => {
    setId(crypto.randomUUID?.() ?? String(Math.random()));
    setColumns(columns);
    if (system !== undefined) put({ system });
  };
  const open = (conversation) => {
    const there = (model) => (models.some((one) => one.id === model) ? model : models[0].id);
    begin(conversation.columns.map((one) => ({ ...one, model: there(one.model) })), conversation.system);
    setId(conversation.id);
  };
  useEffect(() => {
    const conversation = lastShown();
    if (conversation) open(conversation);
  }, []);
  useEffect(() => show(id), [id]);
  // The same turn of all columns is written anew.
  const edit = (column, place) => {
    const turn = column.messages.slice(0, place).filter((message) => message.role === "user").length;
    setPrompt(column.messages[place].content);
    setColumns((now) =>
      now.map((one) => {
        const places = one.messages.flatMap((message, at) => (message.role === "user" ? [at] : []));
        return { ...one, error: null, messages: one.messages.slice(0, places[turn] ?? one.messages.length) };
      }),
    );
  };
  const again = (index, column) => {
    const asked = column.messages.findLastIndex((message) => message.role === "user" || message.role === "tool");
    setBusy(true);
    run(index, column, column.messages.slice(0, asked + 1));
  };
  const stop = () => running.current.forEach((abort) => abort.abort());
  const keys = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !busy) send(event);
  };
  const other = models.find((model) => model.id !== columns[0].model) ?? models[0];

  return html`<div class="playground">
    <aside>
      <${Field} label="System prompt" wide>
        <textarea rows="3" placeholder=${of(columns[0].model).system} value=${options.system} onInput=${set("system")}></textarea>
      <//>
      <${Sampling} defaults=${{ ...models[0].sampling_defaults, ...of(columns[0].model) }} options=${options} set=${set} />
      <${Binding} options=${options} set=${set} put=${put} model=${columns[0].model} />
      <${Conversations} list=${list} current=${id} busy=${busy} open=${open} change=${setList} />
    </aside>
    <div class="columns">
      <div class="pair">
        ${columns.map(
          (column, index) =>
            html`<${Column}
              index=${index}
              column=${column}
              models=${models}
              options=${options}
              defaults=${of(column.model)}
              change=${(what) => change(index, what)}
              edit=${!busy && ((place) => edit(column, place))}
              again=${!busy && (() => again(index, column))}
              close=${index > 0 && !busy && (() => setColumns((now) => now.slice(0, 1)))}
            />`,
        )}
      </div>
      <form class="prompt card" onSubmit=${send}>
        <textarea
          aria-label="Message"
          rows="2"
          placeholder="Say something; Enter sends, Shift+Enter breaks the line"
          value=${prompt}
          onInput=${(event) => setPrompt(event.target.value)}
          onKeyDown=${keys}
        ></textarea>
        <div class="bar">
          ${busy
            ? html`<button type="button" onClick=${stop}>Stop</button>`
            : html`<button class="primary">Send</button>`}
          ${columns.length === 1 &&
          html`<button
            type="button"
            disabled=${busy}
            onClick=${() => setColumns((now) => [...now, { model: other.id, messages: [] }])}
          >
            Compare
          </button>`}
          <button
            type="button"
            class="quiet"
            disabled=${busy}
            onClick=${() => begin(columns.map((one) => ({ model: one.model, messages: [] })))}
          >
            New
          </button>
        </div>
      </form>
    </div>
  </div>`;
}

function take(answer, chunk) {
  if (chunk.usage) answer.usage = chunk.usage;
  for (const choice of chunk.choices) {
    const delta = choice.delta;
    answer.content += delta.content ?? "";
    answer.reasoning += delta.reasoning_content ?? "";
    for (const call of delta.tool_calls ?? []) {
      const known = (answer.calls[call.index] ??= { id: call.id, name: "", arguments: "" });
      known.name += call.function?.name ?? "";
      known.arguments += call.function?.arguments ?? "";
    }
    answer.tokens.push(...(choice.logprobs?.content ?? []));
    if (choice.finish_reason) {
      answer.finish = choice.finish_reason;
      answer.validation = choice.personae?.validation;
      answer.seconds = (performance.now() - answer.began) / 1000;
    }
  }
}

// An answer as messages of the history: what was said, and a place for the result of each call.
function asMessages(answer) {
  if (!answer.content && !answer.calls.length && !answer.reasoning) return [];
  const message = { role: "assistant", content: answer.content };
  Object.defineProperty(message, "answer", { value: answer }); // for this page alone: it is not sent
  if (answer.reasoning) message.reasoning_content = answer.reasoning;
  if (answer.calls.length) {
    message.tool_calls = answer.calls.map((one) => ({
      id: one.id,
      type: "function",
      function: { name: one.name, arguments: one.arguments },
    }));
  }
  const results = answer.calls.map((one) => ({ role: "tool", tool_call_id: one.id, content: "" }));
  return [message, ...results];
}
