"""Options of the placard, its nights, its pace and its counts."""

import argparse
import logging
from datetime import datetime, time

import pytest

from mmserve.demos.placard.command import add
from mmserve.demos.placard.counts import Counts, Pace, TooMany
from mmserve.demos.placard.options import Night, PlacardOptions, home
from mmserve.demos.placard.settings import Host, Settings
from mmserve.errors import ConfigError, InvalidRequest
from mmserve.options import section_from


def parsed(*flags):
    parser = argparse.ArgumentParser()
    add(parser.add_subparsers())
    return parser.parse_args(["placard", *flags])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"voice": "pirate"}, "voice must be one of curator"),
        ({"language": "xx"}, "language must be one of en"),
        ({"saving": "some"}, "saving must be one of off, ask, all"),
        ({"still_s": 0}, "still_s must be at least 0.1"),
        ({"max_labels_per_min": 0}, "max_labels_per_min must be at least 1"),
        ({"maker": "m" * 121}, "maker must have at most 120 characters"),
        ({"night": "late"}, "night must be two times like 22:00-08:00, not 'late'"),
        ({"night": "22:00-22:00"}, "night must be"),
        ({"night": "22:00"}, "night must be"),
        ({"night": "22:00-24:30"}, "night must be"),
        ({"public_url": "placard.example"}, "public_url must be like"),
        ({"public_url": "https://placard.example/sub"}, "public_url must be like"),
    ],
)
def test_a_wrong_option_names_what_is_allowed(values, words):
    with pytest.raises(ConfigError, match=words):
        PlacardOptions(**values)


def test_flags_of_placard_and_server_stand_beside_each_other():
    args = parsed("some/model", "--port", "0", "--voice", "poet", "--no-auto", "--night", "22:00-08:00")
    options = section_from(PlacardOptions, args)
    assert (options.voice, options.auto, options.night) == ("poet", False, "22:00-08:00")
    assert (args.model, args.port, args.browser) == ("some/model", 0, True)


def test_labels_are_kept_among_the_users_data(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert PlacardOptions().path == home() == tmp_path / "mmserve" / "placard"
    assert PlacardOptions(folder="~/here").path.is_absolute()


@pytest.mark.parametrize(
    ("hours", "moment", "asleep", "changes_in"),
    [
        ("22:00-08:00", "21:59", False, 60),
        ("22:00-08:00", "22:00", True, 36_000),
        ("22:00-08:00", "03:00", True, 18_000),
        ("22:00-08:00", "08:00", False, 50_400),
        ("12:00-13:30", "12:30", True, 3600),
        ("12:00-13:30", "13:30", False, 81_000),
        ("12:00-13:30", "00:00", False, 43_200),
    ],
)
def test_nights_begin_and_end_every_day(hours, moment, asleep, changes_in):
    night, at = Night.of(hours), time.fromisoformat(moment)
    assert night.covers(at) is asleep
    assert night.changes_in(datetime.combine(datetime(2026, 12, 1), at)) == changes_in


def test_the_page_is_told_that_it_is_night_and_for_how_long():
    settings = Settings(PlacardOptions(night="22:00-08:00"), Host("a/model"))
    body = settings.body(datetime(2026, 12, 1, 23))
    assert (body["night"], body["asleep"], body["asleep_changes_in_s"]) == ("22:00-08:00", True, 9 * 3600)
    body = Settings(PlacardOptions(), Host("a/model")).body(datetime(2026, 12, 1, 23))
    assert (body["night"], body["asleep"], body["asleep_changes_in_s"]) == (None, False, None)


def test_every_language_has_the_lines_that_options_fix_and_its_own_for_the_rest():
    settings = Settings(PlacardOptions(language="de", maker="Ada"), Host("a/model"))
    body = settings.body(datetime(2026, 12, 1))
    assert (body["maker"], body["dimensions"]) == ("Ada", "Maße variabel")
    assert body["schema"]["properties"]["dimensions"] == {"const": "Maße variabel"}
    french = next(each for each in body["languages"] if each["id"] == "fr")
    assert french["schema"]["properties"]["maker"] == {"const": "Ada"}
    assert french["schema"]["properties"]["dimensions"] == {"const": "dimensions variables"}
    assert all(voice["available"] and voice["instructions"] for voice in body["voices"])
    assert body["alt_question"] is None


def test_the_bundled_model_has_one_voice_and_language_and_describes_first():
    settings = Settings(PlacardOptions(language="de"), Host("mmserve/tiny-vl", bundled=True))
    body = settings.body(datetime(2026, 12, 1))
    assert [voice["id"] for voice in body["voices"] if voice["available"]] == [body["voice"]] == ["tiny"]
    assert [each["id"] for each in body["languages"]] == [body["language"]] == ["en"]
    assert body["voices"][0]["instructions"] == body["languages"][0]["instructions"] == ""
    assert (body["alt_question"], body["alt_first"]) == ("Describe this image.", True)
    assert (body["pictures"], body["sampling"]) == (True, {"temperature": 0})
    form = settings.form("A cat in the centre of a green ground.", "en")
    assert form["properties"]["title"] == {"const": "Cat on Green"}
    with pytest.raises(InvalidRequest, match="language must be one of en"):
        settings.form("A cat.", "de")


def test_the_pace_leaves_room_again_after_a_minute():
    pace = Pace(2)
    pace.take(100.0)
    pace.take(130.0)
    with pytest.raises(TooMany) as caught:
        pace.take(159.0)
    assert caught.value.wait_s == 1.0
    pace.take(160.0)
    with pytest.raises(TooMany):
        pace.take(161.0)
    pace.take(190.0)


def test_counts_are_all_that_the_log_tells(caplog):
    counts = Counts()
    counts.add(looked=3, written=2)
    counts.add(saved=1)
    assert counts.body() == {"looked": 3, "written": 2, "saved": 1, "refused": 0}
    with caplog.at_level(logging.INFO):
        counts.tell()
    assert caplog.messages == ["looked 3, written 2, saved 1, refused 0"]
