// Conversations of the playground, kept in this browser. No key is ever kept.

import { html } from "./preact-htm.js";

const PLACE = "personae.conversations";
const SHOWN = "personae.conversation"; // which one a page shows, for its next reload
const MOST = 100;
const CHARACTERS = 2_000_000; // of all together; the oldest are dropped

function read() {
  try {
    return JSON.parse(localStorage.getItem(PLACE)) ?? [];
  } catch {
    return []; // the browser allows no storage, or another program wrote there
  }
}

function write(kept) {
  while (kept.length > MOST || JSON.stringify(kept).length > CHARACTERS) kept = kept.slice(0, -1);
  try {
    localStorage.setItem(PLACE, JSON.stringify(kept));
  } catch {
    // The browser allows no storage: the conversation is there until the page is closed.
  }
  return kept;
}

export const kept = read;

// The conversations with this one first, which takes the place of an earlier state of it.
export function keep(conversation) {
  return write([conversation, ...read().filter((one) => one.id !== conversation.id)]);
}

export function show(id) {
  try {
    sessionStorage.setItem(SHOWN, id);
  } catch {
    // The browser allows no storage: a reload begins with an empty page.
  }
}

// The conversation that this page showed before it was loaded again, if there was one.
export function lastShown() {
  try {
    const id = sessionStorage.getItem(SHOWN);
    return read().find((one) => one.id === id);
  } catch {
    return undefined;
  }
}

export function drop(id) {
  return write(read().filter((one) => one.id !== id));
}

function download(conversation) {
  const body = JSON.stringify(conversation, null, 2);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([body], { type: "application/json" }));
  link.download = `${conversation.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "conversation"}.json`;
  link.click();
  URL.revokeObjectURL(link.href);
}

export function Conversations({ list, current, busy, open, change }) {
  if (!list.length) return null;
  return html`<details class="card">
    <summary>Conversations in this browser</summary>
    <ul class="conversations">
      ${list.map(
        (one) => html`<li key=${one.id} aria-current=${one.id === current ? "true" : undefined}>
          <button type="button" class="quiet title" disabled=${busy} onClick=${() => open(one)}>${one.title}</button>
          <span class="bar">
            <button type="button" class="quiet" aria-label=${`Export ${one.title}`} onClick=${() => download(one)}>Export</button>
            <button type="button" class="quiet" aria-label=${`Delete ${one.title}`} disabled=${busy} onClick=${() => change(drop(one.id))}>Delete</button>
          </span>
        </li>`,
      )}
    </ul>
  </details>`;
}
