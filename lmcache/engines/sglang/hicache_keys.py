"""Keys of the JSON that lmcache shares with SGLang's HiCache. Imports no engine."""

SGLANGS_OWN = frozenset(
    {
        "backend_name",
        "module_path",
        "class_name",
        "interface_v1",
        "allocator",
        "tp_lcm_size",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys",
    }
)
"""Keys of that JSON that SGLang reads itself."""
