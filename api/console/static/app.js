import { html, render, useEffect, useState } from "./preact-htm.js";
import { call, hasKey, setKey } from "./api.js";
import { Adapters } from "./adapters.js";
import { Batches } from "./batches.js";
import { Docs } from "./docs.js";
import { Live } from "./live.js";
import { Failure } from "./parts.js";
import { Playground } from "./playground.js";
import { Tenants } from "./tenants.js";

const TABS = {
  playground: ["Playground", Playground],
  live: ["Live", Live],
  adapters: ["Adapters", Adapters],
  tenants: ["Tenants", Tenants],
  batches: ["Batches and evals", Batches],
  docs: ["API", Docs],
};

function chosen() {
  const named = location.hash.slice(1);
  if (named in TABS) return named;
  return location.pathname.endsWith("/docs") ? "docs" : "playground";
}

function KeyForm({ error, done }) {
  const [value, setValue] = useState("");
  const submit = (event) => {
    event.preventDefault();
    setKey(value);
    done();
  };
  return html`<form class="key card" onSubmit=${submit}>
    <h2>API key</h2>
    <p>This server asks for a key. It is kept in this page's memory until the page is closed.</p>
    <${Failure} error=${hasKey() ? error : null} />
    <label class="field wide"
      ><span>Key</span
      ><input type="password" autocomplete="off" autofocus value=${value} onInput=${(e) => setValue(e.target.value)}
    /></label>
    <button class="primary">Use it</button>
  </form>`;
}

function App() {
  const [tab, setTab] = useState(chosen());
  const [models, setModels] = useState(null);
  const [error, setError] = useState(null);
  const [theme, setTheme] = useState("auto");
  const ask = async () => {
    try {
      setModels((await call("GET", "v1/models")).data);
      setError(null);
    } catch (failure) {
      setModels(null);
      setError(failure);
    }
  };
  useEffect(() => {
    ask();
    const moved = () => setTab(chosen());
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
  }, [theme]);
  const next = { auto: "light", light: "dark", dark: "auto" };
  const locked = error?.status === 401;
  return html`
    <header>
      <h1>Personae</h1>
      <nav aria-label="Console">
        ${Object.entries(TABS).map(
          ([id, [name]]) =>
            html`<button
              type="button"
              aria-current=${id === tab ? "page" : null}
              onClick=${() => {
                location.hash = id;
              }}
            >
              ${name}
            </button>`,
        )}
      </nav>
      <button type="button" class="quiet" onClick=${() => setTheme(next[theme])} title="Light or dark">
        Theme: ${theme}
      </button>
    </header>
    <main>
      ${locked
        ? html`<${KeyForm} error=${error.code && models === null ? error : null} done=${ask} />`
        : error
          ? html`<${Failure} error=${error} />`
          : models &&
            Object.entries(TABS).map(
              ([id, [name, Tab]]) =>
                html`<section hidden=${id !== tab} aria-label=${name} key=${id}>
                  <${Tab} models=${models} refresh=${ask} shown=${id === tab} />
                </section>`,
            )}
    </main>
  `;
}

const root = document.getElementById("app");
root.textContent = "";
render(html`<${App} />`, root);
