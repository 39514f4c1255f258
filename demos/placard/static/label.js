/* Reads a JSON object of strings while it is still being written.

     const reader = new LabelReader();
     reader.push('{"title": "A c');      // ["title"]: the fields that have grown
     reader.fields.title;                // "A c"
     reader.push('at", "date": ""}');    // ["title", "date"]
     reader.closed.has("title");         // true; reader.done, too

   Text may be cut anywhere: within an escape, within a \uXXXX, between two halves of a surrogate pair. What is
   shown is always whole: half of a character is kept back until the rest has come. */

const ESCAPES = { '"': '"', "\\": "\\", "/": "/", b: "\b", f: "\f", n: "\n", r: "\r", t: "\t" };
const SPACE = " \t\n\r";
const HIGH = /[\ud800-\udbff]$/;
const LONE = /\p{Surrogate}/gu; // with u, pairs are one character and no surrogates

export class LabelError extends Error {}

export class LabelReader {
  constructor() {
    this.fields = {};
    this.closed = new Set();
    this.done = false;
    this._at = this._opening;
    this._name = "";
    this._text = ""; // of the string that is being read
    this._kept = ""; // a high surrogate that waits for its low one
    this._hex = "";
    this._then = null; // what comes after this string
  }

  /* Take more text; the names of fields that have grown or been closed. LabelError where it is no such object. */
  push(text) {
    const grown = new Set();
    for (let i = 0; i < text.length; i++) {
      const name = this._at(text[i]);
      if (name) grown.add(name);
    }
    return [...grown];
  }

  // ------------------------------------------------------------ between strings

  _opening(char) {
    if (SPACE.includes(char)) return;
    if (char !== "{") throw new LabelError(`a label begins with {, not ${char}`);
    this._at = this._key;
  }

  _key(char) {
    if (SPACE.includes(char)) return;
    if (char === '"') return this._begin(this._named);
    if (char !== "}") throw new LabelError(`a field's name begins with ", not ${char}`);
    this._finish();
  }

  _colon(char) {
    if (SPACE.includes(char)) return;
    if (char !== ":") throw new LabelError(`behind a field's name stands :, not ${char}`);
    this._at = this._value;
  }

  _value(char) {
    if (SPACE.includes(char)) return;
    if (char !== '"') throw new LabelError(`a field is a string, which begins with ", not ${char}`);
    this.fields[this._name] = "";
    this._begin(this._valued);
    return this._name;
  }

  _comma(char) {
    if (SPACE.includes(char)) return;
    if (char === ",") this._at = this._key;
    else if (char === "}") this._finish();
    else throw new LabelError(`behind a field stands a comma or }, not ${char}`);
  }

  _after(char) {
    if (!SPACE.includes(char)) throw new LabelError(`behind a label stands nothing, not ${char}`);
  }

  _finish() {
    this.done = true;
    this._at = this._after;
  }

  // ------------------------------------------------------------ within a string

  _begin(then) {
    this._text = this._kept = "";
    this._then = then;
    this._at = this._inside;
  }

  _inside(char) {
    if (char === '"') return this._then();
    if (char === "\\") this._at = this._escape;
    else return this._add(char);
  }

  _escape(char) {
    this._at = char === "u" ? this._unicode : this._inside;
    this._hex = "";
    if (char === "u") return;
    if (!(char in ESCAPES)) throw new LabelError(`there is no escape \\${char}`);
    return this._add(ESCAPES[char]);
  }

  _unicode(char) {
    if (!/[0-9a-f]/i.test(char)) throw new LabelError(`\\u takes four hex digits, not ${char}`);
    this._hex += char;
    if (this._hex.length < 4) return;
    this._at = this._inside;
    return this._add(String.fromCharCode(parseInt(this._hex, 16)));
  }

  _add(char) {
    const text = this._kept + char;
    this._kept = HIGH.test(text) ? text.slice(-1) : "";
    this._text += (this._kept ? text.slice(0, -1) : text).replace(LONE, "\ufffd");
    if (this._then !== this._valued) return;
    this.fields[this._name] = this._text;
    return this._name;
  }

  _named() {
    this._name = this._text;
    this._at = this._colon;
  }

  _valued() {
    if (this._kept) this.fields[this._name] = this._text + "\ufffd"; // half a character, and no more of it
    this.closed.add(this._name);
    this._at = this._comma;
    return this._name;
  }
}

/* How far `text` goes to the end of its last whole sentence. */
export function wholeSentences(text) {
  const ends = [...text.matchAll(/[.!?…]["'”’»)]*(?=\s|$)|[。！？]/g)];
  const last = ends.at(-1);
  return last ? last.index + last[0].length : 0;
}
