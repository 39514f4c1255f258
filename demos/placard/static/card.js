/* The label on the wall: what is written appears on it word by word, and the old one stays until then. */

import { wholeSentences } from "./label.js";
import { t } from "./i18n.js";

const FADE_MS = 240;
const SMALLEST_PX = 15; // letters of a label that else would not fit beside its picture
const GIVEN = ["maker", "dimensions", "credit_line"]; // lines that are known before a label is written
const PLACES = { title: ".title", medium: ".medium", date: ".date", text: ".text", maker: ".maker", dimensions: ".dimensions", credit_line: ".credit" };
const SPOKEN = ["title", "medium", "date"];

/* The place where labels hang. One hangs there at a time, and for a moment the one before it. */
export class Wall {
  constructor(stack, region) {
    Object.assign(this, { stack, region });
    this.card = null; // that hangs there
    this._growing = new ResizeObserver(() => this._fit());
    window.addEventListener("resize", () => {
      this.card?.element.style.removeProperty("font-size");
      this._fit();
    });
  }

  /* Hang an empty label in the place of what hangs there. */
  hang(card) {
    const old = [...this.stack.children];
    this.stack.append(card.element);
    this.card = card;
    this._growing.disconnect();
    this._growing.observe(card.element);
    for (const element of old) {
      element.classList.add("leaving");
      element.inert = true;
      element.setAttribute("aria-hidden", "true");
      setTimeout(() => element.remove(), calm() ? 0 : FADE_MS);
    }
  }

  /* Write a label that has grown too long for its place in smaller letters, so that nobody has to scroll. */
  _fit() {
    const { stack } = this;
    const { element } = this.card;
    let size = parseFloat(getComputedStyle(element).fontSize);
    while (stack.scrollHeight > stack.clientHeight && size > SMALLEST_PX) {
      size = Math.max(SMALLEST_PX, size - 0.5);
      element.style.fontSize = `${size}px`;
    }
  }

  /* Have `text` read out, when what is being said has been said. */
  announce(text, language) {
    const line = document.createElement("p");
    line.lang = language;
    line.textContent = text;
    this.region.append(line);
    while (this.region.children.length > 8) this.region.firstChild.remove();
  }
}

export class Card {
  /* `given` are the lines that are known already; `language` is that of the label. */
  constructor(given, language) {
    this.language = language;
    this.label = { ...given };
    this.finished = false;
    this._said = new Set(); // lines that were announced
    this._announced = 0; // characters of the text that were
    this._shown = {};
    this.element = document.getElementById("card").content.firstElementChild.cloneNode(true);
    this.element.lang = language;
    for (const name of GIVEN) if (given[name]) this.write(name, given[name]);
    const machine = this.element.querySelector(".machine");
    machine.textContent = t("machine");
    machine.lang = document.documentElement.lang;
  }

  /* Show `text`, which begins as what the field `name` shows already; new words fade in. What is shown already,
     since it was known before it was written, stays. */
  write(name, text) {
    const known = this.label[name] ?? "";
    if (known.startsWith(text) && this._shown[name] === known) return;
    this.label[name] = text;
    const place = PLACES[name] && this.element.querySelector(PLACES[name]);
    if (!place) return;
    if (!text.startsWith(this._shown[name] ?? "")) place.textContent = this._shown[name] = "";
    const more = text.slice((this._shown[name] ?? "").length);
    if (!more) return;
    const ink = document.createElement("span");
    ink.className = "ink";
    ink.textContent = more;
    place.append(ink);
    this._shown[name] = text;
    place.classList.add("begun");
    for (const other of this.element.querySelectorAll(".growing")) other.classList.remove("growing");
    place.classList.add("growing");
  }

  /* What of the label can be said now that could not before: a short line when it is `closed`, whole sentences
     of the text. */
  news(closed) {
    const said = [];
    for (const name of SPOKEN) {
      if (!closed.has(name) || this._said.has(name)) continue;
      this._said.add(name);
      if (this.label[name]) said.push(`${this.label[name]}.`);
    }
    const text = this.label.text ?? "";
    const end = closed.has("text") ? text.length : wholeSentences(text);
    if (end > this._announced) said.push(text.slice(this._announced, end).trim());
    this._announced = Math.max(end, this._announced);
    return said.join(" ");
  }

  /* Nothing more is written on it. */
  finish(whole) {
    this.finished = whole;
    for (const place of this.element.querySelectorAll(".begun")) {
      place.classList.remove("growing");
      place.textContent = place.textContent; // one text in the place of its pieces
    }
    this.element.classList.add("finished");
    if (!whole) this.element.querySelector(".machine").textContent = t("unfinished");
  }

  /* Show where it is saved. */
  saved({ url, qr_url }) {
    const code = this.element.querySelector(".code");
    const link = code.querySelector("a");
    link.href = url;
    link.setAttribute("aria-label", t("do.open"));
    const image = code.querySelector("img");
    image.src = qr_url;
    image.alt = t("qr");
    code.hidden = false;
  }
}

export function calm() {
  return matchMedia("(prefers-reduced-motion: reduce)").matches;
}
