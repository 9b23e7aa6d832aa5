"""Stands in for SGLang's compiled kernels on a CPU without AMX, where SGLang falls back to torch for all but one.

Nothing but tests puts this folder on the path.
"""

__version__ = "0.4.10"


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, *rest):
    """Write newly allocated slots into the requests' rows."""
    position = 0
    for number, row in enumerate(req_pool_indices.tolist()):
        first, stop = int(start[number]), int(end[number])
        slots = out_cache_loc[position : position + stop - first]
        req_to_token[row, first:stop] = slots.to(req_to_token.dtype)
        position += stop - first


def __getattr__(name):
    """SGLang imports many more, and calls none of them here."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*arguments, **named):
        raise NotImplementedError(f"sgl_kernel.{name} is not among the kernels of tests")

    return missing
