"""What a model says, taken apart as it comes: thoughts, calls of tools, and words for the reader."""
