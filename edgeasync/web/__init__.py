"""The hub's page in the browser, and its metrics for Prometheus. Needs the extra `web`."""
