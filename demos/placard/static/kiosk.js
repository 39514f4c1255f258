/* Care for a screen that stands in an exhibition, and for the hours of the house. */

const SHIFT_MS = 60000;
const SHIFTS = [[0, 0], [1, 0], [1, 1], [2, 1], [2, 2], [1, 2], [0, 2], [0, 1]]; // pixels, so that nothing burns in
const DIM_MS = 10 * 60000; // without anything new
const STUCK_MS = 60000; // of trouble, after which the page is loaded anew
const TROUBLE = new Set(["lost", "busy", "no-camera", "taken", "refused", "asking", "connecting"]);
const LOOK_MS = 5000;

/* Keep the screen awake, move the page by a pixel now and then, dim it when nothing happens, and begin anew
   after trouble that lasts, as soon as the server can be reached. */
export function careFor(machine, server) {
  stayAwake();
  let step = 0;
  setInterval(() => {
    const [x, y] = SHIFTS[++step % SHIFTS.length];
    document.documentElement.style.setProperty("--shift-x", `${x}px`);
    document.documentElement.style.setProperty("--shift-y", `${y}px`);
  }, SHIFT_MS);
  let newsAt = performance.now();
  const news = () => {
    newsAt = performance.now();
    document.body.classList.remove("dim");
  };
  machine.addEventListener("change", ({ detail }) => detail.state === "writing" && news());
  for (const kind of ["pointerdown", "keydown", "touchstart"]) document.addEventListener(kind, news);
  setInterval(async () => {
    const now = performance.now();
    document.body.classList.toggle("dim", now - newsAt > DIM_MS);
    const stuck = TROUBLE.has(machine.state) && now - machine.since > STUCK_MS;
    if (stuck && (await server.reachable())) location.reload();
  }, LOOK_MS);
}

/* The browser lets the lock go when the page is hidden. */
async function stayAwake() {
  const lock = () => document.visibilityState === "visible" && navigator.wakeLock?.request("screen").catch(() => {});
  document.addEventListener("visibilitychange", lock);
  await lock();
}

/* When the house opens again, as "08:00", if `night` ("22:00-08:00") is now; else null. */
export function closedUntil(night, now = new Date()) {
  if (!night) return null;
  const [begins, ends] = night.split("-").map((time) => time.trim());
  const clock = `${String(now.getHours()).padStart(2, "0")}:${String(now.getMinutes()).padStart(2, "0")}`;
  const closed = begins <= ends ? begins <= clock && clock < ends : begins <= clock || clock < ends;
  return closed ? ends : null;
}
