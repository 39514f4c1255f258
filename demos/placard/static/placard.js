/* The placard: joins the camera, the label and the controls. What may happen when is the machine's (state.js). */

import { Server, Tally } from "./api.js";
import { BUSY, Eye, Line, cameras, openCamera } from "./camera.js";
import { Card, Wall } from "./card.js";
import { NAMES, known, t, translate, use } from "./i18n.js";
import { careFor, closedUntil } from "./kiosk.js";
import { LabelReader } from "./label.js";
import { preparePrint, printing } from "./print.js";
import { showScreen } from "./screen.js";
import { FROZEN, Machine } from "./state.js";

const $ = (id) => document.getElementById(id);
const QUERY = new URLSearchParams(location.search);
const LONGEST_SIDE = 1568; // of a picture that is uploaded or saved, in pixels
const LONGEST_ALT = 200; // characters
const FIRST_WORDS = 200; // figures that are kept
const RETRY_MS = 3000;
const NIGHT_MS = 20000; // between two looks at the clock
const TELL_MS = 1000; // between two changes of figures that change all the time
const MOVED_LATELY_MS = 4000; // beyond the time that a scene must be still: an older motion is not the cause

const server = new Server();
const machine = new Machine();
const wall = new Wall($("stack"), $("spoken"));
const tally = new Tally(server);
const channel = new BroadcastChannel("placard"); // to a second display
const figures = { labels: 0, swaps: 0, firstWordMs: null, sinceMotionMs: null, firstWords: [], frameAgeMs: null, via: null, state: machine.state };

let setup = null;
let stream = null;
let line = null;
let eye = null;
let writing = null; // what is being written, or was last
let begun = []; // moments at which labels were begun by themselves
let rest = null; // a timer, while the page rests from writing
let woken = false; // somebody has opened it for this night
let watches = 0; // how often a camera was opened
const second = QUERY.has("screen"); // this is a second display, which shows the label alone

// ---------------------------------------------------------------- what is chosen

const chosen = {
  get(name) {
    return localStorage.getItem(`placard.${name}`);
  },
  set(name, value) {
    localStorage.setItem(`placard.${name}`, value);
  },
};

function voice() {
  const offered = setup.voices.filter((each) => each.available !== false);
  return offered.find((each) => each.id === (chosen.get("voice") ?? setup.voice)) ?? offered[0];
}

/* The language that labels are written in: that of the page, if the model writes it. */
function tongue() {
  return setup.languages.find((each) => each.id === document.documentElement.lang) ?? setup.languages[0];
}

function automatic() {
  return (chosen.get("automatic") ?? String(setup.auto)) === "true";
}

function form() {
  return tongue().schema ?? setup.schema;
}

function sampling() {
  return { ...setup.sampling, structured_outputs: { json: form() } };
}

function instructions() {
  return [voice().instructions, tongue().instructions].filter(Boolean).join("\n\n");
}

/* The lines of a label that are not the model's to write, whether its form has them or not. */
function given() {
  const fields = form().properties;
  const lines = ["maker", "dimensions", "credit_line"].map((name) => [name, fields[name]?.const ?? tongue()[name] ?? setup[name]]);
  return Object.fromEntries(lines.filter(([, line]) => line));
}

/* How the camera is to be watched now. A model that is shown pictures has nothing to say about the camera itself:
   that an answer begins is the sign that the scene stands still. */
function wanted() {
  const itself = automatic() && !machine.frozen && rest === null;
  const policy = {
    fps: 2,
    sensitivity: 0.5,
    memory: 0,
    window_items: 1,
    still_s: setup.still_s,
    question: voice().question,
    trigger: itself ? "still" : "ask",
  };
  return { policy, sampling: setup.pictures ? { ...setup.sampling } : sampling(), instructions: instructions() };
}

// ---------------------------------------------------------------- the beginning

async function begin() {
  if (machine.state !== "starting") return;
  try {
    setup ??= await server.setup();
  } catch (error) {
    if (error.status === 401) return machine.on("lock");
    machine.on("lose");
    return setTimeout(() => machine.on("again"), RETRY_MS);
  }
  furnish();
  if (second) return showScreen({ server, wall, channel, given: given(), invite });
  if (closedUntil(setup.night) && !woken) return machine.on("pause");
  await watch();
}

/* Open the camera, and have the server watch it. */
async function watch() {
  stop();
  machine.on("ask");
  const mine = ++watches;
  let opened;
  try {
    opened = await openCamera(chosen.get("camera"));
  } catch (error) {
    return mine === watches && machine.on(error.event);
  }
  if (mine !== watches || machine.state !== "asking") return end(opened);
  stream = opened;
  const [track] = stream.getVideoTracks();
  track.addEventListener("ended", () => machine.can("hold") && watch());
  $("view").srcObject = stream;
  await $("view").play().catch(() => {});
  offerCameras(track.getSettings().deviceId);
  machine.on("open");
  look();
  connect();
}

function look() {
  eye = new Eye($("view"), 1000 * setup.still_s);
  eye.addEventListener("move", () => machine.on("move"));
  eye.addEventListener("rest", () => machine.on("rest"));
  eye.addEventListener("blank", () => machine.on("blank"));
  eye.addEventListener("see", () => machine.on("see"));
}

function connect() {
  const transport = QUERY.get("transport") ?? (setup.whip ? null : "ws");
  line = new Line($("view"), stream, wanted(), { key: server.key, transport });
  const mine = line;
  const heed = (name, act) => line.addEventListener(name, ({ detail }) => mine === line && act(detail));
  heed("up", () => {
    figures.via = line.via;
    if (["connecting", "lost"].includes(machine.state)) machine.on("watch");
    else if (machine.state === "busy" && !writing?.waits) machine.on("watch");
  });
  heed("down", () => machine.on("lose"));
  heed("full", () => machine.on("busy"));
  heed("locked", () => machine.on("lock") || machine.on("lose"));
  heed("ack", (ack) => {
    figures.frameAgeMs = Math.round(ack.age_ms);
    if (ack.kept) tally.add("looked");
  });
  heed("answer", bySelf);
}

function stop() {
  line?.close();
  eye?.stop();
  end(stream);
  line = eye = stream = null;
  $("view").srcObject = null;
}

function end(opened) {
  for (const track of opened?.getTracks() ?? []) track.stop();
}

// ---------------------------------------------------------------- writing

/* An answer that the server has begun by itself, since the scene stands still. */
async function bySelf(answer) {
  if (!machine.automatic || machine.state === "empty" || eye.blank) {
    tally.add("refused");
    return leave(answer);
  }
  const now = performance.now();
  begun = [...begun.filter((moment) => now - moment < 60000), now];
  if (begun.length >= setup.max_labels_per_min) restUntil(begun[0] + 60000);
  const movedAt = Math.max(eye.movedAt, line.upAt); // nobody sees that it stands still before
  const lately = now - movedAt < eye.stillMs + MOVED_LATELY_MS;
  machine.on("write");
  if (setup.pictures) leave(answer);
  await write({ answer, movedAt: lately ? movedAt : now, stillMs: lately ? eye.stillMs : 0, ...seen() });
}

/* Leaving the loop cancels an answer. */
async function leave(answer) {
  try {
    for await (const _ of answer) break;
  } catch {
    // it was not wanted anyway
  }
}

/* The picture of this moment. */
function seen() {
  return { picture: photograph($("view")), cells: eye.cells };
}

/* Write no more by itself until a moment of performance.now(). */
function restUntil(moment) {
  rest = setTimeout(() => {
    rest = null;
    resume();
  }, Math.max(0, moment - performance.now()));
  line?.update(wanted());
}

/* The shutter: take the picture, and write about it. */
async function shoot() {
  if (!line?.up || !machine.can("shutter")) return;
  if (eye.blank) return say(t("note.empty"));
  const movedAt = performance.now();
  const shot = seen();
  freeze(shot.picture);
  machine.on("shutter");
  await write({ answer: line.ask(voice().question), movedAt, taken: true, ...shot });
}

/* A picture from a file (or an <img>) takes the place of the camera's. */
async function upload(file) {
  if (!file || !setup || inKiosk() || !machine.can("shutter")) return;
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    return say(t("say.unread"));
  }
  const movedAt = performance.now();
  const picture = photograph(bitmap);
  bitmap.close();
  freeze(picture);
  machine.on("shutter");
  await write({ movedAt, picture, cells: null, taken: true });
}

/* Have a label written about `picture`, and show it as it comes. `answer` are pieces about the camera, where the
   model can be asked so; `movedAt` is when the scene came to rest, for `stillMs` until that was certain. The
   picture was `taken` by somebody, or is what a camera happened to see. */
async function write({ answer = null, movedAt, stillMs = 0, picture, cells, taken = false }) {
  const mine = { card: null, movedAt, stillMs, picture, cells, taken, waits: false, voice: voice().id, language: tongue().id, seenAt: new Date().toISOString(), reader: new LabelReader(), alt: null };
  writing = mine;
  enable();
  try {
    let finish = null;
    for await (const piece of answer === null || setup.pictures ? aboutPicture(mine) : answer) {
      if (mine !== writing) break; // a newer one is being written
      if (Number.isFinite(piece.ageMs)) figures.frameAgeMs = Math.round(piece.ageMs);
      show(mine, piece.fields ? take(mine, piece.fields) : mine.reader.push(piece.text));
      finish = piece.finish ?? finish;
    }
    await complete(mine, finish === "stop" && mine.reader.done);
  } catch (error) {
    mine.card?.finish(false);
    if (mine === writing) failed(mine, error);
  }
  if (mine === writing) machine.on("done");
}

/* What is written about the picture of `mine`, in pieces. Some models describe it first, which gives the form. */
async function* aboutPicture(mine) {
  const picture = await jpeg(mine.picture);
  let asked = sampling();
  if (setup.alt_first) {
    mine.alt = await described(picture);
    const schema = await server.form(mine.alt, mine.language);
    asked = { ...setup.sampling, structured_outputs: { json: schema } };
    const title = schema.properties.title?.const;
    if (title) yield { text: "", fields: { title }, finish: null };
  }
  yield* server.about(picture, voice().question, { instructions: instructions(), sampling: asked });
}

/* Fields that are known before they are written; their names. */
function take(mine, fields) {
  Object.assign(mine.reader.fields, fields);
  return Object.keys(fields);
}

/* Put what has grown on the wall; the first visible text takes the old label down. */
function show(mine, grown) {
  const { fields, closed } = mine.reader;
  if (mine.card === null) {
    if (!Object.values(fields).some((text) => text.trim())) return;
    mine.card = new Card(given(), mine.language);
    hang(mine);
  }
  for (const name of grown) mine.card.write(name, fields[name]);
  const said = mine.card.news(closed);
  if (said && mine === writing) wall.announce(said, mine.language);
  if (grown.length) channel.postMessage({ label: mine.card.label, language: mine.language, number: figures.swaps });
}

function hang(mine) {
  const now = performance.now();
  if (machine.state === "busy") machine.on(mine.taken ? "shutter" : "write"); // there was room at last
  wall.hang(mine.card);
  figures.swaps += 1;
  figures.sinceMotionMs = Math.round(now - mine.movedAt);
  figures.firstWordMs = Math.round(now - Math.min(now, mine.movedAt + mine.stillMs));
  figures.firstWords = [...figures.firstWords, figures.firstWordMs].slice(-FIRST_WORDS);
  tell();
}

async function complete(mine, whole) {
  mine.card?.finish(whole);
  if (!whole || mine.card === null) return enable();
  if (mine.card.label.title === setup.unknown && mayTry()) {
    mine.card.element.querySelector(".foot").before(...suggestion(stream === null));
  }
  figures.labels += 1;
  tally.add("written");
  channel.postMessage({ label: mine.card.label, language: mine.language, number: figures.swaps, whole });
  if (setup.alt_question) mine.card.label.alt_text = mine.alt ?? (await described(await jpeg(mine.picture)));
  name(mine);
  enable();
  if (setup.saving === "all") await save(mine);
}

/* Some models cannot write the alternative text within the form; they are asked for it plainly. */
async function described(picture) {
  let text = "";
  for await (const piece of server.about(picture, setup.alt_question, { sampling: setup.sampling })) text += piece.text;
  return text.trim().slice(0, LONGEST_ALT);
}

/* The picture that stands still has the words of its label. */
function name(mine) {
  const words = mine.card.label.alt_text || t("picture.held");
  mine.picture.setAttribute("aria-label", words);
}

function failed(mine, error) {
  if (BUSY.has(error.code)) {
    mine.waits = true;
    machine.on("busy");
    return setTimeout(() => anew(mine), RETRY_MS);
  }
  if (machine.state === "busy") machine.on(line?.up ? "watch" : "again");
  if (error.code !== "connection_lost") say(t("say.failed", { message: error.message }));
}

/* Write what there was no room for: about the picture that was taken, or else about what is seen now. */
function anew(mine) {
  if (mine !== writing || machine.state !== "busy") return;
  const movedAt = performance.now();
  if (mine.taken) return write({ movedAt, taken: true, picture: mine.picture, cells: mine.cells });
  if (!line?.up || !automatic() || eye.blank) return machine.on(line?.up ? "watch" : "again");
  return write({ answer: line.ask(voice().question), movedAt, ...seen() });
}

/* Write by itself again; what has changed since the last label does not wait for another change. */
function resume() {
  line?.update(wanted());
  const changed = eye !== null && (writing === null || eye.differs(writing.cells));
  if (!changed || !automatic() || rest !== null || !["looking", "still"].includes(machine.state) || eye.blank || !line?.up) return;
  machine.on("write");
  write({ answer: line.ask(voice().question), movedAt: performance.now(), ...seen() });
}

// ---------------------------------------------------------------- pictures

/* A canvas of what `source` (a <video> or a bitmap) shows. */
function photograph(source) {
  const width = source.videoWidth ?? source.width;
  const height = source.videoHeight ?? source.height;
  const scale = Math.min(1, LONGEST_SIDE / Math.max(width, height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(height * scale));
  canvas.getContext("2d", { alpha: false }).drawImage(source, 0, 0, canvas.width, canvas.height);
  return canvas;
}

/* Put `canvas` in the frame. */
function freeze(canvas) {
  const old = $("still");
  canvas.id = "still";
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", canvas.getAttribute("aria-label") ?? t("picture.held"));
  canvas.hidden = old.hidden;
  frame(canvas.width / canvas.height);
  if (old !== canvas) old.replaceWith(canvas);
}

/* The frame has the shape of what it holds. */
function frame(aspect) {
  document.documentElement.style.setProperty("--aspect", Math.min(2.2, Math.max(0.5, aspect)));
}

function frameCamera() {
  const { videoWidth, videoHeight } = $("view");
  if (!machine.frozen && videoWidth && videoHeight) frame(videoWidth / videoHeight);
}

function jpeg(canvas) {
  return new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.88));
}

// ---------------------------------------------------------------- what visitors do

/* Hold what hangs there with the picture that it is about, or go on. */
function hold() {
  if (machine.frozen) return stream ? machine.on("release") : machine.on("again");
  if (!machine.can("hold")) return;
  freeze(writing?.card || machine.state === "writing" ? writing.picture : photograph($("view")));
  machine.on("hold");
}

async function save(mine = writing) {
  if (setup.saving === "off") return say(t("say.off"));
  if (!mine?.card?.finished) return say(t("say.nothing"));
  if (mine.saved || mine.saving) return mine.saved && open(mine.saved.url, "_self");
  mine.saving = true;
  enable();
  try {
    mine.saved = await server.save(await jpeg(mine.picture), { ...mine, label: mine.card.label });
    mine.card.saved(mine.saved);
    if (mine === writing && setup.saving === "ask") say(t("say.saved"));
  } catch (error) {
    const kind = { 429: "say.limit", 403: "say.off" }[error.status] ?? "say.unsaved";
    say(t(kind, { message: error.message }));
  } finally {
    mine.saving = false;
    enable();
  }
}

async function unlock(event) {
  event.preventDefault();
  try {
    await server.unlock($("unlock").key.value);
  } catch (error) {
    return say(error.message);
  }
  $("unlock").reset();
  const next = QUERY.get("next") ?? "";
  if (next.startsWith("/placard/")) return location.assign(next); // where the key was missing
  machine.on("again");
}

function inKiosk() {
  return document.body.classList.contains("kiosk");
}

function ask(dialog) {
  if (!document.querySelector("dialog[open]")) $(dialog).showModal();
}

const KEYS = {
  " ": shoot,
  h: hold,
  u: () => $("file").click(),
  s: () => save(),
  p: () => !$("print").disabled && ask("printing"),
  g: () => !$("gallery").hidden && $("gallery").click(),
  "?": () => ask("help"),
};

function listen() {
  $("shutter").onclick = shoot;
  $("hold").onclick = hold;
  $("upload").onclick = $("notice-upload").onclick = KEYS.u;
  $("file").onchange = ({ target }) => {
    upload(target.files[0]);
    target.value = "";
  };
  $("save").onclick = KEYS.s;
  $("print").onclick = KEYS.p;
  $("open-settings").onclick = () => ask("settings");
  $("open-help").onclick = $("more").onclick = KEYS["?"];
  $("retry").onclick = () => {
    woken ||= machine.state === "paused";
    return machine.can("again") ? machine.on("again") : watch();
  };
  $("unlock").onsubmit = unlock;
  $("view").onresize = frameCamera;
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;
    const field = event.target.closest("input, select, textarea, dialog");
    const presses = event.key === " " && event.target.closest("button, a, summary");
    if (field || presses || !(event.key in KEYS) || (inKiosk() && !" h".includes(event.key))) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    upload(event.dataTransfer.files[0]);
  });
  document.addEventListener("paste", (event) => event.clipboardData.files[0] && upload(event.clipboardData.files[0]));
  printing($("printing"), (card) => preparePrint($("sheet"), wall.card, card));
  navigator.mediaDevices?.addEventListener?.("devicechange", () => offerCameras());
  window.addEventListener("pagehide", stop);
  window.addEventListener("pageshow", ({ persisted }) => persisted && location.reload());
}

// ---------------------------------------------------------------- settings

/* Set the page up as the server and its visitor want it. */
function furnish() {
  const kiosk = setup.kiosk || QUERY.has("kiosk");
  const usual = kiosk ? [] : navigator.languages; // in an exhibition the house chooses
  speak(chosen.get("language") ?? known([QUERY.get("lang") ?? "", ...usual, setup.language ?? "en"]));
  fill($("language"), Object.entries(NAMES), document.documentElement.lang);
  $("automatic").checked = automatic();
  document.documentElement.dataset.light = $("light").value = chosen.get("light") ?? "system";
  document.body.dataset.saving = setup.saving;
  if (kiosk && !inKiosk()) careFor(machine, server);
  document.body.classList.toggle("kiosk", kiosk);
  fill($("camera"), [["", t("set.camera.default")]], "");
  if (!second) invite();
  enable();
}

function settings() {
  $("voice").onchange = ({ target }) => {
    chosen.set("voice", target.value);
    note();
    again();
  };
  $("language").onchange = ({ target }) => {
    chosen.set("language", target.value);
    speak(target.value);
    again();
  };
  $("automatic").onchange = ({ target }) => {
    chosen.set("automatic", target.checked);
    invite();
    again();
  };
  $("camera").onchange = ({ target }) => {
    chosen.set("camera", target.value);
    watch();
  };
  $("light").onchange = ({ target }) => {
    chosen.set("light", target.value);
    document.documentElement.dataset.light = target.value;
  };
}

/* What was chosen holds for the next label. */
function again() {
  line?.update(wanted());
}

/* Say everything in `language`. */
function speak(language) {
  document.documentElement.lang = use(language);
  document.title = t("brand");
  translate(document);
  $("written").textContent = tongue().id === document.documentElement.lang ? "" : t("set.written", { language: tongue().name });
  const kept = { all: "privacy.all", ask: "privacy.saved" }[setup.saving] ?? "privacy.off";
  for (const place of document.querySelectorAll(".frames")) place.textContent = privacy();
  $("privacy-saved").textContent = t(kept, { folder: setup.folder ?? "" });
  fill($("voice"), setup.voices.map((each) => [each.id, t(`voice.${each.id}`), each.available === false]), voice().id);
  note();
  change();
}

/* What becomes of the pictures. */
function privacy() {
  return t(setup?.saving === "all" ? "privacy.frames.kept" : "privacy.frames");
}

function note() {
  $("voice-note").textContent = t(`voice.${voice().id}.note`);
}

function fill(select, options, value) {
  select.replaceChildren(...options.map(([id, name, off = false]) => Object.assign(new Option(name, id), { disabled: off })));
  select.value = value;
}

async function offerCameras(current = $("camera").value) {
  const found = await cameras();
  const names = found.map((device, i) => [device.deviceId, device.label || `${t("set.camera")} ${i + 1}`]);
  fill($("camera"), names.length ? names : [["", t("set.camera.default")]], current);
}

/* What hangs on the wall before the first label, by whether there is a camera; a model that knows little has
   pictures to try. */
function invite() {
  if (wall.card && !wall.card.invites) return;
  const blind = HINDERED.has(machine.state);
  const closed = ["paused", "locked"].includes(machine.state);
  const few = !closed && mayTry();
  const how = closed ? "" : t(blind ? "invite.upload" : automatic() ? "invite.text" : "invite.shutter");
  const invites = [document.documentElement.lang, how, few].join("\n");
  if (wall.card?.invites === invites) return;
  const card = new Card({}, document.documentElement.lang);
  card.invites = invites;
  card.write("title", t("invite.title"));
  card.write("text", how);
  card.finish(false);
  card.element.classList.add("invites");
  card.element.classList.toggle("at-once", Boolean(wall.card));
  if (few) card.element.append(...suggestion(blind));
  wall.hang(card);
}

/* Whether visitors are offered pictures to try, since the model knows little else. */
function mayTry() {
  return setup.samples.length > 0 && !inKiosk() && !second;
}

/* That the model knows drawn things alone, and some of them. */
function suggestion(blind) {
  const words = document.createElement("p");
  words.className = "known";
  words.lang = document.documentElement.lang;
  words.textContent = t(blind ? "invite.known.upload" : "invite.known");
  return [words, samples()];
}

/* Pictures of the model's world; each is a button by which it is taken. */
function samples() {
  const list = document.createElement("ul");
  list.className = "samples";
  list.setAttribute("aria-label", t("samples"));
  for (const name of setup.samples) {
    const image = Object.assign(new Image(), { src: `static/samples/${name}.jpg`, alt: t(`sample.${name}`) });
    const button = Object.assign(document.createElement("button"), { type: "button", onclick: () => upload(image) });
    button.append(image);
    const item = document.createElement("li");
    item.append(button);
    list.append(item);
  }
  return list;
}

// ---------------------------------------------------------------- what is shown

const WAYS_ON = {
  refused: ["retry", "notice-upload"],
  "no-camera": ["retry", "notice-upload"],
  taken: ["retry", "notice-upload"],
  insecure: ["notice-upload"],
  lost: ["retry"],
  busy: [],
  paused: ["retry"],
  locked: ["unlock"],
};
const NOTICES = new Set(["starting", "asking", ...Object.keys(WAYS_ON)]);
const HINDERED = new Set(["insecure", "refused", "no-camera", "taken"]); // no camera, for whatever reason
const WATCHED = new Set(["looking", "still", "empty", "writing"]); // the age of the picture is told

/* Show the state that the machine is in. */
function change() {
  const { state } = machine;
  figures.state = state;
  document.body.dataset.state = state;
  document.body.classList.toggle("frozen", machine.frozen);
  $("still").hidden = !machine.frozen;
  $("view").setAttribute("aria-hidden", machine.frozen);
  frameCamera();
  $("hint").textContent = state === "empty" ? t("note.empty") : "";
  $("notice").hidden = !NOTICES.has(state);
  if (NOTICES.has(state)) {
    $("notice-title").textContent = t(`note.${state}`);
    $("notice-text").textContent = t(`note.${state}.text`, { time: closedUntil(setup?.night) ?? "", privacy: privacy() });
  }
  for (const id of ["retry", "notice-upload", "unlock"]) $(id).hidden = !WAYS_ON[state]?.includes(id);
  if (wall.card?.invites) invite();
  $("notice-samples").replaceChildren(...(HINDERED.has(state) && wall.card?.finished && mayTry() ? [samples()] : []));
  $("retry").textContent = t(state === "paused" ? "do.wake" : "do.retry");
  enable();
  tell();
}

/* Which controls can be used, and what they are called now. */
function enable() {
  const { frozen } = machine;
  caption("hold", frozen ? "do.release" : "do.hold");
  $("hold").disabled = !frozen && !machine.can("hold");
  caption("shutter", frozen ? "do.retake" : "do.shutter");
  $("shutter").disabled = !stream || !machine.can("shutter");
  $("upload").disabled = !machine.can("shutter");
  caption("save", writing?.saved ? "do.saved" : "do.save");
  $("save").hidden = setup?.saving === "off";
  $("save").disabled = !writing?.card?.finished || Boolean(writing.saving);
  $("print").disabled = !writing?.card?.finished;
}

function caption(id, key) {
  $(id).querySelector(".name").textContent = t(key);
}

/* The small line. */
function tell() {
  $("state").textContent = t(rest !== null && ["looking", "still"].includes(machine.state) ? "state.resting" : `state.${machine.state}`);
  $("age").textContent = figures.frameAgeMs === null || !WATCHED.has(machine.state) ? "" : t("figure.age", { ms: figures.frameAgeMs });
  $("first").textContent = figures.firstWordMs === null ? "" : t("figure.first", { ms: figures.firstWordMs });
  $("via").textContent = (line?.up && { webrtc: "WebRTC", websocket: "websocket" }[figures.via]) || "";
}

let silence = null;
function say(text) {
  $("toast").textContent = text;
  clearTimeout(silence);
  silence = setTimeout(() => ($("toast").textContent = ""), 6000);
}

// ---------------------------------------------------------------- states that something begins with

machine.addEventListener("change", ({ detail: { state, before, event } }) => {
  change();
  if (state === "starting") begin();
  if (state === "paused") stop();
  if (event === "release") resume();
  else if (FROZEN.has(state) !== FROZEN.has(before)) line?.update(wanted());
});

/* At night the gallery is closed, and opens by itself. */
setInterval(() => {
  if (!setup) return;
  const closed = closedUntil(setup.night) !== null;
  if (closed && machine.state !== "paused" && !woken) machine.on("pause");
  if (!closed) {
    woken = false;
    if (machine.state === "paused") machine.on("again");
  }
}, NIGHT_MS);

setInterval(tell, TELL_MS);
window.placard = { figures, machine };
use(known(navigator.languages));
translate(document);
listen();
settings();
change();
begin();
