"""Live sessions: a camera that is watched, and questions about what it shows now."""
