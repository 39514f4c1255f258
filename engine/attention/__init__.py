"""Causal attention over the paged KV pool: one interface, a plain reference, and the fast ones."""
