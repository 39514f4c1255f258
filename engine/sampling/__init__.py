"""From logits to tokens: penalties, the draw, log-probabilities; whole batches at once."""
