"""The placard's page in a real browser with tiny-vl behind it."""

import asyncio
import base64
import itertools
import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest
from helpers import browser as helpers
from helpers.browser import needs_browser
from helpers.placard_page import (
    CUT,
    NO_WEBRTC,
    PATIENCE_S,
    SAMPLES,
    SOME,
    SUBJECTS,
    WATCH_THE_WALL,
    check_access,
    finished,
    give_file,
    look_as,
    opened,
    shoot,
    shoot_all,
    state,
)
from live_server import serving

from mmserve.core.config import Config
from mmserve.demos.placard.app import create_placard
from mmserve.demos.placard.counts import Counts
from mmserve.demos.placard.options import PlacardOptions
from mmserve.demos.placard.settings import Host
from mmserve.demos.placard.store import Store

pytestmark = needs_browser

CHECKS = Path(__file__).parents[1] / "helpers" / "placard_modules.mjs"

# ---------------------------------------------------------------- the whole way


async def test_each_subject_is_named_saved_printed_found_again_and_deleted(hang, film_of, shots, capsys):
    with hang() as url:
        async with opened(f"{url}/placard/", film_of(*SUBJECTS.values())) as page:
            await page.evaluate(WATCH_THE_WALL)
            for word in SUBJECTS:
                await page.until(f"seen.some((text) => text.toLowerCase().includes('{word}'))")
            assert await page.evaluate("bare") == 0, "the old label hangs until the new one has begun"
            text = await finished(page)
            assert text.startswith("Unknown maker"), "the maker stands above the title"
            await page.press("h")
            await state(page, "held")
            figures = await page.evaluate("placard.figures")
            await check_access(page)
            await look_as(page, "laptop", "dark")
            await check_access(page)
            await shoot_all(page, shots, "page")
            await save_and_print(page, shots)
            await find_and_delete(page, url, shots)
    assert figures["via"] in ("webrtc", "websocket")
    with capsys.disabled():
        print(
            f"\nfirst word after {figures['firstWords']} ms of a scene that stands still for 500 ms"
            f" ({figures['sinceMotionMs']} ms after its last motion, the last time); {figures['via']}"
        )


async def save_and_print(page, shots):
    await page.evaluate("document.getElementById('save').click()")
    await page.until("document.querySelector('.label:not(.leaving) .code img')?.complete")
    await page.until("!document.querySelector('.label:not(.leaving) .code').hidden")
    for size, marks, width, height in (
        ("a6", True, 164, 121),
        ("a6", False, 148, 105),
        ("sixfour", True, 168.4, 117.6),
    ):
        await page.evaluate(f"""(() => {{
            const fields = document.querySelector("#printing form").elements;
            fields.size.value = "{size}";
            fields.marks.checked = {json.dumps(marks)};
            window.dispatchEvent(new Event("beforeprint"));
        }})()""")
        pdf = base64.b64decode(
            (await page.call("Page.printToPDF", preferCSSPageSize=True, printBackground=True))["data"]
        )
        (shots / f"card-{size}-{'marks' if marks else 'cut'}.pdf").write_bytes(pdf)
        [box] = set(re.findall(rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)\]", pdf))
        assert [float(side) / 72 * 25.4 for side in box] == pytest.approx([width, height], abs=0.6)
        assert len(re.findall(rb"/Type /Page\b", pdf)) == 1


async def find_and_delete(page, url, shots):
    await page.go(f"{url}/placard/?screen")
    assert "Unknown maker" in await finished(page)
    await shoot(page, shots / "screen.png")
    await page.go(f"{url}/placard/gallery")
    await page.until("document.querySelector('.work img')?.complete")
    await check_access(page)
    await shoot_all(page, shots, "gallery", SOME)
    await page.go(await page.evaluate("document.querySelector('.work a').href"))
    await page.until("Boolean(document.querySelector('.permalink .qr svg'))")
    await check_access(page)
    await shoot_all(page, shots, "permalink", SOME)
    pdf = await page.call("Page.printToPDF", preferCSSPageSize=True)
    assert len(re.findall(rb"/Type /Page\b", base64.b64decode(pdf["data"]))) == 1
    await page.evaluate("document.querySelector('[data-delete]').click()")
    assert await page.evaluate("Boolean(document.querySelector('[data-delete][data-sure]'))"), "it asks"
    await page.evaluate("document.querySelector('[data-delete]').click()")
    await page.until("Boolean(document.querySelector('.gallery .empty'))")


# ---------------------------------------------------------------- other ways


async def test_without_webrtc_the_keyboard_alone_does_everything(hang, film_of, shots):
    with hang() as url:
        async with opened(f"{url}/placard/", film_of(None, "cat.jpg"), NO_WEBRTC) as page:
            await state(page, "empty")
            assert await page.evaluate("document.getElementById('hint').textContent")
            assert await page.evaluate("placard.figures.labels") == 0, "nothing is written about nothing"
            assert "cat" in (await finished(page, "cat")).lower()
            assert await page.evaluate("placard.figures.via") == "websocket"
            spoken = await page.evaluate("document.getElementById('spoken').textContent")
            assert "Cat on Green." in spoken, "screen readers are told the title"
            await page.press("h")
            await state(page, "held")
            await check_focus(page)
            await page.press("h")
            await check_keys(page, shots)


async def check_focus(page):
    """With Tab alone every control is reached, and each shows that it is."""
    reached, rings = [], []
    for _ in range(14):
        await page.press("Tab")
        reached.append(await page.evaluate("document.activeElement.id || document.activeElement.className"))
        rings.append(await page.evaluate("getComputedStyle(document.activeElement).outlineStyle"))
    wanted = {
        "skip",
        "gallery",
        "open-settings",
        "open-help",
        "hold",
        "upload",
        "shutter",
        "save",
        "print",
        "more",
    }
    assert wanted <= set(reached)
    assert set(rings[: reached.index("more")]) <= {"solid", "auto"}
    await page.evaluate("document.activeElement.blur()")


async def check_keys(page, shots):
    labels = await page.evaluate("placard.figures.labels")
    while await page.evaluate("!placard.machine.frozen"):  # nothing is written while there is nothing to see
        await state(page, "looking", "still", "writing")
        await page.press(" ")
    await state(page, "held")
    assert await page.evaluate("placard.figures.labels") > labels
    assert await page.evaluate("document.getElementById('still').getAttribute('aria-label')")
    await page.press("h")
    await state(page, "looking", "still", "writing", "empty")
    await page.press("h")
    await state(page, "held")
    await page.press("s")
    await page.until("document.getElementById('save').textContent.trim() === 'Saved'")
    for key, dialog in (("?", "help"), ("p", "printing")):
        await page.press(key)
        await page.until(f"document.getElementById('{dialog}').open")
        await check_access(page)
        await shoot(page, shots / f"{dialog}.png")
        await page.press("Escape")
        await page.until(f"!document.getElementById('{dialog}').open")
    await page.evaluate("document.getElementById('open-settings').focus()")
    await page.press("Enter")
    await page.until("document.getElementById('settings').open")
    await check_access(page)
    await shoot(page, shots / "settings.png")
    await page.press("Escape")
    await page.evaluate("document.activeElement.blur()")
    await page.press("g")
    await page.until("document.querySelector('.gallery .work') && document.readyState === 'complete'")


@pytest.mark.parametrize(
    ("hindrance", "name"),
    [
        ("NotAllowedError", "refused"),
        ("NotFoundError", "no-camera"),
        ("NotReadableError", "taken"),
        (None, "insecure"),
    ],
)
async def test_whoever_has_no_camera_is_told_why_and_uploads(hang, shots, hindrance, name):
    refuse = f"Promise.reject(new DOMException('no', '{hindrance}'))"
    script = (
        f"navigator.mediaDevices.getUserMedia = () => {refuse};"
        if hindrance
        else "Object.defineProperty(window, 'isSecureContext', { value: false });"
    )
    with hang() as url:
        async with opened(f"{url}/placard/", script=script) as page:
            await state(page, name)
            title = await page.evaluate("document.getElementById('notice-title').textContent")
            words = await page.evaluate("import('/placard/static/i18n.js').then(({ WORDS }) => WORDS.en)")
            assert title == words[f"note.{name}"]
            await shoot(page, shots / f"{name}.png")
            await check_access(page)
            if name == "no-camera":
                await try_samples(page, shots)
            if name == "refused":
                await page.evaluate(WATCH_THE_WALL)
                await give_file(page, SAMPLES / "circle-rabbit.jpg")
                assert "Red Circle and Rabbit on Yellow" in await finished(page, "rabbit")
                await state(page, "held")
                await page.evaluate("document.getElementById('hold').click()")
                await state(page, "refused")


async def try_samples(page, shots):
    """The pictures that hang there to be tried have labels, before the first one and afterwards."""
    await page.evaluate("document.querySelector('.label:not(.leaving) .samples button').click()")
    assert "Cat on Green" in await finished(page, "cat")
    await state(page, "held")
    await page.press("h")
    await state(page, "no-camera")
    await check_access(page)
    await shoot(page, shots / "samples.png")
    await page.evaluate("document.querySelector('#notice-samples li:last-child button').click()")
    assert "Teapot" in await finished(page, "teapot")
    await state(page, "held")


async def test_who_shows_what_tiny_vl_does_not_know_is_told_what_it_knows(hang, film_of, shots):
    with hang() as url:
        async with opened(f"{url}/placard/", film_of("photograph.jpg")) as page:
            assert "tiny-vl" in await finished(page, "drawn things")
            await page.press("h")
            await state(page, "held")
            await check_access(page)
            await shoot_all(page, shots, "unknown", SOME)
            await page.evaluate("document.querySelector('.label:not(.leaving) .samples button').click()")
            assert "drawn things" not in await finished(page, "cat on green")


async def test_a_server_that_was_away_is_found_again_and_the_label_stays(hang, film_of, shots):
    with hang() as url:
        async with opened(f"{url}/placard/?transport=ws", film_of("cat.jpg"), CUT) as page:
            await finished(page, "cat")
            await page.evaluate("window.away = true; sockets.at(-1).close()")
            await state(page, "lost")
            await shoot(page, shots / "lost.png")
            assert "Cat on Green" in await finished(page)
            await page.evaluate("window.away = false")
            await state(page, "looking", "still", "writing")
            assert "Cat on Green" in await finished(page)


async def test_a_locked_gallery_asks_for_the_key_once(tiny_service, tmp_path, shots):
    key = "k" * 20
    config = Config.of(api_key=key, webrtc_hosts="127.0.0.1", webrtc_private=True, drain_s=1)
    options = PlacardOptions(folder=str(tmp_path / "labels"))
    store = Store(options.path)
    store.prepare()
    host = Host(tiny_service.model_name, bundled=True, keyed=True)
    with serving(tiny_service, config, create_placard(options, store, host, Counts())) as url:
        async with opened(f"{url}/placard/?next=/placard/gallery") as page:
            await state(page, "locked")
            await shoot(page, shots / "locked.png")
            await check_access(page)
            await page.evaluate(f"document.querySelector('#unlock input').value = '{key}'")
            await page.evaluate("document.querySelector('#unlock button').click()")
            await page.until("document.body?.classList.contains('gallery')")


# ---------------------------------------------------------------- a long time


@pytest.mark.slow
async def test_hours_of_labels_leave_no_trace_in_page_or_server(hang, film_of, capsys):
    """MMSERVE_SOAK_S seconds (300 if not given) of scenes that change; figures are printed."""
    seconds = float(os.environ.get("MMSERVE_SOAK_S", 300))
    with hang(max_labels_per_min=60) as url:
        async with helpers.browser(f"{url}/placard/", film_of(*SUBJECTS.values())) as page:
            async with asyncio.timeout(PATIENCE_S):
                await finished(page)
            told = []
            until = asyncio.get_running_loop().time() + seconds
            while asyncio.get_running_loop().time() < until:
                await asyncio.sleep(min(10, seconds / 10))
                told.append(await measured(page))
    labels = [each["labels"] for each in told]
    with capsys.disabled():
        print(f"\nafter each tenth: {told[:: max(1, len(told) // 10)]}")
        print(f"start {told[0]}, a third {told[len(told) // 3]}, end {told[-1]}")
        waits = [len(list(same)) for _, same in itertools.groupby(labels)]
        print(f"{labels[-1]} labels; no new one was found at most {max(waits)} looks in turn, of {len(told)}")
        print(f"states at those looks: {Counter(each['state'] for each in told)}")
    assert all(later > earlier for earlier, later in zip(labels[::3], labels[3::3], strict=False)), "stuck"
    half = len(told) // 2
    for what, slack in (("heap_kib", 4096), ("nodes", 300), ("server_mib", 64)):
        early, late = (min(each[what] for each in part) for part in (told[half // 2 : half], told[half:]))
        assert late <= early + slack, f"{what} grows from {early} to {late}"


async def measured(page):
    """What the page has written and holds once its garbage is collected, and what this process, which is the
    server, does."""
    await page.call("HeapProfiler.collectGarbage")
    await page.call("Performance.enable")
    told = {each["name"]: each["value"] for each in (await page.call("Performance.getMetrics"))["metrics"]}
    resident = re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())
    return {
        "labels": await page.evaluate("placard.figures.labels"),
        "state": await page.evaluate("placard.machine.state"),
        "heap_kib": int(told["JSHeapUsedSize"]) >> 10,
        "nodes": int(told["Nodes"]),
        "server_mib": int(resident[1]) >> 10,
    }


# ---------------------------------------------------------------- modules


async def test_the_modules_do_in_a_browser_what_they_do_in_node(hang):
    program = json.dumps(CHECKS.read_text(encoding="utf-8"))
    with hang() as url:
        async with opened(f"{url}/static/live.html") as page:
            found = await page.evaluate(f"""(async () => {{
                const module = new Blob([{program}], {{ type: "text/javascript" }});
                const {{ checked }} = await import(URL.createObjectURL(module));
                return checked("{url}/placard/static");
            }})()""")
    assert found == "checked"
