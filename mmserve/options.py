"""Options that are checked and documented as the server's own are, for applications that use mmserve."""

from mmserve.core.config import BUNDLED_MODEL, Config, Section, add_flags, option, section_from

__all__ = ["BUNDLED_MODEL", "Config", "Section", "add_flags", "option", "section_from"]
