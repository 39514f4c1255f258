/* The camera and its way to the server: WebRTC first, a websocket where that does not come about. */

import { LiveCamera, LiveError, publish } from "/static/live.js";

const CONNECT_MS = 4000; // for WebRTC, before the websocket is taken
const FRAMES_A_SECOND = 6; // by websocket; the server looks at as many as it needs
const PAUSES_MS = [500, 1000, 2000, 4000, 8000]; // between two tries to reach the server
const FULL = new Set([1013, 4429]); // close codes of a server that has no room
export const BUSY = new Set(["overloaded", "engine_restarting", "workers_dead", "server_stopping", "not_ready"]);

/* The camera `device`, or the one on the back of a phone. Throws an Error whose `event` is what the machine is
   to be told: insecure, refuse, absent or taken. */
export async function openCamera(device) {
  if (!window.isSecureContext || !navigator.mediaDevices?.getUserMedia) throw hindrance("insecure");
  const which = device ? { deviceId: { ideal: device } } : { facingMode: { ideal: "environment" } };
  const video = { ...which, width: { ideal: 1280 }, height: { ideal: 720 } };
  try {
    return await navigator.mediaDevices.getUserMedia({ video, audio: false });
  } catch (error) {
    if (error.name === "NotAllowedError" || error.name === "SecurityError") throw hindrance("refuse");
    throw hindrance(error.name === "NotFoundError" ? "absent" : "taken");
  }
}

export async function cameras() {
  const found = (await navigator.mediaDevices?.enumerateDevices?.()) ?? [];
  return found.filter((device) => device.kind === "videoinput" && device.deviceId);
}

function hindrance(event) {
  return Object.assign(new Error(event), { event });
}

/* Holds a conversation with the server about a stream, and makes it again when it is lost, for ever.

   Events: "up" (the server sees the camera), "down" (it is away), "full", "locked" (it wants another key),
   "answer" (detail: pieces of an answer that began by itself), "ack" (detail: what became of a frame). */
export class Line extends EventTarget {
  /* `wanted`: { policy, sampling, instructions }, as the live client takes them. `transport` is "whip" or "ws"
     to have that one alone, else null. */
  constructor(view, stream, wanted, { key = null, transport = null } = {}) {
    super();
    Object.assign(this, { view, stream, wanted, key, transport });
    this.via = null;
    this.upAt = null; // since when the server sees the camera, by performance.now()
    this._talk = null;
    this._closed = false;
    this._tries = 0;
    this._keep();
  }

  get up() {
    return this._talk !== null;
  }

  /* The answer to `question` about what is seen now, in pieces. */
  async *ask(question) {
    if (this._talk === null) throw new LiveError("the server is away", { code: "connection_lost" });
    yield* this._talk.ask(question, { sampling: this.wanted.sampling });
  }

  /* Change the policy, the form of answers and the voice from now on. */
  update(wanted) {
    const instructions = wanted.instructions === this.wanted.instructions ? null : wanted.instructions;
    this.wanted = wanted;
    try {
      this._talk?.update({ ...wanted.policy, sampling: wanted.sampling }, instructions);
    } catch {
      // it is away; the next connection is made as is wanted then
    }
  }

  close() {
    this._closed = true;
    const talk = this._talk;
    this._talk = null;
    Promise.resolve(talk?.close()).catch(() => {});
  }

  // ------------------------------------------------------------ connecting

  async _keep() {
    while (!this._closed) {
      try {
        this._talk = await this._connect();
        this.upAt = null;
        if (this._closed) return this.close();
        this._tries = 0;
        await this._ended(this._talk);
      } catch (error) {
        if (this._tellOf(error)) return;
      }
      this._talk = null;
      if (this._closed) return;
      const pause = PAUSES_MS[Math.min(this._tries++, PAUSES_MS.length - 1)];
      await new Promise((resolve) => setTimeout(resolve, pause));
    }
  }

  /* Say what `error` means; whether it is of no use to try again. */
  _tellOf(error) {
    const locked = error.closed === 4401 || error.code === "invalid_api_key";
    const full = FULL.has(error.closed) || BUSY.has(error.code);
    if (!this._closed) this._say(locked ? "locked" : full ? "full" : "down");
    return locked;
  }

  async _connect() {
    if (this.transport !== "ws") {
      try {
        return await this._byWhip();
      } catch (error) {
        if (this.transport === "whip" || error.code === "invalid_api_key") throw error;
      }
    }
    return this._byWebsocket();
  }

  async _byWhip() {
    const { policy, sampling, instructions } = this.wanted;
    const given = { key: this.key, policy, settings: { sampling }, instructions: instructions || null };
    const talk = await within(CONNECT_MS, publish(this.stream, given), (late) => late.close());
    this.via = "webrtc";
    talk.peer.addEventListener("connectionstatechange", () => {
      if (talk.peer.connectionState === "disconnected") this._say("down");
    });
    return this._listen(talk);
  }

  async _byWebsocket() {
    const { policy, sampling, instructions } = this.wanted;
    const given = { key: this.key, policy: { ...policy, sampling }, instructions: instructions || null };
    const talk = new LiveCamera({ ...given, giveUpMs: Infinity });
    await talk.open();
    talk.addEventListener("lost", ({ detail }) => this._tellOf(detail));
    talk.show(this.view, { fps: FRAMES_A_SECOND });
    this.via = "websocket";
    return this._listen(talk);
  }

  _listen(talk) {
    talk.addEventListener("answer", ({ detail }) => this._say("answer", detail));
    talk.addEventListener("event", ({ detail }) => {
      if (detail.type !== "mmserve.frame.ack") return;
      if (detail.kept || detail.reason === "unchanged") {
        this.upAt ??= performance.now();
        this._say("up");
      }
      this._say("ack", detail);
    });
    return talk;
  }

  /* Throws what ended the conversation, when it has. */
  _ended(talk) {
    return new Promise((_, reject) => {
      talk.addEventListener("end", ({ detail }) => reject(detail));
    });
  }

  _say(name, detail = null) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }
}

/* What `promise` comes to, if it does so in time; what comes later is handed to `late`. */
function within(ms, promise, late) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(() => {
      promise.then(late, () => {});
      reject(new LiveError("no connection in time", { code: "connect_timeout" }));
    }, ms);
    promise.then(resolve, reject).finally(() => clearTimeout(timer));
  });
}

// ---------------------------------------------------------------- what the page itself sees

const LOOK_MS = 120;
const CELLS = [16, 12];
const MOVED = 10; // grey levels of 256 by which a cell differs, beside what all have in common
const DARK = 14; // mean grey of a picture that shows nothing
const FLAT = 5; // spread of grey of a picture that shows nothing

/* Looks at `view` a few times a second. Events: "move" and "rest" (after `stillMs` without motion), "blank" and
   "see" (a black or empty picture, and one that is not). */
export class Eye extends EventTarget {
  constructor(view, stillMs) {
    super();
    Object.assign(this, { view, stillMs });
    this.movedAt = performance.now();
    this.cells = null;
    this._canvas = new OffscreenCanvas(...CELLS);
    this._pen = this._canvas.getContext("2d", { willReadFrequently: true });
    this._timer = setInterval(() => this._look(), LOOK_MS);
  }

  get resting() {
    return performance.now() - this.movedAt >= this.stillMs;
  }

  get blank() {
    return this.cells !== null && nothing(this.cells);
  }

  /* Whether what is seen now differs from what was seen as `cells`. */
  differs(cells) {
    return cells === null || this.cells === null || change(this.cells, cells) > MOVED;
  }

  stop() {
    clearInterval(this._timer);
  }

  _look() {
    if (this.view.readyState < 2 || this.view.paused) return;
    this._pen.drawImage(this.view, 0, 0, ...CELLS);
    const cells = grey(this._pen.getImageData(0, 0, ...CELLS).data);
    if (this.differs(cells)) this.movedAt = performance.now();
    this.cells = cells;
    this.dispatchEvent(new Event(this.blank ? "blank" : "see"));
    this.dispatchEvent(new Event(this.resting ? "rest" : "move"));
  }
}

function grey(rgba) {
  const cells = new Float32Array(rgba.length / 4);
  for (let i = 0; i < cells.length; i++) {
    cells[i] = 0.299 * rgba[4 * i] + 0.587 * rgba[4 * i + 1] + 0.114 * rgba[4 * i + 2];
  }
  return cells;
}

/* Whether a picture of these grey levels is black, or all alike. */
export function nothing(cells) {
  const mean = cells.reduce((sum, cell) => sum + cell, 0) / cells.length;
  const spread = Math.sqrt(cells.reduce((sum, cell) => sum + (cell - mean) ** 2, 0) / cells.length);
  return mean < DARK || spread < FLAT;
}

/* By how much the two cells that differ most do, the lesser of the two. */
function change(cells, others) {
  const apart = cells.map((cell, i) => cell - others[i]);
  const common = [...apart].sort((a, b) => a - b)[apart.length >> 1];
  const sizes = apart.map((each) => Math.abs(each - common)).sort((a, b) => b - a);
  return sizes[1];
}
