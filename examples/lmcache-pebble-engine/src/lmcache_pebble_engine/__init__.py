"""Pebble, a made-up inference engine, and its adapter for lmcache."""
