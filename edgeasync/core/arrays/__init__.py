"""Models and updates as float32 vectors: deterministic arithmetic for any thread."""
