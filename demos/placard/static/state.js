/* What the page is doing: one machine, whose states are the only ones there are.

   A camera is asked for, and the server (asking, connecting); it is watched (looking, still, empty), a label is
   written (writing, or developing where its picture has been taken: by the shutter, or from a file), and is held
   beside its picture (held). What keeps the page from that has a state of its own each, with a message and a
   way on. */

/* state: { event: the state after it }. Events that are not named change nothing. */
const AWAY = { ask: "asking", lose: "lost", busy: "busy", lock: "locked", pause: "paused" };
const WATCHING = { ...AWAY, write: "writing", shutter: "developing", hold: "held" };
const HINDERED = { ask: "asking", shutter: "developing", lose: "lost", pause: "paused" };

export const TABLE = {
  starting: { ...AWAY, insecure: "insecure", absent: "no-camera", shutter: "developing" },
  asking: { ...AWAY, open: "connecting", insecure: "insecure", refuse: "refused", absent: "no-camera", taken: "taken", shutter: "developing" },
  connecting: { ...AWAY, watch: "looking", shutter: "developing" },
  looking: { ...WATCHING, rest: "still", blank: "empty" },
  still: { ...WATCHING, move: "looking", blank: "empty" },
  empty: { ...WATCHING, write: "empty", see: "looking" },
  writing: { ...WATCHING, done: "looking", hold: "developing" },
  developing: { ...AWAY, shutter: "developing", write: "developing", done: "held", release: "looking", again: "starting" },
  held: { ...AWAY, shutter: "developing", release: "looking", again: "starting" },
  insecure: HINDERED,
  refused: HINDERED,
  "no-camera": HINDERED,
  taken: HINDERED,
  lost: { ...AWAY, watch: "looking", again: "starting" },
  busy: { ...AWAY, watch: "looking", again: "starting", write: "writing", shutter: "developing" },
  locked: { again: "starting", lose: "lost" },
  paused: { again: "starting" },
};

/* States in which the picture stands still, and what is written is about it. */
export const FROZEN = new Set(["developing", "held"]);
/* States in which the camera may have a label written by itself. */
const AUTOMATIC = new Set(["looking", "still", "empty", "writing"]);

export class Machine extends EventTarget {
  constructor() {
    super();
    this.state = "starting";
    this.since = performance.now();
  }

  get frozen() {
    return FROZEN.has(this.state);
  }

  get automatic() {
    return AUTOMATIC.has(this.state);
  }

  /* Whether `event` would change anything now. */
  can(event) {
    return event in TABLE[this.state];
  }

  /* Let `event` happen; whether it changed the state. A "change" event tells { state, before, event }. */
  on(event) {
    const state = TABLE[this.state][event];
    if (state === undefined || state === this.state) return false;
    const before = this.state;
    this.state = state;
    this.since = performance.now();
    this.dispatchEvent(new CustomEvent("change", { detail: { state, before, event } }));
    return true;
  }
}
