// The last steps of one engine as bars: how long each took, and what it computed.

import { html, useState } from "./preact-htm.js";
import { Failure, milliseconds } from "./parts.js";

const HEIGHT = 90;
const BAR = 5;
const SHOWN = 120;
const LISTED = 20;

// What an engine says of a step is an array.
const read = ([epoch, rows, tokens, seconds, gap]) => ({ epoch, rows, tokens, seconds, gap });
const prompts = (step) => (step.tokens ? (step.tokens - step.rows) / step.tokens : 0);

function box(index, bottom, height) {
  const left = index * BAR;
  return `M${left} ${(HEIGHT - bottom).toFixed(1)}v${(-height).toFixed(1)}h${BAR - 1}v${height.toFixed(1)}z`;
}

const count = (number, name) => `${number} ${name}${number === 1 ? "" : "s"}`;

function said(step) {
  const idle = step.gap > 0.00005 ? `, ${milliseconds(step.gap)} idle before it` : "";
  return `${milliseconds(step.seconds)}: ${count(step.rows, "row")}, ${count(step.tokens, "token")}${idle}`;
}

function median(values) {
  return [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)];
}

function Bars({ steps, at, setAt }) {
  const top = Math.max(...steps.map((step) => step.seconds + step.gap), 1e-6);
  const scale = (HEIGHT - 4) / top;
  const shapes = { answers: [], prompts: [], idle: [], restart: [] };
  steps.forEach((step, index) => {
    const whole = step.seconds * scale;
    const part = whole * prompts(step);
    shapes.answers.push(box(index, 0, whole - part));
    shapes.prompts.push(box(index, whole - part, part));
    shapes.idle.push(box(index, whole, step.gap * scale));
    if (index && step.epoch !== steps[index - 1].epoch) shapes.restart.push(`M${index * BAR - 0.5} 0v${HEIGHT}`);
  });
  const place = (event) => {
    const { left, width } = event.currentTarget.getBoundingClientRect();
    const index = Math.floor(((event.clientX - left) / width) * SHOWN);
    setAt(index < steps.length ? index : null);
  };
  const keys = (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    event.preventDefault();
    setAt((now) => Math.min(Math.max((now ?? steps.length) + move, 0), steps.length - 1));
  };
  const about = `The last ${steps.length} steps, median ${milliseconds(median(steps.map((step) => step.seconds)))}, longest ${milliseconds(top)}`;
  return html`<div
      class="bars"
      tabindex="0"
      role="group"
      aria-label="${about}; arrow keys move from step to step"
      onMouseMove=${place}
      onMouseLeave=${() => setAt(null)}
      onKeyDown=${keys}
      onBlur=${() => setAt(null)}
    >
      <svg viewBox="0 0 ${SHOWN * BAR} ${HEIGHT}" aria-hidden="true" preserveAspectRatio="none">
        ${at !== null && steps[at] && html`<path class="chosen-bar" d=${box(at, 0, HEIGHT)} />`}
        ${Object.entries(shapes).map(([name, parts]) => html`<path class=${`bar-${name}`} d=${parts.join("")} />`)}
      </svg>
    </div>
    <p class="legend">
      <span class="key-answers">one token a row</span><span class="key-prompts">prompts</span
      ><span class="key-idle">idle before</span>
      ${shapes.restart.length > 0 && html`<span class="key-restart">the engine restarted</span>`}
      <small>${about}</small>
    </p>`;
}

export function Timeline({ engine, several }) {
  const [at, setAt] = useState(null);
  const steps = engine.steps.slice(-SHOWN).map(read);
  const step = at === null ? null : steps[at];
  return html`<section class="card steps" aria-label=${several ? `Steps of engine ${engine.id}` : "Steps"}>
    <h2>${several ? `Steps of engine ${engine.id}` : "Steps"}</h2>
    <${Failure} error=${engine.error && { message: engine.error }} />
    ${steps.length
      ? html`<${Bars} steps=${steps} at=${at} setAt=${setAt} />
          <p class="of-step" role="status">${step ? said(step) : "Point at a bar, or press the arrow keys."}</p>
          <${Listed} steps=${steps} />`
      : html`<p>No step was run yet.</p>`}
  </section>`;
}

function Listed({ steps }) {
  const [open, setOpen] = useState(false);
  return html`<details onToggle=${(event) => setOpen(event.target.open)}>
    <summary>As a table</summary>
    ${open &&
    html`<table>
      <thead>
        <tr>
          ${["Took", "Rows", "Tokens", "Idle before"].map((name) => html`<th scope="col">${name}</th>`)}
        </tr>
      </thead>
      <tbody>
        ${steps
          .slice(-LISTED)
          .reverse()
          .map(
            (step) =>
              html`<tr>
                <td>${milliseconds(step.seconds)}</td>
                <td>${step.rows}</td>
                <td>${step.tokens}</td>
                <td>${milliseconds(step.gap)}</td>
              </tr>`,
          )}
      </tbody>
    </table>`}
  </details>`;
}
