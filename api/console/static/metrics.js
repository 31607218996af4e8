// The server's metrics as numbers.

// By name, the samples: {labels, value}.
export function samples(stats) {
  return new Map(Object.entries(stats.samples));
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
