"""Built-in eviction policies, one class per file. `queue.py` has the list that they keep nodes in."""
