"""The one configuration tree: validated once at the door, frozen after, shown by ``mmserve doctor``.

Every field is made by ``option``, which carries its line of documentation and what is allowed. The
command line is generated from the tree (``add_arguments`` / ``from_arguments``), so that an option
cannot exist without being checked and documented.
"""

import argparse
import ipaddress
import math
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from mmserve.core.errors import ConfigError

BUNDLED_MODEL = "mmserve/tiny-vl"
NO_BOUND = 1e9  # a ``stall_factor`` that nothing reaches
_HOST_NAMES = re.compile(r"\s*[\w-]+(\.[\w-]+)*\s*(,\s*[\w-]+(\.[\w-]+)*\s*)*", re.ASCII)
_ICE_SERVER = re.compile(r"stun:[^\s@:]+:\d{1,5}|turn:[^\s@:]+:[^\s@]+@[^\s@:]+:\d{1,5}")
_PORTS = re.compile(r"(\d{4,5})-(\d{4,5})", re.ASCII)


def option(
    default: Any,
    doc: str,
    *,
    choices: tuple[Any, ...] | None = None,
    low: float | None = None,
    high: float | None = None,
    many: bool = False,
) -> Any:
    """A field of the tree: its default, one line of documentation, and what is allowed. The flag of a text
    with ``many`` may be given several times, which joins its values by commas."""
    meta = {"doc": doc, "choices": choices, "low": low, "high": high, "many": many}
    return field(default=default, metadata=meta)


class Section:
    """Base of the tree's sections; checks every field when it is made."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for f in fields(self):  # type: ignore[arg-type]
            _check(f, hints[f.name], getattr(self, f.name))


S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class ModelOptions(Section):
    model: str = option(BUNDLED_MODEL, "model folder or hub name; the bundled tiny-vl if none is named")
    revision: str | None = option(None, "hub revision (branch, tag or commit)")
    served_model_name: str | None = option(
        None, "name shown by /v1/models; the model's own name if not given"
    )
    dtype: str = option("auto", "weights and activations", choices=("auto", "bfloat16", "float32"))
    quantization: str = option(
        "none",
        "int8 keeps the weights of linear layers in 8 bits, half of bfloat16's memory, and reads them twice"
        " as fast, at some cost in precision; on a CPU only so far",
        choices=("none", "int8"),
    )
    load_format: str = option(
        "auto", "dummy makes random weights of the real shape", choices=("auto", "dummy")
    )
    device: str = option("auto", "where the model runs", choices=("auto", "cpu", "cuda"))
    max_model_len: int | None = option(None, "longest prompt plus answer, in tokens", low=16)


@dataclass(frozen=True)
class CacheOptions(Section):
    page_size: int = option(16, "tokens of a KV page", low=1, high=256)
    prefix_caching: bool = option(
        True, "keep keys and values of prompts and answers for those that begin alike"
    )
    kv_cache_mib: int | None = option(
        None,
        "size of the KV pool in MiB; if not given 1024 on a CPU, and on a GPU what gpu_memory_share leaves"
        " when the largest step and the largest picture were measured",
        low=1,
    )
    gpu_memory_share: float = option(
        0.9, "share of a GPU's memory that may be taken, what others hold of it included", low=0.05, high=1.0
    )
    encoder_cache_mib: int = option(256, "size of the pool of encoded pictures in MiB", low=1)
    early_answers_mib: int = option(
        16, "memory for what pictures and clips became (sizes and digests, no pixels) in MiB", low=0
    )
    pixel_cache_mib: int = option(
        128,
        "memory for resized pixels that the encoder does not have yet in MiB; at most a quarter of arena_mib",
        low=0,
    )


@dataclass(frozen=True)
class SchedulerOptions(Section):
    max_running: int = option(64, "requests in one batch", low=1, high=4096)
    max_waiting: int = option(512, "requests queued before new ones are refused with 503", low=1)
    step_tokens: int = option(512, "token budget of one step: decodes first, then prefill chunks", low=1)
    encoder_tokens: int | None = option(
        None,
        "vision tokens encoded between two steps (one larger item runs alone); 256 on a CPU, 4096 on a GPU"
        " if not given",
        low=1,
    )
    stall_factor: float | None = option(
        None,
        "most that prompts and pictures may hold up answers that are being written: how many times the usual"
        " time a token may take; 1.8 on a CPU, without bound on a GPU if not given",
        low=1.0,
    )


@dataclass(frozen=True)
class RunnerOptions(Section):
    attention_backend: str = option(
        "auto",
        "attention over the paged KV cache; native is by kernels in C++ for the CPU, flashinfer and triton"
        " are for GPUs, torch by matrix products, reference the slow oracle",
        choices=("auto", "native", "flashinfer", "triton", "torch", "reference"),
    )
    linear_backend: str = option(
        "auto",
        "onednn prepacks weights on a CPU; native widens bf16 ones where the CPU has no bf16 instructions;"
        " plain is the reference; with a quantization it is for the layers that stay as they are",
        choices=("auto", "onednn", "native", "plain"),
    )
    grammar_backend: str = option(
        "guidance",
        "library that keeps answers to their forms; xgrammar is an extra, keeps no calls of tools to theirs"
        " and refuses grammars, and schemas and patterns that it would not hold exactly",
        choices=("guidance", "xgrammar"),
    )
    overlap: str = option(
        "auto",
        "launch a step before the results of the one before are handled, which hides the host's time; auto is"
        " on for a GPU and off on a CPU, where there is nothing to hide",
        choices=("auto", "on", "off"),
    )
    enforce_eager: bool = option(
        False, "run every step as it is: record none on a CPU, capture no CUDA graphs on a GPU"
    )
    threads: int | None = option(None, "CPU threads of the model; all cores if not given", low=1)


@dataclass(frozen=True)
class MediaOptions(Section):
    workers: int = option(
        2,
        "processes that decode pictures and clips; 0 decodes on threads of the server itself, where a file"
        " that crashes a decoder or takes all memory takes the server with it",
        low=0,
        high=256,
    )
    worker_memory_mib: int = option(
        2048, "memory that one worker may use in MiB; a picture or clip that takes more is refused", low=256
    )
    arena_mib: int = option(
        1024, "memory for pixels on their way to the model, and for files in work, in MiB", low=16
    )
    prepare_timeout_s: float = option(
        60.0, "seconds that a picture or clip may wait for a worker, and again that it may take", low=0.1
    )
    max_preparing: int = option(
        256, "requests whose media and text are being prepared before new ones are refused with 503", low=1
    )
    max_image_bytes: int = option(64 << 20, "largest encoded picture in bytes", low=1)
    max_image_pixels: int = option(
        100_000_000,
        "largest picture in pixels, checked before decoding",
        low=1,
        high=178_956_970,  # where Pillow itself refuses
    )
    max_video_bytes: int = option(512 << 20, "largest encoded clip in bytes", low=1)
    max_video_frames: int = option(768, "most frames taken from one clip", low=1)
    video_pruning_rate: float = option(
        0.0,
        "most of a clip's vision tokens, from 0 to below 1, that are left out because they show what was"
        " there before; a request may say otherwise",
        low=0.0,
    )
    max_animation_pixels: int = option(
        1 << 31,
        "largest GIF, APNG, WebP or AVIF animation sent as a clip, in pixels of all its frames",
        low=1,
    )
    max_items: int = option(64, "pictures and clips in one request", low=1)
    max_text_chars: int = option(
        2_000_000, "characters of text in one request, refused before they are tokenised if more", low=1
    )
    background: str = option("white", "colour under transparent pixels: a name or #rrggbb")
    fetch_urls: bool = option(True, "fetch http(s) media URLs (public addresses only)")
    fetch_domains: str | None = option(
        None, "only fetch from these hosts and their sub-domains, separated by commas; from all if not given"
    )
    fetch_timeout_s: float = option(20.0, "seconds for one media URL", low=0.1)
    fetch_idle_s: float = option(5.0, "seconds that the host of a media URL may stay silent", low=0.1)
    max_fetches: int = option(32, "media URLs fetched at once; more wait", low=1)
    allow_private_urls: bool = option(False, "also fetch from private and loopback addresses")
    media_store_mib: int = option(512, "memory for media that callers send once or name, in MiB", low=1)
    media_store_s: float = option(3600.0, "seconds that such media are kept after their last use", low=0.1)
    media_root: str | None = option(None, "folder under which file:// URLs may be read; none if not given")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.allow_private_urls and not self.fetch_urls:
            raise ConfigError(
                "allow_private_urls contradicts fetch_urls being off", param="allow_private_urls"
            )
        if self.video_pruning_rate >= 1:
            raise ConfigError(
                f"video_pruning_rate must be below 1, not {self.video_pruning_rate}",
                param="video_pruning_rate",
            )
        if self.fetch_domains is not None and not _HOST_NAMES.fullmatch(self.fetch_domains):
            raise ConfigError(
                f"fetch_domains must be host names separated by commas, not {self.fetch_domains!r}",
                param="fetch_domains",
            )
        if self.media_root is not None and not Path(self.media_root).is_dir():
            raise ConfigError(f"media_root must be a folder, not {self.media_root!r}", param="media_root")


@dataclass(frozen=True)
class ServerOptions(Section):
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 picks a free one", low=0, high=65535)
    api_key: str | None = option(
        None,
        "clients must send it as a bearer token; several, separated by commas or given one by one, are"
        " clients of their own: what they store is apart, and the engine serves them in fair turns",
        many=True,
    )
    max_request_bytes: int = option(256 << 20, "largest request body in bytes", low=1)
    body_idle_s: float = option(
        30.0, "seconds that a client may take for a request's head, and stay silent in its body", low=0.1
    )
    response_store_mib: int = option(
        256,
        "memory for responses that are kept to be read and answered again, pictures included, in MiB",
        low=0,
    )
    drain_s: int = option(30, "seconds that running requests get to finish when the server stops", low=0)
    engine_process: bool = option(
        True, "run the engine and the detokenizer as processes of their own, which are restarted if they end"
    )
    hang_timeout_s: float = option(
        30.0,
        "seconds without a sign of life after which the engine's or the detokenizer's process is killed and"
        " restarted; the server is not ready from a third of that on",
        low=3.0,
    )
    step_timeout_s: float = option(
        300.0,
        "seconds that one step of the engine, or one message at the detokenizer, may take before its process"
        " is killed and restarted",
        low=1.0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("hang_timeout_s", "step_timeout_s"):
            if not self.engine_process and getattr(self, name) != getattr(ServerOptions, name):
                raise ConfigError(f"{name} contradicts engine_process being off", param=name)
        if "" in self.api_keys:
            raise ConfigError("api_key must not hold an empty key", param="api_key")
        if len(set(self.api_keys)) < len(self.api_keys):
            raise ConfigError("api_key must not hold a key twice", param="api_key")

    @property
    def api_keys(self) -> tuple[str, ...]:
        """Every key that is valid; empty when none is asked for."""
        return () if self.api_key is None else tuple(key.strip() for key in self.api_key.split(","))


@dataclass(frozen=True)
class RealtimeOptions(Section):
    realtime_clients: int = option(256, "clients of /v1/realtime at once; more are closed with 1013", low=1)
    max_message_bytes: int = option(
        16 << 20, "largest message of such a client in bytes; a larger one closes it with 1009", low=1024
    )
    max_frame_bytes: int = option(
        4 << 20, "largest frame of a camera in bytes; a larger one is dropped as too_big", low=1024
    )
    realtime_unread_kib: int = option(
        1024,
        "events in KiB that may wait for a client to read them before it is closed with 1008; what repeats"
        " its own words does not count",
        low=1,
    )
    realtime_events: int = option(
        6000,
        "events that a client may send in a minute before it is closed with 4429; frames do not count",
        low=1,
    )
    realtime_ping_s: float = option(
        20.0, "seconds between two pings; a client that answers none within as many is closed", low=0.1
    )
    realtime_idle_s: float = option(
        600.0,
        "seconds after which a client that sends nothing, watches no camera and waits for no answer is closed"
        " with 4408",
        low=0.1,
    )
    realtime_conversation_mib: int = option(
        64, "memory for the texts and pictures of one client's conversation in MiB", low=1
    )
    allow_origins: str | None = option(
        None,
        "web sites whose pages may open websockets and read answers over HTTP, as https://example.org; * for"
        " all. If none is given: over HTTP none, websockets all where a key is asked for, else this host and"
        " pages of this machine",
        many=True,
    )


@dataclass(frozen=True)
class LiveOptions(Section):
    max_live_sessions: int = option(
        256, "live sessions (cameras that are watched) at once before new ones are refused", low=1
    )
    live_load: float = option(
        0.9,
        "share of the engine's time that live sessions may take, by what their frames are measured to cost:"
        " beyond it they send fewer frames, then fewer pixels, then new ones are refused",
        low=0.01,
        high=16.0,
    )


@dataclass(frozen=True)
class CameraOptions(Section):
    max_cameras: int = option(64, "cameras at once that come by WebRTC, uploads or are pulled", low=1)
    pull_cameras: bool = option(
        False, "let callers have this server pull cameras: an rtsp, http(s) or file URL to POST /v1/cameras"
    )
    allow_private_cameras: bool = option(
        False, "also pull cameras from private and loopback addresses, where those of one's own network are"
    )
    camera_max_pixels: int = option(
        3840 * 2160, "largest frame of a pulled or WebRTC camera in pixels; what is larger is dropped", low=64
    )
    camera_max_s: float = option(86400.0, "seconds after which a camera is ended, however it does", low=0.1)
    camera_connect_s: float = option(
        20.0, "seconds that a camera has to connect and to show its first frame", low=0.1
    )
    camera_idle_s: float = option(
        20.0,
        "seconds without a frame after which a camera that sends is ended, and one that is pulled is"
        " connected to again",
        low=0.1,
    )
    camera_away_s: float = option(
        600.0, "seconds without a frame after which a pulled camera is given up", low=0.1
    )
    camera_memory_mib: int = option(1024, "memory that one camera's process may use in MiB", low=256)
    webrtc_hosts: str | None = option(
        None,
        "addresses of this machine at which WebRTC is offered, the most reachable first, separated by commas"
        " or given one by one; all but loopback if not given",
        many=True,
    )
    webrtc_announce: str | None = option(
        None, "address to offer WebRTC at first, where a router passes its UDP ports on to this machine"
    )
    webrtc_ports: str | None = option(
        None, "UDP ports that WebRTC uses, as LOWEST-HIGHEST; any that are free if not given"
    )
    webrtc_private: bool = option(
        False,
        "also send to WebRTC clients at the private addresses they name; without it those connect too, where"
        " they reach this machine by themselves",
    )
    ice_servers: str | None = option(
        None,
        "STUN and TURN servers, as stun:HOST:PORT or turn:USER:SECRET@HOST:PORT, separated by commas or given"
        " one by one; none if not given",
        many=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.allow_private_cameras and not self.pull_cameras:
            raise ConfigError(
                "allow_private_cameras contradicts pull_cameras being off", param="allow_private_cameras"
            )
        for name in ("webrtc_hosts", "webrtc_announce"):
            for host in listed(getattr(self, name)):
                _check_address(name, host)
        for server in listed(self.ice_servers):
            if not _ICE_SERVER.fullmatch(server):
                raise ConfigError(
                    "ice_servers must be stun:HOST:PORT or turn:USER:SECRET@HOST:PORT, not"
                    f" {_without_secret(server)!r}",
                    param="ice_servers",
                )
        if self.webrtc_ports is not None and not port_range(self.webrtc_ports):
            raise ConfigError(
                f"webrtc_ports must be LOWEST-HIGHEST within 1024-65535, not {self.webrtc_ports!r}",
                param="webrtc_ports",
            )


@dataclass(frozen=True)
class Config:
    """The whole tree. ``Config.of(model="...", port=8080)`` sets fields by their unique names."""

    model: ModelOptions = field(default_factory=ModelOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    runner: RunnerOptions = field(default_factory=RunnerOptions)
    media: MediaOptions = field(default_factory=MediaOptions)
    server: ServerOptions = field(default_factory=ServerOptions)
    live: LiveOptions = field(default_factory=LiveOptions)
    realtime: RealtimeOptions = field(default_factory=RealtimeOptions)
    cameras: CameraOptions = field(default_factory=CameraOptions)

    @classmethod
    def of(cls, **values: Any) -> "Config":
        """A tree with ``values`` set, each name looked up in all sections; ConfigError for an unknown one."""
        homes = {f.name: section for section, f in options()}
        unknown = sorted(set(values) - set(homes))
        if unknown:
            raise ConfigError(
                f"unknown option {unknown[0]!r}; known: {', '.join(sorted(homes))}", param=unknown[0]
            )
        kinds = get_type_hints(cls)
        return cls(
            **{
                name: kind(**{k: v for k, v in values.items() if homes[k] == name})
                for name, kind in kinds.items()
            }
        )

    def for_whole_answers(self) -> "Config":
        """The same for callers who read no answer before its end: unless ``stall_factor`` was given, prompts
        and pictures may hold up tokens for as long as they like, which gets more done in all."""
        if self.scheduler.stall_factor is not None:
            return self
        return replace(self, scheduler=replace(self.scheduler, stall_factor=NO_BOUND))

    def flat(self) -> dict[str, dict[str, Any]]:
        """``{section: {field: value}}`` for printing; the API key and secrets are masked."""
        tree = {
            f.name: {g.name: getattr(getattr(self, f.name), g.name) for g in fields(getattr(self, f.name))}
            for f in fields(self)
        }
        if tree["server"]["api_key"]:
            tree["server"]["api_key"] = "***"
        servers = listed(self.cameras.ice_servers)
        tree["cameras"]["ice_servers"] = ", ".join(map(_without_secret, servers)) or None
        return tree


def listed(values: str | None) -> tuple[str, ...]:
    """The values of an option with ``many``, none if it is not given."""
    return tuple(value.strip() for value in (values or "").split(",") if value.strip())


def port_range(text: str) -> range:
    """The ports of LOWEST-HIGHEST; none if they cannot be."""
    found = _PORTS.fullmatch(text)
    low, high = map(int, found.groups()) if found else (0, 0)
    return range(low, high + 1) if 1024 <= low <= high <= 65535 else range(0)


def _check_address(name: str, host: str) -> None:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(f"{name} must be numeric addresses, not {host!r}", param=name) from None


def _without_secret(server: str) -> str:
    """An ICE server as it may be shown."""
    kind, _, rest = server.partition(":")
    return f"{kind}:***@{rest.rpartition('@')[2]}" if "@" in rest else server


def options() -> Iterator[tuple[str, Field[Any]]]:
    """Every (section name, field) of the tree."""
    for name, kind in get_type_hints(Config).items():
        for f in fields(kind):
            yield name, f


def add_arguments(parser: argparse.ArgumentParser, *sections: str, skip: tuple[str, ...] = ()) -> None:
    """Add ``--kebab-case`` flags for the fields of ``sections`` to ``parser``, with their documentation."""
    kinds = get_type_hints(Config)
    for name in sections:
        add_flags(parser.add_argument_group(name), kinds[name], skip)


def add_flags(group: Any, section: type[Section], skip: tuple[str, ...] = ()) -> None:
    """The same for a section that need not be one of the tree, in a group of a parser."""
    hints = get_type_hints(section)
    for f in fields(section):  # type: ignore[arg-type]
        if f.name in skip:
            continue
        meta = f.metadata
        kind = next(t for t in (*get_args(hints[f.name]), hints[f.name]) if isinstance(t, type))
        flag = "--" + f.name.replace("_", "-")
        note = f"{meta['doc']} (default: {f.default})"
        if kind is bool:
            group.add_argument(
                flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=meta["doc"]
            )
        else:
            group.add_argument(
                flag,
                action=_Joined if meta["many"] else "store",
                type=kind,
                choices=meta["choices"],
                default=argparse.SUPPRESS,
                help=note,
                metavar=_metavar(meta),
            )


class _Joined(argparse.Action):
    """A flag that may be given several times."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, flag: Any = None) -> None:
        before = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, values if before is None else f"{before},{values}")


def from_arguments(args: argparse.Namespace) -> Config:
    """The tree from parsed flags; attributes that are no option of the tree are left out."""
    names = {f.name for _, f in options()}
    return Config.of(**{k: v for k, v in vars(args).items() if k in names})


def section_from(section: type[S], args: argparse.Namespace) -> S:
    """A ``section`` from parsed flags."""
    names = {f.name for f in fields(section)}  # type: ignore[arg-type]
    return section(**{name: value for name, value in vars(args).items() if name in names})


def _metavar(meta: Any) -> str | None:
    return None if meta["choices"] else "VALUE"


def _check(f: Field[Any], hint: Any, value: Any) -> None:
    allowed = tuple(float if t is float else t for t in (get_args(hint) or (hint,)))
    if float in allowed:
        allowed = (*allowed, int)
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise ConfigError(f"{f.name} must be {_names(allowed)}, not {value!r}", param=f.name)
    if value is None or f.default is MISSING:
        return
    meta = f.metadata
    if meta["choices"] and value not in meta["choices"]:
        raise ConfigError(
            f"{f.name} must be one of {', '.join(meta['choices'])}, not {value!r}", param=f.name
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{f.name} must be a finite number, not {value}", param=f.name)
    if value == "":
        raise ConfigError(f"{f.name} must not be empty", param=f.name)
    if meta["low"] is not None and value < meta["low"]:
        raise ConfigError(f"{f.name} must be at least {meta['low']}, not {value}", param=f.name)
    if meta["high"] is not None and value > meta["high"]:
        raise ConfigError(f"{f.name} must be at most {meta['high']}, not {value}", param=f.name)


def _names(kinds: tuple[Any, ...]) -> str:
    return " or ".join("none" if k is type(None) else k.__name__ for k in kinds)
