"""What a realtime session is set to, and what one response of it asks for: checked whole before it holds."""

import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, structs

from mmserve.core.errors import InvalidRequest
from mmserve.core.messages import SamplingParams
from mmserve.generation import Generator
from mmserve.live.policy import SessionPolicy
from mmserve.parsing.toolbox import Toolbox, read_toolbox
from mmserve.server.deadline import DeadlineMs
from mmserve.server.errors import unsupported
from mmserve.server.forms import form_of, form_with_tools
from mmserve.server.models import check_model
from mmserve.server.protocol import Priority, SamplingFields, convert
from mmserve.server.realtime_events import AnswerFields, ResponseFields, SessionFields, Truncation
from mmserve.server.responses import ReasoningFields, check_metadata, nested_choice, nested_tools
from mmserve.server.sampling import sampling_params

Ack = Literal["all", "kept", "none"]


class OwnFields(Struct, frozen=True, kw_only=True):
    """Of ``session.mmserve`` what is the door's own; the rest is the policy of the camera.

    ``frame_ack`` says of which frames ``mmserve.frame.ack`` tells, ``delta_age`` puts ``mmserve: {age_ms,
    frame_seq}`` into text deltas, every ``stats_every_s`` (0: never) comes an ``mmserve.stats``, ``sampling``
    has the fields of other endpoints (temperature, top_p, seed, stop, structured_outputs, ...).
    """

    frame_ack: Ack = "all"
    delta_age: bool = False
    stats_every_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    sampling: SamplingFields | None = None


class OwnResponseFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """Of ``response.mmserve``: for this answer alone."""

    sampling: SamplingFields | None = None
    deadline_ms: DeadlineMs | None = None
    priority: Priority | None = None


class Settings(Struct, frozen=True, kw_only=True):
    """All that a session is set to. Changed by making a new one, so that a refused update changes nothing."""

    instructions: str = ""
    max_output_tokens: int | Literal["inf"] = "inf"
    tools: tuple[Any, ...] = ()
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    reasoning: ReasoningFields = ReasoningFields()
    truncation: Truncation = "auto"
    own: OwnFields = OwnFields()
    policy: SessionPolicy = SessionPolicy()

    def updated(self, fields: SessionFields, service: Generator) -> "Settings":
        """The settings with what is given in ``fields``; InvalidRequest names the one that cannot be."""
        fields.check("session")
        check_model(service, fields.model)
        changed = self._changed(fields, "session")
        if fields.truncation is not UNSET:
            changed = structs.replace(changed, truncation=fields.truncation or "auto")
        if fields.mmserve is not UNSET:
            own, policy = _own(fields.mmserve or {}, self.own, self.policy)
            changed = structs.replace(changed, own=own, policy=policy)
        changed.wanted(None, service)  # so that what no response could honour is refused here
        return changed

    def wanted(self, fields: ResponseFields | None, service: Generator) -> "Wanted":
        """What a response asks for: ``fields`` where they are given, else the session's own."""
        fields = fields or ResponseFields()
        fields.check("response")
        check_metadata(fields.metadata, "response.metadata")
        settings = self._changed(fields, "response")
        mine = _converted(fields.mmserve or None, OwnResponseFields, "response.mmserve")
        sampling = mine.sampling or self.own.sampling or SamplingFields()
        return Wanted(
            settings=settings,
            tools=settings.toolbox("response" if fields.tools is not UNSET else "session"),
            sampling_fields=sampling,
            conversation=fields.conversation or "auto",
            instructions_given=isinstance(fields.instructions, str),
            input=fields.input,
            metadata=fields.metadata,
            deadline_ms=mine.deadline_ms,
            priority=mine.priority or 0,
            asked=time.monotonic(),
        ).checked(service)

    def standing(self, service: Generator) -> "Wanted | None":
        """How answers are given that a trigger starts; None where nothing is said of it."""
        said = self.own.sampling is not None or self.max_output_tokens != "inf"
        return self.wanted(None, service) if said else None

    def toolbox(self, where: str) -> Toolbox:
        """The tools, checked; InvalidRequest names the field below ``where``."""
        tools, choice = nested_tools(list(self.tools)), nested_choice(self.tool_choice)
        try:
            return read_toolbox(tools, choice, self.parallel_tool_calls)
        except InvalidRequest as error:
            raise renamed(error, ".function", "", where) from None

    def shown(self, session_id: str, model: str) -> dict[str, Any]:
        """As ``session.created`` and ``session.updated`` tell it."""
        return {
            "type": "realtime",
            "object": "realtime.session",
            "id": session_id,
            "model": model,
            "output_modalities": ["text"],
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "tools": list(self.tools),
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "truncation": self.truncation,
            "tracing": None,
            "include": None,
            "mmserve": {**_given(self.own), **structs.asdict(self.policy)},
        }

    def _changed(self, fields: AnswerFields, where: str) -> "Settings":
        given = {name: getattr(fields, name) for name in _PLAIN if getattr(fields, name) is not UNSET}
        defaults = {name: getattr(Settings(), name) for name, value in given.items() if value is None}
        if given.get("tools") is not None:
            given["tools"] = tuple(given["tools"])
        if "tools" in given and "tool_choice" not in given and where == "response":
            defaults["tool_choice"] = "auto"  # the session's may name a tool that is not among these
        return structs.replace(self, **given | defaults)


_PLAIN = (
    "instructions",
    "max_output_tokens",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "reasoning",
)


class Wanted(Struct, kw_only=True):
    """What one response asks for, checked."""

    settings: Settings
    tools: Toolbox
    sampling_fields: SamplingFields
    conversation: Literal["auto", "none"]
    instructions_given: bool
    input: list[Any] | None
    metadata: dict[str, str] | None
    deadline_ms: int | None
    priority: int
    asked: float  # in seconds of ``time.monotonic``
    sampling: SamplingParams = SamplingParams()

    def checked(self, service: Generator) -> "Wanted":
        """The same with its ``sampling``; InvalidRequest where that cannot be."""
        fields, spec = self.sampling_fields, service.spec
        try:
            fields.refuse()
            if fields.max_tokens is not None:
                raise unsupported("max_tokens", "the limit of an answer is called max_output_tokens here")
            form = form_with_tools(form_of(None, fields.structured_outputs), self.tools, spec.chat_template)
            self.sampling = sampling_params(fields, spec.sampling, max_tokens=self.max_tokens, form=form)
        except InvalidRequest as error:
            raise renamed(error, "", "", "tools" if error.param == "tools" else "mmserve.sampling") from None
        return self

    @property
    def max_tokens(self) -> int | None:
        limit = self.settings.max_output_tokens
        return None if limit == "inf" else limit

    @property
    def stop(self) -> tuple[str, ...]:
        return self.sampling_fields.stop_texts()

    @property
    def template_kwargs(self) -> dict[str, Any]:
        kwargs: dict[str, Any] = {"tools": list(self.tools.shown)} if self.tools.callable else {}
        if self.settings.reasoning.effort == "none":
            kwargs["enable_thinking"] = False
        return kwargs


def renamed(error: InvalidRequest, old: str, new: str, where: str) -> InvalidRequest:
    """``error`` with ``old`` replaced by ``new`` in its words, and its field named below ``where``."""
    if old:
        error.message = error.message.replace(old, new)
    if error.param:
        param = error.param.replace(old, new) if old else error.param
        error.param = param if param == where else f"{where}.{param}"
    return error


def _own(given: Mapping[str, Any], own: OwnFields, policy: SessionPolicy) -> tuple[OwnFields, SessionPolicy]:
    """``session.mmserve`` sorted into the door's fields and the camera's policy, each with what it had."""
    where = "session.mmserve"
    mine = {name: value for name, value in given.items() if name in OwnFields.__struct_fields__}
    rest = {name: value for name, value in given.items() if name not in mine}
    new = _converted(mine, OwnFields, where)
    try:
        policy = SessionPolicy.of(rest, policy) if rest else policy
    except InvalidRequest as error:
        raise renamed(error, "", "", where) from None
    return structs.replace(own, **{name: getattr(new, name) for name in mine}), policy


def _converted(given: Mapping[str, Any] | None, kind: Any, where: str) -> Any:
    try:
        return convert(given or {}, kind)
    except InvalidRequest as error:
        raise renamed(error, "the body", where, where) from None


def _given(own: OwnFields) -> dict[str, Any]:
    shown = structs.asdict(own)
    if own.sampling is not None:
        sampling = msgspec.to_builtins(own.sampling)
        shown["sampling"] = {name: value for name, value in sampling.items() if value is not None}
    return shown
