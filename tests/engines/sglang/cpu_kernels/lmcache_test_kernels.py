"""What HiCache needs of an accelerator, in plain torch: loaded by SGLang itself, as a plugin of its own.

Nothing but tests puts this folder on the path.
"""


def activate() -> None:
    """Pin nothing, and copy between device and host pools by indexing."""
    from sglang.srt.mem_cache.pool_host import base, common, mha, mla

    for module in (base, common, mha, mla):
        for name in ("_cuda_host_register", "_cuda_host_unregister"):
            if hasattr(module, name):
                setattr(module, name, lambda *arguments, **named: None)
    for module in (mha, mla):
        module.transfer_kv_direct = _rows
        module.transfer_kv_all_layer_direct_lf_pf = _all_layers_to_pages
        module.transfer_kv_per_layer_direct_pf_lf = _layer_from_pages


def _rows(src_layers, dst_layers, src_indices, dst_indices, page_size):
    for source, to in zip(src_layers, dst_layers, strict=True):
        to[dst_indices] = source[src_indices]


def _all_layers_to_pages(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    """From K of each layer, then V of each layer, to one array of pages for each of the two."""
    layers = len(src_ptrs) // len(dst_ptrs)
    page, within = dst_indices // page_size, dst_indices % page_size
    for part, to in enumerate(dst_ptrs):
        for layer in range(layers):
            to[page, layer, within] = src_ptrs[part * layers + layer][src_indices]


def _layer_from_pages(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size):
    page, within = src_indices // page_size, src_indices % page_size
    for source, to in zip(src_ptrs, dst_ptrs, strict=False):
        to[dst_indices] = source[page, layer_id, within]
