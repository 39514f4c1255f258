/* Deleting in the gallery: asks before, and takes the label down. Without this module the button's form does it. */

const KEY = "placard.key";

async function remove(id) {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const answer = await fetch(`/placard/labels/${encodeURIComponent(id)}`, { method: "DELETE", headers });
  if (!answer.ok && answer.status !== 404) throw new Error(`the server answers ${answer.status}`);
}

/* The first press asks, on the button itself; the second one within a while means it. */
function armed(button) {
  if (button.dataset.sure) return true;
  const name = button.textContent;
  button.dataset.sure = "yes";
  button.textContent = button.dataset.ask ?? "Delete for good?";
  setTimeout(() => {
    delete button.dataset.sure;
    button.textContent = name;
  }, 4000);
  return false;
}

function takeDown(button) {
  const work = button.closest(".work");
  if (work === null) return location.assign("/placard/gallery");
  const next = work.nextElementSibling ?? work.previousElementSibling;
  work.remove();
  if (next) next.querySelector("a").focus();
  else location.reload();
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button[data-delete]");
  if (!button) return;
  event.preventDefault();
  if (!armed(button)) return;
  button.disabled = true;
  try {
    await remove(button.dataset.delete);
    takeDown(button);
  } catch (error) {
    button.disabled = false;
    button.textContent = error.message;
  }
});
