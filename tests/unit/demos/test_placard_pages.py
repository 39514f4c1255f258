"""The pages that the server writes: what labels say is text, and QR codes say where they lead."""

import re
from html.parser import HTMLParser

import pytest
from helpers.placard import FIELDS, read_code, saved

from mmserve.demos.placard import pages
from mmserve.demos.placard.labels import LANGUAGES

NASTY = "</p><script>alert(1)</script><img src=x onerror='x' \" & {title}"
ADDRESS = "https://placard.example:8443/placard/labels/abcDEF-_123"


class Reader(HTMLParser):
    """Every tag with its attributes, and all text."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data

    def all(self, name):
        return [attributes for tag, attributes in self.tags if tag == name]


def nasty():
    return saved(**{name: NASTY[:40] if name == "date" else NASTY for name in FIELDS})


@pytest.mark.parametrize(
    "page",
    [
        lambda: pages.permalink(nasty(), ADDRESS, "en"),
        lambda: pages.gallery([nasty(), nasty()], 7, False, "en"),
    ],
    ids=["permalink", "gallery"],
)
def test_whatever_a_label_says_is_text(page):
    read = Reader(page())
    assert NASTY in read.text
    assert [each["src"] for each in read.all("script")] == ["/placard/static/gallery.js"]
    assert all("onerror" not in each for each in read.all("img"))
    assert {each["alt"] for each in read.all("img")} == {NASTY}


def test_nothing_is_loaded_from_elsewhere_and_nothing_styled_in_line():
    for page in (pages.permalink(saved(), ADDRESS, "en"), pages.gallery([saved()], None, True, "de")):
        read = Reader(page)
        for tag, attributes in read.tags:
            assert not {name for name in attributes if name == "style" or name.startswith("on")}, tag
            for name in ("src", "href", "action"):
                assert attributes.get(name, "/placard/").startswith("/placard/"), attributes
        assert "<style" not in page


def test_a_label_stands_in_its_language_and_the_rest_in_the_readers():
    page = pages.permalink(saved(), ADDRESS, "tr")
    read = Reader(page)
    assert read.all("html")[0]["lang"] == "tr"
    assert read.all("article")[0]["lang"] == "en"
    assert "Yanılabilir" in read.text


def test_the_permalink_has_the_code_of_its_own_address_in_it():
    assert read_code(pages.permalink(saved(), ADDRESS, "en")) == ADDRESS


def test_a_code_of_its_own_is_a_whole_svg_file():
    svg = pages.code(ADDRESS).decode()
    assert svg.startswith("<?xml")
    assert 'xmlns="http://www.w3.org/2000/svg"' in svg
    assert read_code(svg) == ADDRESS


def test_the_gallery_deletes_by_a_form_and_leads_on_and_back():
    label = saved()
    read = Reader(pages.gallery([label], 7, False, "en"))
    assert read.all("form") == [{"method": "post", "action": f"/placard/labels/{label.id}/delete"}]
    assert read.all("button") == [{"type": "submit", "data-delete": label.id, "data-ask": "Delete for good?"}]
    assert [each.get("rel") for each in read.all("a") if "rel" in each] == ["first", "next"]
    assert "/placard/gallery?before=7" in [each["href"] for each in read.all("a")]


def test_an_empty_gallery_says_so_in_every_language():
    for language in LANGUAGES:
        page = pages.gallery([], None, True, language.id)
        assert pages.WORDS[language.id]["empty"] in page
        assert 'class="pages"' not in page


def test_all_languages_have_all_words():
    assert set(pages.WORDS) == {language.id for language in LANGUAGES}
    for words in pages.WORDS.values():
        assert words.keys() == pages.WORDS["en"].keys()
        assert re.findall(r"{\w+}", words["machine"]) == ["{model}", "{day}"]


@pytest.mark.parametrize(
    ("accepted", "language"),
    [
        ("de-CH,de;q=0.9,en;q=0.8", "de"),
        ("sv,fr-FR;q=0.7", "fr"),
        ("", "it"),
        ("sv", "it"),
        ("*", "it"),
        ("JA", "ja"),
    ],
)
def test_pages_are_in_the_readers_language(accepted, language):
    assert pages.language_of(accepted, "it") == language
