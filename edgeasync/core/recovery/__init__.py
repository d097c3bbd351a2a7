"""The hub's durable state, and its recovery by replaying the events that came after it was saved."""
