"""What a caller may ask of a picture or clip: one grammar for every place where it is written.

The places, from near to far. What a nearer one says holds, and nothing that is written is ignored::

    {"image_url": {"url": ..., "max_pixels": 1}}       in the part's own object
    {"image_url": ..., "max_pixels": 2}                beside it
    POST /v1/media {..., "max_pixels": 3}              with the stored medium that the part names
    {"messages": ..., "mm_processor_kwargs": {...}}    in the request, for all parts that say nothing

``fps`` and ``num_frames`` are two words for one thing: whichever stands nearer goes before the other.
"""

import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from mmserve.core.errors import InvalidRequest

Kind = Literal["image", "video"]
Options = Mapping[str, Any]  # by the names of the fields of ImagePart and VideoPart

LOW_DETAIL_PIXELS = 512 * 512  # what "detail": "low" means to OpenAI
DETAILS = ("auto", "low", "high")
LARGEST = sys.float_info.max
NO_LIMIT = -1  # what vLLM calls "all there is" in media_io_kwargs

_COMMON = ("min_pixels", "max_pixels", "detail")
NAMES: dict[Kind, tuple[str, ...]] = {
    "image": (*_COMMON, "rgba_background_color"),
    "video": (*_COMMON, "fps", "num_frames", "timestamps", "video_pruning_rate"),
}
_HOMES: dict[Kind, str] = {"image": "a picture", "video": "a clip"}
_NESTED: dict[str, Kind] = {
    "image": "image",
    "images_kwargs": "image",
    "video": "video",
    "videos_kwargs": "video",
}
_RIVALS = {"fps": "num_frames", "num_frames": "fps"}


def read_options(fields: Mapping[str, Any], kind: Kind, where: str, *, also: Iterable[str] = ()) -> Options:
    """The options that ``fields`` sets, checked; ``also`` are names that ``fields`` may have beside them.

    InvalidRequest for a name or a value that is none, and for two that contradict each other.
    """
    given = {name: value for name, value in fields.items() if value is not None and name not in set(also)}
    for name in given:
        if name not in NAMES[kind]:
            raise InvalidRequest(_unknown(name, kind, where), param=inside(where, name))
    read = {name: _READERS[name](value, inside(where, name)) for name, value in given.items()}
    options = {_FIELDS.get(name, name): value for name, value in read.items() if value is not None}
    if given.get("max_pixels") is not None:
        options["max_pixels"] = read["max_pixels"]
    check_together(options, where)
    return options


def request_options(processor: Any, io: Any) -> dict[Kind, Options]:
    """What ``mm_processor_kwargs`` and ``media_io_kwargs`` ask for every picture, and for every clip.

    The first are flat, for both kinds as far as they fit, or nested by kind; nested ones go before flat
    ones. The second are nested by kind. InvalidRequest where two of them contradict each other.
    """
    flat, nested = _sorted(_object(processor, "mm_processor_kwargs"), "mm_processor_kwargs")
    loose, others = _sorted(_object(io, "media_io_kwargs"), "media_io_kwargs")
    if loose:
        name = next(iter(loose))
        raise InvalidRequest(
            f"media_io_kwargs.{name} is unknown; options stand in media_io_kwargs.image or"
            " media_io_kwargs.video",
            param=f"media_io_kwargs.{name}",
        )
    _check_flat(flat)
    return {kind: _of_kind(kind, flat, nested, others) for kind in NAMES}


def merged(*levels: Options) -> dict[str, Any]:
    """One set of options out of several, the nearest first."""
    options: dict[str, Any] = {}
    for level in levels:
        options |= {n: v for n, v in level.items() if n not in options and _RIVALS.get(n) not in options}
    return options


def check_together(options: Options, where: str) -> None:
    """InvalidRequest when options contradict each other."""
    if "fps" in options and "num_frames" in options:
        raise InvalidRequest(
            f"{where or 'here'}: fps and num_frames exclude each other; give one of them",
            param=inside(where, "num_frames"),
        )
    low, high = options.get("min_pixels"), options.get("max_pixels")
    if low is not None and high is not None and low > high:
        raise InvalidRequest(
            f"{where or 'here'}: min_pixels ({low}) must not exceed max_pixels ({high})",
            param=inside(where, "min_pixels"),
        )


# ---------------------------------------------------------------- options of a request


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{name} must be an object, not {type(value).__name__}", param=name)
    return value


def _sorted(fields: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[tuple[Kind, str, Options]]]:
    """The flat options, and the nested ones with their kind and their place."""
    flat = {n: v for n, v in fields.items() if n not in _NESTED and v is not None}
    nested = [
        (_NESTED[n], f"{where}.{n}", _limits(_object(v, f"{where}.{n}"), where))
        for n, v in fields.items()
        if n in _NESTED and v is not None
    ]
    return flat, [(kind, place, read_options(v, kind, place)) for kind, place, v in nested]


def _limits(fields: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """``fields`` without the numbers by which vLLM says that there is no limit."""
    if where != "media_io_kwargs":
        return fields
    return {n: v for n, v in fields.items() if not (n in _RIVALS and v == NO_LIMIT)}


def _check_flat(flat: Mapping[str, Any]) -> None:
    for name in flat:
        if not any(name in names for names in NAMES.values()):
            raise InvalidRequest(
                f"mm_processor_kwargs.{name} is unknown; it takes {', '.join(_all_names())}, and objects"
                f" of such for one kind as {', '.join(_NESTED)}",
                param=f"mm_processor_kwargs.{name}",
            )


def _of_kind(
    kind: Kind, flat: Mapping[str, Any], *nested: Sequence[tuple[Kind, str, Options]]
) -> dict[str, Any]:
    mine = {n: v for n, v in flat.items() if n in NAMES[kind]}
    options: dict[str, Any] = {}
    for place, found in [(place, found) for group in nested for k, place, found in group if k == kind]:
        _check_agreement(options, found, place)
        options |= found
    return merged(options, read_options(mine, kind, "mm_processor_kwargs"))


def _check_agreement(options: Options, found: Options, place: str) -> None:
    for name, value in found.items():
        rival = _RIVALS.get(name, "")
        if options.get(name, value) != value or rival in options:
            raise InvalidRequest(
                f"{place}.{name} contradicts another one in mm_processor_kwargs or media_io_kwargs",
                param=f"{place}.{name}",
            )


# ---------------------------------------------------------------- names and values


def _unknown(name: str, kind: Kind, where: str) -> str:
    others = [k for k, names in NAMES.items() if name in names]
    if others:
        return f"{inside(where, name)} is for {_HOMES[others[0]]}, and this is {_HOMES[kind]}"
    return (
        f"{inside(where, name)} is unknown here; the options of {_HOMES[kind]} are {', '.join(NAMES[kind])}"
    )


def _all_names() -> list[str]:
    return list(dict.fromkeys(name for names in NAMES.values() for name in names))


def inside(where: str, name: str) -> str:
    """The field ``name`` of what stands at ``where``, as errors call it."""
    name = str(name)[:64]
    return f"{where}.{name}" if where else name


def shown(value: Any) -> str:
    """A caller's value as an error repeats it: short, whatever it is."""
    return reprlib.repr(value)


def _whole(value: Any, param: str) -> int:
    if not is_number(value) or value < 1 or value != int(value):
        raise InvalidRequest(f"{param} must be a whole number of at least 1, not {shown(value)}", param=param)
    return int(value)


def _rate(value: Any, param: str) -> float:
    if not is_number(value) or value <= 0:
        raise InvalidRequest(f"{param} must be a number above 0, not {shown(value)}", param=param)
    return float(value)


def _share(value: Any, param: str) -> float:
    if not is_number(value) or not 0 <= value < 1:
        raise InvalidRequest(f"{param} must be a number from 0 to below 1, not {shown(value)}", param=param)
    return float(value)


def _seconds(value: Any, param: str) -> tuple[float, ...]:
    if not isinstance(value, list | tuple) or not all(is_number(v) and v >= 0 for v in value):
        raise InvalidRequest(f"{param} must be a list of seconds", param=param)
    return tuple(float(v) for v in value)


def _detail(value: Any, param: str) -> int | None:
    if value not in DETAILS:
        raise InvalidRequest(f"{param} must be auto, low or high, not {shown(value)}", param=param)
    return LOW_DETAIL_PIXELS if value == "low" else None


def _colour(value: Any, param: str) -> tuple[int, ...]:
    fits = isinstance(value, list | tuple) and len(value) == 3
    if not fits or not all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v <= 255 for v in value):
        raise InvalidRequest(
            f"{param} must be three whole numbers from 0 to 255 (red, green, blue), not {shown(value)}",
            param=param,
        )
    return tuple(value)


def is_number(value: Any) -> bool:
    """Whether ``value`` is a finite number, and as a float still one."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


_FIELDS = {"detail": "max_pixels", "rgba_background_color": "background"}
_READERS: dict[str, Callable[[Any, str], Any]] = {
    "min_pixels": _whole,
    "max_pixels": _whole,
    "detail": _detail,
    "rgba_background_color": _colour,
    "fps": _rate,
    "num_frames": _whole,
    "timestamps": _seconds,
    "video_pruning_rate": _share,
}
