// From the playground's controls to the body of a chat completion, and to programs that send it.

export const KINDS = {
  none: "Free text",
  schema: "JSON Schema",
  regex: "Regular expression",
  choice: "One of these lines",
  grammar: "Grammar (Lark or GBNF)",
};

function number(value) {
  return value === "" ? undefined : Number(value);
}

function json(text, name) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw Object.assign(new Error(`This is not JSON: ${error.message}`), { param: name });
  }
}

// What binds the answer. Throws an error with a `param` for text that is not JSON.
export function binding(options) {
  const bound = {};
  const source = options.source.trim();
  if (options.kind === "schema" && source) {
    const schema = json(source, "response_format");
    bound.response_format = {
      type: "json_schema",
      json_schema: { name: "answer", strict: options.strict, schema },
    };
  } else if (options.kind === "choice" && source) {
    bound.structured_outputs = { choice: source.split("\n").filter(Boolean) };
  } else if (options.kind !== "none" && source) {
    bound.structured_outputs = { [options.kind]: source };
  }
  if (options.tools.trim()) {
    bound.tools = json(options.tools, "tools");
    if (options.toolChoice !== "auto") bound.tool_choice = options.toolChoice;
  }
  return bound;
}

export const MOST_TOKENS = 256; // of an answer, if neither the field nor the adapter says

export function chatBody(model, options, messages, defaults = {}) {
  const system = options.system.trim() ? [{ role: "system", content: options.system }] : [];
  const body = {
    model,
    messages: [...system, ...messages],
    max_completion_tokens: number(options.maxTokens) ?? (defaults.max_tokens ? undefined : MOST_TOKENS),
    temperature: number(options.temperature),
    top_p: number(options.topP),
    top_k: number(options.topK),
    seed: number(options.seed),
    ...binding(options),
  };
  if (options.thinking !== "default") body.enable_thinking = options.thinking === "on";
  if (options.logprobs) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  return JSON.parse(JSON.stringify(body)); // without what is undefined
}

function python(value, indent = "") {
  const deeper = `${indent}    `;
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) {
    if (!value.length) return "[]";
    return `[\n${value.map((one) => `${deeper}${python(one, deeper)},\n`).join("")}${indent}]`;
  }
  if (typeof value === "object") {
    const entries = Object.entries(value);
    if (!entries.length) return "{}";
    const lines = entries.map(([name, one]) => `${deeper}${JSON.stringify(name)}: ${python(one, deeper)},\n`);
    return `{\n${lines.join("")}${indent}}`;
  }
  return JSON.stringify(value);
}

// Fields that the openai package has no argument for.
const OURS = new Set(["top_k", "structured_outputs", "enable_thinking", "adapters"]);

export function asCurl(address, body) {
  const text = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return [
    `curl ${address}v1/chat/completions \\`,
    "  -H 'content-type: application/json' \\",
    '  -H "authorization: Bearer $PERSONAE_API_KEY" \\',
    `  -d '${text}'`,
    "",
  ].join("\n");
}

export function asPython(address, body) {
  const usual = Object.entries(body).filter(([name]) => !OURS.has(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => OURS.has(name)));
  const lines = usual.map(([name, value]) => `    ${name}=${python(value, "    ")},\n`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${python(extra, "    ")},\n`);
  return [
    "import os",
    "",
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${address}v1", api_key=os.environ.get("PERSONAE_API_KEY", "none"))`,
    `answer = client.chat.completions.create(\n${lines.join("")})`,
    "print(answer.choices[0].message)",
    "",
  ].join("\n");
}

export function asJavaScript(address, body) {
  return [
    'import OpenAI from "openai";',
    "",
    "const client = new OpenAI({",
    `  baseURL: "${address}v1",`,
    '  apiKey: process.env.PERSONAE_API_KEY ?? "none",',
    "});",
    `const answer = await client.chat.completions.create(${JSON.stringify(body, null, 2)});`,
    "console.log(answer.choices[0].message);",
    "",
  ].join("\n");
}
