// A line chart, by uPlot. Below it stand the latest values, or those under the pointer.

import { html, useEffect, useRef, useState } from "./preact-htm.js";
import uPlot from "./uplot.js";

const HEIGHT = 120;
const COLORS = ["--accent", "--second"];
const WHOLE = Array.from({ length: 13 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();
const TIMES = [1, 5, 10, 15, 30, 60, 1440, 2880, 7200, 14400].map((minutes) => 60 * minutes);

// Read at each drawing, because the colors of the page may change.
const color = (name) => () => getComputedStyle(document.documentElement).getPropertyValue(name);

function options(say, at, whole, point) {
  const line = { stroke: color("--soft"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false } };
  const words = (said) => (_, splits) => splits.map(said);
  const wide = (_, labels) => 12 + 7 * Math.max(...(labels ?? []).map((label) => label.length), 1);
  return {
    width: 0,
    height: HEIGHT,
    legend: { show: false },
    cursor: { y: false, drag: { x: false, y: false }, sync: { key: "charts" } },
    scales: { x: { time: false }, y: { range: (_, low, high) => [0, high > 0 ? 1.05 * high : 1] } },
    axes: [
      { ...line, incrs: TIMES, space: 70, values: words(at), size: 26 },
      { ...line, ...(whole && { incrs: WHOLE }), values: words(say), size: wide },
    ],
    series: [{}, ...COLORS.map((name) => ({ stroke: color(name), width: 1.5, points: { show: false } }))],
    hooks: { setCursor: [(plot) => point(plot.cursor.idx ?? null)] },
  };
}

// `times`: Unix seconds, in order. `series`: up to two of {name, values}, a value for each time, which may be null. `say` and `at`
// give the words for a value and for a time. `whole`: values are counts.
export function Chart({ title, times, series, say, at, whole }) {
  const place = useRef(null);
  const plot = useRef(null);
  const [pointed, point] = useState(null);
  useEffect(() => {
    const drawn = new uPlot(options(say, at, whole, point), [[]], place.current);
    const again = () => drawn.redraw();
    const size = new ResizeObserver(() => drawn.setSize({ width: place.current.clientWidth, height: HEIGHT }));
    const theme = new MutationObserver(again);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    size.observe(place.current);
    theme.observe(document.documentElement, { attributeFilter: ["data-theme"] });
    dark.addEventListener("change", again);
    plot.current = drawn;
    return () => {
      size.disconnect();
      theme.disconnect();
      dark.removeEventListener("change", again);
      drawn.destroy();
    };
  }, []);
  useEffect(() => plot.current.setData([times, ...COLORS.map((_, index) => series[index]?.values ?? times.map(() => null))]));
  const shown = pointed ?? times.length - 1;
  const value = (one) => say(one.values[shown] ?? null);
  const latest = series.map((one) => `${one.name} ${say(one.values.at(-1) ?? null)}`).join(", ");
  return html`<figure class="card chart">
    <figcaption>${title}</figcaption>
    <div ref=${place} role="img" aria-label="${title}, ${times.length} values, the latest: ${latest}"></div>
    <p class="legend">
      ${series.map((one, index) => html`<span class="line-${index}"><b>${one.name}</b> ${value(one)}</span>`)}
      <small>${pointed != null && pointed < times.length && at(times[pointed])}</small>
    </p>
  </figure>`;
}
