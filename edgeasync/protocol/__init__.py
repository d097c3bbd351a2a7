"""The wire protocol: messages, frames, codecs and transfers in pieces."""
