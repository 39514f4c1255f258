/* A client of mmserve's live sessions for browsers: one file, no build step, no dependencies.

   By websocket, frames as JPEG files from a canvas:

     import { LiveCamera } from "/static/live.js";

     const camera = new LiveCamera({ key: "...", policy: { fps: 2 } });     // server: this page's own
     await camera.open();
     camera.show(await navigator.mediaDevices.getUserMedia({ video: true }), { fps: 5 });
     for await (const piece of camera.ask("What do you see?")) {
       out.textContent += piece.text;          // piece.ageMs: how old what it knew was; piece.frameSeq
     }
     camera.close();

   By WebRTC (WHIP), the browser's own video coder, which takes less of slow networks:

     import { publish } from "/static/live.js";

     const camera = await publish(stream, { key: "...", policy: { fps: 2 } });
     for await (const piece of camera.ask("What do you see?")) ...

   Both are a Conversation. Answers that the policy's `trigger` starts come as "answer" events, whose `detail`
   is to be iterated over like what `ask` gives. Every event of the server is an "event" event, too. Browsers
   show cameras to pages of https and of localhost only. */

const FRAMES = "mmserve.frames.v1";
const KEY = "openai-insecure-api-key.";
const HEADER = 16; // bytes: "MF", version, flags, number, microseconds; see ARCHITECTURE.md, "Realtime"
const HAS_TIME = 1;
const MOST_UNKNOWN = 8; // frames of which the server has not told yet what became of them
const UNTOLD_MS = 1000; // after which nothing more is expected to be told of them
const SEEN_MS = 10000; // for the first frame to be seen; then questions are asked all the same
const MOST_BUFFERED = 1 << 16; // bytes that have not left
const PASSING = new Set([1001, 1005, 1006, 1011, 1012, 1013, 4408, 4429]); // ends after which to try again
const FIRST_PAUSE_MS = 250;
const LONGEST_PAUSE_MS = 8000;
const GATHER_MS = 2000; // for the browser to find its addresses

/* An answer failed, or the connection has ended; then `closed` is its close code. */
export class LiveError extends Error {
  constructor(message, { code = "live_error", closed = null } = {}) {
    super(message);
    this.name = "LiveError";
    this.code = code;
    this.closed = closed;
  }
}

/* One answer, to be iterated over once: pieces { text, ageMs, frameSeq, finish, usage }. The last has no text,
   but a `finish`: "stop", "length", "cut" by a newer question, or "cancelled". `left` is called when the loop
   is left. */
class Answer {
  constructor(left = () => {}) {
    this.id = null;
    this.ended = false;
    this._left = left;
    this._pieces = [];
    this._news = null;
  }

  _put(piece) {
    if (this.ended) return;
    this.ended = piece instanceof Error || piece.finish !== null;
    this._pieces.push(piece);
    this._news?.();
  }

  async *[Symbol.asyncIterator]() {
    try {
      for (;;) {
        while (!this._pieces.length) await new Promise((resolve) => (this._news = resolve));
        const piece = this._pieces.shift();
        if (piece instanceof Error) throw piece;
        yield piece;
        if (piece.finish !== null) return;
      }
    } finally {
      this._left(this);
    }
  }
}

/* Questions and answers over some channel; `_send(text)` is what carries them. */
export class Conversation extends EventTarget {
  constructor() {
    super();
    this.fates = {}; // of frames: how many, by what the server told of them
    this._count = 0;
    this._asked = new Map();
    this._open = new Map();
    this._over = null;
    this._gates = {};
  }

  /* The answer about what is seen now, in pieces; leaving the loop early cancels it. It waits until there is
     something to be seen. A newer question cuts the one under way, or waits, as the policy says. */
  async *ask(question, { maxTokens = null, sampling = null } = {}) {
    await this._until("seen");
    const name = `ask_${++this._count}`;
    const response = { instructions: question, metadata: { ask: name } };
    if (maxTokens !== null) response.max_output_tokens = maxTokens;
    if (sampling !== null) response.mmserve = { sampling };
    const answer = new Answer();
    this._asked.set(name, answer);
    try {
      this._say({ type: "response.create", event_id: name, response });
      yield* answer;
    } finally {
      this._asked.delete(name);
      this._cancel(answer);
    }
  }

  /* Change fields of `session.mmserve`, or the instructions, from now on. */
  update(policy, instructions = null) {
    const session = { type: "realtime", mmserve: policy };
    if (instructions !== null) session.instructions = instructions;
    this._say({ type: "session.update", session });
  }

  _cancel(answer) {
    if (answer.ended || answer.id === null) return;
    answer.ended = true;
    if (this._over === null) this._say({ type: "response.cancel", response_id: answer.id });
  }

  _say(event) {
    if (this._over !== null) throw this._over;
    this._send(JSON.stringify(event));
  }

  /* Wait until `name` is reached; throws where the conversation has ended. */
  async _until(name) {
    const gate = (this._gates[name] ??= latch());
    await gate.promise;
    if (this._over !== null) throw this._over;
  }

  _reach(name) {
    (this._gates[name] ??= latch()).open();
  }

  _leave(name) {
    if (this._gates[name]?.opened) delete this._gates[name];
  }

  /* What was under way ends with the connection. */
  _lose(error) {
    for (const answer of [...this._asked.values(), ...this._open.values()]) answer._put(error);
    this._asked.clear();
    this._open.clear();
  }

  _end(error) {
    if (this._over !== null) return;
    this._over = error;
    this._lose(error);
    for (const name of ["ready", "seen"]) this._reach(name);
    this.dispatchEvent(new CustomEvent("end", { detail: error }));
  }

  _heed(text) {
    const event = JSON.parse(text);
    switch (event.type) {
      case "session.updated":
        this._reach("ready");
        break;
      case "mmserve.frame.ack":
        this.fates[event.reason] = (this.fates[event.reason] ?? 0) + 1;
        this._told(event);
        break;
      case "response.created":
        this._begin(event.response);
        break;
      case "response.output_text.delta":
        this._open.get(event.response_id)?._put({ text: event.delta, ...sight(event.mmserve), finish: null });
        break;
      case "response.done":
        this._done(event.response);
        break;
      case "error":
        this._complain(event.error);
        break;
    }
    this.dispatchEvent(new CustomEvent("event", { detail: event }));
  }

  _told() {}

  _begin(response) {
    const name = response.metadata?.ask;
    if (name !== undefined && !this._asked.has(name)) {
      this._say({ type: "response.cancel", response_id: response.id }); // whoever asked has left
      return;
    }
    const answer = this._asked.get(name) ?? new Answer((left) => this._cancel(left));
    answer.id = response.id;
    this._open.set(response.id, answer);
    if (name === undefined) this.dispatchEvent(new CustomEvent("answer", { detail: answer }));
  }

  _done(response) {
    const answer = this._open.get(response.id);
    this._open.delete(response.id);
    const details = response.status_details ?? {};
    if (response.status === "failed") {
      const { message = "the answer failed", code } = details.error ?? {};
      answer?._put(new LiveError(message, { code }));
    } else {
      const finish = finishOf(response.status, details.reason);
      answer?._put({ text: "", ...sight(response.mmserve), finish, usage: response.usage });
    }
  }

  _complain(error) {
    this._fault = new LiveError(error.message, { code: error.code });
    this._asked.get(error.event_id)?._put(this._fault);
    if (error.event_id === "session") this._refuse(this._fault);
  }

  _refuse(error) {
    this._end(error);
  }
}

/* A camera over a websocket. `policy` are fields of `session.mmserve`; `camera` names one that the server has
   from elsewhere, to ask about it. A connection that is lost is made again for
   `giveUpMs`; "lost" and "open" events tell. */
export class LiveCamera extends Conversation {
  constructor({
    server = location.origin,
    key = null,
    policy = {},
    instructions = null,
    camera = null,
    giveUpMs = 60000,
  } = {}) {
    super();
    const url = new URL(server.replace(/\/(v1\/?)?$/, "") + "/v1/realtime");
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    if (camera !== null) url.searchParams.set("camera", camera);
    this._url = url;
    this._protocols = [FRAMES, "realtime", ...(key ? [KEY + key] : [])];
    this._policy = { delta_age: true, ...policy };
    this._instructions = instructions;
    this._watching = camera !== null;
    this._giveUpMs = giveUpMs;
    this._seq = 0;
    this._unknown = 0;
    this._sentAt = 0;
    this._hope = null;
    this._everOpen = false;
    this._well = false; // the server has seen a frame over this connection
    this._lostAt = performance.now();
    this._pause = FIRST_PAUSE_MS;
    this._stops = new Set();
  }

  /* Connect; resolves when the server has taken the policy. */
  async open() {
    this._connect();
    await this._until("ready");
  }

  close() {
    for (const stop of [...this._stops]) stop();
    this._end(new LiveError("the client was closed", { code: "closed" }));
    this._socket?.close(1000);
  }

  /* Send a picture file (a Blob or ArrayBuffer of a JPEG, PNG or WebP), captured at a moment of
     performance.now(); its number, or null if the network cannot take it now: it is not queued. */
  async put(picture, captured = performance.now()) {
    const data = picture instanceof Blob ? await picture.arrayBuffer() : picture;
    if (!this._free()) return null;
    const message = new Uint8Array(HEADER + data.byteLength);
    const view = new DataView(message.buffer);
    const seq = ++this._seq;
    message.set([0x4d, 0x46, 1, HAS_TIME]);
    view.setUint32(4, seq);
    view.setBigUint64(8, BigInt(Math.max(0, Math.round(captured * 1000))));
    message.set(new Uint8Array(data), HEADER);
    this._socket.send(message);
    this._unknown += 1;
    this._sentAt = performance.now();
    const told = (this._policy.frame_ack ?? "all") === "all";
    this._hope ??= setTimeout(() => this._reach("seen"), told ? SEEN_MS : 0);
    return seq;
  }

  /* Send what `source` shows (a MediaStream, <video> or <canvas>), `fps` times a second, until the returned
     function is called. A frame that the network cannot take is left out: what is sent is always the newest. */
  show(source, { fps = 5, maxPixels = 1 << 18, quality = 0.85 } = {}) {
    const shown = source instanceof MediaStream ? videoOf(source) : source;
    const canvas = document.createElement("canvas");
    let busy = false;
    const look = async () => {
      if (busy || !this._free()) return;
      busy = true;
      try {
        const captured = performance.now();
        const picture = await still(shown, canvas, maxPixels, quality);
        if (picture !== null) await this.put(picture, captured);
      } finally {
        busy = false;
      }
    };
    const timer = setInterval(look, 1000 / fps);
    const stop = () => {
      clearInterval(timer);
      this._stops.delete(stop);
    };
    this._stops.add(stop);
    return stop;
  }

  /* Whether a frame could leave now. */
  _free() {
    if (this._unknown >= MOST_UNKNOWN && performance.now() - this._sentAt > UNTOLD_MS) this._unknown = 0;
    const ready = this._socket?.readyState === WebSocket.OPEN && this._gates.ready?.opened;
    return ready && this._unknown < MOST_UNKNOWN && this._socket.bufferedAmount < MOST_BUFFERED;
  }

  update(policy, instructions = null) {
    Object.assign(this._policy, policy);
    this._instructions = instructions ?? this._instructions;
    super.update(policy, instructions);
  }

  _told({ kept }) {
    this._unknown = Math.max(0, this._unknown - 1);
    if (kept) this._reach("seen");
  }

  _send(text) {
    if (this._socket?.readyState !== WebSocket.OPEN) {
      throw new LiveError("the connection was lost", { code: "connection_lost" });
    }
    this._socket.send(text);
  }

  _connect() {
    const socket = new WebSocket(this._url, this._protocols);
    this._socket = socket;
    this._fault = null;
    this._well = false;
    this._unknown = 0;
    socket.onopen = () => {
      const session = { type: "realtime", mmserve: this._policy };
      if (this._instructions !== null) session.instructions = this._instructions;
      socket.send(JSON.stringify({ type: "session.update", event_id: "session", session }));
    };
    socket.onmessage = ({ data }) => this._heed(data);
    socket.onclose = ({ code, reason }) => this._closed(code, reason);
  }

  _heed(text) {
    const ready = this._gates.ready?.opened;
    super._heed(text);
    if (this._gates.ready?.opened && this._over === null) {
      this._everOpen = true;
      if (this._watching) this._reach("seen");
      this._well ||= this._gates.seen?.opened;
      if (!ready) this.dispatchEvent(new CustomEvent("open"));
    }
  }

  _refuse(error) {
    super._refuse(error);
    this._socket.close(1000);
  }

  _closed(code, reason) {
    if (this._over !== null) return;
    const said = this._fault?.message || reason || "the server cannot be reached";
    const error = new LiveError(`the connection was ended (${code}): ${said}`, {
      code: "connection_lost",
      closed: code,
    });
    this._leave("ready");
    this._leave("seen");
    clearTimeout(this._hope);
    this._hope = null;
    if (this._well) {
      this._pause = FIRST_PAUSE_MS;
      this._lostAt = performance.now();
    }
    const away = performance.now() - this._lostAt;
    if (!this._everOpen || !PASSING.has(code) || away >= this._giveUpMs) {
      this._end(error);
      return;
    }
    this._lose(error);
    this.dispatchEvent(new CustomEvent("lost", { detail: error }));
    setTimeout(() => this._over === null && this._connect(), this._pause);
    this._pause = Math.min(2 * this._pause, LONGEST_PAUSE_MS);
  }
}

/* A camera sent by WebRTC; made by `publish`. `id` is its name for /v1/realtime?camera=ID. */
class SentCamera extends Conversation {
  constructor(peer, channel) {
    super();
    this.peer = peer;
    this._channel = channel;
    channel.onmessage = ({ data }) => this._heed(data);
    this._hope = setTimeout(() => this._reach("seen"), SEEN_MS);
    channel.onclose = () => this._end(new LiveError("the camera has ended", { code: "connection_lost" }));
  }

  _send(text) {
    this._channel.send(text);
  }

  _told({ reason }) {
    if (reason === "kept" || reason === "unchanged") this._reach("seen");
  }

  async close() {
    clearTimeout(this._hope);
    this._end(new LiveError("the client was closed", { code: "closed" }));
    this.peer.close();
    if (this._place) await fetch(this._place, { method: "DELETE", headers: this._headers });
  }
}

/* Send the video of `stream` by WHIP (RFC 9725) to a server of the page's own origin; resolves when it can be
   asked about. `policy` are fields of a session's policy, `settings` what else stands in `session.mmserve`
   (sampling, frame_ack, ...). `iceServers` are asked of the server if not given. */
export async function publish(
  stream,
  {
    server = location.origin,
    key = null,
    policy = {},
    settings = {},
    instructions = null,
    name = null,
    iceServers = null,
  } = {},
) {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const url = new URL(server.replace(/\/(v1\/?)?$/, "") + "/v1/whip");
  const peer = new RTCPeerConnection({ iceServers: iceServers ?? (await iceServersOf(url, headers)) });
  const camera = new SentCamera(peer, peer.createDataChannel("events"));
  try {
    peer.addTransceiver(stream.getVideoTracks()[0], { direction: "sendonly", streams: [stream] });
    await peer.setLocalDescription();
    await gathered(peer);
    const given = { ...policy, ...(name && { name }), ...(instructions && { instructions }) };
    for (const [field, value] of Object.entries(given)) url.searchParams.set(field, value);
    const sent = { method: "POST", headers: { ...headers, "content-type": "application/sdp" } };
    const answer = await fetch(url, { ...sent, body: peer.localDescription.sdp });
    const text = await answer.text();
    if (!answer.ok) throw refusal(text, answer.status);
    camera._headers = headers;
    camera._place = new URL(answer.headers.get("location"), url);
    camera.id = camera._place.pathname.split("/").pop();
    await peer.setRemoteDescription({ type: "answer", sdp: text });
    camera._channel.onopen = () =>
      camera._say({
        type: "session.update",
        event_id: "session",
        session: { type: "realtime", mmserve: { delta_age: true, ...settings } },
      });
    if (camera._channel.readyState === "open") camera._channel.onopen();
    peer.onconnectionstatechange = () => {
      if (peer.connectionState === "failed") {
        camera._end(new LiveError("no way to the server was found", { code: "connection_lost" }));
      }
    };
    await camera._until("ready");
    return camera;
  } catch (error) {
    await camera.close().catch(() => {});
    throw error;
  }
}

// ---------------------------------------------------------------- bits

function latch() {
  const made = { opened: false };
  made.promise = new Promise((resolve) => {
    made.open = () => {
      made.opened = true;
      resolve();
    };
  });
  return made;
}

function sight(told) {
  return { ageMs: told?.age_ms ?? null, frameSeq: told?.frame_seq ?? null };
}

function finishOf(status, reason) {
  if (status === "cancelled") return reason === "turn_detected" ? "cut" : "cancelled";
  return status === "incomplete" ? "length" : "stop";
}

function videoOf(stream) {
  const video = document.createElement("video");
  video.muted = true;
  video.playsInline = true;
  video.srcObject = stream;
  video.play().catch(() => {}); // it is tried again by whoever shows it
  return video;
}

/* What `shown` shows now as a JPEG file; null if it shows nothing yet. */
async function still(shown, canvas, maxPixels, quality) {
  const width = shown.videoWidth ?? shown.width;
  const height = shown.videoHeight ?? shown.height;
  if (!width || !height || shown.readyState < 2) return null;
  const scale = Math.min(1, Math.sqrt(maxPixels / (width * height)));
  canvas.width = Math.max(1, Math.floor(width * scale));
  canvas.height = Math.max(1, Math.floor(height * scale));
  canvas.getContext("2d", { alpha: false }).drawImage(shown, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", quality));
}

async function iceServersOf(url, headers) {
  const answer = await fetch(url, { method: "OPTIONS", headers });
  const links = (answer.headers.get("link") ?? "").split(/,\s*(?=<)/).filter((link) => link.includes("ice-server"));
  return links.map((link) => {
    const server = { urls: link.match(/<([^>]*)>/)[1] };
    for (const field of ["username", "credential"]) {
      const found = link.match(new RegExp(`${field}="([^"]*)"`));
      if (found) server[field] = found[1];
    }
    return server;
  });
}

/* Resolves when the offer holds the browser's addresses, or enough time has passed. */
function gathered(peer) {
  return new Promise((resolve) => {
    const look = () => peer.iceGatheringState === "complete" && resolve();
    peer.addEventListener("icegatheringstatechange", look);
    setTimeout(resolve, GATHER_MS);
    look();
  });
}

function refusal(text, status) {
  try {
    const { message, code } = JSON.parse(text).error;
    return new LiveError(message, { code });
  } catch {
    return new LiveError(`the server answers ${status}`, { code: "refused" });
  }
}
