// Small parts that several tabs have.

import { html, useEffect, useRef, useState } from "./preact-htm.js";

export function Field({ label, children, hint, wide }) {
  return html`<label class=${wide ? "field wide" : "field"}>
    <span>${label}</span>${children}${hint && html`<small>${hint}</small>`}
  </label>`;
}

export function Failure({ error }) {
  if (!error) return null;
  return html`<p class="failure" role="alert">
    ${error.param && html`<code>${error.param}</code> `}${error.message}
  </p>`;
}

export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (number >= 1024 && unit < units.length - 1) {
    number /= 1024;
    unit += 1;
  }
  return `${number < 10 && unit ? number.toFixed(1) : Math.round(number)} ${units[unit]}`;
}

const NAMES = new Intl.Collator("en", { numeric: true });

/** Which of two values comes first, for `sort`: numbers in a name count as numbers. */
export function inOrder(a, b) {
  return typeof a === "number" ? a - b : NAMES.compare(a, b);
}

export function when(seconds) {
  return seconds == null ? "–" : new Date(seconds * 1000).toLocaleString();
}

export function day(seconds) {
  return new Date(seconds * 1000).toLocaleDateString();
}

// The hour that begins at a time.
export function hour(seconds) {
  const shown = { year: "numeric", month: "short", day: "numeric", hour: "numeric" };
  return new Date(seconds * 1000).toLocaleString([], shown);
}

export function Copy({ text, quiet, children }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text());
      setDone(true);
      setTimeout(() => setDone(false), 1500);
    } catch {
      setDone(false);
    }
  };
  return html`<button type="button" class=${quiet ? "quiet" : ""} onClick=${copy}>${done ? "Copied" : children}</button>`;
}

export function milliseconds(seconds) {
  const number = 1000 * seconds;
  return `${number < 10 ? number.toFixed(1) : Math.round(number)} ms`;
}

// Calls `work` now and every so many seconds while the page is looked at: never in a hidden tab, and never
// while it still runs. Returns a function that calls it at once.
export function useEvery(seconds, work, dependencies = []) {
  const latest = useRef(work);
  const busy = useRef(false);
  latest.current = work;
  const tick = async () => {
    if (document.hidden || busy.current) return;
    busy.current = true;
    try {
      await latest.current();
    } finally {
      busy.current = false;
    }
  };
  useEffect(() => {
    tick();
    const timer = setInterval(tick, seconds * 1000);
    document.addEventListener("visibilitychange", tick);
    return () => {
      clearInterval(timer);
      document.removeEventListener("visibilitychange", tick);
    };
  }, dependencies);
  return tick;
}

// What a request brought: [value, error, ask again].
export function useAnswer(ask, dependencies = []) {
  const [state, setState] = useState([null, null]);
  const again = () =>
    ask().then(
      (value) => setState([value, null]),
      (error) => setState(([value]) => [value, error]),
    );
  useEffect(() => void again(), dependencies);
  return [...state, again];
}
