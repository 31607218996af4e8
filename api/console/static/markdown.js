// Markdown as elements. The library reads it; what is drawn is made here, so text never becomes HTML.

import { html } from "./preact-htm.js";
import { lexer } from "./marked.js";

const DEEPEST = 24; // lists in lists, quotes in quotes
const LONGEST = 200_000; // characters; a longer text is shown as it is
const LINK = /^(https?:|mailto:)/i;

export function Markdown({ text }) {
  const read = text.length <= LONGEST && blocks(text);
  return read ? html`<div class="text markdown">${draw(read, 0)}</div>` : html`<div class="text">${text}</div>`;
}

function blocks(text) {
  try {
    return lexer(text);
  } catch {
    return null; // it is nested too deeply to be read
  }
}

function draw(tokens, depth) {
  return tokens.map((token) => (depth > DEEPEST ? token.raw : one(token, depth + 1)));
}

function one(token, depth) {
  const inside = () => (token.tokens ? draw(token.tokens, depth) : token.text);
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "heading":
      return html`<p class=${`heading h${token.depth}`}>${inside()}</p>`;
    case "paragraph":
      return html`<p>${inside()}</p>`;
    case "code":
      return html`<pre><code>${token.text}</code></pre>`;
    case "blockquote":
      return html`<blockquote>${inside()}</blockquote>`;
    case "list": {
      const items = token.items.map((item) => html`<li>${draw(item.tokens, depth)}</li>`);
      return token.ordered ? html`<ol start=${token.start || 1}>${items}</ol>` : html`<ul>${items}</ul>`;
    }
    case "checkbox":
      return token.checked ? "☑ " : "☐ ";
    case "table":
      return table(token, depth);
    case "hr":
      return html`<hr />`;
    case "br":
      return html`<br />`;
    case "strong":
      return html`<strong>${inside()}</strong>`;
    case "em":
      return html`<em>${inside()}</em>`;
    case "del":
      return html`<del>${inside()}</del>`;
    case "codespan":
      return html`<code>${token.text}</code>`;
    case "link":
    case "image":
      return LINK.test(token.href)
        ? html`<a href=${token.href} target="_blank" rel="noopener noreferrer nofollow">${inside() || token.href}</a>`
        : token.raw;
    case "text":
    case "escape":
      return inside();
    default:
      return token.raw; // HTML among them
  }
}

function table(token, depth) {
  const cells = (row, Tag) => row.map((cell) => html`<${Tag}>${draw(cell.tokens, depth)}<//>`);
  return html`<table>
    <thead><tr>${cells(token.header, "th")}</tr></thead>
    <tbody>${token.rows.map((row) => html`<tr>${cells(row, "td")}</tr>`)}</tbody>
  </table>`;
}
