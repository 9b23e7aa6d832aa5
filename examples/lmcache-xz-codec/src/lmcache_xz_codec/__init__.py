"""Payloads as .xz streams: a codec for lmcache. `codec.py` is the plugin."""
