"""The ranks that share each page, and how they come to one decision. Imports torch."""

from typing import Any

import torch
import torch.distributed as dist


class RankGroup:
    """The tensor-parallel ranks of attention, and this one's place among them."""

    def __init__(self, group: Any) -> None:
        """`group` is SGLang's CPU process group, or None where there is one rank."""
        self._group = group
        self.size = dist.get_world_size(group=group) if group is not None else 1
        self.rank = dist.get_rank(group=group) if group is not None else 0

    @classmethod
    def of(cls, params: Any) -> "RankGroup":
        """From SGLang's `CacheInitParams`."""
        return cls(getattr(params, "attn_tp_cache_group", None) or getattr(params, "tp_cache_group", None))

    def all_agree(self, here: bool) -> bool:
        """Whether all ranks say so. Each has to call it, at the same point of its work."""
        if self.size == 1:
            return here
        verdict = torch.tensor([int(here)], dtype=torch.int)
        dist.all_reduce(verdict, op=dist.ReduceOp.MIN, group=self._group)
        return bool(verdict.item())
