"""The hub's durable state, and its recovery by replaying the events that followed."""
