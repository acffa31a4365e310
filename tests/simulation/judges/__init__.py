"""What a simulation must never show."""
