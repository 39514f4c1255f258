"""Shared words of every part: messages, errors, configuration, digests, the device protocol. No torch."""
