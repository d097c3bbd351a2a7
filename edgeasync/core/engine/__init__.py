"""Between frames and the cores: decode what comes in, run transfers, carry out effects. Still no I/O."""
