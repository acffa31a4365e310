"""Parts that need more than Django and a store: OpenTelemetry, health checks. They are imported only by your code."""
