// What the server says that it would enforce of a request.

import { html } from "./preact-htm.js";
import { Failure } from "./parts.js";

const SAID = {
  enforced: "enforced",
  "best effort": "as far as possible",
  checked: "checked at the end",
  refused: "refused",
  unknown: "not decided",
  "no effect": "no effect",
};
const ORDER = ["refused", "checked", "best effort", "unknown", "enforced", "no effect"];

export function Verdict({ verdict }) {
  return html`<div class="verdict" role="status">
    <p class=${verdict.accepted ? "good" : "bad"}>
      ${verdict.accepted ? "The server would serve this." : "The server refuses this."}
      ${verdict.ignored.length > 0 && ` Ignored: ${verdict.ignored.join(", ")}.`}
    </p>
    <${Failure} error=${verdict.error} />
    ${verdict.schemas.map((schema) => html`<${Schema} schema=${schema} />`)}
  </div>`;
}

function Schema({ schema }) {
  const rows = [...schema.keywords].sort((a, b) => ORDER.indexOf(a.verdict) - ORDER.indexOf(b.verdict));
  return html`<details open>
    <summary><code>${schema.param}</code> (${schema.strict ? "strict" : "not strict"})</summary>
    <table class="keywords">
      <thead>
        <tr>
          <th scope="col">Keyword</th>
          <th scope="col">Where</th>
          <th scope="col">Verdict</th>
        </tr>
      </thead>
      <tbody>
        ${rows.map(
          (one) =>
            html`<tr class=${one.verdict.replace(" ", "-")}>
              <td><code>${one.keyword}</code></td>
              <td><code>${one.pointer}</code></td>
              <td>${SAID[one.verdict]}</td>
            </tr>`,
        )}
      </tbody>
    </table>
  </details>`;
}
