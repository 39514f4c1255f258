/* Checks of the placard's modules that need no page: run by node, or imported by a browser. `checked` throws at
   the first that fails. */

function same(found, wanted, what) {
  const [one, two] = [found, wanted].map((value) => JSON.stringify(value));
  if (one !== two) throw new Error(`${what}: ${one}, not ${two}`);
}

function refused(act, what) {
  try {
    act();
  } catch {
    return;
  }
  throw new Error(`${what} was taken`);
}

function labels({ LabelReader, wholeSentences }) {
  const label = { title: 'A "cat" \\ on/the wall', date: "", text: "Füße\n\u{1f63a} 猫\t." };
  const spellings = [
    JSON.stringify(label),
    JSON.stringify(label, null, 2),
    JSON.stringify(label).replace(/[^\x20-\x7e]/g, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`),
  ];
  for (const text of spellings) {
    for (const size of [1, 2, 3, 5, 7, text.length]) {
      const reader = new LabelReader();
      const seen = {};
      for (let at = 0; at < text.length; at += size) {
        for (const name of reader.push(text.slice(at, at + size))) {
          const shown = reader.fields[name];
          if (!shown.startsWith(seen[name] ?? "")) throw new Error(`${name} took back what it showed`);
          if (/\p{Surrogate}/u.test(shown)) throw new Error(`half of a character was shown in ${name}`);
          seen[name] = shown;
        }
      }
      same(reader.fields, label, `read by ${size}`);
      same([...reader.closed], Object.keys(label), "closed fields");
      same(reader.done, true, "done");
    }
  }
  const reader = new LabelReader();
  same(reader.push('{"title": "A c'), ["title"], "what has grown");
  same([reader.fields.title, reader.closed.size, reader.done], ["A c", 0, false], "a field that is open");
  same(reader.push('at\\ud83d'), ["title"], "what has grown");
  same(reader.fields.title, "A cat", "a half that waits");
  reader.push('x\\ude3a"');
  same(reader.fields.title, "A cat\ufffdx\ufffd", "halves that stay alone");
  for (const text of ["[", "x", '{"a": 1', '{"a" "b"', '{"a": "\\x', '{"a": "\\u12g', '{} x', '{"a": "b" "c"', "{a"]) {
    refused(() => new LabelReader().push(text), text);
  }
  same(new LabelReader().push("{}"), [], "an empty label");
  same(wholeSentences("One. Two? “Three!” Fo"), 18, "whole sentences");
  same(wholeSentences("3.5 metres"), 0, "a number");
  same(wholeSentences("猫がいる。もう"), 5, "Japanese");
}

function states({ Machine, TABLE }) {
  const names = new Set(Object.keys(TABLE));
  for (const [state, ways] of Object.entries(TABLE)) {
    same(Object.keys(ways).length > 0, true, `${state} has a way on`);
    for (const [event, next] of Object.entries(ways)) same(names.has(next), true, `${state} + ${event} → ${next}`);
  }
  const reached = new Set(["starting"]);
  for (let before = -1; before !== reached.size; ) {
    before = reached.size;
    for (const state of [...reached]) for (const next of Object.values(TABLE[state])) reached.add(next);
  }
  same([...names].filter((name) => !reached.has(name)), [], "states that nothing leads to");
  const walk = (...events) => {
    const machine = new Machine();
    for (const event of events) machine.on(event);
    return machine.state;
  };
  same(walk("ask", "open", "watch", "rest", "write", "done"), "looking", "a label by itself");
  same(walk("ask", "open", "watch", "rest", "write", "hold", "done"), "held", "held while it is written");
  same(walk("ask", "open", "watch", "shutter", "done", "release"), "looking", "the shutter, and on");
  same(walk("ask", "refuse", "shutter", "done"), "held", "a picture without a camera");
  same(walk("ask", "refuse", "watch"), "refused", "an event that does not belong");
  same(walk("ask", "open", "watch", "blank", "write"), "empty", "nothing is written about nothing");
  same(walk("ask", "open", "watch", "lose", "watch"), "looking", "away and back");
}

function words({ WORDS, NAMES, known, t, use }) {
  const holes = (text) => (text.match(/\{\w+\}/g) ?? []).sort();
  same(Object.keys(WORDS), Object.keys(NAMES), "languages");
  for (const [language, said] of Object.entries(WORDS)) {
    same(Object.keys(said).sort(), Object.keys(WORDS.en).sort(), `keys of ${language}`);
    for (const [key, text] of Object.entries(said)) {
      same(holes(text), holes(WORDS.en[key]), `places in ${key} of ${language}`);
      same(text.trim().length > 0, true, `${key} of ${language}`);
    }
  }
  same([known(["xx", "de-AT", "fr"]), known(["xx"])], ["de", "en"], "the first language that is known");
  use("tr");
  same(t("do.save"), WORDS.tr["do.save"], "what is said");
  same(t("say.unsaved", { message: "{x} $&" }), WORDS.tr["say.unsaved"].replace("{message}", () => "{x} $&"), "what is put in");
}

function hours({ closedUntil }) {
  const at = (clock) => new Date(`2026-12-01T${clock}:00`);
  same(["21:59", "22:00", "03:00", "08:00"].map((clock) => closedUntil("22:00-08:00", at(clock))), [null, "08:00", "08:00", null], "over midnight");
  same(["08:59", "12:00", "17:00"].map((clock) => closedUntil("09:00-17:00", at(clock))), [null, "17:00", null], "by day");
  same(closedUntil(null), null, "no night");
}

export async function checked(folder) {
  const load = (name) => import(`${folder}/${name}.js`);
  labels(await load("label"));
  states(await load("state"));
  words(await load("i18n"));
  hours(await load("kiosk"));
  return "checked";
}
