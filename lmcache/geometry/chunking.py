from lmcache.geometry.groups import GroupKind, KVGroup
def kept_blocks(group: KVGroup, chunk_size: int) -> int:
    if group.kind is GroupKind.SCRATCH: return 0
    if group.kind is GroupKind.RECURRENT: return 1
    kept = min(group.window, chunk_size) if group.window else chunk_size
    return -(-kept // group.tokens_per_block)
