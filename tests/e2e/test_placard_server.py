"""The placard beside a server without a model: who may do what, and what it answers to what is wrong."""

import json
import ssl

import httpx
import pytest
from fake_service import FakeService
from helpers.placard import FIELDS, jpeg, read_code
from live_server import serving

from mmserve.core.config import Config
from mmserve.demos.placard.app import KINDS, STATIC, create_placard
from mmserve.demos.placard.certificate import certificate
from mmserve.demos.placard.counts import Counts
from mmserve.demos.placard.options import PlacardOptions
from mmserve.demos.placard.settings import Host
from mmserve.demos.placard.store import Store

KEY = "k;e y" * 5
PNG = b"\x89PNG\r\n\x1a\n" + bytes(64)


@pytest.fixture
def hang(tmp_path):
    """Hangs a placard with the options given; a client of its server."""
    opened = []

    def begin(api_key=None, bundled=False, tls=None, **options):
        options = PlacardOptions(folder=str(tmp_path / "labels"), **{"max_labels_per_min": 100, **options})
        store = Store(options.path, options.keep_labels)
        if options.saving != "off":
            store.prepare()
        beside = create_placard(options, store, Host("a/model", bundled, bool(api_key)), Counts())
        if tls:
            beside = beside.__class__(**{**vars(beside), "certificate": tls})
        context = serving(FakeService("a/model"), Config.of(api_key=api_key, drain_s=1), beside)
        url = context.__enter__()
        client = httpx.Client(
            base_url=url, timeout=20, verify=ssl.create_default_context(cafile=tls[0]) if tls else True
        )
        opened.append((client, context))
        return client

    yield begin
    for client, context in opened:
        client.close()
        context.__exit__(None, None, None)


def save(web, image=None, headers=None, **changes):
    label = {**FIELDS, **changes.pop("label", {})}
    fields = {"label": json.dumps(label), "voice": "curator", "language": "en", **changes}
    image = ("it.jpg", jpeg() if image is None else image, "image/jpeg")
    fields = {name: value for name, value in fields.items() if value is not None}
    return web.post("/placard/labels", files={"image": image}, data=fields, headers=headers)


def code_of(answer):
    return answer.status_code, answer.json()["error"]["code"]


# ---------------------------------------------------------------- pages


def test_the_root_leads_to_the_page(hang):
    web = hang()
    for path in ("/", "/placard"):
        answer = web.get(path, follow_redirects=True)
        assert (answer.status_code, answer.url.path) == (200, "/placard/")
        assert answer.headers["content-type"].startswith("text/html")


def test_every_answer_keeps_browsers_to_this_server(hang):
    web = hang()
    name = save(web).json()["id"]
    for path in (
        "/",
        "/setup.json",
        "/gallery",
        "/labels",
        f"/labels/{name}",
        f"/labels/{name}.jpg",
        "/nowhere",
    ):
        headers = web.get(f"/placard{path}").headers
        policy = headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "http" not in policy
        assert "*" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "same-origin"
        assert headers["permissions-policy"].startswith("camera=(self)")


def test_what_stands_in_the_folder_is_served_and_nothing_else(hang):
    web = hang()
    for path in STATIC.rglob("*"):
        if path.is_file():
            answer = web.get(f"/placard/static/{path.relative_to(STATIC).as_posix()}")
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith(KINDS[path.suffix])
            assert answer.content == path.read_bytes()
    for name in ("app.py", "../app.py", "..%2fapp.py", "%2e%2e/app.py", "", "nothing.js", "/etc/passwd"):
        assert web.get(f"/placard/static/{name}").status_code == 404, name


def test_the_api_is_where_it_was(hang):
    web = hang()
    assert web.get("/v1/models").json()["data"][0]["id"] == "a/model"
    assert web.get("/static/live.js").status_code == 200
    assert code_of(web.get("/nowhere")) == (404, "not_found")
    assert "/placard" not in web.get("/openapi.json").text


def test_errors_below_it_have_the_shape_of_the_api(hang):
    web = hang()
    assert code_of(web.get("/placard/nowhere")) == (404, "not_found")
    assert code_of(web.put("/placard/labels")) == (405, "method_not_allowed")
    assert code_of(web.get("/placard/labels/abc.png")) == (404, "not_found")
    assert code_of(web.get("/placard/labels?before=x")) == (400, "invalid_value")
    for limit in (0, 1000):
        assert code_of(web.get(f"/placard/labels?limit={limit}")) == (400, "invalid_value")


def test_a_fault_of_its_own_is_a_500_that_tells_nothing(hang, monkeypatch):
    web = hang()
    monkeypatch.setattr(Store, "page", lambda *args: 1 / 0)
    answer = web.get("/placard/labels")
    assert code_of(answer) == (500, "internal_error")
    assert "division" not in answer.text


# ---------------------------------------------------------------- labels


def test_a_label_is_saved_shown_and_deleted(hang):
    web = hang()
    answer = save(web, seen_at="2026-12-01T10:30:00+01:00")
    body = answer.json()
    assert answer.status_code == 201
    assert answer.headers["location"] == body["url"] == f"/placard/labels/{body['id']}"
    assert body["label"] == FIELDS
    assert (body["voice"], body["language"], body["model"]) == ("curator", "en", "a/model")
    assert (body["seen_at"], body["width"], body["height"]) == ("2026-12-01T09:30:00+00:00", 64, 48)
    assert web.get(f"{body['url']}.json").json() == body
    assert web.get("/placard/labels").json() == {"labels": [body], "next": None}
    image = web.get(body["image_url"])
    assert (image.headers["content-type"], image.content) == ("image/jpeg", jpeg())
    page = web.get(body["url"])
    assert FIELDS["text"] in page.text
    assert read_code(page.text) == read_code(web.get(body["qr_url"]).text) == f"{web.base_url}{body['url']}"
    assert FIELDS["title"] in web.get("/placard/gallery").text
    assert web.delete(body["url"]).status_code == 204
    for suffix in (".json", ".jpg", ".svg"):
        assert code_of(web.get(body["url"] + suffix)) == (404, "not_found")
    gone = web.get(body["url"])
    assert (gone.status_code, gone.headers["content-type"]) == (404, "text/html; charset=utf-8")
    assert "may have been deleted" in gone.text
    assert code_of(web.delete(body["url"])) == (404, "not_found")
    assert web.get("/placard/labels").json()["labels"] == []


def test_pages_of_labels_lead_from_one_to_the_next(hang):
    web = hang()
    names = [save(web).json()["id"] for _ in range(5)]
    first = web.get("/placard/labels?limit=3").json()
    rest = web.get("/placard/labels", params={"limit": 3, "before": first["next"]}).json()
    assert [each["id"] for each in (*first["labels"], *rest["labels"])] == names[::-1]
    assert rest["next"] is None


def test_a_code_leads_where_visitors_reach_the_server(hang):
    web = hang(public_url="https://placard.example:8443")
    body = save(web).json()
    assert read_code(web.get(body["qr_url"]).text) == f"https://placard.example:8443{body['url']}"


def test_a_form_deletes_and_leads_back_to_the_gallery(hang):
    web = hang()
    body = save(web).json()
    answer = web.post(f"{body['url']}/delete", headers={"origin": str(web.base_url).rstrip("/")})
    assert (answer.status_code, answer.headers["location"]) == (303, "/placard/gallery")
    assert web.get(body["url"]).status_code == 404


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"image": PNG}, "image"),
        ({"image": b""}, "image"),
        ({"label": {"title": "t" * 81}}, "label"),
        ({"label": {"more": "x"}}, "label"),
        ({"label": {"text": 7}}, "label"),
        ({"voice": "pirate"}, "voice"),
        ({"voice": None}, "voice"),
        ({"language": "xx"}, "language"),
        ({"seen_at": "yesterday"}, "seen_at"),
    ],
)
def test_what_cannot_be_saved_is_a_400_that_names_the_field(hang, changes, param):
    web = hang()
    answer = save(web, **changes)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert web.get("/placard/labels").json()["labels"] == []


def test_a_form_without_a_picture_or_that_is_none_is_a_400(hang):
    web = hang()
    assert code_of(web.post("/placard/labels", data={"label": "{}"})) == (400, "invalid_value")
    assert web.post("/placard/labels", json={}).status_code == 400


def test_a_picture_beyond_the_limit_is_a_413_before_it_is_read(hang):
    web = hang()
    assert code_of(save(web, jpeg() + bytes(4 << 20))) == (413, "payload_too_large")
    boundary = b'--b\r\nContent-Disposition: form-data; name="image"; filename="x"\r\n\r\n'
    parts = (boundary if number == 0 else bytes(1 << 20) for number in range(9))
    endless = web.post(
        "/placard/labels", content=parts, headers={"content-type": "multipart/form-data; boundary=b"}
    )
    assert code_of(endless) == (413, "payload_too_large")


def test_beyond_the_pace_a_label_is_a_429_that_says_when(hang):
    web = hang(max_labels_per_min=2)
    assert [save(web).status_code for _ in range(2)] == [201, 201]
    answer = save(web)
    assert code_of(answer) == (429, "too_many_labels")
    assert 0 < int(answer.headers["retry-after"]) <= 61
    assert len(web.get("/placard/labels").json()["labels"]) == 2
    assert web.get("/placard/counts").json() == {"looked": 0, "written": 0, "saved": 2, "refused": 1}


def test_with_saving_off_nothing_is_kept_and_no_folder_is_made(hang, tmp_path):
    web = hang(saving="off")
    assert code_of(save(web)) == (403, "saving_off")
    assert web.get("/placard/setup.json").json()["folder"] is None
    assert web.get("/placard/gallery").status_code == 200
    assert not (tmp_path / "labels").exists()


def test_pages_of_other_sites_change_nothing(hang):
    web = hang()
    body = save(web).json()
    elsewhere = {"origin": "https://elsewhere.example"}
    assert code_of(save(web, headers=elsewhere)) == (403, "origin_refused")
    assert code_of(web.delete(body["url"], headers=elsewhere)) == (403, "origin_refused")
    assert code_of(web.post(f"{body['url']}/delete", headers=elsewhere)) == (403, "origin_refused")
    assert code_of(web.post("/placard/counts", json={}, headers=elsewhere)) == (403, "origin_refused")
    assert len(web.get("/placard/labels").json()["labels"]) == 1


def test_pages_report_their_counts_and_get_the_sum(hang):
    web = hang()
    for _ in range(2):
        assert web.post("/placard/counts", json={"looked": 2, "written": 1}).status_code == 204
    assert web.get("/placard/counts").json() == {"looked": 4, "written": 2, "saved": 0, "refused": 0}
    for wrong in ({"looked": -1}, {"written": 1001}, {"saved": 1}, {"looked": "x"}, []):
        assert code_of(web.post("/placard/counts", json=wrong)) == (400, "invalid_value")
    assert code_of(web.post("/placard/counts", content=bytes(9000))) == (413, "payload_too_large")


def test_the_form_about_a_description_comes_from_the_server(hang):
    web = hang(bundled=True)
    asked = {"alt_text": "A cat in the centre of a green ground.", "language": "en"}
    form = web.post("/placard/form", json=asked).json()["schema"]
    assert form["properties"]["title"] == {"const": "Cat on Green"}
    assert code_of(web.post("/placard/form", json={"alt_text": "x" * 1001})) == (400, "invalid_value")


# ---------------------------------------------------------------- keys


def test_without_the_key_there_is_the_page_that_asks_for_it_and_nothing_else(hang):
    web = hang(KEY)
    assert web.get("/", follow_redirects=True).status_code == 200
    assert web.get("/placard/static/placard.js").status_code in (200, 404)
    for path in ("/gallery", "/labels/abc"):
        answer = web.get(f"/placard{path}")
        assert (answer.status_code, answer.headers["location"]) == (303, f"/placard/?next=/placard{path}")
    for path in (
        "/setup.json",
        "/labels",
        "/labels/abc.json",
        "/labels/abc.jpg",
        "/labels/abc.svg",
        "/counts",
    ):
        assert code_of(web.get(f"/placard{path}")) == (401, "invalid_api_key")
    assert code_of(save(web)) == (401, "invalid_api_key")
    assert code_of(web.delete("/placard/labels/abc")) == (401, "invalid_api_key")
    assert code_of(web.post("/placard/labels/abc/delete")) == (401, "invalid_api_key")
    assert code_of(web.post("/placard/counts", json={})) == (401, "invalid_api_key")
    assert code_of(web.post("/placard/form", json={"alt_text": ""})) == (401, "invalid_api_key")
    assert code_of(web.post("/placard/key")) == (401, "invalid_api_key")


def test_with_the_key_in_the_header_everything_goes_and_the_cookie_opens_the_rest(hang):
    web = hang(KEY)
    shown = {"authorization": f"Bearer {KEY}"}
    assert web.get("/placard/setup.json", headers=shown).json()["keyed"] is True
    body = save(web, headers=shown).json()
    assert web.get("/placard/key", headers=shown).status_code == 405
    answer = web.post("/placard/key", headers=shown)
    assert answer.status_code == 204
    assert "HttpOnly; SameSite=Strict" in answer.headers["set-cookie"]
    assert web.get("/placard/gallery").status_code == 200  # the client has the cookie now
    assert FIELDS["text"] in web.get(body["url"]).text
    assert web.get(body["image_url"]).status_code == 200
    assert web.get("/v1/models").status_code == 401
    assert web.delete(body["url"]).status_code == 401
    assert web.delete(body["url"], headers={"origin": str(web.base_url).rstrip("/")}).status_code == 204


def test_a_wrong_key_gets_no_cookie(hang):
    web = hang(KEY)
    answer = web.post("/placard/key", headers={"authorization": "Bearer wrong"})
    assert code_of(answer) == (401, "invalid_api_key")
    assert "set-cookie" not in answer.headers


# ---------------------------------------------------------------- TLS


def test_over_https_all_of_the_server_speaks_tls_and_cookies_are_secure(hang, tmp_path):
    web = hang(KEY, tls=certificate(tmp_path / "https", ("127.0.0.1",)))
    assert web.base_url.scheme == "https"
    shown = {"authorization": f"Bearer {KEY}"}
    assert web.get("/v1/models", headers=shown).status_code == 200
    assert web.post("/placard/key", headers=shown).headers["set-cookie"].endswith("; Secure")
    body = save(web, headers=shown).json()
    assert read_code(web.get(body["qr_url"]).text) == f"{web.base_url}{body['url']}"
    with pytest.raises(httpx.HTTPError):
        httpx.get(str(web.base_url).replace("https", "http"), timeout=5)
