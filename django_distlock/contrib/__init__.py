"""What needs more than Django and a store: OpenTelemetry, health checks. Nothing here is imported unless you do."""
