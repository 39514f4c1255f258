"""Preprocessing in worker processes over one arena of shared memory."""
