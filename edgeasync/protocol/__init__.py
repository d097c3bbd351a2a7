"""What travels between hub and devices: messages, their frames, tensor codecs, and transfers in pieces."""
