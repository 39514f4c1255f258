/* The label as a card of paper, A6 or 6 by 4 inches, with crop marks or cut to its size. */

const LARGEST_PT = 20;
const SMALLEST_PT = 7;

/* Ask in `dialog` how to print; `prepare` is given { size, marks }, before the browser prints in any way. */
export function printing(dialog, prepare) {
  const fields = dialog.querySelector("form");
  const card = () => ({ size: fields.elements.size.value, marks: fields.elements.marks.checked });
  window.addEventListener("beforeprint", () => prepare(card()));
  dialog.addEventListener("close", () => {
    if (dialog.returnValue === "print") window.print();
    dialog.returnValue = "";
  });
}

/* Lay `card` (of the wall) on the `sheet`, in letters as large as fit. */
export function preparePrint(sheet, card, { size, marks }) {
  sheet.dataset.size = marks ? `${size}-marks` : size;
  const place = sheet.querySelector(".fit");
  place.replaceChildren();
  if (card === null) return;
  const label = card.element.cloneNode(true);
  label.classList.remove("leaving", "invites");
  place.append(label);
  fit(sheet, place);
}

function fit(sheet, place) {
  sheet.classList.add("measured");
  let size = LARGEST_PT;
  const set = () => place.style.setProperty("font-size", `${size}pt`);
  for (set(); size > SMALLEST_PT && place.scrollHeight > place.clientHeight; set()) size -= 0.5;
  sheet.classList.remove("measured");
}
