"""Which attention backend a configuration gets. (``mmserve doctor`` shows the same names.)"""

from mmserve.engine.attention.base import AttentionBackend
from mmserve.engine.attention.matmul import MatmulAttention
from mmserve.engine.attention.reference import ReferenceAttention
from mmserve.engine.kv.pool import KVPool


def attention_for(name: str, pool: KVPool) -> AttentionBackend:
    """The backend of ``attention_backend`` over ``pool``; auto is the fastest that runs on its device."""
    if name == "reference":
        return ReferenceAttention(pool)
    return MatmulAttention(pool)
