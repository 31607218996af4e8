// A small line chart.

import { html } from "./preact-htm.js";

const WIDTH = 300;
const HEIGHT = 80;

// `series`: [{name, values}], where a value may be null; all over the same times.
export function Chart({ title, series, say }) {
  const values = series.flatMap((one) => one.values).filter((value) => value != null);
  const top = Math.max(...values, 1e-9);
  const length = Math.max(...series.map((one) => one.values.length), 2);
  const x = (index) => (index * WIDTH) / (length - 1);
  const y = (value) => HEIGHT - 2 - ((HEIGHT - 6) * value) / top;
  const latest = series.map((one) => `${one.name} ${say(one.values.at(-1) ?? null)}`).join(", ");
  return html`<figure class="card chart">
    <figcaption>${title}</figcaption>
    <svg viewBox="0 0 ${WIDTH} ${HEIGHT}" role="img" aria-label="${title}: ${latest}" preserveAspectRatio="none">
      ${series.map(
        (one, index) =>
          html`<polyline
            class="line line-${index}"
            points=${one.values
              .map((value, at) => (value == null ? null : `${x(at).toFixed(1)},${y(value).toFixed(1)}`))
              .filter(Boolean)
              .join(" ")}
          />`,
      )}
    </svg>
    <p class="legend">
      ${series.map(
        (one, index) =>
          html`<span class="line-${index}"><b>${one.name}</b> ${say(one.values.at(-1) ?? null)}</span>`,
      )}
      <small>top ${say(values.length ? top : null)}</small>
    </p>
  </figure>`;
}
