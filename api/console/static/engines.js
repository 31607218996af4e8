// The engines behind the server: what each does, and how many there are to be.

import { html, useState } from "./preact-htm.js";
import { call } from "./api.js";
import { Failure, Field } from "./parts.js";

function Scale({ engines, most, again }) {
  const there = engines.filter((one) => one.status !== "failed" && one.status !== "draining").length;
  const [wanted, setWanted] = useState(null);
  const [error, setError] = useState(null);
  const count = wanted ?? there;
  const send = async (event) => {
    event.preventDefault();
    if (count < there && !confirm(`Drain and remove ${there - count} of ${there} engines?`)) return;
    try {
      await call("POST", "v1/replicas", { replicas: count });
      setError(null);
      setWanted(null);
      again();
    } catch (failure) {
      setError(failure);
    }
  };
  return html`<form class="bar" onSubmit=${send}>
      <${Field} label=${`Engines (at most ${most})`}>
        <input
          type="number"
          min="1"
          max=${most}
          required
          value=${count}
          onInput=${(event) => setWanted(event.target.value === "" ? null : Number(event.target.value))}
        />
      <//>
      <button disabled=${count === there}>Scale</button>
    </form>
    <${Failure} error=${error} />`;
}

function Pages({ engine }) {
  const { kv_pages: all, kv_pages_used: used, kv_pages_lent: lent, id } = engine;
  return html`<meter min="0" max=${Math.max(all, 1)} value=${used + lent} aria-label=${`KV pages of engine ${id}`}></meter>
    <small>${used} of ${all}${lent > 0 && `, ${lent} lent to adapters`}</small>`;
}

export function Engines({ engines, most, again }) {
  return html`<section class="card wide" aria-label="Engines">
    <h2>Engines</h2>
    <div class="scrolls" tabindex="0" role="region" aria-label="Table of engines">
      <table>
        <thead>
          <tr>
            ${["Engine", "State", "Running", "Waiting", "Restarts", "KV pages"].map(
              (name) => html`<th scope="col">${name}</th>`,
            )}
          </tr>
        </thead>
        <tbody>
          ${engines.map(
            (engine) =>
              html`<tr>
                <td>${engine.id}</td>
                <td class=${engine.status === "ready" ? "good" : "bad"}>${engine.status}</td>
                <td>${engine.running}</td>
                <td>${engine.waiting}</td>
                <td>${engine.restarts}</td>
                <td><${Pages} engine=${engine} /></td>
              </tr>`,
          )}
        </tbody>
      </table>
    </div>
    ${most > 1 && html`<${Scale} engines=${engines} most=${most} again=${again} />`}
  </section>`;
}
