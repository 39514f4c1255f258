/* What the page asks of the server besides the camera: its setting, pictures that were uploaded, and the saved. */

const KEY = "placard.key"; // in the tab's own storage, which is gone with the tab

const TELL_MS = 30000;

export class ApiError extends Error {
  constructor(message, { status = 0, code = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export class Server {
  get key() {
    return sessionStorage.getItem(KEY);
  }

  /* Take a key, or none. The server is told, too, so that pictures and the gallery come without the header. */
  async unlock(key) {
    sessionStorage.setItem(KEY, key);
    await this.ask("key", { method: "POST" });
  }

  async setup() {
    return (await this.ask("setup.json", { cache: "no-store" })).json();
  }

  /* { id, url, qr_url } of a label with its picture (a Blob), saved. */
  async save(picture, { label, voice, language, seenAt }) {
    const form = new FormData();
    form.set("image", picture, "picture.jpg");
    form.set("label", JSON.stringify(label));
    form.set("voice", voice);
    form.set("language", language);
    form.set("seen_at", seenAt);
    return (await this.ask("labels", { method: "POST", body: form })).json();
  }

  /* The form of a label about what the model has described already. */
  async form(described, language) {
    const headers = { "content-type": "application/json" };
    const body = JSON.stringify({ alt_text: described, language });
    return (await (await this.ask("form", { method: "POST", headers, body })).json()).schema;
  }

  /* The newest label that was saved, or null. */
  async newest() {
    const { labels } = await (await this.ask("labels?limit=1", { cache: "no-store" })).json();
    return labels[0] ?? null;
  }

  async reachable() {
    try {
      return (await fetch("static/icon.svg", { cache: "no-store" })).ok;
    } catch {
      return false;
    }
  }

  /* The answer to `question` about `picture` (a Blob), in pieces { text, finish } as a camera's are. */
  async *about(picture, question, { instructions = "", sampling = {} } = {}) {
    const seen = { type: "image_url", image_url: { url: await dataUrl(picture) } };
    const messages = [{ role: "user", content: [seen, { type: "text", text: question }] }];
    if (instructions) messages.unshift({ role: "system", content: instructions });
    const { structured_outputs: form, ...rest } = sampling;
    const response_format = form && { type: "json_schema", json_schema: { name: "label", schema: form.json } };
    const body = JSON.stringify({ messages, stream: true, ...rest, ...(form && { response_format }) });
    const headers = { "content-type": "application/json" };
    const answer = await this.ask("/v1/chat/completions", { method: "POST", headers, body });
    for await (const data of events(answer.body)) {
      if (data === "[DONE]") return;
      const told = JSON.parse(data);
      if (told.error) throw new ApiError(told.error.message, { code: told.error.code });
      const [choice] = told.choices;
      if (choice) yield { text: choice.delta?.content ?? "", finish: choice.finish_reason ?? null };
    }
  }

  async ask(path, { headers = {}, ...options } = {}) {
    if (this.key) headers = { ...headers, authorization: `Bearer ${this.key}` };
    let answer;
    try {
      answer = await fetch(path, { ...options, headers });
    } catch (error) {
      throw new ApiError(error.message, { code: "connection_lost" });
    }
    if (answer.ok) return answer;
    const told = await answer.json().catch(() => ({}));
    const { message = `the server answers ${answer.status}`, code = null } = told.error ?? {};
    throw new ApiError(message, { status: answer.status, code });
  }
}

/* Counts of what the page did, told to the server now and then: numbers, and nothing else. */
export class Tally {
  constructor(server) {
    this.server = server;
    this.counts = {};
    setInterval(() => this.tell(), TELL_MS);
    window.addEventListener("pagehide", () => this.tell());
  }

  add(name) {
    this.counts[name] = (this.counts[name] ?? 0) + 1;
  }

  tell() {
    if (!Object.keys(this.counts).length) return;
    const body = JSON.stringify(this.counts);
    this.counts = {};
    const headers = { "content-type": "application/json" };
    this.server.ask("counts", { method: "POST", headers, body, keepalive: true }).catch(() => {}); // counts may be lost
  }
}

/* The data of each server-sent event in `body`. */
async function* events(body) {
  const decoder = new TextDecoder();
  let text = "";
  for await (const chunk of pieces(body)) {
    text += decoder.decode(chunk, { stream: true });
    const lines = text.split("\n");
    text = lines.pop();
    for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
  }
}

/* The chunks of a stream; leaving the loop early cancels it. Not every browser iterates over streams itself. */
async function* pieces(stream) {
  const reader = stream.getReader();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}

function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}
