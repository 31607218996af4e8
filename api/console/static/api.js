// Requests to the server that served this page. The key lives in this module's memory and nowhere else.

let key = "";

export function setKey(value) {
  key = value.trim();
}

export function hasKey() {
  return key !== "";
}

export function url(path) {
  return new URL(path, document.baseURI);
}

export class ApiError extends Error {
  constructor(status, error) {
    super(error?.message ?? `The server answered ${status}.`);
    this.status = status;
    this.param = error?.param ?? null;
    this.code = error?.code ?? null;
  }
}

function headers(more = {}) {
  return key ? { authorization: `Bearer ${key}`, ...more } : more;
}

async function failure(response) {
  let error = null;
  try {
    error = (await response.json()).error;
  } catch {
    // no JSON: the status has to do
  }
  return new ApiError(response.status, error);
}

async function send(method, path, body, signal) {
  const json = body === undefined ? {} : { "content-type": "application/json" };
  const response = await fetch(url(path), {
    method,
    headers: headers(json),
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await failure(response);
  return response;
}

export async function call(method, path, body, signal) {
  return (await send(method, path, body, signal)).json();
}

// What the server answers to a body that is written already, whatever it is: its status and its text.
export async function attempt(method, path, body) {
  const more = body === undefined ? {} : { "content-type": "application/json" };
  const response = await fetch(url(path), { method, headers: headers(more), body });
  const found = await response.text();
  try {
    return { status: response.status, text: JSON.stringify(JSON.parse(found), null, 2) };
  } catch {
    return { status: response.status, text: found };
  }
}

// Whether the engine would serve a request now.
export async function ready() {
  return (await fetch(url("ready"))).ok;
}

// Saves a file of the server's. It is never opened as a page: its type is no page's.
export async function download(path, name) {
  const content = await (await send("GET", path)).blob();
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([content], { type: "application/octet-stream" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

export async function text(path) {
  return (await send("GET", path)).text();
}

// The events of a streamed answer, each as its JSON.
export async function* stream(path, body, signal) {
  const response = await send("POST", path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += value;
    const events = rest.split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const line = event.split("\n").find((one) => one.startsWith("data: "));
      if (!line || line === "data: [DONE]") continue;
      const data = JSON.parse(line.slice(6));
      if (data.error) throw new ApiError(response.status, data.error);
      yield data;
    }
  }
}

// Sends a form with files. `progress` is told the share that was sent.
export function upload(path, form, progress) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", url(path));
    for (const [name, value] of Object.entries(headers())) request.setRequestHeader(name, value);
    request.upload.onprogress = (event) => event.lengthComputable && progress(event.loaded / event.total);
    request.onerror = () => reject(new ApiError(0, { message: "The connection broke." }));
    request.onload = () => {
      let answer = null;
      try {
        answer = JSON.parse(request.responseText);
      } catch {
        // no JSON: the status has to do
      }
      if (request.status < 300) resolve(answer);
      else reject(new ApiError(request.status, answer?.error));
    };
    request.send(form);
  });
}
