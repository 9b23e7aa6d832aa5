"""First in, first out: an eviction policy for lmcache. `policy.py` is the plugin."""
