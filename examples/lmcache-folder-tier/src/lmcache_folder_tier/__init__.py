"""Blobs in files of one folder: a storage tier for lmcache. `tier.py` is the plugin."""
