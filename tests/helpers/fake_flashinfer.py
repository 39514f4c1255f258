"""FlashInfer's wrappers in torch, with its names, arguments and habits, to test who calls them on a CPU.

As the library's own: arrays on the host are read by ``plan``; a wrapper for CUDA graphs copies them into the
buffers that it was made with, whose addresses and sizes are fixed, and ``run`` reads those alone. Within
``noted()`` every call is noted, to be bound to the signatures of the installed library.
"""

from contextlib import contextmanager
from itertools import pairwise

import torch

_calls = None


@contextmanager
def noted():
    """A list of (class, method, args, kwargs), which grows as calls are made."""
    global _calls
    _calls = []
    try:
        yield _calls
    finally:
        _calls = None


class _Wrapper:
    def __init_subclass__(cls):
        for name in ("__init__", "plan", "run", "reset_workspace_buffer"):
            if hasattr(cls, name):
                setattr(cls, name, _noting(cls.__name__, name, getattr(cls, name)))

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        pass


def _noting(kind, name, method):
    def call(self, *args, **kwargs):
        if _calls is not None and type(self).__name__ == kind:
            _calls.append((kind, name, args, kwargs))
        return method(self, *args, **kwargs)

    return call


class _Paged(_Wrapper):
    """``ends``, ``pages``, ``last`` as ``run`` reads them: static buffers, or tensors of the last plan."""

    def _begin(self, kv_layout, static, ends, pages, last):
        assert kv_layout == "HND"
        self.static = static
        if static:
            assert len(ends) == len(last) + 1
            self.ends, self.pages, self.last = ends, pages, last

    def _read(self, ends, pages, last, heads, kv_heads, dim, page_size):
        assert all(t.dtype == torch.int32 for t in (ends, pages, last))
        assert heads % kv_heads == 0
        assert ends[0] == 0
        assert ends[-1] == len(pages)
        assert (ends.diff() >= 1).all()
        assert ((last >= 1) & (last <= page_size)).all()
        if self.static:
            assert len(last) == len(self.last), "the batch of a graph has one size"
            self.ends.copy_(ends)
            self.last.copy_(last)
            self.pages[: len(pages)].copy_(pages)
        else:
            self.ends, self.pages, self.last = ends.clone(), pages.clone(), last.clone()
        self.shape = (heads, kv_heads, dim, page_size)

    def _attend(self, q, cache, rows, causal):
        """(out, log2 of the sum of exponentials [T, heads]); ``rows`` [n + 1] are the ends of queries."""
        heads, kv_heads, dim, page_size = self.shape
        keys, values = cache
        assert keys.stride() == values.stride()
        assert keys.shape[1:] == (kv_heads, page_size, dim)
        assert q.shape[1:] == (heads, dim)
        assert q.stride(-1) == 1
        assert q.dtype == keys.dtype == self.dtype
        assert q.shape[0] == rows[-1]
        out, lse = torch.empty(q.shape, dtype=q.dtype), torch.empty(q.shape[:2])
        for i, (a, b) in enumerate(pairwise(rows.tolist())):
            pages = self.pages[self.ends[i] : self.ends[i + 1]].long()
            length = (len(pages) - 1) * page_size + int(self.last[i])
            k, v = (side[pages].transpose(0, 1).flatten(1, 2)[:, :length].float() for side in (keys, values))
            group = heads // kv_heads
            k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
            scores = q[a:b].transpose(0, 1).float() @ k.transpose(1, 2) * dim**-0.5
            if causal:
                count = b - a
                seen = torch.ones(count, length, dtype=torch.bool).tril(length - count)
                scores = scores.masked_fill(~seen, -torch.inf)
            out[a:b] = (scores.softmax(-1) @ v).transpose(0, 1).to(q.dtype)
            lse[a:b] = scores.logsumexp(-1).transpose(0, 1) * torch.log2(torch.tensor(torch.e))
        return out, lse


class BatchDecodeWithPagedKVCacheWrapper(_Paged):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
    ):
        self._begin(
            *(kv_layout, use_cuda_graph, paged_kv_indptr_buffer),
            *(paged_kv_indices_buffer, paged_kv_last_page_len_buffer),
        )

    def plan(self, indptr, indices, last_page_len, *shape, q_data_type, kv_data_type):
        assert q_data_type == kv_data_type
        self.dtype = q_data_type
        self._read(indptr, indices, last_page_len, *shape)

    def run(self, q, paged_kv_cache, out=None):
        result, _ = self._attend(q, paged_kv_cache, torch.arange(len(self.last) + 1), False)
        return result if out is None else out.copy_(result)


class BatchPrefillWithPagedKVCacheWrapper(_Paged):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        backend="auto",
    ):
        self._begin(
            *(kv_layout, use_cuda_graph, paged_kv_indptr_buf),
            *(paged_kv_indices_buf, paged_kv_last_page_len_buf),
        )
        self.rows = qo_indptr_buf

    def plan(self, rows, ends, pages, last, *shape, causal=False, q_data_type, kv_data_type):
        assert q_data_type == kv_data_type
        self.dtype, self.causal = q_data_type, causal
        if self.static:
            self.rows.copy_(rows)
        else:
            self.rows = rows.clone()
        self._read(ends, pages, last, *shape)

    def run(self, q, paged_kv_cache, out=None, return_lse=False):
        result, lse = self._attend(q, paged_kv_cache, self.rows, self.causal)
        result = result if out is None else out.copy_(result)
        return (result, lse) if return_lse else result


class MultiLevelCascadeAttentionWrapper(_Wrapper):
    def __init__(
        self,
        num_levels,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf_arr=None,
        paged_kv_indptr_buf_arr=None,
        paged_kv_indices_buf_arr=None,
        paged_kv_last_page_len_buf_arr=None,
    ):
        self.levels = [
            BatchPrefillWithPagedKVCacheWrapper(
                float_workspace_buffer,
                kv_layout,
                use_cuda_graph,
                *(arrays[i] for arrays in (qo_indptr_buf_arr, paged_kv_indptr_buf_arr)),
                *(arrays[i] for arrays in (paged_kv_indices_buf_arr, paged_kv_last_page_len_buf_arr)),
            )
            for i in range(num_levels)
        ]

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffers):
        assert len(int_workspace_buffers) == len(self.levels)

    def plan(self, rows, ends, pages, last, *shape, q_data_type, kv_data_type):
        dtypes = {"q_data_type": q_data_type, "kv_data_type": kv_data_type}
        for level, arrays in zip(self.levels, zip(rows, ends, pages, last, strict=True), strict=True):
            level.plan(*arrays, *shape, **dtypes)

    def run(self, q, paged_kv_cache):
        found = [level.run(q, paged_kv_cache, return_lse=True) for level in self.levels]
        weights = torch.stack([lse * torch.log(torch.tensor(2.0)) for _, lse in found]).softmax(0)
        parts = torch.stack([out.float() for out, _ in found])
        return (parts * weights[..., None]).sum(0).to(q.dtype)


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False):
        assert (kv_layout, use_cuda_graph) == ("NHD", False)

    def plan(self, qo_indptr, kv_indptr, *shape, causal=False, q_data_type, kv_data_type):
        self.ends, self.shape, self.dtype = qo_indptr.clone(), shape, q_data_type
        assert not causal
        assert torch.equal(qo_indptr, kv_indptr)

    def run(self, q, k, v):
        heads, kv_heads, dim = self.shape
        assert q.shape == k.shape == v.shape == (self.ends[-1], heads, dim)
        assert (heads, q.dtype) == (kv_heads, self.dtype)
        out = torch.empty(q.shape, dtype=q.dtype)
        for a, b in pairwise(self.ends.tolist()):
            x, y, z = (t[a:b].transpose(0, 1).float() for t in (q, k, v))
            out[a:b] = ((x @ y.transpose(1, 2) * dim**-0.5).softmax(-1) @ z).transpose(0, 1).to(q.dtype)
        return out
