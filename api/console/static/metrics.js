// Prometheus's text format as numbers.

const LINE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

// By name, the samples: {labels, value}.
export function parse(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = LINE.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(LABEL)) {
      labels[name] = value.replace(/\\(.)/g, (_, one) => (one === "n" ? "\n" : one));
    }
    if (!found.has(match[1])) found.set(match[1], []);
    found.get(match[1]).push({ labels, value: Number(match[3]) });
  }
  return found;
}

export function sum(metrics, name, wanted = {}) {
  let total = 0;
  for (const { labels, value } of metrics.get(name) ?? []) {
    if (Object.entries(wanted).every(([label, one]) => labels[label] === one)) total += value;
  }
  return total;
}

// The value below which a share of what a histogram saw between two scrapes lies; null if it saw nothing.
export function percentile(now, before, name, share) {
  const counts = new Map();
  for (const [metrics, sign] of [
    [now, 1],
    [before, -1],
  ]) {
    for (const { labels, value } of metrics?.get(`${name}_bucket`) ?? []) {
      const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
      counts.set(bound, (counts.get(bound) ?? 0) + sign * value);
    }
  }
  const bounds = [...counts.keys()].sort((a, b) => a - b);
  const total = counts.get(Infinity) ?? 0;
  if (total <= 0) return null;
  let below = 0;
  let low = 0;
  for (const bound of bounds) {
    const upTo = counts.get(bound);
    if (upTo >= share * total) {
      if (bound === Infinity) return low;
      return low + ((bound - low) * (share * total - below)) / (upTo - below);
    }
    below = upTo;
    low = bound;
  }
  return low;
}
