// One turn of a conversation. Whatever a model writes is text here, never HTML.

import { html, useState } from "./preact-htm.js";
import { Markdown } from "./markdown.js";
import { Copy } from "./parts.js";

export function Turn({ message, answer, edit, again }) {
  if (message.role === "assistant") {
    const said = message.content || (message.tool_calls ?? []).map((one) => one.function.arguments).join("\n");
    return html`<${Answer} answer=${message.answer ?? asAnswer(message)}>
      <${Copy} quiet text=${() => said}>Copy<//>
      ${again && html`<button type="button" class="quiet" onClick=${again}>Again</button>`}
    <//>`;
  }
  if (message.role === "tool") {
    return html`<div class="turn tool">
      <label class="field wide"
        ><span>Result of <code>${message.tool_call_id}</code></span
        ><textarea rows="2" value=${message.content} onInput=${(event) => answer(event.target.value)}></textarea
      ></label>
    </div>`;
  }
  return html`<div class="turn user">
    <span class="who">You</span>
    <div class="text">${message.content}</div>
    <div class="bar turns">
      <${Copy} quiet text=${() => message.content}>Copy<//>
      ${edit && html`<button type="button" class="quiet" onClick=${edit}>Edit</button>`}
      ${again && html`<button type="button" class="quiet" onClick=${again}>Again</button>`}
    </div>
  </div>`;
}

// The answer of a conversation that was kept: without figures and probabilities.
function asAnswer(message) {
  const calls = (message.tool_calls ?? []).map((one) => ({ id: one.id, ...one.function }));
  return { content: message.content ?? "", reasoning: message.reasoning_content ?? "", calls, tokens: [], finish: null };
}

export function Answer({ answer, children }) {
  const spelled = answer.tokens.map((one) => one.token).join("");
  const inPlace = answer.tokens.length > 0 && spelled.startsWith(answer.content); // the end token comes after it
  return html`<div class="turn assistant">
    <span class="who">Model</span>
    ${answer.reasoning &&
    html`<details class="reasoning" open=${!answer.content}>
      <summary>Reasoning</summary>
      <div class="text">${answer.reasoning}</div>
    </details>`}
    ${inPlace
      ? html`<${Tokens} tokens=${within(answer.tokens, answer.content.length)} />`
      : answer.bound
        ? html`<div class="text">${answer.content}</div>`
        : html`<${Markdown} text=${answer.content} />`}
    ${answer.calls.map(
      (call) => html`<div class="call"><code class="name">${call.name}</code><pre>${pretty(call.arguments)}</pre></div>`,
    )}
    ${answer.tokens.length > 0 && !inPlace && html`<${Tokens} tokens=${answer.tokens} />`}
    <${Summary} answer=${answer} />
    ${children && html`<div class="bar turns">${children}</div>`}
  </div>`;
}

function Summary({ answer }) {
  const usage = answer.usage;
  if (!answer.finish) return null;
  const rate = usage && answer.seconds ? (usage.completion_tokens / answer.seconds).toFixed(1) : null;
  const cached = usage?.prompt_tokens_details?.cached_tokens ?? 0;
  const invalid = answer.validation && !answer.validation.valid;
  return html`<p class="summary">
    ${answer.finish}${usage &&
    ` · ${usage.prompt_tokens} prompt tokens (${cached} cached) · ${usage.completion_tokens} tokens`}
    ${rate && ` · ${rate}/s`} ${answer.restarted && " · the engine restarted meanwhile"} ${invalid && html`<strong>· the answer does not satisfy its schema</strong>`}
  </p>`;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // it is still being written
  }
}

// The tokens that are in a text of this length; the end token comes after it.
function within(tokens, length) {
  let at = 0;
  return tokens.filter((one) => (at += one.token.length) - one.token.length < length);
}

// The tokens of an answer, each with its chances. Arrow keys move from one to the next.
function Tokens({ tokens }) {
  const [at, setAt] = useState(null);
  const keys = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    setAt((now) => Math.min(Math.max((now ?? -1) + step, 0), tokens.length - 1));
  };
  return html`<div class="tokens">
    <div
      class="text"
      tabindex="0"
      role="group"
      aria-label="Tokens with probabilities; arrow keys move"
      onKeyDown=${keys}
      onMouseLeave=${() => setAt(null)}
      onBlur=${() => setAt(null)}
    >
      ${tokens.map(
        (one, index) =>
          html`<span
            class=${`token ${level(one.logprob)}${index === at ? " chosen" : ""}`}
            onMouseEnter=${() => setAt(index)}
            >${one.token}</span
          >`,
      )}
    </div>
    ${at !== null &&
    tokens[at] &&
    html`<table class="chances" aria-live="polite">
      <caption>
        Token ${at + 1}
      </caption>
      ${[tokens[at], ...tokens[at].top_logprobs.filter((one) => one.token !== tokens[at].token)].map(
        (one, index) =>
          html`<tr class=${index ? "" : "chosen"}>
            <td><code>${visible(one.token)}</code></td>
            <td>${(100 * Math.exp(one.logprob)).toFixed(1)} %</td>
          </tr>`,
      )}
    </table>`}
  </div>`;
}

function level(logprob) {
  const chance = Math.exp(logprob);
  if (chance > 0.9) return "sure";
  if (chance > 0.5) return "likely";
  return chance > 0.1 ? "unsure" : "unlikely";
}

function visible(token) {
  return token.replaceAll("\n", "⏎").replaceAll(" ", "␣");
}
