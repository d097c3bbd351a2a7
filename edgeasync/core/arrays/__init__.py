"""Models and updates as float32 vectors: deterministic arithmetic that may run in any thread."""
