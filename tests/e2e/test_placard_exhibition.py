"""The placard's page in an exhibition: a kiosk by day, closed at night, a model that has no room, and
labels and languages that need much of it."""

import asyncio
import base64
import json
import re

import httpx
import pytest
from helpers.browser import needs_browser
from helpers.placard import FIELDS
from helpers.placard_page import (
    CUT,
    SAMPLES,
    SCENE_S,
    SIZES,
    SOME,
    check_access,
    finished,
    give_file,
    look_as,
    opened,
    shoot,
    shoot_all,
    state,
)

from mmserve.core.errors import Overloaded
from mmserve.demos.placard.labels import LIMITS
from mmserve.demos.placard.pages import WORDS
from mmserve.server.errors import error_response

pytestmark = needs_browser

# Clocks that a test sets: `hour` of the day, and `later`, milliseconds that have passed beside the true ones.
# What the page does now and then it does at once.
CLOCKS = """
  window.hour = Number(sessionStorage.getItem("hour") ?? 12);
  window.later = 0;
  const True = Date, now = performance.now.bind(performance), every = setInterval.bind(window);
  window.Date = class extends True {
    constructor(...given) {
      super(...given);
      if (given.length === 0) this.setHours(window.hour, 0);
    }
  };
  performance.now = () => now() + window.later;
  window.setInterval = (act, ms, ...rest) => every(act, Math.min(ms, 150), ...rest);
"""
# Notes which screens are kept awake.
WAKE = """
  window.locks = [];
  navigator.wakeLock.request = async (kind) => locks.push(kind);
"""


def without_room(message="the queue is full"):
    """A script by which the server has no room for as long as ``full`` is true, as it says so itself."""
    answer = error_response(Overloaded(message))
    return f"""
      window.full = true;
      window.asked = 0;
      const plain = window.fetch;
      window.fetch = (path, options) => {{
        if (!String(path).endsWith("/v1/chat/completions")) return plain(path, options);
        window.asked += 1;
        if (!window.full) return plain(path, options);
        const headers = {{ "content-type": "application/json" }};
        const told = {{ status: {answer.status_code}, headers }};
        return Promise.resolve(new Response({json.dumps(answer.body.decode())}, told));
      }};
    """


async def words(page, key, **values):
    """What the page says for ``key``."""
    found = await page.evaluate(
        f"import('/placard/static/i18n.js').then(({{ t }}) => t('{key}', {json.dumps(values)}))"
    )
    return found


async def told(page, place):
    return await page.evaluate(f"document.getElementById('{place}').textContent")


async def labels(page):
    return await page.evaluate("placard.figures.labels")


# ---------------------------------------------------------------- a model without room


async def test_a_model_without_room_is_asked_again_until_the_label_is_there(hang, film_of, shots):
    with hang() as url:
        async with opened(f"{url}/placard/", film_of("cat.jpg"), without_room()) as page:
            await state(page, "busy")
            assert await told(page, "notice-title") == await words(page, "note.busy")
            assert await told(page, "state") == await words(page, "state.busy")
            await check_access(page)
            await shoot_all(page, shots, "busy", SOME)
            await page.until("window.asked > 1")
            assert (await labels(page), await page.evaluate("placard.machine.state")) == (0, "busy")
            await page.evaluate("window.full = false")
            assert "Cat on Green" in await finished(page, "cat")
            await state(page, "looking", "still")


async def test_what_the_shutter_took_is_written_about_when_there_is_room(hang, film_of):
    with hang(auto=False) as url:
        async with opened(f"{url}/placard/", film_of("cat.jpg"), without_room()) as page:
            await state(page, "looking", "still")
            await page.press(" ")
            await state(page, "busy")
            await page.evaluate("window.full = false")
            assert "Cat on Green" in await finished(page, "cat")
            await state(page, "held")


async def test_an_upload_without_a_camera_waits_for_room_too(hang):
    refuse = (
        "navigator.mediaDevices.getUserMedia = () => Promise.reject(new DOMException('', 'NotFoundError'));"
    )
    with hang() as url:
        async with opened(f"{url}/placard/", script=refuse + without_room()) as page:
            await state(page, "no-camera")
            await give_file(page, SAMPLES / "cat.jpg")
            await state(page, "busy")
            await page.evaluate("window.full = false")
            await finished(page, "cat")
            await state(page, "held")


async def test_a_fault_ends_the_waiting_and_is_told(hang, film_of):
    with hang(auto=False) as url:
        async with opened(f"{url}/placard/", film_of("cat.jpg"), without_room()) as page:
            await state(page, "looking", "still")
            await page.press(" ")
            await state(page, "busy")
            await page.evaluate("window.fetch = () => Promise.reject(new TypeError('gone'))")
            await state(page, "looking", "still")


# ---------------------------------------------------------------- night


async def test_at_night_the_gallery_is_closed_and_opens_by_itself(hang, film_of, shots):
    script = 'sessionStorage.setItem("hour", 23);' + CLOCKS
    with hang(night="22:00-08:00") as url:
        async with opened(f"{url}/placard/", film_of("cat.jpg"), script) as page:
            await state(page, "paused")
            assert await told(page, "notice-text") == await words(page, "note.paused.text", time="08:00")
            assert await page.evaluate("document.getElementById('view').srcObject") is None
            await check_access(page)
            await shoot_all(page, shots, "night", SOME)
            assert await labels(page) == 0
            assert not await page.evaluate("document.querySelector('.samples')"), "nothing can be tried now"
            await page.evaluate("window.hour = 8")
            assert "Cat on Green" in await finished(page, "cat")
            await page.evaluate("window.hour = 22")
            await state(page, "paused")
            assert await page.evaluate("document.getElementById('view').srcObject") is None, (
                "the camera is off"
            )
            assert "Cat on Green" in await finished(page), "what hangs there stays"


async def test_who_opens_the_gallery_at_night_has_it_until_the_next_one(hang, film_of):
    script = 'sessionStorage.setItem("hour", 3);' + CLOCKS
    with hang(night="22:00-08:00") as url:
        async with opened(f"{url}/placard/", film_of("cat.jpg"), script) as page:
            await state(page, "paused")
            assert await told(page, "retry") == await words(page, "do.wake")
            await page.evaluate("document.getElementById('retry').click()")
            await finished(page, "cat")
            await asyncio.sleep(0.5)  # a few looks at the clock
            await state(page, "looking", "still", "writing")
            await page.evaluate("window.hour = 12")
            await asyncio.sleep(0.5)
            await page.evaluate("window.hour = 22")
            await state(page, "paused")


# ---------------------------------------------------------------- a kiosk


async def test_a_kiosk_writes_and_saves_by_itself_and_shows_no_menus(hang, film_of, shots):
    with hang(kiosk=True, saving="all") as url:
        async with opened(f"{url}/placard/", film_of("cat.jpg"), WAKE) as page:
            assert "Cat on Green" in await finished(page, "cat")
            await page.until("document.querySelector('.label:not(.leaving) .code img')?.naturalWidth")
            [saved] = httpx.get(f"{url}/placard/labels").json()["labels"]
            assert saved["label"]["title"] == "Cat on Green"
            assert await page.evaluate("window.locks") == ["screen"]
            kept = await words(page, "privacy.frames.kept")
            assert await page.evaluate("document.querySelector('.privacy .frames').textContent") == kept
            shown = await page.evaluate("""[...document.querySelectorAll("button, a")]
                .filter((each) => each.checkVisibility()).map((each) => each.id)""")
            assert [name for name in shown if name] == ["hold", "shutter"]
            for key in "?pug":
                await page.press(key)
            assert await page.evaluate("document.querySelector('dialog[open]')") is None
            assert await page.evaluate("location.pathname") == "/placard/"
            await give_file(page, SAMPLES / "circle-rabbit.jpg")
            await page.press("h")
            await state(page, "held")
            assert "Cat on Green" in await finished(page), "nobody brings pictures of one's own"
            await check_access(page)
            await shoot_all(page, shots, "kiosk")
            await page.go(f"{url}/placard/?screen")
            assert "Cat on Green" in await finished(page)
            await check_access(page)
            await shoot_all(page, shots, "screen")


async def test_a_kiosk_moves_and_dims_what_it_shows_until_somebody_comes(hang, film_of):
    with hang(kiosk=True) as url:
        async with opened(f"{url}/placard/", film_of("cat.jpg"), CLOCKS) as page:
            await finished(page, "cat")
            await state(page, "looking", "still")
            style = "getComputedStyle(document.documentElement).getPropertyValue('--shift-x')"
            places = {await page.until(f"{style} || 'nowhere'")}
            while not {"0px", "1px", "2px"} <= places:
                places.add(await page.evaluate(style))
            assert places <= {"nowhere", "0px", "1px", "2px"}
            assert not await page.evaluate("document.body.classList.contains('dim')")
            await page.evaluate("window.later += 11 * 60000")
            await page.until("document.body.classList.contains('dim')")
            await page.press(" ")
            await page.until("!document.body.classList.contains('dim')")


async def test_a_kiosk_whose_server_was_away_for_long_begins_anew(hang, film_of):
    with hang(kiosk=True) as url:
        async with opened(f"{url}/placard/?transport=ws", film_of("cat.jpg"), CLOCKS + CUT) as page:
            await finished(page, "cat")
            await page.evaluate("window.before = true; window.away = true; sockets.at(-1).close()")
            await state(page, "lost")
            await asyncio.sleep(0.5)
            assert await page.evaluate("window.before"), "not at once"
            await page.evaluate("window.later += 61000")
            await page.until("window.before === undefined && document.readyState === 'complete'")
            assert "Cat on Green" in await finished(page, "cat")


async def test_a_kiosk_rests_when_it_has_written_enough_for_a_minute(hang, film_of):
    with hang(kiosk=True, max_labels_per_min=1) as url:
        async with opened(f"{url}/placard/", film_of("cat.jpg", "apples.jpg")) as page:
            await finished(page)
            resting = await words(page, "state.resting")
            await page.until(f"document.getElementById('state').textContent === {json.dumps(resting)}")
            await asyncio.sleep(1.5 * SCENE_S)  # the other scene
            assert await labels(page) == 1
            await page.press(" ")  # who asks for one has it
            await page.until("placard.figures.labels === 2")


# ---------------------------------------------------------------- what is long

LONG = {
    **FIELDS,
    "title": "Two Apples Beside a Blue Enamel Jug on a Table, Before or After a Meal",
    "text": "A blue jug leans its handle towards two apples, one red and one going soft at the stem. " * 7,
}
# What the model writes, whoever asks.
WRITES = """
  const plain = window.fetch;
  window.fetch = (path, options) => {
    if (!String(path).endsWith("/v1/chat/completions")) return plain(path, options);
    const said = options.body.includes("response_format") ? JSON.stringify(LABEL) : "A jug.";
    const event = (content, finish_reason) =>
      `data: ${JSON.stringify({ choices: [{ delta: { content }, finish_reason }] })}\\n\\n`;
    const told = { headers: { "content-type": "text/event-stream" } };
    return Promise.resolve(new Response(event(said, null) + event("", "stop") + "data: [DONE]\\n\\n", told));
  };
"""
FITS = """(({ scrollHeight, clientHeight }) => scrollHeight <= clientHeight)(
    document.getElementById("stack"))"""


def writing(label):
    """A script by which the model writes ``label``, cut to what its form allows."""
    cut = {name: text[: LIMITS[name]] for name, text in label.items()}
    return WRITES.replace("LABEL", json.dumps(cut))


async def test_the_longest_label_is_seen_whole_and_printed_on_one_card(hang, film_of, shots):
    with hang(kiosk=True, saving="all") as url:
        async with opened(f"{url}/placard/", film_of("apples.jpg"), writing(LONG)) as page:
            await finished(page, "two apples")
            await page.until("document.querySelector('.label:not(.leaving) .code img')?.naturalWidth")
            for size in ("laptop", "wall"):
                await look_as(page, size)
                await page.until(FITS)
                await shoot(page, shots / f"long-{size}.png")
            for size in SIZES:
                await look_as(page, size)
                await page.go(f"{url}/placard/?screen")
                await finished(page, "two apples")
                await page.until(FITS)
                await shoot(page, shots / f"long-screen-{size}.png")
            [saved] = httpx.get(f"{url}/placard/labels").json()["labels"]
            await page.go(f"{url}{saved['url']}")
            pdf = await page.call("Page.printToPDF", preferCSSPageSize=True)
            pdf = base64.b64decode(pdf["data"])
            (shots / "long-permalink.pdf").write_bytes(pdf)
            assert len(re.findall(rb"/Type /Page\b", pdf)) == 1
            await page.call("Emulation.setEmulatedMedia", media="print")
            card, label = await page.evaluate("""["main", ".label"].map((name) =>
                document.querySelector(name).getBoundingClientRect().bottom)""")
            assert label <= card


@pytest.mark.parametrize("width", [390, 320])
async def test_no_language_needs_more_room_than_a_phone_has(hang, film_of, shots, width):
    with hang() as url:
        async with opened(f"{url}/placard/", film_of("cat.jpg")) as page:
            await finished(page, "cat")
            await page.press("h")
            await page.press("s")
            await look_as(page, "phone", width=width)
            for language in WORDS:
                target = f"{{ target: {{ value: '{language}' }} }}"
                await page.evaluate(f"document.getElementById('language').onchange({target})")
                wide = await page.evaluate("""[...document.querySelectorAll("header, main, .side, .tools")]
                    .filter(({ scrollWidth, clientWidth }) => scrollWidth > clientWidth + 1)
                    .map((each) => each.className)""")
                assert not wide, (language, wide)
                await shoot(page, shots / f"{language}-{width}.png")
