"""The paged memory of keys and values: who holds which pages, and the tensors they stand for."""
