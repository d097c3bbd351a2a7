"""The hub's durable state: written down, and recovered by replaying the events that followed."""
