/* A second display: the label alone, as it is written on another page of this browser, or saved by anyone. */

import { Card } from "./card.js";

const LOOK_MS = 5000;
const LIVE_MS = 60000; // for which what this browser writes goes before what is saved

export async function showScreen({ server, wall, channel, given, invite }) {
  document.body.classList.add("screen");
  let shown = { number: null, id: null, at: -Infinity };

  /* Show `label`; one with another number or id takes the place of what hangs there. */
  const show = ({ label, language, number = null, id = null, whole }) => {
    if (wall.card === null || number !== shown.number || id !== shown.id) {
      wall.hang(new Card(given, language));
      shown = { number, id };
    }
    for (const [field, text] of Object.entries(label)) wall.card.write(field, text);
    if (whole) wall.card.finish(true);
  };

  channel.onmessage = ({ data }) => {
    show(data);
    shown.at = performance.now();
  };
  const look = async () => {
    if (performance.now() - (shown.at ?? -Infinity) < LIVE_MS) return;
    const saved = await server.newest().catch(() => null);
    if (saved && saved.id !== shown.id) show({ ...saved, whole: true });
  };
  await look();
  if (wall.card === null) invite();
  setInterval(look, LOOK_MS);
}
