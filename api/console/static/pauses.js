// Notices when a stream pauses since the engine restarts.

import { ready } from "./api.js";

const QUIET = 1500; // milliseconds without a word, after which the server is asked

// `tell` is called with true when the engine is away, and with false when the stream goes on.
export function watchPauses(tell) {
  let heard = performance.now();
  let paused = false;
  let asking = false;
  const say = (now) => {
    if (now !== paused) tell((paused = now));
  };
  const timer = setInterval(async () => {
    if (paused || asking || document.hidden || performance.now() - heard < QUIET) return;
    asking = true;
    const before = heard;
    const away = await ready().then(
      (served) => !served,
      () => false,
    );
    asking = false;
    if (away && heard === before) say(true);
  }, QUIET / 2);
  return {
    heard() {
      heard = performance.now();
      say(false);
    },
    end() {
      heard = Infinity;
      clearInterval(timer);
    },
  };
}
